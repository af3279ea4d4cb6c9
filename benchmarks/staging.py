"""A stand-in for a device: what is copied to it goes into one reused buffer on the host.

It is torch's meta device, whose tensors have no memory, with a copy that does the work of a
transfer: each byte is copied once, into a buffer of the thread that copies. So every loader runs
its own code, down to `tensor.to(device)`, and nobody pays for fresh memory.
"""

from __future__ import annotations

import queue
import threading
import warnings
from typing import Any

import torch

BUFFER_BYTES = 16 << 20
THREADS = 2  # that may copy at once, each through a buffer of its own
DEVICE = torch.device("meta")


class Staging:
    """Counts the bytes that were copied to the device while it stands.

    check: also add up what was copied, as 16-bit numbers: the same tensors give the same sum, in
    whatever order and pieces they come. It takes time, so it is for runs that are not measured.
    """

    def __init__(self, *, check: bool = False) -> None:
        self._buffers: queue.SimpleQueue[torch.Tensor] = queue.SimpleQueue()
        for _ in range(THREADS):
            self._buffers.put(torch.zeros(BUFFER_BYTES, dtype=torch.uint8))
        self._lock = threading.Lock()
        self._check = check
        self.forget()
        self._library = torch.library.Library("aten", "IMPL")
        with warnings.catch_warnings():  # that it overrides what is there
            warnings.simplefilter("ignore")
            self._library.impl("copy_", self._copy, "Meta")

    def forget(self) -> None:
        """Count from zero."""
        self.size_bytes = self.checksum = 0

    def _copy(self, into: Any, source: Any, non_blocking: bool = False) -> Any:
        if source.device.type == "cpu" and source.numel():
            self.take(source.contiguous().view(-1).view(torch.uint8))
        return into

    def take(self, flat: torch.Tensor) -> None:
        """Copy bytes through the buffer."""
        buffer = self._buffers.get()
        for piece in torch.split(flat, BUFFER_BYTES):
            buffer[: piece.numel()].copy_(piece)
        self._buffers.put(buffer)
        added = 0
        if self._check:
            words = flat[: flat.numel() // 2 * 2].view(torch.int16)
            added = sum(int(part.sum(dtype=torch.int64)) for part in words.split(1 << 22))
        with self._lock:
            self.size_bytes += flat.numel()
            self.checksum += added
