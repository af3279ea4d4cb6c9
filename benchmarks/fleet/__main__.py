"""`python -m benchmarks.fleet`: the tables and plots of docs/scale.md."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from benchmarks.fleet.inputs import BOTH, INPUTS, MODELS, Values, values
from benchmarks.fleet.tables import both, tables, with_tables

DOCUMENT = Path(__file__).parents[2] / "docs" / "scale.md"


def draw(told: Values, folder: Path) -> None:
    """scale-hosts.svg and scale-ranks.svg: the same bytes each time."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    style: Any = {"svg.hashsalt": "shardc", "svg.fonttype": "none", "path.simplify": True}
    counts = [round(10 ** (i / 4)) for i in range(17)]
    with plt.rc_context(style):
        figure, axes = plt.subplots(1, 2, figsize=(9, 3.8), sharey=True, layout="constrained")
        for ax, host, ranks in zip(axes, ("small", "large"), (1, 8), strict=True):
            for color, name in enumerate(("Hub", "S3", "EFS")):
                done = [both(told, "klein-4B", name, host, hosts=n, ranks=ranks) for n in counts]
                for way, line, seconds in zip(BOTH, "-:", zip(*done, strict=True), strict=True):
                    ax.loglog(counts, seconds, line, color=f"C{color}", label=f"{name}, {way}")
            ax.minorticks_off()
            ax.set(xlabel="hosts", title=f"klein-4B tp 8, {ranks} of 8 ranks a host")
            ax.grid(alpha=0.3)
        axes[0].set(ylabel="seconds until all are ready")
        axes[0].legend(fontsize="small")
        save(figure, folder / "scale-hosts.svg")
        figure, ax = plt.subplots(figsize=(6, 3.6), layout="constrained")
        for model in MODELS.values():
            shares = [2**i for i in range(model.tp.bit_length())]
            saved = [model.full_bytes / model.pulled_bytes("own", n) for n in shares]
            ax.loglog([n / model.tp for n in shares], saved, "o-", label=f"{model.name}")
        ax.set(xlabel="share of the set's ranks on one host", ylabel="full bytes / own bytes")
        ax.set_xticks([1 / 2**i for i in range(6)], ["1", *(f"1/{2**i}" for i in range(1, 6))])
        ax.set_yticks([1, 2, 4, 8, 16, 32], ["1", "2", "4", "8", "16", "32"])
        ax.minorticks_off()
        ax.grid(alpha=0.3)
        ax.legend(fontsize="small")
        save(figure, folder / "scale-ranks.svg")
    plt.close("all")


def save(figure: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})
    lines = path.read_text().splitlines()  # it leaves spaces at the ends of lines
    path.write_text("".join(f"{line.rstrip()}\n" for line in lines))


def parse(changes: Sequence[str]) -> dict[str, float]:
    """NAME=VALUE pairs; click.BadParameter where one is not an input or not positive."""
    changed = {}
    for change in changes:
        name, _, number = change.partition("=")
        if name not in INPUTS:
            raise click.BadParameter(f"{name!r} is none of {', '.join(INPUTS)}")
        try:
            changed[name] = float(number)
        except ValueError:
            raise click.BadParameter(f"{change!r}: write NAME=NUMBER") from None
        if not 0 < changed[name] < math.inf:
            raise click.BadParameter(f"{change!r}: must be above 0 and finite")
    return changed


@click.command()
@click.option("--set", "changes", multiple=True, metavar="NAME=VALUE", help="In its own unit.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@click.option("--plot", type=click.Path(path_type=Path, file_okay=False), help="Draw into DIR.")
@click.option("--write", is_flag=True, help="Fill in the tables of docs/scale.md.")
def main(changes: tuple[str, ...], as_json: bool, plot: Path | None, write: bool) -> None:
    """Time to ready of a fleet, full checkpoint against per-rank pulls, by arithmetic.

    Example: python -m benchmarks.fleet --set gp3=125 --set s3_connections=8
    """
    if write and changes:
        raise click.UsageError("--write is for the inputs as they are: leave out --set")
    told = values(**parse(changes))
    made = tables(told)
    if plot:
        draw(told, plot)
    if write:
        DOCUMENT.write_text(with_tables(DOCUMENT.read_text(), made))
    if as_json:
        click.echo(json.dumps({name: table.records() for name, table in made.items()}, indent=1))
    else:
        for name, table in made.items():
            click.echo(f"{name}\n\n{table.markdown()}\n")


if __name__ == "__main__":
    main(prog_name="python -m benchmarks.fleet")
