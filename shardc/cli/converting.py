"""`shardc merge` and `shardc reshard`."""

from __future__ import annotations

from pathlib import Path

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
)
from shardc.cli.output import progress, reporting, say_json


def _total(path: Path) -> int:
    from shardc.shardset import open_shard_set

    indexes = open_shard_set(path).components.values()
    return sum(file.size for index in indexes for file in index.files.values())


@click.command()
@click.argument("shards", metavar="OUT", type=PATH)
@out_option
@resource_options
@force_option
@json_option
@quiet_option
@reporting
def merge(
    shards: Path,
    out: Path,
    no_fsync: bool,
    workers: int | None,
    memory: int,
    force: bool,
    as_json: bool,
    quiet: bool,
) -> None:
    """Give back the full checkpoint of shard set OUT, bit for bit, without the source.

    \b
    Example:
      shardc merge klein-tp8 -o klein-again
    """
    from shardc import api

    with progress("merge", _total(shards), quiet=quiet or as_json) as advance:
        report = api.merge(
            shards, out, resources=resources(no_fsync, workers, memory, advance), force=force
        )
    if as_json:
        say_json({"ok": True, **report.to_json()})
    elif not quiet:
        show_build(report)


@click.command()
@click.argument("shards", metavar="OUT", type=PATH)
@click.option(
    "--tp", type=click.IntRange(min=1), required=True, metavar="M", help="The new degree."
)
@out_option
@resource_options
@force_option
@json_option
@quiet_option
@reporting
def reshard(
    shards: Path,
    tp: int,
    out: Path,
    no_fsync: bool,
    workers: int | None,
    memory: int,
    force: bool,
    as_json: bool,
    quiet: bool,
) -> None:
    """Make shard set OUT one of another degree, without the source.

    The result has the very bytes of a build of the source at that degree.

    \b
    Example:
      shardc reshard klein-tp8 --tp 4 -o klein-tp4
    """
    from shardc import api

    with progress("reshard", _total(shards), quiet=quiet or as_json) as advance:
        report = api.reshard(
            shards, out, tp, resources=resources(no_fsync, workers, memory, advance), force=force
        )
    if as_json:
        say_json({"ok": True, **report.to_json()})
    elif not quiet:
        show_build(report)
