"""`shardc demo`."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import click

from shardc.cli.options import PATH, json_option
from shardc.cli.output import console, reporting, say_json, table
from shardc.errors import OutputError, Problem


@click.command()
@click.option("--keep", type=PATH, metavar="DIR", help="Leave everything in this new folder.")
@json_option
@reporting
def demo(keep: Path | None, as_json: bool) -> None:
    """Run a tiny FLUX.2 end to end: make, plan, build, verify, merge, compare.

    \b
    Example:
      shardc demo
      shardc demo --keep demo
    """
    from shardc import demo as demonstration

    if keep is None:
        with tempfile.TemporaryDirectory(prefix="shardc-demo-") as folder:
            report = demonstration.run(Path(folder))
    else:
        if keep.exists():
            raise OutputError(Problem(str(keep), "exists already", "--keep takes a new folder"))
        keep.mkdir(parents=True)
        try:
            report = demonstration.run(keep)
        except KeyboardInterrupt:
            shutil.rmtree(keep, ignore_errors=True)
            raise
    if as_json:
        say_json({"ok": True, **report.to_json(), "folder": keep and str(keep)})
        return
    shown = table("step", "result", ">seconds")
    for step in report.steps:
        shown.add_row(step.name, step.result, f"{step.seconds:.2f}")
    out = console()
    out.print(shown)
    out.print(f"Who holds which rows of {demonstration.FUSED} (a digit is a rank):")
    for line in demonstration.draw(report.picture):
        out.print(f"  {line}")
    out.print(
        "A contiguous cut would have given rank 0 all of Q and K: the right shape, and wrong."
    )
    if keep is not None:
        out.print(f"All of it is in {keep}.")
