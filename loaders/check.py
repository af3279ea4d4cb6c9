"""What `shardc demo` and `python -m shardc.loaders` ask of their ranks: load, report, compare."""

from __future__ import annotations

import importlib
import json
import resource
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from torch import nn

    from shardc.loaders.reads import Reads

IMAGE_TOKENS, TEXT_TOKENS = (8, 8), 16


def load(
    path: str,
    component: str | None,
    device: str,
    begun: float,
    reads: Reads = "auto",
    remote: Mapping[str, Any] | None = None,
) -> tuple[dict[str, Any], nn.Module]:
    """A rank's part of the model, and the report of it: `model.shardc`, start-up and memory.

    begun: time.monotonic() when the rank's process was asked for. Imports count as start-up, not
    as part of the load; of an address the model's own class does, which is not known before.
    remote: what else load_model takes of an address.
    """
    from shardc.loaders import load_model
    from shardc.loaders.storage import choose_component
    from shardc.location import locate
    from shardc.manifest import parse_manifest
    from shardc.shardset import open_shard_set

    remote = remote or {}
    importlib.import_module("accelerate")
    where = locate(path, revision=remote.get("revision"))
    if isinstance(where, Path):
        shard_set = open_shard_set(where)
        index = shard_set.components[choose_component(shard_set, component)]
        library = parse_manifest(index.manifest.text, index.manifest.name).library
        getattr(importlib.import_module(library), index.source.class_, None)
    start, before_bytes = time.monotonic() - begun, _host_bytes("VmRSS")
    model = load_model(path, component=component, device=device, reads=reads, **remote)
    loaded: Any = model.shardc
    report: dict[str, Any] = loaded.to_json()
    del report["path"]
    report["start_seconds"] = start
    report["host_bytes_before"] = before_bytes
    report["host_bytes_peak"] = _host_bytes("VmHWM")
    return report, model


def loaded(
    path: str,
    component: str | None,
    device: str,
    begun: float,
    reads: Reads,
    remote: Mapping[str, Any],
) -> dict[str, Any]:
    """The report of a load, on a rank that keeps nothing of it."""
    return load(path, component, device, begun, reads, remote)[0]


def sharded(path: str, component: str, begun: float) -> tuple[dict[str, Any], np.ndarray]:
    """The report of a load on cpu, and what the model's forward gave on this rank."""
    report, model = load(path, component, "cpu", begun)
    return report, _forward(model)


def whole(path: str, component: str) -> np.ndarray:
    """The same forward of the unsharded checkpoint, loaded by diffusers alone."""
    import diffusers

    folder = Path(path) / component
    cls = getattr(diffusers, json.loads((folder / "config.json").read_bytes())["_class_name"])
    return _forward(cls.from_pretrained(str(folder), local_files_only=True).eval())


def _forward(model: Any) -> np.ndarray:
    """The output for inputs that depend on the config only. The model is a FLUX.2 transformer."""
    import torch

    generator = torch.Generator().manual_seed(0)
    height, width = IMAGE_TOKENS
    grid = [[0, row, column, 0] for row in range(height) for column in range(width)]
    image = torch.randn(1, height * width, model.config.in_channels, generator=generator)
    text = torch.randn(1, TEXT_TOKENS, model.config.joint_attention_dim, generator=generator)
    with torch.no_grad():
        out: torch.Tensor = model(
            hidden_states=image,
            encoder_hidden_states=text,
            timestep=torch.tensor([0.5]),
            img_ids=torch.tensor([grid]).float(),
            txt_ids=torch.tensor([[[0, 0, 0, token] for token in range(TEXT_TOKENS)]]).float(),
            return_dict=False,
        )[0]
    found: np.ndarray = out.numpy()
    return found


def _host_bytes(key: str) -> int:
    """Resident memory of this process: VmRSS now, VmHWM its peak (elsewhere than on Linux, too)."""
    try:
        text = Path("/proc/self/status").read_text()
    except OSError:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024
    return int(text.partition(f"{key}:")[2].split()[0]) * 1024
