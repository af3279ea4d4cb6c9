"""Host views onto a device: cpu keeps them, cuda, neuron and xla each get their own way of copying.

What is said here of neuron follows the public torch_neuronx sources and documents, and was checked
on a simulated device (tests/neuronsim), not on hardware; cuda and xla were checked only against
stand-ins of their API.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist

from shardc.errors import Problem, ShardcError
from shardc.loaders.pages import SLICE_BYTES

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

XLA_BYTES = 128 << 20  # in flight at most: a transfer holds a host buffer until it is waited for
RING_SLOTS = 2  # of SLICE_BYTES each
SMALL_BYTES = 1 << 20  # pinning the ring costs more than it gains
# Where no mesh says it: the device type whose tensors a process group's backend carries.
BACKENDS = {"nccl": "cuda", "neuron": "neuron", "xla": "xla"}

Done = Callable[[int, int], None]  # told which bytes of a view, from and to, are on the device


class DeviceError(ShardcError):
    """A device is missing, not ready, or has no room."""


class Lane(Protocol):
    """The way onto one device, for as long as a load takes.

    threads: how many may put at once. One does not fill the way from the page cache where the copy
    is the host's work.
    """

    threads: int

    def put(self, view: torch.Tensor, done: Done | None = None) -> torch.Tensor:
        """The view's values on the device; `done` hears of each slice that the device has."""

    def sync(self) -> None:
        """Wait until all that was put is there."""

    def free_bytes(self) -> int | None:
        """How much more the device can hold, where that is known."""


def lane(device: torch.device) -> Lane:
    """The way onto `device`, by its type; DeviceError where there is none."""
    kind = LANES.get(device.type)
    if kind is None:
        raise DeviceError(Problem(str(device), f"is none of {', '.join(LANES)}"))
    made: Lane = kind(device)
    return made


def put(view: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A host tensor on `device`, in its own dtype, contiguous; on cpu the very same tensor."""
    way = lane(device)
    placed = way.put(view)
    way.sync()
    return placed


def sync(device: torch.device) -> None:
    """Wait until the device has all that it was given."""
    lane(device).sync()


def free_bytes(device: torch.device) -> int | None:
    """How much more the device can hold, None where that is not known (cpu, older stacks)."""
    return lane(device).free_bytes()


def check_room(way: Lane, device: torch.device, need_bytes: int) -> None:
    """DeviceError where it is known already that the device cannot hold `need_bytes` more."""
    free = way.free_bytes()
    if free is not None and need_bytes > free:
        raise DeviceError(
            Problem(
                str(device),
                f"has {free} bytes free, this rank's tensors take {need_bytes}",
                "build for a higher tp",
            )
        )


def empty(view: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Memory on `device` for a tensor like `view`; DeviceError where there is not enough."""
    try:
        return torch.empty(view.shape, dtype=view.dtype, device=device)
    except (RuntimeError, TypeError) as error:
        what = f"cannot hold {view.nbytes} bytes more of {view.dtype}: "
        fix = "build with --dtype" if isinstance(error, TypeError) else "build for a higher tp"
        reason = str(error).strip().splitlines()[0]
        raise DeviceError(Problem(str(device), what + reason, fix)) from error


def put_threads() -> int:
    """How many threads of this rank may put at once, by the processors that each has here.

    Two fill the way from the page cache, where they do not take another rank's processor. Source:
    LOCAL_WORLD_SIZE, which torchrun sets.
    """
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "")
    each = (os.cpu_count() or 1) // max(1, int(ranks) if ranks.isdecimal() else 1)
    return 2 if each >= 2 else 1


