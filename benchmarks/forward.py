"""What a forward costs by runtime: shardc's plain tensors, its DTensors, diffusers' own sharding.

A random FLUX.2 is written, built, and loaded by every contestant in the same ranks of this machine
(cpu, gloo); then they run forwards in turn. Narrow models show what Python and the collectives
cost, which a fast device cannot hide. Run it from the repository: python -m benchmarks.forward
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

import shardc
from shardc.demo import CONFIG, write_flux2
from shardc.loaders import local

BLOCKS = {"num_layers": 5, "num_single_layers": 20}  # as FLUX.2-klein-4B
CONTESTANTS = ("plain, compact", "plain, native", "dtensor", "diffusers")


def load(name: str, folder: Path, tp: int) -> Any:
    """A contestant's model on this rank."""
    import torch.distributed as dist

    from shardc.loaders import load_model

    if name == "diffusers":
        import torch
        from diffusers import Flux2Transformer2DModel, TensorParallelConfig
        from diffusers.hooks import tensor_parallel as theirs
        from torch.distributed.device_mesh import init_device_mesh

        model: Any = Flux2Transformer2DModel.from_pretrained(
            folder / "source", subfolder="transformer", torch_dtype=torch.float32
        )
        config, mesh = TensorParallelConfig(tp_degree=tp), init_device_mesh("cpu", (tp,))
        config.setup(dist.get_rank(), tp, torch.device("cpu"), mesh)
        theirs._SUPPORTED_TP_DEVICES = {"cpu"}  # it works there, but is refused
        theirs.apply_tensor_parallel(model, config, model._tp_plan)
        return model.eval()
    if name == "dtensor":
        return load_model(folder / "native", runtime="dtensor")
    return load_model(folder / name.removeprefix("plain, "))


def measure(folder: str, tp: int, rounds: int, tokens: int) -> dict[str, list[float]]:
    """Seconds of each contestant's forwards on this rank, taken in turn, the first one dropped."""
    import torch
    import torch.distributed as dist

    models = {name: load(name, Path(folder), tp) for name in CONTESTANTS}
    config = models[CONTESTANTS[0]].config
    draw = torch.Generator().manual_seed(0)
    inputs = {
        "hidden_states": torch.randn(1, tokens, config.in_channels, generator=draw),
        "encoder_hidden_states": torch.randn(
            1, tokens // 2, config.joint_attention_dim, generator=draw
        ),
        "timestep": torch.tensor([0.5]),
        "img_ids": torch.zeros(1, tokens, 4),
        "txt_ids": torch.zeros(1, tokens // 2, 4),
        "return_dict": False,
    }

    def once(model: Callable[..., Any]) -> tuple[float, Any]:
        dist.barrier()
        started = time.perf_counter()
        with torch.no_grad():
            out = model(**inputs)[0]
        return time.perf_counter() - started, out

    seconds: dict[str, list[float]] = {name: [] for name in models}
    outputs = {}
    for number in range(rounds + 1):
        for name, model in models.items():
            took, outputs[name] = once(model)
            if number:
                seconds[name].append(took)
    whole = outputs["diffusers"]
    for name, out in outputs.items():
        assert torch.allclose(out, whole, rtol=1e-4, atol=1e-4), f"{name} differs from diffusers"
    return seconds


def compare(folder: Path, tp: int, head: int, rounds: int, tokens: int) -> list[dict[str, Any]]:
    """Write, build, run; a row a contestant, of the slowest rank in each round."""
    axes = (head // 4,) * 4
    write_flux2(
        folder / "source",
        CONFIG | BLOCKS | {"attention_head_dim": head, "axes_dims_rope": axes},
        dtype="fp32",
    )
    for profile in ("compact", "native"):
        shardc.build(folder / "source", folder / profile, tp, profile=profile)  # type: ignore[arg-type]
    from benchmarks.forward import measure as importable  # this module itself may be __main__

    ranks = local.run(importable, tp, str(folder), tp, rounds, tokens)
    rows = []
    for name in CONTESTANTS:
        taken = [max(at) for at in zip(*(rank[name] for rank in ranks), strict=True)]
        rows.append({"runtime": name, "median": statistics.median(taken), "fastest": min(taken)})
    return rows


@click.command()
@click.option("--tp", default=2, show_default=True, help="Ranks.")
@click.option("--head", default=16, show_default=True, help="Elements a head: a multiple of 8.")
@click.option("--tokens", default=16, show_default=True, help="Image tokens.")
@click.option("--rounds", default=15, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout.")
def main(tp: int, head: int, tokens: int, rounds: int, as_json: bool) -> None:
    """Time forwards of each runtime in turn."""
    with tempfile.TemporaryDirectory() as folder:
        rows = compare(Path(folder), tp, head, rounds, tokens)
    if as_json:
        click.echo(json.dumps(rows))
        return
    table = Table("runtime", "median ms", "fastest ms", "against diffusers")
    base = rows[-1]["median"]
    for row in rows:
        table.add_row(
            row["runtime"],
            f"{row['median'] * 1e3:.1f}",
            f"{row['fastest'] * 1e3:.1f}",
            f"{row['median'] / base:.2f}",
        )
    Console().print(table)


if __name__ == "__main__":
    main()
