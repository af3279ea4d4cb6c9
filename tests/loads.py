"""What a rank tells of a load, whatever its device: what it holds, what was copied, who spoke."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.neuron_ranks import reset_peak, status_bytes, tensors

T = TypeVar("T")
HOST_LIMIT_BYTES = 64 << 20  # what the host may grow by for a load, whatever its size


class Watch(TorchDispatchMode):
    """Counts every collective, by name, as PyTorch's process groups are asked for it."""

    def __init__(self) -> None:
        super().__init__()
        self.moved: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            self.moved[func._opname] += 1
        return func(*args, **(kwargs or {}))


def watched(load: Callable[[], T]) -> tuple[T, dict[str, Any]]:
    """What `load` gives; how often the ranks met for it, their other collectives, and the copies.

    A meeting is an `all_gather_object`, which moves no tensor of a model.
    """
    simulator = sys.modules.get("torch_neuronx")
    watch, meetings, theirs = Watch(), 0, Counter[str]()
    gather_object = dist.all_gather_object

    def meeting(*args: Any, **kwargs: Any) -> None:
        nonlocal meetings, theirs
        before = Counter(watch.moved)
        gather_object(*args, **kwargs)
        meetings, theirs = meetings + 1, theirs + (watch.moved - before)

    if simulator is not None:
        simulator.reset_counters()
    dist.all_gather_object = meeting
    try:
        with watch:
            loaded = load()
    finally:
        dist.all_gather_object = gather_object
    collectives = watch.moved - theirs
    if simulator is not None:  # its process group is asked past the dispatcher
        collectives += simulator.distributed.collectives
    return loaded, {
        "meetings": meetings,
        "collectives": collectives,
        "copied": None if simulator is None else simulator.counters(),
    }


def grown(load: Callable[[], T]) -> tuple[T, int]:
    """What `load` gives, and by how many bytes the host's memory grew for it at most."""
    reset_peak()
    before = status_bytes("VmRSS")
    loaded = load()
    return loaded, status_bytes("VmHWM") - before


def held(module: nn.Module) -> dict[str, torch.Tensor]:
    """This rank's part of all parameters and buffers, those that no state dict names included."""
    found: dict[str, Any] = dict(tensors(module))
    return {n: t.to_local() if hasattr(t, "to_local") else t for n, t in found.items()}


def places(*modules: nn.Module) -> dict[str, Any]:
    """Where the tensors of these are, and their bytes."""
    all_of_them = [tensor for module in modules for tensor in held(module).values()]
    return {
        "devices": sorted({str(tensor.device) for tensor in all_of_them}),
        "bytes": sum(tensor.nbytes for tensor in all_of_them),
        "bytes of single elements": sum(t.nbytes for t in all_of_them if t.numel() == 1),
    }


def forward(model: nn.Module, inputs: Mapping[str, Any]) -> torch.Tensor:
    """The model's output on the host, from inputs that are there."""
    [device] = {str(tensor.device) for tensor in held(model).values()}
    placed = {n: v.to(device) if isinstance(v, torch.Tensor) else v for n, v in inputs.items()}
    with torch.no_grad():
        output: torch.Tensor = model(**placed)[0]
    return output.cpu()


def check(device: str, rank: int, moved: dict[str, Any], placed: dict[str, Any]) -> None:
    """Each tensor is on the rank's device, went there once and straight, and from no other rank."""
    assert moved["collectives"] == {}
    if device == "cpu":
        assert placed["devices"] == ["cpu"]
        assert moved["copied"] is None
        return
    assert placed["devices"] == [f"{device}:{rank}"]
    assert moved["copied"] == {
        "h2d": placed["bytes"],
        "staged": 0,
        "cast": 0,
        "bounce": placed["bytes of single elements"],  # the stack's own: it has no other way
        "d2h": 0,
    }
