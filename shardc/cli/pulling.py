"""`shardc pull`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from shardc.cli.options import PATH, json_option, quiet_option, revision_option, token_option
from shardc.cli.output import console, degrees, progress, reporting, say_json, size, table

if TYPE_CHECKING:
    from shardc.pull import PullReport


@click.command()
@click.argument("repo")
@click.option(
    "--rank",
    "ranks",
    type=click.IntRange(min=0),
    multiple=True,
    metavar="R",
    help="Fetch this rank's files (repeatable).  [default: all ranks']",
)
@click.option("--tp", type=click.IntRange(min=1), metavar="N", help="Which degree, of several.")
@click.option(
    "-o",
    "--out",
    type=PATH,
    metavar="DIR",
    help="A folder to fetch into.  [default: the Hub's cache; of S3 shardc's own]",
)
@revision_option
@token_option
@json_option
@quiet_option
@click.option("--debug", is_flag=True, help="Show tracebacks.")
@reporting
def pull(
    repo: str,
    ranks: tuple[int, ...],
    tp: int | None,
    out: Path | None,
    revision: str | None,
    token: str | None,
    as_json: bool,
    quiet: bool,
    debug: bool,
) -> None:
    """Fetch a shard set from REPO, or only what some ranks need of it.

    REPO: org/name or hf://org/name, a repo of the Hub; or s3://bucket/prefix. It is the set
    itself, or has sets in folders tpN. Every file is checked; what is here already is not fetched
    again, and after an interrupt the same command goes on.

    \b
    Example:
      shardc pull me/klein-sharded --tp 8 --rank 0 --rank 1
      shardc pull me/klein-sharded --tp 8 -o klein-tp8
      shardc pull s3://bucket/klein-tp8
    """
    from shardc.errors import Problem
    from shardc.location import LocationError, locate
    from shardc.pull import prepare

    location = locate(repo, revision=revision)
    if isinstance(location, Path):
        raise LocationError(Problem(repo, "is no address: REPO is org/name, hf:// or s3://"))
    wanted = ranks or None
    found = prepare(location, ranks=wanted, tp=tp, out=out, token=token)
    with progress("pulling", found.missing_bytes, quiet=quiet or as_json) as count:
        report = found.run(count)
    if as_json:
        say_json({"ok": True, **report.to_json()})
    elif not quiet:
        _show(report)


def _show(report: PullReport) -> None:
    shown = table("", "")
    shown.show_header = False
    shown.add_row("ranks", f"{degrees(list(report.ranks))} of {report.tp}")
    shown.add_row("fetched", size(report.fetched_bytes))
    shown.add_row("there already", size(report.present_bytes))
    shown.add_row("seconds", f"{report.seconds:.2f}")
    out = console()
    out.print(f"{report.source} is at", soft_wrap=True)
    out.print(report.path, soft_wrap=True)  # on one line, for who copies it
    out.print(shown)
