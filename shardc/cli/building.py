"""`shardc plan` and `shardc build`."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from shardc.cli.options import (
    PATH,
    Source,
    debug_option,
    force_option,
    json_option,
    planning_options,
    quiet_option,
    resource_options,
    resources,
    resume_option,
)
from shardc.cli.output import (
    console,
    degrees,
    mebibytes,
    parameters,
    progress,
    reporting,
    say_json,
    size,
    table,
)
from shardc.errors import PlanError, Problem, ShardcError
from shardc.location import locate

if TYPE_CHECKING:
    from shardc.builder import BuildReport
    from shardc.planner import Plan


def make_plan(
    src: str, *, target: str | None, debug: bool, **options: Any
) -> tuple[Plan, list[Problem]]:
    """The plan, and what its target and, with `debug`, its invariants have against it."""
    from shardc import api

    options["components"] = options["components"] or None
    part_bytes = options.pop("max_part_bytes")
    if part_bytes is not None:
        options["max_part_bytes"] = part_bytes
    try:
        planned = api.plan(src, **options)
    except PlanError as error:
        raise PlanError([*error.problems, *_legal_hint(src, options)]) from error
    problems: list[Problem] = []
    if part_bytes is not None:
        problems += _too_large(planned, part_bytes)
    if target is not None:
        from shardc import targets

        problems += targets.check(planned, targets.TARGETS[target])
    if debug:
        from shardc.check import check_plan

        problems += check_plan(planned)
    return planned, problems


def _too_large(planned: Plan, part_bytes: int) -> list[Problem]:
    """Tensors that no part of the size that was asked for can hold: a tensor is never cut."""
    return [
        Problem(
            f"tensor {info.name!r}",
            f"takes {info.size_bytes} bytes of {file.name}, --max-part-size is {part_bytes}",
            "allow larger parts, or choose a higher degree",
        )
        for part in planned.components
        for file in part.files
        for info in file.tensors
        if info.size_bytes > part_bytes
    ]


def _legal_hint(src: str, options: dict[str, Any]) -> list[Any]:
    """Where only the degree is wrong, which degrees are right."""
    from shardc import api
    from shardc.report import plan_report

    try:
        report = plan_report(api.plan(src, **{**options, "tp": 1}))
    except ShardcError:
        return []
    return [
        Problem(
            part["name"] or part["class"], f"legal degrees are {degrees(part['legal_degrees'])}"
        )
        for part in report["components"]
    ]


def default_out(src: str, tp: int) -> Path:
    """NAME-tpN here; a Hub cache snapshot is named by its repo."""
    where = locate(src)
    if not isinstance(where, Path):
        return Path(f"{where.name.removesuffix('.safetensors')}-tp{tp}")
    resolved = Path(os.path.abspath(where))  # `..` goes, a Hub cache's links stay
    name = resolved.stem if resolved.is_file() else resolved.name
    if resolved.parent.name == "snapshots" and resolved.parent.parent.name.startswith("models--"):
        name = resolved.parent.parent.name.split("--")[-1]
    return Path(f"{name}-tp{tp}")


@click.command()
@click.argument("src", type=Source())
@planning_options
@json_option
@debug_option
@reporting
def plan(src: str, as_json: bool, debug: bool, **options: Any) -> None:
    """Show how SRC would be cut, from its headers alone: no weight is read.

    SRC: a pipeline folder, a component folder, or a .safetensors file with its config.json; or
    what holds one elsewhere: a Hub repo (org/name, hf://org/name@rev/folder) or s3://bucket/prefix.

    \b
    Example:
      shardc plan FLUX.2-klein-4B --tp 8
      shardc plan FLUX.2-klein-4B --tp 8 --target trn2 --json
      shardc plan black-forest-labs/FLUX.2-klein-4B --tp 8
    """
    from shardc.report import plan_report

    planned, problems = make_plan(src, debug=debug, **options)
    report = {"ok": not problems, "problems": list(map(str, problems)), **plan_report(planned)}
    if as_json:
        say_json(report)
    else:
        show_plan(report)
    for problem in problems:
        click.echo(f"error: {problem}", err=True)
    if problems:
        sys.exit(1)


def padding(part: dict[str, Any]) -> str:
    """What zero heads, columns and rows cost a component."""
    share = part["padding_bytes"] / part["source_bytes"]
    return f"{size(part['padding_bytes'])} ({share:.1%} of the source)"


def show_plan(report: dict[str, Any]) -> None:
    """A plan's report as tables."""
    out = console()
    main = table(
        "component",
        "class",
        ">params",
        ">source",
        ">a rank",
        ">replicated",
        ">files",
        title=f"{report['source']} at tp {report['tp']}, profile {report['profile']}",
    )
    for part in report["components"]:
        main.add_row(
            part["name"] or ".",
            part["class"],
            parameters(part["parameters"]),
            size(part["source_bytes"]),
            size(max(part["rank_bytes"])),
            f"{size(part['replicated_bytes'])} ({part['replicated_share']:.1%})",
            str(part["files"]),
        )
    for part in report["kept"]:
        held = size(part["bytes"])
        main.add_row(part["name"], f"{part['class'] or '?'}, kept whole", "", held, held, "", "")
    out.print(main)
    out.print(f"A rank holds {size(report['rank_bytes'])} in all.")
    for part in report["components"]:
        out.print()
        out.print(part["name"] or part["class"], style="bold")
        facts = table("", "")
        facts.show_header = False
        profiles = part["profiles"].items()
        facts.add_row("manifest", part["manifest"])
        facts.add_row(
            "bytes a rank by profile",
            ", ".join(f"{k} {'not legal' if v is None else size(v)}" for k, v in profiles),
        )
        facts.add_row(
            "dtypes", ", ".join(f"{k}: {v['tensors']} tensors" for k, v in part["dtypes"].items())
        )
        if part["cast"]:
            facts.add_row("cast", f"{part['cast']} tensors to {report['dtype']}")
        if part["padding_bytes"]:
            facts.add_row("zeros added, all ranks", padding(part))
        if part["replicated_share"] > 0.001:
            facts.add_row(
                "largest replicated",
                "\n".join(f"{t['name']} ({size(t['bytes'])})" for t in part["largest_replicated"]),
            )
        facts.add_row("legal degrees to 64", degrees(part["legal_degrees"]))
        for group in part["illegal_degrees"]:
            facts.add_row(f"not {degrees(group['degrees'])}", group["why"])
        if part["unused_optional"]:
            facts.add_row("optional rules unused", "\n".join(part["unused_optional"]))
        out.print(facts)
    for part in report["kept"]:
        out.print(f"{part['name']} is kept whole: {part['why']}.")
    if report["left_out"]:
        out.print(f"Left out (other weights): {', '.join(report['left_out'])}")


@click.command()
@click.argument("src", type=Source())
@planning_options
@click.option("-o", "--out", type=PATH, metavar="OUT", help="Folder to make.  [default: NAME-tpN]")
@resource_options
@click.option("--dry-run", is_flag=True, help="Plan and check, write nothing.")
@resume_option
@force_option
@json_option
@quiet_option
@debug_option
@reporting
def build(
    src: str,
    out: Path | None,
    no_fsync: bool,
    workers: int | None,
    memory: int | None,
    dry_run: bool,
    resume: bool,
    force: bool,
    as_json: bool,
    quiet: bool,
    debug: bool,
    **options: Any,
) -> None:
    """Cut the full checkpoint SRC into one shard a rank.

    SRC: a pipeline folder, a component folder, or a .safetensors file with its config.json; or
    what holds one elsewhere: a Hub repo (org/name, hf://org/name@rev/folder) or s3://bucket/prefix.
    Components without a manifest are kept whole. OUT appears when it is complete; where it is up
    to date already, nothing is done.

    \b
    Example:
      shardc build FLUX.2-klein-4B --tp 8
      shardc build FLUX.2-klein-4B --tp 8 --resume
      shardc build black-forest-labs/FLUX.2-klein-4B --tp 8
      shardc build FLUX.2-klein-4B --tp 8 --dtype bf16 -o klein-tp8 --json
    """
    from shardc import builder
    from shardc.report import plan_report

    planned, problems = make_plan(src, debug=debug, **options)
    if problems:
        raise PlanError(problems)
    out = out or default_out(src, planned.options.tp)
    if dry_run:
        up_to_date = builder.check_out(planned, out, force=force, resume=resume)
        report = {
            "ok": True,
            "problems": [],
            **plan_report(planned),
            "out": str(out),
            "dry_run": True,
            "up_to_date": up_to_date,
        }
        if as_json:
            say_json(report)
        elif not quiet:
            show_plan(report)
            ending = "is up to date" if up_to_date else "was not written"
            click.echo(f"Dry run: {out} {ending}.")
        return
    if planned.options.pad_heads and not quiet:
        for part in plan_report(planned)["components"]:
            click.echo(f"{part['name'] or part['class']}: zeros add {padding(part)}", err=True)
    total = builder.source_bytes(planned)
    with progress("build", total, quiet=quiet or as_json) as advance:
        done = builder.build(
            planned, out, resources(no_fsync, workers, memory, advance), force=force, resume=resume
        )
    if as_json:
        say_json({"ok": True, **done.to_json()})
    elif not quiet:
        show_build(done)


def show_build(report: BuildReport) -> None:
    """What a build, merge or reshard did, as a table."""
    if report.up_to_date:
        click.echo(f"{report.out}: up to date")
        return
    made = table("", "")
    made.show_header = False
    made.add_row("out", report.out)
    for name in report.sharded:
        made.add_row("sharded", f"{name or '.'} at tp {report.tp}")
    for name, how in report.kept.items():
        made.add_row("kept whole", f"{name}: weights {how}")
    if report.resumed_tensors:
        made.add_row("resumed", f"{report.resumed_tensors} tensors were written already")
    made.add_row("files", str(report.files))
    made.add_row("written", f"{size(report.written_bytes)} ({report.written_bytes} bytes)")
    made.add_row("seconds", f"{report.seconds:.2f}")
    made.add_row("rate", f"{report.source_bytes / max(report.seconds, 1e-9) / 1e9:.2f} GB/s")
    made.add_row("peak memory", mebibytes(report.peak_rss_bytes))
    console().print(made)
