"""`shardc push`."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from shardc.cli.options import PATH, json_option, quiet_option
from shardc.cli.output import console, progress, reporting, say_json, size, table

if TYPE_CHECKING:
    from shardc.shipment import Progress, PushReport, ShippedFile

CARDS = {
    "written": "README.md is the card",
    "updated": "its table has this degree",
    "unchanged": "as it was",
    "kept": "README.md is none of shardc's, and was left alone",
}


@click.command()
@click.argument("out", type=PATH)
@click.argument("repo")
@click.option("--private", is_flag=True, help="Make the repo private, if it has to be created.")
@click.option("--revision", metavar="BRANCH", help="Commit to this branch.  [default: main]")
@click.option("--token", metavar="T", help="Token for the Hub.  [default: HF_TOKEN, or the saved]")
@click.option(
    "--base-model", metavar="ID", help="The Hub repo of the full checkpoint, for the card."
)
@click.option("-m", "--message", metavar="M", help="Summary of the commit.")
@click.option("--dry-run", is_flag=True, help="Verify and compare, send nothing.")
@json_option
@quiet_option
@click.option("--debug", is_flag=True, help="Show tracebacks.")
@reporting
def push(
    out: Path,
    repo: str,
    private: bool,
    revision: str | None,
    token: str | None,
    base_model: str | None,
    message: str | None,
    dry_run: bool,
    as_json: bool,
    quiet: bool,
    debug: bool,
) -> None:
    """Verify shard set OUT and publish it at REPO: as a whole, or not at all.

    REPO: org/name or hf://org/name, a repo of the Hub, where the set goes into folder tpN, or
    into the folder that is named after it; or s3://bucket/prefix, where it goes itself.
    What is there already is not sent again.

    \b
    Example:
      shardc push klein-tp8 me/klein-sharded --private
      shardc push klein-tp4 me/klein-sharded
      shardc push klein-tp8 s3://bucket/klein-tp8
    """
    from shardc import push as pushing
    from shardc.push_hub import HubOptions

    def bar(what: str, total_bytes: int) -> AbstractContextManager[Progress]:
        return progress(what, total_bytes, quiet=quiet or as_json)

    options = HubOptions(private, token, base_model, message)
    report = pushing.push(out, repo, revision=revision, options=options, dry_run=dry_run, bar=bar)
    if as_json:
        say_json({"ok": True, **report.to_json()})
    elif not quiet:
        _show(report)


def _show(report: PushReport) -> None:
    ranks = table(
        "component",
        ">a rank's own",
        ">of all ranks",
        title=f"What each of {report.tp} ranks downloads",
    )
    for part in report.parts:
        own = size(max(part.own_bytes)) if part.own_bytes else ""
        name = {"files": "other files", "kept": f"{part.name}, kept whole"}.get(
            part.kind, part.name
        )
        ranks.add_row(name or ".", own, size(part.shared_bytes))
    out = console()
    out.print(ranks)
    most, least = max(report.rank_bytes), min(report.rank_bytes)
    span = size(most) if most == least else f"{size(least)} to {size(most)}"
    out.print(f"A rank downloads {span} in all, a host of all ranks {size(_whole(report))}.")
    out.print()
    if report.up_to_date:
        out.print(f"{report.target}: up to date, nothing was sent")
        return
    done = table("", "")
    done.show_header = False
    done.add_row("to" if report.dry_run else "published", report.target)
    if report.created and not report.target.startswith("s3://"):
        done.add_row("repo", "would be created" if report.dry_run else "created")
    done.add_row("to send" if report.dry_run else "sent", _files(report.sent))
    done.add_row("there already", _files(report.unchanged))
    if report.deleted:
        done.add_row("to delete" if report.dry_run else "deleted", "\n".join(report.deleted))
    if report.card is not None:
        done.add_row("card", CARDS[report.card])
    if report.card == "written" and report.base_model is None:
        done.add_row("base model", "not known: --base-model ID has the card name it")
    if report.license is not None:
        done.add_row("license", f"{report.license}: the weights' license goes with them")
    if report.url is not None:
        done.add_row("commit", report.url)
    done.add_row("seconds", f"{report.seconds:.2f}")
    out.print(done)
    if report.dry_run:
        out.print("Dry run: nothing was sent.")


def _files(files: list[ShippedFile]) -> str:
    return f"{len(files)} files, {size(sum(file.size_bytes for file in files))}"


def _whole(report: PushReport) -> int:
    """All ranks' shards, and once what they share."""
    return sum(sum(part.own_bytes) + part.shared_bytes for part in report.parts)
