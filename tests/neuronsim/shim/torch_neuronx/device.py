"""`torch.neuron`: the part of the real module that loaders and PyTorch itself call."""

from __future__ import annotations

from typing import Any

import torch

from torch_neuronx import native

Device = torch.device | str | int | None


def is_available() -> bool:
    return device_count() > 0


def is_initialized() -> bool:
    initialized: bool = native.is_initialized()
    return initialized


def init() -> None:
    native.init()


def current_device() -> int:
    index: int = native.current_device()
    return index


def device_count() -> int:
    count: int = native.device_count()
    return count


def set_device(device: Device) -> None:
    """Raises ValueError for a core that is another process's."""
    native.set_device(_index(device))


def _index(device: Device) -> int:
    if isinstance(device, int):
        return device
    index = None if device is None else torch.device(device).index
    return current_device() if index is None else index


def synchronize(device: Device = None) -> None:
    """Nothing is asynchronous here."""


def empty_cache() -> None:
    """Nothing is cached here."""


def memory_allocated(device: Device = None) -> int:
    used: int = native.used_bytes()
    return used


def max_memory_allocated(device: Device = None) -> int:
    peak: int = native.peak_bytes()
    return peak


def mem_get_info(device: Device = None) -> tuple[int, int]:
    total: int = native.hbm_bytes()
    return total - memory_allocated(), total


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.float32, torch.float16, torch.bfloat16]


# --- what PyTorch asks every device module for --------------------------------------------------


def _is_in_bad_fork() -> bool:
    return False


def manual_seed(seed: int) -> None:
    """The host's generator stands in for the device's."""


manual_seed_all = manual_seed


def get_rng_state(device: Device = None) -> torch.Tensor:
    return torch.default_generator.get_state()


def set_rng_state(state: torch.Tensor, device: Device = None) -> None:
    torch.default_generator.set_state(state)


class device:
    """Context manager: another current core."""

    def __init__(self, device: Device) -> None:
        self._index = _index(device)
        self._before = self._index

    def __enter__(self) -> None:
        self._before = current_device()
        native.set_device(self._index)

    def __exit__(self, *_: Any) -> None:
        native.set_device(self._before)
