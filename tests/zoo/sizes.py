"""`python -m tests.zoo.sizes [TEXT]...`: what sharding the published weights comes to.

Each is built on the meta device from its configuration, written as a sparse file of its true
names and shapes, and planned: no weight is there.
"""

from __future__ import annotations

import importlib
import json
import math
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import shardc
from shardc.header import dump_header, lay_out
from shardc.resolve import legal_degrees
from tests.zoo.case import Published, published

TP = 8


@dataclass(frozen=True)
class Sizes:
    """Parameters, legal degrees, and the bytes that a rank holds at `tp` in each profile."""

    published: Published
    parameters: int
    degrees: tuple[int, ...]
    tp: int
    rank_bytes: dict[str, int]
    replicated_bytes: int  # of compact


def on_meta(one: Published) -> tuple[Any, dict[str, Any]]:
    """The model without weights, and its config.json."""
    from accelerate import init_empty_weights

    library: Any = importlib.import_module(one.library)
    cls = getattr(library, one.class_name)
    with init_empty_weights():
        if one.library == "diffusers":
            model = cls(**one.config)
            return model, {**model.config, "_class_name": one.class_name}
        model = cls(cls.config_class(**one.config))
        return model, {**model.config.to_dict(), "architectures": [one.class_name]}


def write_sparse(one: Published, folder: Path) -> int:
    """A checkpoint of the true names and shapes whose data are holes; its parameters."""
    model, config = on_meta(one)
    tied = {} if one.library == "diffusers" else dict(model.all_tied_weights_keys or {})
    wide = tuple(getattr(model, "_keep_in_fp32_modules", None) or ())
    rows = []
    for name, tensor in model.state_dict().items():
        if name in tied:
            continue
        whole = tensor.dtype == torch.float32 and any(part in wide for part in name.split("."))
        dtype = "F32" if whole else "BF16" if tensor.is_floating_point() else "I64"
        rows.append((name, dtype, tuple(tensor.shape)))
    infos = lay_out(rows)
    header = dump_header(infos, {"format": "pt"})
    path = folder / "diffusion_pytorch_model.safetensors"
    path.write_bytes(header)
    with path.open("r+b") as file:
        file.truncate(len(header) + infos[-1].stop)
    (folder / "config.json").write_text(json.dumps(config, default=str))
    return sum(math.prod(shape) for _, dtype, shape in rows if dtype != "I64")


def measure(one: Published) -> Sizes:
    """Plan one in both profiles, at 8 ranks or at the most below that its heads allow."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        total = write_sparse(one, folder)
        whole = shardc.plan(folder, tp=1).components[0]
        legal = legal_degrees(whole.resolution, whole.manifest, whole.dims)
        degrees = tuple(tp for tp, reason in legal.items() if reason is None)
        tp = max(d for d in degrees if d <= TP)
        held = {}
        for profile in ("compact", "native"):
            plan = shardc.plan(folder, tp=tp, profile=profile).components[0]  # type: ignore[arg-type]
            held[profile] = max(plan.rank_bytes())
            if profile == "compact":
                replicated = plan.replicated_bytes()
    return Sizes(one, total, degrees, tp, held, replicated)


def main(texts: list[str]) -> int:
    for one in published():
        if texts and not any(t in one.repo or t in one.class_name for t in texts):
            continue
        try:
            found = measure(one)
        except Exception as error:
            sys.stdout.write(f"{one.repo}: FAILED {type(error).__name__}: {error}\n")
            continue
        sys.stdout.write(
            f"{one.repo} ({one.class_name}): {found.parameters / 1e9:.2f}B; degrees "
            f"{', '.join(map(str, found.degrees))}; at tp {found.tp}: compact "
            f"{found.rank_bytes['compact'] / 1e9:.3f} GB ({found.replicated_bytes / 1e6:.1f} MB "
            f"replicated), native {found.rank_bytes['native'] / 1e9:.3f} GB\n"
        )
        sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
