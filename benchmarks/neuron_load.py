"""What a load takes of the host: shardc's beside diffusers' own streaming load, simulated cores.

A FLUX.2 of 795 million parameters, bfloat16, is written, built for the ranks, and loaded by each
loader in fresh processes; then both run the same forward. A rank's host peak is its largest
resident set while it loads, mapped file pages included, over what it was just before. Nothing here
says how fast a real core loads. Run it from the repository: python -m benchmarks.neuron_load
"""

from __future__ import annotations

import json
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console
from rich.table import Table

import shardc
from benchmarks.make_checkpoint import DIFFUSERS_VERSION, FLUX2
from shardc.demo import write_flux2
from tests.neuron_ranks import forward, mesh, reset_peak, status_bytes, tensors
from tests.neuronsim.launch import launch, results

CONFIG = FLUX2 | {
    "_diffusers_version": DIFFUSERS_VERSION,
    "joint_attention_dim": 7680,
    "num_attention_heads": 24,
    "num_layers": 1,
    "num_single_layers": 3,
}
INPUTS = {
    "hidden_states": [1, 16, 128],
    "encoder_hidden_states": [1, 8, 7680],
    "timestep": 0.5,
    "img_ids": [1, 16, 4],
    "txt_ids": [1, 8, 4],
}
MIB = 1 << 20
SAMPLE_SECONDS = 0.002
COLUMNS = (
    "loader", "rank", "seconds", "weights", "host peak", "of it heap", "h2d", "staged", "cast",
    "bounce", "collectives", "against unsharded",
)  # fmt: skip


class HeapPeak:
    """The largest anonymous memory of this process while it lives, over what it had: sampled."""

    def __enter__(self) -> HeapPeak:
        self._before = self._peak = status_bytes("RssAnon")
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._sample)
        self._thread.start()
        return self

    def _sample(self) -> None:
        while not self._over.wait(SAMPLE_SECONDS):
            self._peak = max(self._peak, status_bytes("RssAnon"))

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    @property
    def grown_bytes(self) -> int:
        return self._peak - self._before


def _load(loader: str, path: str, tp: Any) -> torch.nn.Module:
    if loader == "shardc":
        from shardc.loaders import load_model

        return load_model(path, mesh=tp, component="transformer")
    from diffusers import Flux2Transformer2DModel, TensorParallelConfig

    model: torch.nn.Module = Flux2Transformer2DModel.from_pretrained(
        path,
        subfolder="transformer",
        torch_dtype=torch.bfloat16,
        parallel_config=TensorParallelConfig(mesh=tp),
    ).eval()
    return model


def _local(tensor: torch.Tensor) -> torch.Tensor:
    local: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local


def _measure(loader: str, path: str, expected: str) -> dict[str, Any]:
    """One rank's load: in a fresh process, everything imported and the core in use before."""
    import torch_neuronx
    from diffusers import Flux2Transformer2DModel, TensorParallelConfig  # noqa: F401

    import shardc.loaders.diffusers  # noqa: F401

    tp = mesh()
    torch.zeros(8, device="neuron")
    torch_neuronx.reset_counters()
    reset_peak()
    before = status_bytes("VmRSS")
    with HeapPeak() as heap:
        started = time.perf_counter()
        model = _load(loader, path, tp)
        seconds = time.perf_counter() - started
    found = {
        "seconds": seconds,
        "peak": status_bytes("VmHWM") - before,
        "heap": heap.grown_bytes,
        "weights": sum(_local(tensor).nbytes for tensor in tensors(model).values()),
        "collectives": sum(torch_neuronx.distributed.collectives.values()),
        **torch_neuronx.counters(),
    }
    output, reference = _run(model, "neuron").cpu(), torch.load(expected)
    error = (output - reference).abs().max() / reference.abs().max()
    return {**found, "error": error.item()}


def _run(model: torch.nn.Module, device: str) -> torch.Tensor:
    return forward(model, INPUTS, device, torch.bfloat16)


@click.group(invoke_without_command=True)
@click.pass_context
@click.option("--tp", default=2, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout.")
def main(context: click.Context, tp: int, as_json: bool) -> None:
    """Measure both loaders and print a table, a line a rank."""
    if context.invoked_subcommand is None:
        with tempfile.TemporaryDirectory() as folder:
            rows = compare(Path(folder), tp)
        click.echo(json.dumps(rows)) if as_json else show(rows)


@main.command(hidden=True)
@click.argument("arguments", type=json.loads)
def rank(arguments: dict[str, Any]) -> None:
    """One rank of a measurement."""
    found = _measure(**arguments)
    torch.distributed.destroy_process_group()
    click.echo(json.dumps(found))


def compare(folder: Path, tp: int) -> list[dict[str, Any]]:
    """Write, build, load by each loader; a row a rank."""
    source, shards, expected = folder / "source", folder / "shards", folder / "expected.pt"
    write_flux2(source, CONFIG, files=2)
    shardc.build(source, shards, tp)
    torch.save(_unsharded(source), expected)
    rows = []
    for loader, path in (("shardc", shards), ("diffusers", source)):
        arguments = {"loader": loader, "path": str(path), "expected": str(expected)}
        ended = launch(__spec__.name, "rank", world=tp, arguments=arguments, seconds=600)
        rows += [{"loader": loader, "rank": i, **row} for i, row in enumerate(results(ended))]
    return rows


def _unsharded(source: Path) -> torch.Tensor:
    from diffusers import Flux2Transformer2DModel

    model = Flux2Transformer2DModel.from_pretrained(
        source, subfolder="transformer", torch_dtype=torch.bfloat16
    )
    return _run(model.eval(), "cpu")


def show(rows: list[dict[str, Any]]) -> None:
    table = Table(*COLUMNS, title="Loading onto simulated cores; MiB")
    for row in rows:
        sizes = [row[key] for key in ("weights", "peak", "heap", "h2d", "staged", "cast", "bounce")]
        table.add_row(
            row["loader"],
            str(row["rank"]),
            f"{row['seconds']:.2f}",
            *(f"{size / MIB:.0f}" for size in sizes),
            f"{row['collectives'] / MIB:.0f}",
            f"{row['error']:.1e}",
        )
    Console(width=150).print(table)


if __name__ == "__main__":
    main()
