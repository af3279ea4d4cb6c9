"""`python -m benchmarks build|load|startup|growth` measures; `report` makes a page of it.

Run it from the repository, on a machine that does nothing else.
"""

from __future__ import annotations

import functools
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from benchmarks import build, document, growth, load, machine, plot, startup
from benchmarks.harness import Match, series
from benchmarks.page_cache import PageCacheError
from benchmarks.process import RunError
from benchmarks.report import Document, tables
from benchmarks.shapes import SHAPES, Workplace

FOLDER = Path(tempfile.gettempdir()) / "shardc-benchmarks"
PATH = click.Path(path_type=Path)
WIDTH = 130  # of tables that do not go to a terminal


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
def main() -> None:
    """Measure shardc against what it is to beat, side by side.

    \b
    Example:
      python -m benchmarks build --shape small --rounds 3
      python -m benchmarks load --shape klein-4b --cold --json load-cold.json
    """


def measuring(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options that all measurements have."""

    @functools.wraps(command)
    def carry_out(**options: Any) -> None:
        try:
            command(**options)
        except (RunError, PageCacheError) as error:
            raise click.ClickException(str(error)) from error

    for option in reversed(
        (
            click.option("--shape", type=click.Choice(list(SHAPES)), default="klein-4b",
                         show_default=True, help="The checkpoint's names and sizes."),
            click.option("--tp", type=click.IntRange(1), default=8, show_default=True),
            click.option("--rounds", type=click.IntRange(0), default=5, show_default=True,
                         help="Pairs of each match; 0: every contestant once."),
            click.option("--cold", is_flag=True,
                         help="Drop the files from the page cache before each run."),
            click.option("--drop-caches", is_flag=True,
                         help="With --cold: drop all files of the machine (needs root)."),
            click.option("--folder", type=PATH, default=FOLDER, show_default=True,
                         help="Where checkpoints and sets are made, and used again."),
            click.option("--json", "json_path", type=PATH, metavar="FILE",
                         help="Write every sample."),
            click.option("--plot", "plot_path", type=PATH, metavar="FILE", help="Write an SVG."),
            click.option("-q", "--quiet", is_flag=True, help="Do not tell what is being run."),
        )
    ):  # fmt: skip
        carry_out = option(carry_out)
    return carry_out


ONLY = click.option("--only", multiple=True, metavar="NAME", help="Only this contestant, ...")
OUT = click.option("--out", type=PATH, help="Where outputs go.  [default: in --folder]")


def teller(quiet: bool) -> Callable[[str], None]:
    return (lambda _: None) if quiet else (lambda text: click.echo(text, err=True))


def conclude(found: Document, json_path: Path | None, plot_path: Path | None) -> None:
    """Show the tables, and write what was asked for."""
    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        console.width = WIDTH
    for table in tables(found):
        console.print(table)
    for name, reason in found.skipped.items():
        console.print(f"left out: {name}: {reason}")
    if json_path is not None:
        json_path.parent.mkdir(parents=True, exist_ok=True)
        json_path.write_text(found.to_json())
    if plot_path is not None:
        plot.draw(found, plot_path)


def settings(options: dict[str, Any], **more: Any) -> dict[str, Any]:
    names = ("shape", "tp", "rounds", "cold", "drop_caches")
    return {**{name: options[name] for name in names}, **more}


@main.command("build")
@measuring
@ONLY
@OUT
def build_command(only: Sequence[str], out: Path | None, quiet: bool, **options: Any) -> None:
    """Build a shard set, against cp and the ways of today.

    Whole processes. Cold: the source from the disk, and the output on it at the end. Warm: the
    source is cached, and nothing waits for the disk.
    """
    place = Workplace(SHAPES[options["shape"]], options["folder"])
    out = out or options["folder"] / "out"
    out.mkdir(parents=True, exist_ok=True)
    job = _build_job(place.make_source(), out, options)
    facts = machine.facts(options["folder"], out)
    results, skipped = series(build.matches(job, only), options["rounds"], teller(quiet))
    told = settings(options, only=list(only))
    found = Document("build", told, facts, tuple(results), skipped)
    conclude(found, options["json_path"], options["plot_path"])


def _build_job(source: Path, out: Path, options: dict[str, Any]) -> build.Job:
    cold = options["cold"]
    return build.Job(source, out, options["tp"], cold, cold, options["drop_caches"])


@main.command("growth")
@measuring
@click.option("--axis", "axes", multiple=True, type=click.Choice(list(growth.AXES)),
              help="Only this one, ...")  # fmt: skip
@OUT
def growth_command(axes: Sequence[str], out: Path | None, quiet: bool, **options: Any) -> None:
    """How a build's time and memory grow: with size, degree, and tensors; against cp."""
    shape = SHAPES[options["shape"]]
    out = out or options["folder"] / "out"
    out.mkdir(parents=True, exist_ok=True)
    facts = machine.facts(options["folder"], out)
    template = _build_job(options["folder"], out, options)
    results = growth.run(template, shape, options["folder"], axes, options["rounds"], teller(quiet))
    found = Document("growth", settings(options, axis=list(axes)), facts, tuple(results))
    conclude(found, options["json_path"], options["plot_path"])


@main.command("load")
@measuring
@ONLY
@click.option("--ranks", multiple=True, type=click.IntRange(1),
              help="How many ranks at once, ...  [default: 1, and all]")  # fmt: skip
def load_command(only: Sequence[str], ranks: Sequence[int], quiet: bool, **options: Any) -> None:
    """Load ranks onto a stand-in for a device, against diffusers and other loaders.

    The load alone, imports done. See `contestants` in benchmarks/load.py.
    """
    place, facts = _place(options)
    matches: list[Match] = []
    for count in ranks or dict.fromkeys((1, options["tp"])):
        job = load.Job(place, options["tp"], range(count), options["cold"], options["drop_caches"])
        matches += load.matches(job, only)
    results, skipped = series(matches, options["rounds"], teller(quiet))
    told = settings(options, ranks=list(ranks), only=list(only))
    found = Document("load", told, facts, tuple(results), skipped)
    conclude(found, options["json_path"], options["plot_path"])


@main.command("startup")
@measuring
@ONLY
@click.option("--ranks", multiple=True, type=click.IntRange(1),
              help="1, or as many as the degree, ...  [default: 1]")  # fmt: skip
@click.option("--imports/--no-imports", default=True, help="Also say what imports take.")
def startup_command(
    only: Sequence[str], ranks: Sequence[int], imports: bool, quiet: bool, **options: Any
) -> None:
    """Start processes until their model is ready, against diffusers' from_pretrained."""
    if bad := [count for count in ranks if count not in (1, options["tp"])]:
        raise click.UsageError(f"--ranks {bad[0]}: one rank, or all {options['tp']}")
    place, facts = _place(options)
    matches: list[Match] = []
    for count in ranks or (1,):
        job = startup.Job(
            place, options["tp"], range(count), options["cold"], options["drop_caches"]
        )
        matches += startup.matches(job, only)
    results, skipped = series(matches, options["rounds"], teller(quiet))
    took = {way: startup.import_seconds(way) for way in startup.IMPORTS} if imports else {}
    told = settings(options, ranks=list(ranks), only=list(only))
    found = Document("startup", told, facts, tuple(results), skipped, took)
    conclude(found, options["json_path"], options["plot_path"])


def _place(options: dict[str, Any]) -> tuple[Workplace, dict[str, Any]]:
    place = Workplace(SHAPES[options["shape"]], options["folder"])
    place.make_source()
    return place, machine.facts(options["folder"], options["folder"])


@main.command("report")
@click.argument("files", nargs=-1, type=click.Path(path_type=Path, exists=True))
@click.option("--write", is_flag=True, help="Into docs/benchmarks.md and docs/images.")
def report_command(files: Sequence[Path], write: bool) -> None:
    """Series as docs/benchmarks.md has them.

    FILES: what --json wrote.  [default: benchmarks/results/*.json]
    """
    found = document.read(list(files) or document.stored())
    if not write:
        click.echo(document.render(found), nl=False)
        return
    for path in document.write(found):
        click.echo(f"wrote {os.path.relpath(path)}")


if __name__ == "__main__":
    main(prog_name="python -m benchmarks")
