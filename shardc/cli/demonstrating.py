"""`shardc demo`."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import click

from shardc.cli.options import PATH, json_option
from shardc.cli.output import console, reporting, say_json, table
from shardc.cli.picture import draw_rows
from shardc.errors import OutputError, Problem

IMAGE = "rows.png"


@click.command()
@click.option("--keep", type=PATH, metavar="DIR", help="Leave everything in this new folder.")
@json_option
@reporting
def demo(keep: Path | None, as_json: bool) -> None:
    """Run a tiny FLUX.2 end to end: make, plan, build, verify, merge, load on 2 ranks, compare.

    The load needs the runtime (pip install 'shardc[runtime]'). With --keep there is a picture of
    the cut, too: rows.png.

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
    image = None
    if keep is not None and draw_rows(report.picture, demonstration.FUSED, keep / IMAGE):
        image = str(keep / IMAGE)
    if report.load.skipped is not None:
        click.secho(f"load: skipped, {demonstration.INSTALL}", err=True, bold=True, fg="yellow")
    if as_json:
        kept = None if keep is None else str(keep)
        say_json({"ok": True, **report.to_json(), "folder": kept, "image": image})
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
        "A contiguous cut would have given rank 0 all of Q, K and V: the right shape, and wrong."
    )
    if keep is not None:
        out.print(f"All of it is in {keep}.")
        no_image = "There is no picture: Pillow is not installed."
        out.print(no_image if image is None else f"A picture of the rows is in {image}.")
