"""A case proven: saved, built, loaded on several ranks, and compared with the unsharded model."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import shardc
from shardc import library
from shardc.errors import PlanError
from shardc.loaders.prove import TOLERANCE, error, outputs
from tests import ranks
from tests.zoo.case import Case, Draw, by_name

Outputs = list[np.ndarray]
BF16_SENSIBLE = 0.15  # above this the comparison would say nothing
BF16_FACTOR = 1.5  # of the unsharded bf16 model's own error


@dataclass
class Proof:
    """Errors of one case by (ranks, profile), in fp32, and of both bf16 models against fp32."""

    case: Case
    errors: dict[tuple[int, str], float] = field(default_factory=dict)
    bf16: dict[int, float] = field(default_factory=dict)
    bf16_whole: float = 0.0  # the unsharded bf16 model's own error

    @property
    def worst(self) -> float:
        return max(self.errors.values())

    def check(self) -> None:
        for (size, profile), gap in self.errors.items():
            assert gap <= TOLERANCE, f"{self.case.name}, {size} ranks, {profile}: error {gap:.2g}"
        told = f"{self.case.name}: the whole model is off by {self.bf16_whole:.2g} in bf16 itself"
        assert self.bf16_whole <= BF16_SENSIBLE, told
        limit = BF16_FACTOR * self.bf16_whole
        for size, gap in self.bf16.items():
            told = f"{self.case.name}, {size} ranks, bf16: error {gap:.2g}, at most {limit:.2g}"
            assert gap <= limit, told


def forward(model: Any, case: Case, dtype: torch.dtype) -> Outputs:
    """The model's outputs for the case's inputs, as float64 arrays."""
    found = outputs(model, case.inputs(Draw(dtype)))
    assert found, f"{case.name} gives no tensor"
    return found


def on_rank(rank: int, name: str, sets: Mapping[str, tuple[str, torch.dtype]]) -> dict[str, Any]:
    """Load each set and call it: the outputs of rank 0, and what tells whether others agree."""
    from shardc.loaders import load_model

    case = by_name(name)
    found = {}
    for label, (path, dtype) in sets.items():
        gave = forward(load_model(path), case, dtype)
        digest = hashlib.sha256(b"".join(o.tobytes() for o in gave)).hexdigest()
        found[label] = (digest, gave if rank == 0 else None)
    return found


def rms_of(found: Outputs, wanted: Outputs) -> float:
    """The root mean square of all differences, relative to that of the outputs."""
    gaps = np.concatenate([(f - w).ravel() for f, w in zip(found, wanted, strict=True)])
    return float(
        np.sqrt(np.mean(gaps**2) / np.mean(np.concatenate([w.ravel() for w in wanted]) ** 2))
    )


def on_ranks(
    case: Case, size: int, sets: Mapping[str, tuple[str, torch.dtype]]
) -> dict[str, Outputs]:
    """Every set's outputs on `size` ranks, which must agree bit for bit."""
    told = ranks.values(ranks.run(on_rank, size, case.name, sets, timeout=300))
    for label in sets:
        assert len({rank[label][0] for rank in told}) == 1, f"{case.name}: ranks differ on {label}"
    return {label: told[0][label][1] for label in sets}


def profiles_of(case: Case) -> list[str]:
    manifest = library.for_class(case.class_name)
    assert manifest is not None, f"{case.class_name} has no manifest"
    return ["compact", "native"] if any(r.profile for r in manifest.rules) else ["compact"]


def prove(case: Case, folder: Path, *, briefly: bool = False) -> Proof:
    """Run everything that a case claims; briefly: at its first degree, and in fp32 only."""
    torch.set_num_threads(1)  # tiny models, and several at once
    sizes = case.ranks[:1] if briefly else case.ranks
    in_half = case.bf16 and not briefly
    model = case.build()
    wanted = forward(model, case, torch.float32)
    assert all(np.isfinite(w).all() for w in wanted), f"{case.name}: the outputs are not finite"
    assert max(np.abs(w).max(initial=0) for w in wanted) > 1e-2, f"{case.name}: outputs vanish"
    model.save_pretrained(folder / "fp32")
    proof = Proof(case)
    if in_half:
        kind = {"torch_dtype" if case.library == "diffusers" else "dtype": torch.bfloat16}
        half = type(model).from_pretrained(folder / "fp32", **kind).eval()
        half.save_pretrained(folder / "bf16")
        exact = type(model).from_pretrained(folder / "bf16").float().eval()
        wanted_half = forward(exact, case, torch.float32)
        proof.bf16_whole = rms_of(forward(half, case, torch.bfloat16), wanted_half)
    for size in sizes:
        sets = {}
        for profile in profiles_of(case):
            sets[profile] = build(folder / "fp32", folder / f"{profile}-{size}", size, profile)
        if in_half:
            sets["bf16"] = build(folder / "bf16", folder / f"bf16-{size}", size, "compact")
        gave = on_ranks(case, size, sets)
        if in_half:
            proof.bf16[size] = rms_of(gave.pop("bf16"), wanted_half)
        for profile, found in gave.items():
            proof.errors[size, profile] = error(found, wanted)
    for size in case.padded:
        with pytest.raises(PlanError):
            shardc.plan(folder / "fp32", size)
        sets = {"padded": build(folder / "fp32", folder / f"padded-{size}", size, "compact", True)}
        proof.errors[size, "padded"] = error(on_ranks(case, size, sets)["padded"], wanted)
        shardc.merge(folder / f"padded-{size}", folder / f"full-{size}")
        for path in (folder / "fp32").glob("*.safetensors"):
            assert (folder / f"full-{size}" / path.name).read_bytes() == path.read_bytes()
    return proof


def build(
    source: Path, out: Path, size: int, profile: Any, pad_heads: bool = False
) -> tuple[str, torch.dtype]:
    """Build a set; where it is, and the dtype to call its model with."""
    shardc.build(source, out, size, profile=profile, pad_heads=pad_heads)
    return str(out), torch.bfloat16 if source.name == "bf16" else torch.float32
