"""A tiny shard set, for what has to be wrong with one."""

from __future__ import annotations

from pathlib import Path

import shardc
from tests import checkpoints as ck


def tiny(folder: Path, tp: int = 2) -> Path:
    """A shard set of one component with one tensor a rank shares and one that it does not."""
    tensors = {
        "m.weight": ck.Data.count("F32", [8, 4]),
        "n.weight": ck.Data.count("F32", [4], first=100),
    }
    source = ck.component(folder / "source", tensors)
    rules = ck.manifest(folder / "rules.toml", [{"match": "m", "style": "colwise"}])
    shardc.build(source, folder / "out", tp, manifest=rules)
    return folder / "out"
