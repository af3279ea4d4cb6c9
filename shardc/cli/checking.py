"""`shardc inspect` and `shardc verify`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from shardc.cli.options import (
    PATH,
    Source,
    json_option,
    quiet_option,
    revision_option,
    token_option,
    variant_option,
)
from shardc.cli.output import console, parameters, progress, reporting, say_json, size, table


@click.command()
@click.argument("path", type=Source())
@variant_option
@revision_option
@token_option
@json_option
@reporting
def inspect(
    path: str, variant: str | None, revision: str | None, token: str | None, as_json: bool
) -> None:
    """Say what PATH is: a full checkpoint or a shard set, and of what.

    Of a Hub repo or an S3 prefix only headers and small files are read.

    \b
    Example:
      shardc inspect FLUX.2-klein-4B
      shardc inspect klein-tp8 --json
      shardc inspect org/name/tp8
    """
    from shardc.checkpoint import sharded_components
    from shardc.location import locate
    from shardc.mirror import open_mirror
    from shardc.report import checkpoint_report, shard_set_report
    from shardc.shardset import open_shard_set
    from shardc.source import open_source, read_mirror

    where = locate(path, revision=revision)
    mirror = None
    if isinstance(where, Path):
        folder = where
    else:
        mirror = open_mirror(where, token=token)
        folder = mirror.path
    if folder.is_dir() and sharded_components(folder):
        report = {**shard_set_report(open_shard_set(folder)), "path": path}
    elif mirror is not None:
        report = checkpoint_report(read_mirror(mirror, variant=variant))
    else:
        report = checkpoint_report(open_source(folder, variant=variant))
    if as_json:
        say_json(report)
    else:
        _show(report)


def _show(report: dict[str, Any]) -> None:
    sharded = report["what"] == "shard set"
    extra = (">tp", "profile", "made by") if sharded else ("manifest",)
    shown = table(
        "component",
        "class",
        ">params",
        ">bytes",
        ">files",
        "dtypes",
        *extra,
        title=f"{report['path']}: {report['what']}",
    )
    for part in report["components"]:
        row = [
            part["name"] or ".",
            part["class"] or "?",
            parameters(part["parameters"]),
            size(part["bytes"]),
            str(part["files"]),
            ", ".join(part["dtypes"]),
        ]
        if sharded:
            row += [str(part["tp"]), part["profile"], part["tool"]]
        else:
            row.append("bundled" if part["manifest"] else "none")
        shown.add_row(*row)
    out = console()
    out.print(shown)
    for name in report.get("missing", ()):
        out.print(f"Component {name} is listed, but has no folder.")
    if report.get("left_out"):
        out.print(f"Other weights: {', '.join(report['left_out'])}")


@click.command()
@click.argument("out", type=PATH)
@click.option(
    "--source", type=Source(), metavar="SRC", help="Compare every byte with this source, too."
)
@variant_option
@revision_option
@token_option
@click.option("--rank", type=click.IntRange(min=0), metavar="R", help="Only this rank's files.")
@json_option
@quiet_option
@reporting
def verify(
    out: Path,
    source: str | None,
    variant: str | None,
    revision: str | None,
    token: str | None,
    rank: int | None,
    as_json: bool,
    quiet: bool,
) -> None:
    """Re-read shard set OUT: headers, sizes, digests, index.

    With --source, slice the source independently and compare every byte of every rank.

    \b
    Example:
      shardc verify klein-tp8
      shardc verify klein-tp8 --source FLUX.2-klein-4B
    """
    from shardc import api
    from shardc.shardset import open_shard_set

    files = [f for index in open_shard_set(out).components.values() for f in index.files.values()]
    total = sum(f.size for f in files if rank is None or f.rank in (None, rank))
    with progress("verify", total * (2 if source else 1), quiet=quiet or as_json) as advance:
        report = api.verify(
            out,
            source,
            variant=variant,
            revision=revision,
            token=token,
            rank=rank,
            progress=advance,
        )
    for problem in report.problems:
        click.echo(f"error: {problem}", err=True)
    if as_json:
        say_json(report.to_json())
    elif report.ok and not quiet:
        against = f" and equal to {source}" if source else ""
        click.echo(
            f"{out}: sound{against}: {report.tensors} tensors in {report.files} files, "
            f"{size(report.checked_bytes)} checked in {report.seconds:.1f} s"
        )
    if not report.ok:
        sys.exit(1)
