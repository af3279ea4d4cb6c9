"""A tiny FLUX.2 end to end: made, planned, built for two ranks, verified, merged back, compared.

Where the runtime is installed the shards are loaded as well, and give what the whole model gives.
"""

from __future__ import annotations

import filecmp
import importlib.util
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from shardc import api
from shardc.check import check_plan
from shardc.errors import VerifyError
from shardc.layout import PackedShard
from shardc.planner import Plan
from shardc.synthetic import DTYPES, flux2_tensors, write_json, write_weights
from shardc.writing import Resources

TP = 2
COMPONENT = "transformer"
NEEDS = ("torch", "diffusers", "accelerate")
INSTALL = "pip install 'shardc[runtime]'"
LIMIT = 1e-5  # of the outputs' largest magnitude, in fp32: the sums of two ranks round otherwise
TIMEOUT_S = 300
FUSED = "single_transformer_blocks.0.attn.to_qkv_mlp_proj.weight"
FUSED_BLOCKS = ("Q", "K", "V", "gate", "up")

# The structure is FLUX.2's, the widths are small; keys as diffusers saves them.
CONFIG: dict[str, Any] = {
    "_class_name": "Flux2Transformer2DModel",
    "_diffusers_version": "0.42.1",
    "attention_head_dim": 32,
    "axes_dims_rope": [8, 8, 8, 8],
    "eps": 1e-6,
    "guidance_embeds": False,
    "in_channels": 32,
    "joint_attention_dim": 128,
    "mlp_ratio": 3.0,
    "num_attention_heads": 8,
    "num_layers": 2,
    "num_single_layers": 4,
    "out_channels": None,
    "patch_size": 1,
    "rope_theta": 2000,
    "timestep_guidance_channels": 64,
}


@dataclass(frozen=True, slots=True)
class Step:
    """One thing that the demo did, what came of it, and how long it took."""

    name: str
    result: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Picture:
    """Which rank holds which rows of one fused block, in the source's order."""

    block: str
    start: int
    stop: int
    ranks: tuple[tuple[int, int, int], ...]  # rank, start, stop


@dataclass(frozen=True, slots=True)
class Load:
    """How the shards loaded and ran: the loaders' report of each rank, and the error.

    `skipped` says what to install where the runtime is not there; then the rest is empty.
    """

    skipped: str | None = None
    ranks: tuple[dict[str, Any], ...] = ()
    relative_error: float | None = None
    limit: float = LIMIT


@dataclass(frozen=True, slots=True)
class DemoReport:
    """All steps, in order, the picture of the fused weight, and what the load gave."""

    folder: str
    steps: tuple[Step, ...]
    picture: tuple[Picture, ...]
    load: Load

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def write_flux2(
    folder: Path,
    config: dict[str, Any] = CONFIG,
    *,
    seed: int = 0,
    files: int = 2,
    dtype: str = "bf16",
) -> None:
    """Write a pipeline folder whose transformer is a random FLUX.2 of `config`."""
    write_json(
        folder / "model_index.json",
        {
            "_class_name": "Flux2KleinPipeline",
            "_diffusers_version": config["_diffusers_version"],
            "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
            "transformer": ["diffusers", config["_class_name"]],
        },
    )
    write_json(
        folder / "scheduler" / "scheduler_config.json",
        {"_class_name": "FlowMatchEulerDiscreteScheduler", "shift": 3.0},
    )
    write_json(folder / "transformer" / "config.json", config)
    write_weights(
        folder / "transformer",
        "diffusion_pytorch_model",
        flux2_tensors(config),
        dtype=DTYPES[dtype],
        seed=seed,
        files=files,
    )


def run(folder: Path) -> DemoReport:
    """Run the demo in `folder`; VerifyError where anything is not as it must be."""
    source, shards, merged = folder / "checkpoint", folder / f"shards-tp{TP}", folder / "merged"
    steps = []

    def step(name: str, work: Callable[[], str]) -> None:
        started = time.perf_counter()
        result = work()
        steps.append(Step(name, result, time.perf_counter() - started))

    plans: list[Plan] = []
    step("make a random FLUX.2", lambda: _make(source))
    step(f"plan for {TP} ranks", lambda: _plan(source, plans))
    step("build the shards", lambda: _build(source, shards))
    step("verify against the source", lambda: _verify(source, shards))
    step("merge back", lambda: _merge(shards, merged))
    step("compare with the source", lambda: _compare(source, merged))
    load = _Loading(source, shards)
    step(f"load on {TP} ranks", load.run)
    step("compare with the unsharded model", load.compare)
    return DemoReport(str(folder), tuple(steps), _picture(plans[0]), load.report())


