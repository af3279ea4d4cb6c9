"""A case proven: saved, built, loaded on several ranks, and compared with the unsharded model."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import shardc
from shardc import library
from shardc.errors import PlanError
from tests import ranks
from tests.zoo.case import Case, Draw, by_name

Outputs = list[np.ndarray]
FP32_TOLERANCE = 1e-5  # of the largest output, or of 1 where that is smaller
BF16_FACTOR = 1.5  # of the unsharded bf16 model's own error


@dataclass
class Proof:
    """Errors of one case by (ranks, profile), in fp32, and of both bf16 models against fp32."""

    case: Case
    errors: dict[tuple[int, str], float] = field(default_factory=dict)
    bf16: dict[int, float] = field(default_factory=dict)
    bf16_whole: float = 0.0

    @property
    def worst(self) -> float:
        return max(self.errors.values())

    def check(self) -> None:
        for (size, profile), error in self.errors.items():
            told = f"{self.case.name}, {size} ranks, {profile}: error {error:.2g}"
            assert error <= FP32_TOLERANCE, told
        for size, error in self.bf16.items():
            limit = BF16_FACTOR * self.bf16_whole
            told = f"{self.case.name}, {size} ranks, bf16: error {error:.2g}, at most {limit:.2g}"
            assert error <= limit, told


def tensors_of(output: Any) -> Iterator[torch.Tensor]:
    """Every floating tensor of a model's output, in order."""
    if isinstance(output, torch.Tensor):
        if output.is_floating_point():
            yield output
    elif isinstance(output, Mapping):
        for value in output.values():
            yield from tensors_of(value)
    elif isinstance(output, list | tuple):
        for value in output:
            yield from tensors_of(value)
    elif hasattr(output, "__dict__"):
        yield from tensors_of(vars(output))


def forward(model: Any, case: Case, dtype: torch.dtype) -> Outputs:
    """The model's outputs for the case's inputs, as float64 arrays."""
    torch.manual_seed(2)  # a model may draw noise of its own
    with torch.no_grad():
        found = [t.double().numpy() for t in tensors_of(model(**case.inputs(Draw(dtype))))]
    assert found, f"{case.name} gives no tensor"
    return found


def on_rank(rank: int, name: str, sets: Mapping[str, tuple[str, torch.dtype]]) -> dict[str, Any]:
    """Load each set and call it: the outputs of rank 0, and what tells whether others agree."""
    from shardc.loaders import load_model

    case = by_name(name)
    found = {}
    for label, (path, dtype) in sets.items():
        outputs = forward(load_model(path), case, dtype)
        digest = hashlib.sha256(b"".join(o.tobytes() for o in outputs)).hexdigest()
        found[label] = (digest, outputs if rank == 0 else None)
    return found


def error_of(found: Outputs, wanted: Outputs) -> float:
    """The largest difference, relative to the largest output where that exceeds 1."""
    assert [f.shape for f in found] == [w.shape for w in wanted]
    scale = max(1.0, *(np.abs(w).max(initial=0) for w in wanted))
    return float(
        max(np.abs(f - w).max(initial=0) for f, w in zip(found, wanted, strict=True)) / scale
    )


def rms_of(found: Outputs, wanted: Outputs) -> float:
    """The root mean square of all differences."""
    gaps = np.concatenate([(f - w).ravel() for f, w in zip(found, wanted, strict=True)])
    return float(np.sqrt(np.mean(gaps**2)))


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


def prove(case: Case, folder: Path, sizes: tuple[int, ...] | None = None) -> Proof:
    """Run everything that a case claims; `sizes` for fewer degrees than its own."""
    model = case.build()
    wanted = forward(model, case, torch.float32)
    assert all(np.isfinite(w).all() for w in wanted), f"{case.name}: the outputs are not finite"
    assert max(np.abs(w).max(initial=0) for w in wanted) > 1e-2, f"{case.name}: outputs vanish"
    model.save_pretrained(folder / "fp32")
    kind = {"torch_dtype" if case.library == "diffusers" else "dtype": torch.bfloat16}
    half = type(model).from_pretrained(folder / "fp32", **kind).eval()
    half.save_pretrained(folder / "bf16")
    exact = type(model).from_pretrained(folder / "bf16").float().eval()
    wanted_half = forward(exact, case, torch.float32)
    proof = Proof(case, bf16_whole=rms_of(forward(half, case, torch.bfloat16), wanted_half))
    for size in sizes or case.ranks:
        sets = {}
        for profile in profiles_of(case):
            sets[profile] = build(folder / "fp32", folder / f"{profile}-{size}", size, profile)
        sets["bf16"] = build(folder / "bf16", folder / f"bf16-{size}", size, "compact")
        outputs = on_ranks(case, size, sets)
        proof.bf16[size] = rms_of(outputs.pop("bf16"), wanted_half)
        for profile, found in outputs.items():
            proof.errors[size, profile] = error_of(found, wanted)
    for size in () if sizes else case.padded:
        with pytest.raises(PlanError):
            shardc.plan(folder / "fp32", size)
        sets = {"padded": build(folder / "fp32", folder / f"padded-{size}", size, "compact", True)}
        proof.errors[size, "padded"] = error_of(on_ranks(case, size, sets)["padded"], wanted)
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
