"""How bytes come off the disk: through the mapping, or by large reads, past the page cache or not.

A mapping is free where the file is cached, and faults page by page where it is not: on cold volumes
and network filesystems large reads are several times as fast. And where a page cannot be had, a
mapping kills the process with SIGBUS, while a read is an error that says which file and where.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import Literal

import torch

from shardc.errors import Problem, ShardSetError
from shardc.loaders.ahead import was_asked_for
from shardc.remote import AnyFile, RemoteFile

Reads = Literal["auto", "mapped", "direct"]
Way = Literal["mapped", "cached", "buffered", "direct"]

STAGE_BYTES = 4 << 20  # of a buffer; with two readers this fills a disk's queue
READERS = 2  # buffers are one more: while one is taken away the others fill
REMOTE_STAGE_BYTES = 8 << 20  # of a range that is asked for of a server
REMOTE_READERS = 8  # each such request waits for its first byte
ALIGNMENT = 4096  # of offsets, lengths and buffers, for O_DIRECT
PROBES = 1024
CACHED_SHARE = 0.5  # of a file's pages: from here on the page cache is the faster way
O_DIRECT = getattr(os, "O_DIRECT", 0)
MOUNTS = Path("/proc/self/mountinfo")
# Filesystems of a network, or of a process: they fail while a page is read, local disks hardly do.
REMOTE = {
    "nfs",
    "nfs4",
    "lustre",
    "cifs",
    "smb3",
    "ceph",
    "9p",
    "afs",
    "beegfs",
    "gpfs",
    "virtiofs",
}
REMOTE |= {"fuse"}  # as fuse.sshfs and the like


def resident_share(memory: mmap.mmap) -> float | None:
    """The share of a mapping's pages that the page cache holds, by about PROBES of them.

    To ask for every page takes a tenth of the time to copy them. None where it is unknown.
    Source: mincore(2).
    """
    step = max(1, len(memory) // mmap.PAGESIZE // PROBES) * mmap.PAGESIZE
    there = []
    table = ctypes.c_ubyte()
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        for at in range(0, len(memory), step):
            if libc.mincore(ctypes.c_void_p(start + at), ctypes.c_size_t(1), ctypes.byref(table)):
                return None
            there.append(table.value & 1)  # the other bits have no meaning
    except (OSError, AttributeError, TypeError):
        return None
    return sum(there) / len(there)


def is_remote(path: Path) -> bool:
    """Whether a filesystem of a network or of a user's process holds the file.

    Source: proc_pid_mountinfo(5).
    """
    try:
        device = path.stat().st_dev
        mounts = MOUNTS.read_text(errors="replace").splitlines()
    except OSError:
        return False
    number = f"{os.major(device)}:{os.minor(device)}"
    for mount in mounts:
        own, _, kind = mount.partition(" - ")
        if own.split()[2] == number:
            return kind.split()[0].partition(".")[0] in REMOTE
    return False


def choose(reads: Reads, memory: mmap.mmap | None, path: AnyFile, *, shared: bool) -> Way:
    """How to copy a file's tensors to a device; "cached" is by a mapping with all pages there.

    memory: the file's mapping, None where it has none. shared: other ranks read it too, so it goes
    through the page cache, which then reads the disk once for all of them.
    """
    asked = isinstance(path, Path) and was_asked_for(path)  # it is on its way into the page cache
    past_the_cache: Way = "buffered" if shared or asked else "direct"
    if reads == "direct":
        return past_the_cache
    if memory is None or isinstance(path, RemoteFile):
        return "buffered"
    if reads == "mapped":
        return "mapped"
    share = resident_share(memory)
    if share is not None and share < CACHED_SHARE and not asked:
        return past_the_cache
    if is_remote(path) or (asked and share != 1):
        return "buffered"
    return "cached" if share == 1 else "mapped"


class FileReader:
    """A file read in large aligned pieces through a few buffers, ahead of their use.

    direct: past the page cache, where the filesystem can. A file that is elsewhere is read by
    ranges. Holds one buffer more than it has readers, however large the file is.
    """

    def __init__(self, path: AnyFile, *, direct: bool = False) -> None:
        self._path = path
        self._direct = direct and bool(O_DIRECT)
        self._open = ExitStack()
        self._stop = threading.Event()
        elsewhere = isinstance(path, RemoteFile)
        self._readers = REMOTE_READERS if elsewhere else READERS
        self._stage_bytes = REMOTE_STAGE_BYTES if elsewhere else STAGE_BYTES
        size = self._stage_bytes + 2 * ALIGNMENT
        self._buffers = [mmap.mmap(-1, size) for _ in range(self._readers + 1)]

    def __enter__(self) -> FileReader:
        if isinstance(self._path, Path):
            self._fd = _open(self._path, direct=self._direct)
            self._open.callback(os.close, self._fd)
        self._pool = self._open.enter_context(ThreadPoolExecutor(self._readers, "shardc-read"))
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()  # what was asked for and is not taken
        self._open.close()

    def pieces(self, start: int, stop: int) -> Iterator[tuple[int, torch.Tensor]]:
        """(offset from `start`, bytes) of [start, stop) in order; each valid until the next."""
        edges = enumerate(range(start, stop, self._stage_bytes))
        asked: deque[tuple[int, Future[torch.Tensor]]] = deque()
        for number, first in islice(edges, self._readers):
            asked.append((first, self._ask(number, first, stop)))
        while asked:
            first, waiting = asked.popleft()
            ready = waiting.result()
            for number, following in islice(edges, 1):
                asked.append((following, self._ask(number, following, stop)))
            yield first - start, ready

    def _ask(self, number: int, first: int, stop: int) -> Future[torch.Tensor]:
        last = min(first + self._stage_bytes, stop)
        return self._pool.submit(
            self._read, self._buffers[number % len(self._buffers)], first, last
        )

    def _read(self, buffer: mmap.mmap, first: int, last: int) -> torch.Tensor:
        low = first // ALIGNMENT * ALIGNMENT
        high = -(-last // ALIGNMENT) * ALIGNMENT
        with memoryview(buffer) as whole:
            if isinstance(self._path, RemoteFile):
                with whole[first - low : last - low] as wanted:
                    self._path.read(first, wanted, self._stop)
            else:
                with whole[: high - low] as piece:
                    _fill(self._fd, self._path, piece, low, last, direct=self._direct)
        return torch.frombuffer(buffer, dtype=torch.uint8, count=last - first, offset=first - low)


def read_into(path: AnyFile, start: int, into: memoryview) -> None:
    """Fill `into` from byte `start` of a file on; ShardSetError where it cannot be."""
    if isinstance(path, RemoteFile):
        path.read(start, into)
        return
    fd = _open(path, direct=False)
    try:
        _fill(fd, path, into, start, start + len(into), direct=False)
    finally:
        os.close(fd)


def _open(path: Path, *, direct: bool) -> int:
    if direct:
        try:
            return os.open(path, os.O_RDONLY | O_DIRECT)
        except OSError:  # not every filesystem has direct reads: large ones help all the same
            pass
    try:
        return os.open(path, os.O_RDONLY)
    except OSError as error:
        what = f"cannot open it: {error.strerror}"
        raise ShardSetError(Problem(str(path), what)) from error


def _fill(fd: int, path: Path, into: memoryview, at: int, last: int, *, direct: bool) -> None:
    """Read from byte `at` of the file on, up to `last` at least."""
    while at < last:
        try:
            count = os.preadv(fd, [into], at)
        except OSError as error:
            if direct and error.errno == errno.EINVAL:  # it wants another alignment than ours
                fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) & ~O_DIRECT)
                direct = False
                continue
            what = f"reading {last - at} bytes at byte {at} failed: {error.strerror}"
            fix = "look after the disk or mount that holds it"
            raise ShardSetError(Problem(str(path), what, fix)) from error
        if count == 0:
            what = f"ends at byte {at}, {last} are needed"
            raise ShardSetError(Problem(str(path), what, "fetch it again"))
        into, at = into[count:], at + count