class _Loading:
    """The steps that need the runtime. It works in processes of its own, never in this one."""

    def __init__(self, source: Path, shards: Path) -> None:
        self.source, self.shards = source, shards
        self.missing = [name for name in NEEDS if importlib.util.find_spec(name) is None]
        self.ranks: list[tuple[dict[str, Any], np.ndarray]] = []
        self.error: float | None = None

    def run(self) -> str:
        if self.missing:
            return f"skipped, {INSTALL}"
        self.ranks = self._on(TP, "sharded", str(self.shards), COMPONENT, time.monotonic())
        reports = [report for report, _ in self.ranks]
        slowest = max(report["seconds"] for report in reports)
        return (
            f"{max(report['timings']['placed_bytes'] for report in reports)} bytes a rank in "
            f"{slowest:.2f} s, after {max(r['start_seconds'] for r in reports):.1f} s of start-up"
        )

    def compare(self) -> str:
        if self.missing:
            return f"skipped, {INSTALL}"
        (whole,) = self._on(1, "whole", str(self.source), COMPONENT)
        self.error = relative_error(whole, [out for _, out in self.ranks])
        return f"relative error {self.error:.1e} (limit {LIMIT:.0e}), ranks agree bit for bit"

    def report(self) -> Load:
        if self.missing:
            return Load(skipped=f"{', '.join(self.missing)} not installed: {INSTALL}")
        return Load(None, tuple(report for report, _ in self.ranks), self.error)

    @staticmethod
    def _on(size: int, work: str, *arguments: Any) -> list[Any]:
        # by name: the compiler never imports the runtime
        local = importlib.import_module("shardc.loaders.local")
        check = importlib.import_module("shardc.loaders.check")
        found: list[Any] = local.run(getattr(check, work), size, *arguments, timeout_s=TIMEOUT_S)
        return found


def relative_error(whole: np.ndarray, ranks: Sequence[np.ndarray]) -> float:
    """The largest difference by the largest output; VerifyError where that proves nothing, where
    the ranks differ among themselves, or where it is above LIMIT."""
    if not np.isfinite(whole).all() or whole.std() < 0.1 * np.abs(whole).max():
        raise VerifyError("the unsharded model's output is not finite, or nearly constant")
    for rank, out in enumerate(ranks):
        if out.shape != whole.shape:
            raise VerifyError(f"rank {rank} gave {list(out.shape)}, not {list(whole.shape)}")
        if out.tobytes() != ranks[0].tobytes():
            raise VerifyError(f"the output of rank {rank} is not bit for bit that of rank 0")
    error = float(np.abs(ranks[0] - whole).max() / np.abs(whole).max())
    if not error <= LIMIT:  # NaN, too
        raise VerifyError(
            f"the sharded model's output differs from the unsharded one's by {error:.1e} of its "
            f"largest value, more than {LIMIT:.0e}"
        )
    return error


def _make(source: Path) -> str:
    write_flux2(source, dtype="fp32")
    files = sorted((source / "transformer").glob("*.safetensors"))
    return f"{sum(f.stat().st_size for f in files)} bytes in {len(files)} files"


def _plan(source: Path, plans: list[Plan]) -> str:
    plans.append(api.plan(source, TP))
    if problems := check_plan(plans[0]):
        raise VerifyError(problems)
    part = plans[0].components[0]
    return (
        f"{len(part.tensors)} tensors, {max(part.rank_bytes())} bytes a rank, "
        f"{part.replicated_bytes()} of them replicated"
    )


def _build(source: Path, shards: Path) -> str:
    report = api.build(source, shards, TP, resources=Resources(fsync=False))
    return f"{report.files} files, {report.written_bytes} bytes"


def _verify(source: Path, shards: Path) -> str:
    report = api.verify(shards, source)
    if not report.ok:
        raise VerifyError(report.problems)
    return f"{report.tensors} tensors, every byte of every rank is the source's"


def _merge(shards: Path, merged: Path) -> str:
    report = api.merge(shards, merged, resources=Resources(fsync=False))
    return f"{report.files} files, {report.written_bytes} bytes"


def _compare(source: Path, merged: Path) -> str:
    names = sorted(f.relative_to(source).as_posix() for f in source.rglob("*") if f.is_file())
    _, differ, missing = filecmp.cmpfiles(source, merged, names, shallow=False)
    if differ or missing:
        raise VerifyError(f"after the merge {', '.join(differ + missing)} is not the source's")
    return f"{len(names)} files, byte for byte the same"


def _picture(plan: Plan) -> tuple[Picture, ...]:
    planned = next(t for t in plan.components[0].tensors if t.tensor.name == FUSED)
    assert isinstance(planned.placement, PackedShard)
    found = []
    at = 0
    for name, block in zip(FUSED_BLOCKS, planned.placement.blocks, strict=True):
        stop = at + block.size
        held = tuple(
            (rank, max(piece.start, at), min(piece.stop, stop))
            for rank, pieces in enumerate(planned.pieces)
            for piece in pieces
            if piece.start < stop and piece.stop > at
        )
        found.append(Picture(name, at, stop, held))
        at = stop
    return tuple(found)


def draw(picture: tuple[Picture, ...], columns: int = 60) -> list[str]:
    """The picture as text: one line a block, each column the rank that holds those rows."""
    rows = picture[-1].stop
    lines = []
    for block in picture:
        width = max(TP, math.floor(columns * (block.stop - block.start) / rows))
        cells = ""
        for column in range(width):
            row = block.start + (block.stop - block.start) * column // width
            cells += next(str(r) for r, start, stop in block.ranks if start <= row < stop)
        lines.append(f"{block.block:>5} rows {block.start:>5} to {block.stop:<5} {cells}")
    return lines
