"""Loaders of a rank's own files, which are plain safetensors, and the floor of them all."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from benchmarks.figures import UnavailableError
from benchmarks.worker import Job

READ_BYTES = 4 << 20
READERS = 2
PAGE = 4096
Load = Callable[[], object]


def device_of(job: Job) -> Any:
    """The stand-in, or the simulated Neuron core."""
    import torch

    if job["device"] == "neuron":
        import torch_neuronx

        device = torch.device("neuron", 0)
        torch.zeros(8, device=device)  # the core is in use before anything is measured
        torch_neuronx.reset_counters()
        return device
    return torch.device(job["device"])


def _each(job: Job, tensors: Callable[[], Iterator[Any]]) -> Load:
    device = device_of(job)

    def load() -> None:
        for tensor in tensors():
            tensor.to(device)

    return load


def load_file(job: Job) -> Load:
    from safetensors.torch import load_file as read

    return _each(job, lambda: (t for path in job["files"] for t in read(path).values()))


def fastsafetensors(job: Job) -> Load:
    fast = _import("fastsafetensors")

    def tensors() -> Iterator[Any]:
        with fast.fastsafe_open(job["files"], nogds=True, device="cpu") as file:
            for name in file.keys():  # noqa: SIM118 - not a dict
                yield file.get_tensor(name)

    return _each(job, tensors)


def runai(job: Job) -> Load:
    streamer = _import("runai_model_streamer").SafetensorsStreamer

    def tensors() -> Iterator[Any]:
        with streamer() as stream:
            stream.stream_files(job["files"], device="cpu", owned=False)
            for _, tensor in stream.get_tensors():
                yield tensor

    return _each(job, tensors)


def instanttensor(job: Job) -> Load:
    instant = _import("instanttensor")
    import torch

    if not torch.cuda.is_available():
        raise UnavailableError("it loads onto CUDA devices only")

    def tensors() -> Iterator[Any]:
        with instant.safe_open(job["files"], framework="pt", device=0) as file:
            yield from (tensor for _, tensor in file.tensors())

    return _each(job, tensors)


def _import(name: str) -> Any:
    try:
        return __import__(name)
    except ImportError as error:
        raise UnavailableError(f"not installed: {error}") from error


# --- the floor ------------------------------------------------------------------------------------


def _read_all(job: Job, flags: int) -> Load:
    """Every byte of the files by large reads into a few reused buffers: no loader reads less."""
    import mmap
    from queue import SimpleQueue

    buffers: SimpleQueue[mmap.mmap] = SimpleQueue()
    for _ in range(READERS):
        buffer = mmap.mmap(-1, READ_BYTES)
        buffer[::PAGE] = bytes(READ_BYTES // PAGE)
        buffers.put(buffer)

    def piece(fd: int, at: int) -> int:
        buffer = buffers.get()
        try:
            return os.preadv(fd, [buffer], at)
        finally:
            buffers.put(buffer)

    def load() -> int:
        total = 0
        with ThreadPoolExecutor(READERS) as pool:
            for path in job["files"]:
                fd = os.open(path, os.O_RDONLY | flags)
                edges = range(0, os.fstat(fd).st_size, READ_BYTES)
                total += sum(pool.map(lambda at, fd=fd: piece(fd, at), edges))
                os.close(fd)
        return total

    return load


def floor(job: Job) -> Load:
    return _read_all(job, 0)


def floor_direct(job: Job) -> Load:
    return _read_all(job, getattr(os, "O_DIRECT", 0))


WAYS: dict[str, Callable[[Job], Load]] = {
    "load_file": load_file,
    "fastsafetensors": fastsafetensors,
    "runai": runai,
    "instanttensor": instanttensor,
    "floor": floor,
    "floor, direct": floor_direct,
}
