"""Ahead of a load: a rank's files into the page cache, while the process imports what it needs.

Neither torch nor pydantic is imported here: the files are known by their names.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path

from shardc.loaders.pages import ADVICE_BYTES

# A file of a shard set: this group is the number of the one rank that needs it.
_RANKED = re.compile(r"rank-(\d{5})-of-\d{5}(-part-\d{5})?\.safetensors")
_asked: set[Path] = set()


def prefetch(path: str | Path, rank: int | None = None) -> threading.Thread | None:
    """Have the kernel read what a rank needs of a local shard set, and return at once.

    To be called before `import torch`, which takes longer than a fast disk does for the files.
    rank: default RANK of the environment, which torchrun sets, else 0. Reads into the page cache
    alone: what does not fit there is dropped again. None where there is nothing to do: the path is
    no folder here, or the system takes no such advice. A file that cannot be read is left to the
    load to name.
    """
    if not Path(path).is_dir() or not hasattr(os, "posix_fadvise"):
        return None
    number = int(os.environ.get("RANK", "0")) if rank is None else rank
    return read_ahead(needed(Path(path), number))


def needed(folder: Path, rank: int) -> Iterator[Path]:
    """The weight files below a shard set's folder, but for those of the other ranks."""
    for path in sorted(folder.rglob("*.safetensors")):
        ranked = _RANKED.fullmatch(path.name)
        if ranked is None or int(ranked[1]) == rank:
            yield path


def read_ahead(paths: Iterable[Path]) -> threading.Thread:
    """Have the kernel read these files into the page cache, from a thread of its own."""
    todo = [path.resolve() for path in paths]
    _asked.update(todo)
    thread = threading.Thread(target=_advise, args=(todo,), name="shardc-prefetch", daemon=True)
    thread.start()
    return thread


def was_asked_for(path: Path) -> bool:
    """Whether this process has asked for the file, which then need not all be there yet."""
    return path.resolve() in _asked


def _advise(paths: Iterable[Path]) -> None:
    for path in paths:
        try:
            fd = os.open(path, os.O_RDONLY)
        except OSError:
            continue
        try:
            for at in range(0, os.fstat(fd).st_size, ADVICE_BYTES):
                os.posix_fadvise(fd, at, ADVICE_BYTES, os.POSIX_FADV_WILLNEED)
        finally:
            os.close(fd)