def slices(view: torch.Tensor, placed: torch.Tensor) -> Iterable[tuple[torch.Tensor, ...]]:
    """Both tensors, both contiguous, as pairs of flat slices of at most SLICE_BYTES."""
    step = max(1, SLICE_BYTES // view.element_size())
    parts = torch.split(view.view(-1), step)
    return zip(parts, torch.split(placed.view(-1), step), strict=True)


def _unreserved(api: Any, device: torch.device) -> int | None:
    """What the driver has free, and what the caching allocator holds without using it."""
    if not hasattr(api, "mem_get_info"):
        return None
    free = int(api.mem_get_info(device)[0])
    if hasattr(api, "memory_reserved"):
        free += max(0, api.memory_reserved(device) - api.memory_allocated(device))
    return free


class _Cpu:
    threads = 1

    def __init__(self, device: torch.device) -> None:
        pass

    def put(self, view: torch.Tensor, done: Done | None = None) -> torch.Tensor:
        return view

    def sync(self) -> None:
        pass

    def free_bytes(self) -> int | None:
        return None  # a mapped view takes none


class _Neuron:
    """Blocking copies straight from the mapping: an asynchronous one, a cast or a strided source
    would each make the runtime allocate on the host."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.threads = put_threads()
        self._api: Any = getattr(torch, "neuron", None)
        if self._api is None:
            raise _no_neuron()

    def put(self, view: torch.Tensor, done: Done | None = None) -> torch.Tensor:
        view = view.contiguous()
        placed = empty(view, self.device)
        if view.nbytes <= SLICE_BYTES:
            if view.nbytes:
                placed.copy_(view)
            if done is not None:
                done(0, view.nbytes)
            return placed
        at = 0
        for part, target in slices(view, placed):
            target.copy_(part)
            if done is not None:
                done(at, at + part.nbytes)
            at += part.nbytes
        return placed

    def sync(self) -> None:
        self._api.synchronize()

    def free_bytes(self) -> int | None:
        self.sync()  # the allocator's figures lag behind the program
        return _unreserved(self._api, self.device)


def _pinned(size_bytes: int) -> torch.Tensor:
    return torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)


def _event() -> torch.cuda.Event:
    return torch.cuda.Event()  # type: ignore[no-untyped-call]


class _Cuda:
    """A ring of pinned buffers: one is filled from the mapping while the other is on its way."""

    threads = 1

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._ring: list[torch.Tensor] = []
        self._sent = [_event() for _ in range(RING_SLOTS)]
        self._turn = 0

    def put(self, view: torch.Tensor, done: Done | None = None) -> torch.Tensor:
        view = view.contiguous()
        placed = empty(view, self.device)
        if view.nbytes <= SMALL_BYTES:
            placed.copy_(view)
            if done is not None:
                done(0, view.nbytes)
            return placed
        if not self._ring:
            self._ring = [_pinned(SLICE_BYTES) for _ in range(RING_SLOTS)]
        current = torch.cuda.current_stream(self.device)
        self._stream.wait_stream(current)  # the memory may have been another tensor's until now
        at = 0
        for part, target in slices(view, placed):
            slot, self._turn = self._turn, (self._turn + 1) % RING_SLOTS
            self._sent[slot].synchronize()
            pinned = self._ring[slot][: part.nbytes].view(part.dtype)
            pinned.copy_(part)  # this is the read of the file
            if done is not None:
                done(at, at + part.nbytes)
            at += part.nbytes
            with torch.cuda.stream(self._stream):
                target.copy_(pinned, non_blocking=True)
                self._sent[slot].record(self._stream)
        current.wait_stream(self._stream)
        return placed

    def sync(self) -> None:
        torch.cuda.synchronize(self.device)

    def free_bytes(self) -> int | None:
        return _unreserved(torch.cuda, self.device)


class _Xla:
    """The older Neuron stack, by the XLA device's own means."""

    threads = 1

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._api = _xla_model()
        self._pending_bytes = 0

    def put(self, view: torch.Tensor, done: Done | None = None) -> torch.Tensor:
        placed = view.contiguous().to(self.device)
        self._pending_bytes += view.nbytes
        if self._pending_bytes > XLA_BYTES:
            self.sync()
        if done is not None:
            done(0, view.nbytes)
        return placed

    def sync(self) -> None:
        self._api.mark_step()
        self._api.wait_device_ops()
        self._pending_bytes = 0

    def free_bytes(self) -> int | None:
        return None


# By device type.
LANES: dict[str, Callable[[torch.device], Lane]] = {
    "cpu": _Cpu,
    "cuda": _Cuda,
    "neuron": _Neuron,
    "xla": _Xla,
}


# --- which device -------------------------------------------------------------------------------


def resolve(
    device: str | torch.device | None = None, mesh: DeviceMesh | None = None
) -> torch.device:
    """The device that this rank loads onto, with its index; its stack is imported, and ready.

    device: what was asked for by name; else the mesh's device type; else that of the default
    process group's backend; else cpu. Raises DeviceError where the stack is missing, or a core was
    touched before the process group gave it out.
    """
    if device is None:
        device = mesh.device_type if mesh is not None else _of_default_group()
    kind, _, number = str(device).partition(":")
    index = int(number) if number.isdecimal() else None
    if kind == "cpu":
        return torch.device("cpu")
    if kind == "cuda":
        if not torch.cuda.is_available():
            raise DeviceError(Problem("cuda", "this torch sees no CUDA device"))
        return torch.device("cuda", torch.cuda.current_device() if index is None else index)
    if kind == "neuron":
        return _neuron(index, mesh)
    if kind == "xla":
        found: torch.device = _xla_model().xla_device()
        return found
    raise DeviceError(Problem(str(device), f"is none of {', '.join(LANES)}"))


def _of_default_group() -> str:
    if dist.is_available() and dist.is_initialized():
        return BACKENDS.get(dist.get_backend(), "cpu")
    return "cpu"


def _no_neuron() -> DeviceError:
    return DeviceError(
        Problem(
            "neuron",
            "native TorchNeuron is not installed: torch_neuronx does not give torch.neuron",
            "install torch-neuronx 2.13 or later from AWS's package index, or use a Neuron DLAMI; "
            "the package of that name on PyPI is empty; on Trn1 and Inf2 ask for 'xla'",
        )
    )


def _neuron(index: int | None, mesh: DeviceMesh | None) -> torch.device:
    """This process's core. The process group must have given it out: one core a process."""
    if not hasattr(torch, "neuron"):
        try:
            import_module("torch_neuronx")
        except ImportError as error:
            raise _no_neuron() from error
    api: Any = getattr(torch, "neuron", None)
    if api is None:
        raise _no_neuron()
    distributed = dist.is_available() and dist.is_initialized()
    if not distributed and (mesh is not None or int(os.environ.get("WORLD_SIZE", "1")) > 1):
        touched = hasattr(api, "is_initialized") and api.is_initialized()
        what = "the process group must come first: it gives each process its core"
        if touched:
            what += ", and the device was touched before it (a tensor made on it is enough)"
        raise DeviceError(
            Problem(
                "neuron", what, "call init_process_group('neuron') before anything uses the device"
            )
        )
    if distributed:
        group = mesh.get_group() if mesh is not None and mesh.ndim == 1 else None
        backends = dist.get_backend_config(group)  # "cpu:gloo,neuron:neuron" say
        carried = {part.partition(":")[0] for part in backends.split(",")}
        if dist.get_world_size(group) > 1 and "neuron" not in carried:
            raise DeviceError(
                Problem(
                    "neuron",
                    f"the process group's backend is {backends}: it cannot reduce neuron tensors",
                    "init_process_group('neuron')",
                )
            )
    current = int(api.current_device())
    if index is not None and index != current:
        raise DeviceError(
            Problem("neuron", f"core {index} is not this process's, which is {current}")
        )
    return torch.device("neuron", current)


def _xla_model() -> Any:
    try:
        return import_module("torch_xla.core.xla_model")
    except ImportError as error:
        raise DeviceError(
            Problem(
                "xla",
                "torch_xla is not installed",
                "install the older torch-neuronx, which brings it, from AWS's package index",
            )
        ) from error
