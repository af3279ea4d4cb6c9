"""`python -m shardc.loaders OUT --nproc N`: load a shard set on this machine, and say how long."""

from __future__ import annotations

import importlib.util
import json
import sys
import time
from collections.abc import Mapping
from typing import Any

import click
from rich import box
from rich.console import Console
from rich.table import Table

from shardc.errors import Problem, ShardcError, ShardSetError
from shardc.loaders import check, local

NEEDS = ("torch", "accelerate")
GB, MIB = 1e9, 2**20


@click.command(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.argument("out")
@click.option("--nproc", type=click.IntRange(1), required=True, help="Ranks: the set's tp.")
@click.option("--component", metavar="NAME", help="Which, where several are sharded.")
@click.option("--device", type=click.Choice(list(local.BACKENDS)), default="cpu", show_default=True)
@click.option(
    "--reads",
    type=click.Choice(["auto", "mapped", "direct"]),
    default="auto",
    show_default=True,
    help="By the mapping, by large direct reads, or what suits the cache.",
)
@click.option(
    "--timeout", type=click.FloatRange(1), default=600, show_default=True, metavar="SECONDS"
)
@click.option("--revision", metavar="REV", help="A Hub repo's branch, tag or commit.")
@click.option("--token", metavar="T", help="For the Hub.  [default: HF_TOKEN, or the saved]")
@click.option("--no-cache", is_flag=True, help="Stream from the address, and keep nothing here.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout.")
def main(
    out: str,
    nproc: int,
    component: str | None,
    device: str,
    reads: str,
    timeout: float,
    revision: str | None,
    token: str | None,
    no_cache: bool,
    as_json: bool,
) -> None:
    """Load the shard set OUT on this machine, a process for each rank, and report each load.

    OUT: a folder, or an address: org/name or hf://org/name of the Hub, or s3://bucket/prefix.

    \b
    Example:
      python -m shardc.loaders flux2-tp2 --nproc 2
      python -m shardc.loaders flux2-tp2 --nproc 2 --device cuda --json
    """
    try:
        remote = {"revision": revision, "token": token, "cache": not no_cache}
        reports = _load(out, nproc, component, device, reads, timeout, remote)
    except ShardcError as error:
        problems = [str(problem) for problem in error.problems]
        for problem in problems:
            click.echo(f"error: {problem}", err=True)
        if as_json:
            click.echo(json.dumps({"ok": False, "problems": problems}, indent=1))
        sys.exit(1)
    except KeyboardInterrupt:
        click.echo("interrupted", err=True)
        sys.exit(130)
    if as_json:
        document = {"ok": True, "path": out, "device": device, "ranks": reports}
        click.echo(json.dumps(document, indent=1))
        return
    _show(out, device, reports)
    if device == "cpu" and reads != "direct" and not no_cache:
        click.echo("On cpu the tensors are views of the files: their bytes are read when used.")


def _load(
    out: str,
    nproc: int,
    component: str | None,
    device: str,
    reads: str,
    timeout: float,
    remote: Mapping[str, Any],
) -> list[dict[str, Any]]:
    missing = [name for name in NEEDS if importlib.util.find_spec(name) is None]
    if missing:
        raise ShardSetError(
            Problem(", ".join(missing), "not installed", "pip install 'shardc[runtime]'")
        )
    return local.run(
        check.loaded,
        nproc,
        out,
        component,
        device,
        time.monotonic(),
        reads,
        remote,
        device=device,
        timeout_s=timeout,
    )


def _show(out: str, device: str, reports: list[dict[str, Any]]) -> None:
    phases = [key for key, value in reports[0]["timings"].items() if isinstance(value, float)]
    if not any(report["timings"]["pull"] for report in reports):
        phases.remove("pull")  # of a set on this machine
    title = f"{out}: {reports[0]['component'] or 'model'} on {len(reports)} ranks, {device}"
    shown = Table(title=title, box=box.SIMPLE, title_justify="left", pad_edge=False)
    for column in ("rank", "start s", *(f"{phase} s" for phase in phases), "total s", "GB", "GB/s"):
        shown.add_column(column, justify="right")
    shown.add_column("peak host RSS", justify="right")
    for report in reports:
        placed_bytes, seconds = report["timings"]["placed_bytes"], report["seconds"]
        grown_bytes = report["host_bytes_peak"] - report["host_bytes_before"]
        shown.add_row(
            str(report["rank"]),
            f"{report['start_seconds']:.2f}",
            *(f"{report['timings'][phase]:.3f}" for phase in phases),
            f"{seconds:.3f}",
            f"{placed_bytes / GB:.3f}",
            f"{placed_bytes / seconds / GB:.2f}",
            f"{report['host_bytes_peak'] / MIB:.0f} MiB (load +{grown_bytes / MIB:.0f})",
        )
    width = None if sys.stdout.isatty() else 100
    console = Console(width=width, highlight=False, markup=False, emoji=False)
    console.print(shown)
    console.print("start: the process, its imports and the process group; total: the load alone.")


if __name__ == "__main__":
    main(prog_name="python -m shardc.loaders")
