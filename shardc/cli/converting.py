"""`shardc merge` and `shardc reshard`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from shardc.cli.building import show_build
from shardc.cli.options import (
    PATH,
    force_option,
    json_option,
    out_option,
    quiet_option,
    resource_options,
    resources,
    resume_option,
    stacked,
)
from shardc.cli.output import progress, reporting, say_json

if TYPE_CHECKING:
    from shardc.builder import BuildReport
    from shardc.writing import Resources

output_options = stacked(
    out_option, resource_options, resume_option, force_option, json_option, quiet_option
)


def _convert(
    what: str,
    shards: Path,
    convert: Callable[[Resources], BuildReport],
    *,
    no_fsync: bool,
    workers: int | None,
    memory: int | None,
    as_json: bool,
    quiet: bool,
) -> None:
    """Run one of the two conversions, with its progress and its closing table or document."""
    from shardc.shardset import open_shard_set

    indexes = open_shard_set(shards).components.values()
    total = sum(file.size for index in indexes for file in index.files.values())
    with progress(what, total, quiet=quiet or as_json) as advance:
        report = convert(resources(no_fsync, workers, memory, advance))
    if as_json:
        say_json({"ok": True, **report.to_json()})
    elif not quiet:
        show_build(report)


@click.command()
@click.argument("shards", metavar="OUT", type=PATH)
@output_options
@reporting
def merge(shards: Path, out: Path, resume: bool, force: bool, **options: Any) -> None:
    """Give back the full checkpoint of shard set OUT, bit for bit, without the source.

    \b
    Example:
      shardc merge klein-tp8 -o klein-again
    """
    from shardc import api

    _convert(
        "merge",
        shards,
        lambda resources: api.merge(shards, out, resources=resources, force=force, resume=resume),
        **options,
    )


@click.command()
@click.argument("shards", metavar="OUT", type=PATH)
@click.option(
    "--tp", type=click.IntRange(min=1), required=True, metavar="M", help="The new degree."
)
@output_options
@reporting
def reshard(shards: Path, tp: int, out: Path, resume: bool, force: bool, **options: Any) -> None:
    """Make shard set OUT one of another degree, without the source.

    The result has the very bytes of a build of the source at that degree.

    \b
    Example:
      shardc reshard klein-tp8 --tp 4 -o klein-tp4
    """
    from shardc import api

    _convert(
        "reshard",
        shards,
        lambda resources: api.reshard(
            shards, out, tp, resources=resources, force=force, resume=resume
        ),
        **options,
    )
