"""The page cache of files: dropped before a cold run, filled before a warm one."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterable
from pathlib import Path

SWITCH = Path("/proc/sys/vm/drop_caches")
KEPT_SHARE = 0.01  # of a file's pages that may stay: cold is what has next to nothing cached
PIECE_BYTES = 16 << 20


class PageCacheError(Exception):
    """A file's pages would not leave the page cache, so nothing read from it would be cold."""


def weight_files(folder: Path) -> list[Path]:
    """All regular files below a folder, or the file itself."""
    return [folder] if folder.is_file() else sorted(p for p in folder.rglob("*") if p.is_file())


def drop(files: Iterable[Path], *, everything: bool = False) -> None:
    """Have the page cache give these files up; PageCacheError where it keeps some.

    everything: by the kernel's switch, which takes root and drops every file's pages, those of
    Python's own modules among them; else by posix_fadvise, which takes neither.
    """
    paths = list(files)
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)  # dirty pages stay where they are
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)
    if everything:
        try:
            os.sync()
            SWITCH.write_text("3")
        except OSError as error:
            raise PageCacheError(f"{SWITCH}: {error.strerror}; it takes root") from error
    for path in paths:
        share = resident_share(path)
        if share > KEPT_SHARE:
            raise PageCacheError(
                f"the page cache keeps {share:.0%} of {path.name}: another process has it mapped, "
                "or its filesystem does not drop pages; try --drop-caches"
            )


def warm(files: Iterable[Path]) -> None:
    """Have all of these files in the page cache."""
    buffer = bytearray(PIECE_BYTES)
    for path in files:
        if resident_share(path) == 1:
            continue
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def resident_share(path: Path) -> float:
    """The share of a file's pages that the page cache holds; 1 for an empty one.

    Source: mincore(2).
    """
    size = path.stat().st_size
    if not size:
        return 1.0
    pages = -(-size // mmap.PAGESIZE)
    table = (ctypes.c_ubyte * pages)()
    with path.open("rb") as file:
        # private and writable, so that ctypes will tell its address; nothing is written
        flags, access = mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE
        with mmap.mmap(file.fileno(), size, flags, access) as memory:
            first = ctypes.c_char.from_buffer(memory)
            libc = ctypes.CDLL(None, use_errno=True)
            address, length = ctypes.c_void_p(ctypes.addressof(first)), ctypes.c_size_t(size)
            failed = libc.mincore(address, length, table)
            del first  # else the mapping could not be closed
    if failed:
        raise PageCacheError(f"mincore of {path.name}: {os.strerror(ctypes.get_errno())}")
    told = bytes(table)
    return sum(told.count(odd) for odd in range(1, 256, 2)) / pages  # the lowest bit says it
