"""The process group "neuron": every collective is counted, then done by gloo on host copies.

As on the real stack it gives each process exactly one core, and must come before anything else
that uses the device; and it takes no host tensors.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ProcessGroup, Work

from torch_neuronx import native, visible_cores

Tensors = Sequence[torch.Tensor]

collectives: Counter[str] = Counter()  # bytes of each kind since the last reset
_assigned = False


def _assign_core(rank: int, size: int) -> None:
    """The first group of a process gives it its core."""
    global _assigned
    if _assigned:
        return
    assert not native.is_initialized(), (
        "Neuron runtime should not be initialized before the init_process_group."
    )
    local_rank = int(os.environ.get("LOCAL_RANK", rank))
    os.environ.setdefault("NEURON_RT_VISIBLE_CORES", str(local_rank))
    assert visible_cores() == 1, (
        "Attempted to have more than one device per process in distributed setup"
    )
    native.assign_core(local_rank, int(os.environ.get("LOCAL_WORLD_SIZE", size)))
    _assigned = True


class _Done(Work):
    """Work that is over."""

    def __init__(self, results: Any) -> None:
        super().__init__()
        self._results = results
        self._future: torch.futures.Future[Any] = torch.futures.Future()
        self._future.set_result(results)

    def wait(self, timeout: timedelta | None = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def get_future(self) -> Any:
        return self._future

    def result(self) -> Any:
        return self._results


@contextmanager
def _counted(kind: str, tensors: Tensors) -> Iterator[None]:
    """Count a collective; its way over the host is the simulator's own and is not."""
    for tensor in tensors:
        if tensor.device.type != "neuron":
            raise RuntimeError(f"No backend type associated with device type {tensor.device.type}")
    collectives[kind] += sum(tensor.nbytes for tensor in tensors)
    native.begin_uncounted()
    try:
        yield
    finally:
        native.end_uncounted()


class ProcessGroupNeuron(ProcessGroup):
    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._gloo = dist.ProcessGroupGloo(store, rank, size, timeout)
        self._name = self._desc = ""
        _assign_core(rank, size)

    # --- identity, as PyTorch asks for it

    def getBackendName(self) -> str:
        return "neuron"

    def setGroupName(self, name: str) -> None:
        self._name = name

    def getGroupName(self) -> str:
        return self._name

    def setGroupDesc(self, desc: str) -> None:
        self._desc = desc

    def getGroupDesc(self) -> str:
        return self._desc

    @property
    def group_name(self) -> str:
        return self._name

    @property
    def group_desc(self) -> str:
        return self._desc

    # --- collectives

    def allreduce(self, tensors: Tensors, opts: Any = None) -> Work:
        op = getattr(opts, "reduceOp", dist.ReduceOp.SUM)
        average = op == dist.ReduceOp.AVG  # gloo has none
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.SUM if average else op
        with _counted("allreduce", tensors):
            for tensor in tensors:
                host = tensor.cpu()
                self._gloo.allreduce([host], options).wait()
                tensor.copy_(host / self.size() if average else host)
        return _Done(tensors)

    allreduce_coalesced = allreduce

    def broadcast(self, tensors: Tensors, opts: Any = None) -> Work:
        with _counted("broadcast", tensors):
            for tensor in tensors:
                host = tensor.cpu()
                self._gloo.broadcast([host], opts or dist.BroadcastOptions()).wait()
                tensor.copy_(host)
        return _Done(tensors)

    def _all_parts(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        host = tensor.cpu().contiguous()
        parts = [torch.empty_like(host) for _ in range(self.size())]
        self._gloo.allgather([parts], [host]).wait()
        return parts

    def allgather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> Work:
        with _counted("allgather", inputs):
            for targets, tensor in zip(outputs, inputs, strict=True):
                for target, part in zip(targets, self._all_parts(tensor), strict=True):
                    target.copy_(part)
        return _Done(outputs)

    def all_gather_single(
        self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None
    ) -> Work:
        with _counted("allgather", [tensor]):
            parts = [part.reshape(-1) for part in self._all_parts(tensor)]
            output.copy_(torch.cat(parts).reshape(output.shape))
        return _Done([output])

    def all_gather_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> Work:
        for output, tensor in zip(outputs, inputs, strict=True):
            self.all_gather_single(output, tensor)
        return _Done(outputs)

    def reduce_scatter_single(
        self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None
    ) -> Work:
        with _counted("reduce_scatter", [tensor]):
            host = tensor.cpu().contiguous()
            self._gloo.allreduce([host]).wait()
            output.copy_(host.reshape(self.size(), -1)[self.rank()].reshape(output.shape))
        return _Done([output])

    def reduce_scatter_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> Work:
        for output, tensor in zip(outputs, inputs, strict=True):
            self.reduce_scatter_single(output, tensor)
        return _Done(outputs)

    def scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any = None) -> Work:
        with _counted("scatter", outputs):
            hosts = [torch.empty(out.shape, dtype=out.dtype) for out in outputs]
            parts = [[tensor.cpu() for tensor in tensors] for tensors in inputs]
            self._gloo.scatter(hosts, parts, opts or dist.ScatterOptions()).wait()
            for output, host in zip(outputs, hosts, strict=True):
                output.copy_(host)
        return _Done(outputs)

    def barrier(self, opts: Any = None) -> Work:
        self._gloo.barrier().wait()
        return _Done([])

    # names before torch 2.13
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced


dist.Backend.register_backend("neuron", ProcessGroupNeuron, devices=["neuron"])
