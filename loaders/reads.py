"""How bytes come off the disk: through the mapping, or by large reads past the page cache.

A mapping is free where the file is cached, and faults page by page where it is not: on cold volumes
and network filesystems large direct reads are several times as fast.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import Literal

import torch

from shardc.errors import Problem, ShardSetError

Reads = Literal["auto", "mapped", "direct"]

STAGE_BYTES = 4 << 20  # of a buffer; with two readers this fills a disk's queue
READERS = 2  # buffers are one more: while one is taken away the others fill
ALIGNMENT = 4096  # of offsets, lengths and buffers, for O_DIRECT
CACHED_SHARE = 0.5  # of a file's pages: from here on the mapping is the faster way


def resident_share(memory: mmap.mmap) -> float | None:
    """The share of a mapping's pages that the page cache holds; None where that is unknown.

    Source: mincore(2).
    """
    pages = -(-len(memory) // mmap.PAGESIZE)
    table = (ctypes.c_ubyte * pages)()
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        failed = libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(len(memory)), table)
    except (OSError, AttributeError, TypeError):
        return None
    return None if failed else sum(value & 1 for value in bytes(table)) / pages


def choose(reads: Reads, memory: mmap.mmap | None) -> Literal["mapped", "direct"]:
    """What is asked for, or what the page cache makes the faster way."""
    if reads != "auto" or memory is None:
        return "mapped" if reads != "direct" else "direct"
    share = resident_share(memory)
    return "direct" if share is not None and share < CACHED_SHARE else "mapped"


class DirectFile:
    """A file read in large aligned pieces through a few buffers, past the page cache if it can."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._open = ExitStack()
        self._buffers = [mmap.mmap(-1, STAGE_BYTES + 2 * ALIGNMENT) for _ in range(READERS + 1)]

    def __enter__(self) -> DirectFile:
        flags = os.O_RDONLY | getattr(os, "O_DIRECT", 0)
        try:
            self._fd = os.open(self._path, flags)
        except OSError:  # a filesystem without direct reads: large ones help all the same
            self._fd = os.open(self._path, os.O_RDONLY)
        self._open.callback(os.close, self._fd)
        self._pool = self._open.enter_context(ThreadPoolExecutor(READERS, "shardc-direct-read"))
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def pieces(self, start: int, stop: int) -> Iterator[tuple[int, torch.Tensor]]:
        """(offset from `start`, bytes) of [start, stop) in order; each valid until the next."""
        edges = enumerate(range(start, stop, STAGE_BYTES))
        asked: deque[tuple[int, Future[torch.Tensor]]] = deque()
        for number, first in islice(edges, READERS):
            asked.append((first, self._ask(number, first, stop)))
        while asked:
            first, waiting = asked.popleft()
            ready = waiting.result()
            for number, following in islice(edges, 1):
                asked.append((following, self._ask(number, following, stop)))
            yield first - start, ready

    def _ask(self, number: int, first: int, stop: int) -> Future[torch.Tensor]:
        last = min(first + STAGE_BYTES, stop)
        return self._pool.submit(
            self._read, self._buffers[number % len(self._buffers)], first, last
        )

    def _read(self, buffer: mmap.mmap, first: int, last: int) -> torch.Tensor:
        low = first // ALIGNMENT * ALIGNMENT
        high = -(-last // ALIGNMENT) * ALIGNMENT
        with memoryview(buffer) as whole:
            got = 0
            while low + got < last:
                with whole[got : high - low] as rest:
                    count = os.preadv(self._fd, [rest], low + got)
                if count == 0:
                    what = f"ends at byte {low + got}, {last} are needed"
                    raise ShardSetError(Problem(str(self._path), what, "fetch it again"))
                got += count
        return torch.frombuffer(buffer, dtype=torch.uint8, count=last - first, offset=first - low)
