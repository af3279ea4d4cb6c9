"""How people shard today: in one process, slices per rank, or the whole state dict in chunks.

`python -m benchmarks.build_ways WAY LAYOUT OUT [--sync]` writes a file for each rank, every
replicated tensor in each, by the layout that a manifest gives, so that a fused tensor is cut block
by block. It prints the seconds that the work took, imports left out.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

Layout = dict[str, Any]  # files, tp, tensors: by name their dim and, for each rank, its ranges


def layout(source: Path, tp: int, profile: Any = "compact") -> Layout:
    """What each rank holds of `source`, from a plan."""
    import shardc
    from shardc.layout import Replicate

    planned = shardc.plan(source, tp, profile=profile).components[0]
    tensors: dict[str, dict[str, Any]] = {}
    for one in planned.tensors:
        if isinstance(one.placement, Replicate):
            tensors[one.tensor.name] = {"dim": None}
            continue
        ranges = [[[p.start, p.stop] for p in pieces] for pieces in one.pieces]
        tensors[one.tensor.name] = {"dim": one.placement.dim, "ranges": ranges}
    files = [str(file.path) for file in planned.component.files]
    return {"files": files, "tp": tp, "tensors": tensors}


def cut(whole: Any, entry: dict[str, Any], rank: int) -> torch.Tensor:
    """One rank's part of a tensor, or of a slice of one in a file."""
    import torch

    dim = entry["dim"]
    if dim is None:
        found: torch.Tensor = whole[...]
        return found
    before = (slice(None),) * dim
    parts = [whole[(*before, slice(start, stop))] for start, stop in entry["ranges"][rank]]
    return (parts[0] if len(parts) == 1 else torch.cat(parts, dim)).contiguous()


def by_slices(plan: Layout) -> Iterator[dict[str, torch.Tensor]]:
    """Each rank's tensors: every file is opened again, its slices read and joined."""
    from safetensors import safe_open

    for rank in range(plan["tp"]):
        mine = {}
        for path in plan["files"]:
            with safe_open(path, "pt") as file:
                for name in file.keys():  # noqa: SIM118 - not a dict
                    mine[name] = cut(file.get_slice(name), plan["tensors"][name], rank)
        yield mine


def by_chunks(plan: Layout) -> Iterator[dict[str, torch.Tensor]]:
    """Each rank's tensors, cut from the whole state dict in memory."""
    from safetensors.torch import load_file

    whole = {name: t for path in plan["files"] for name, t in load_file(path).items()}
    for rank in range(plan["tp"]):
        yield {name: cut(tensor, plan["tensors"][name], rank) for name, tensor in whole.items()}


WAYS: dict[str, Callable[[Layout], Iterator[dict[str, Any]]]] = {
    "slices": by_slices,
    "full": by_chunks,
}


def write(way: str, plan: Layout, out: Path, *, sync: bool) -> None:
    from safetensors.torch import save_file

    out.mkdir(parents=True)
    for rank, tensors in enumerate(WAYS[way](plan)):
        path = out / f"rank-{rank}.safetensors"
        save_file(tensors, path, metadata={"format": "pt"})
        if sync:
            fd = os.open(path, os.O_RDONLY)
            os.fsync(fd)
            os.close(fd)


def main(way: str, plan: str, out: str, *options: str) -> None:
    read = json.loads(Path(plan).read_text())
    import safetensors.torch  # noqa: F401 - so that its time is not in the work's

    begun = time.perf_counter()
    write(way, read, Path(out), sync="--sync" in options)
    print(json.dumps({"seconds": time.perf_counter() - begun}))


if __name__ == "__main__":
    main(*sys.argv[1:])
