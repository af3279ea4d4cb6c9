"""What shardc keeps of pulls: objects fetched from S3, notes of what was checked, and locks.

It lies in SHARDC_CACHE, else in shardc below XDG_CACHE_HOME or ~/.cache. Any of it may be deleted
while nothing runs; where it cannot be written, notes and locks are done without.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote

import xxhash


def root() -> Path:
    """The folder of it all."""
    if own := os.environ.get("SHARDC_CACHE"):
        return Path(own).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "shardc"


def key_of(*facts: object) -> str:
    """A name that is these facts', and no other's."""
    return xxhash.xxh3_128_hexdigest("\0".join(map(str, facts)).encode())


def s3_folder(bucket: str, prefix: str, *facts: object) -> Path:
    """Where a set of a bucket goes that is known by these facts."""
    return root() / "s3" / bucket / (quote(prefix, safe="") or "-") / key_of(*facts)[:16]


@contextmanager
def locked(*facts: object) -> Iterator[None]:
    """One at a time, of all processes that share the cache and mean the same thing.

    Not every filesystem can lock, and some only say that they do: it saves work, and nothing may
    be wrong without it.
    """
    from filelock import FileLock

    with ExitStack() as held:
        with suppress(OSError, NotImplementedError):
            folder = root() / "locks"
            folder.mkdir(parents=True, exist_ok=True)
            held.enter_context(FileLock(folder / f"{key_of(*facts)}.lock"))
        yield


def is_checked(path: Path, proof: str) -> bool:
    """Whether this very file was found to be what `proof` says."""
    try:
        return _note(path, proof).exists()
    except OSError:  # there is no such file
        return False


def mark_checked(path: Path, proof: str) -> None:
    """Note that the file is what `proof` says, so that the next start need not read all of it."""
    with suppress(OSError):
        note = _note(path, proof)
        note.parent.mkdir(parents=True, exist_ok=True)
        note.touch()


def _note(path: Path, proof: str) -> Path:
    """The note's own file. Seconds are what images and archives keep of a file's time."""
    real = path.resolve()
    status = real.stat()
    key = key_of(real, status.st_size, int(status.st_mtime), proof)
    return root() / "checked" / key[:2] / key


def save_listing(sizes: Mapping[str, int], *facts: object) -> None:
    """Keep which files a set has, and their sizes, for when its server cannot be asked."""
    with suppress(OSError):
        write_whole(_listing(*facts), json.dumps(dict(sizes)).encode())


def read_listing(*facts: object) -> dict[str, int] | None:
    """What was kept; None where nothing was."""
    try:
        found: Any = json.loads(_listing(*facts).read_bytes())
    except (OSError, ValueError):
        return None
    return {str(name): int(size) for name, size in found.items()}


def _listing(*facts: object) -> Path:
    return root() / "listings" / f"{key_of(*facts)}.json"


def write_whole(path: Path, data: bytes) -> None:
    """Write a small file so that a reader finds all of it or what was there before; OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        part.write_bytes(data)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
