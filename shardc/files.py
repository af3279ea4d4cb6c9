"""Whole files and folders: copied, cloned, linked, removed, and made durable."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import xxhash

from shardc.errors import CheckpointError, OutputError, Problem
from shardc.fileio import write_problem

COPY_BYTES = 1024 * 1024
_FICLONE = 0x40049409  # linux/fs.h


def check_space(out: Path, needed_bytes: int, held_bytes: int = 0) -> None:
    """Refuse before anything is written where the filesystem has not the room.

    held_bytes: what an unfinished build has of it already, to be taken over or removed.
    """
    parent = nearest_folder(out)
    free = shutil.disk_usage(parent).free + held_bytes
    if free < needed_bytes:
        raise OutputError(
            Problem(str(out), f"needs {needed_bytes} bytes, {free} are free", "choose another -o")
        )


def nearest_folder(path: Path) -> Path:
    """The folder that is there already, above `path`."""
    parent = path.absolute().parent
    while not parent.exists():
        parent = parent.parent
    return parent


@contextmanager
def told(path: Path, size_bytes: int | None = None) -> Iterator[None]:
    """An OSError as an OutputError that names the file it is about, else `path`."""
    try:
        yield
    except OSError as error:
        where = Path(os.fsdecode(error.filename or path))
        raise OutputError(write_problem(where, error, size_bytes)) from error


def remove(path: Path) -> None:
    """Whatever is there: a folder with all in it, a file, a link (never what it leads to)."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def copy_file(source: Path, target: Path, *, fsync: bool) -> str:
    """Copy bytes, through symlinks, with the umask's mode; the digest of what was copied."""
    state = xxhash.xxh3_128()
    with _reading(source):
        reader = source.open("rb", buffering=0)
    with reader:
        size = os.fstat(reader.fileno()).st_size
        with told(target, size), target.open("xb", buffering=0) as writer:
            while True:
                with _reading(source):
                    piece = memoryview(reader.read(COPY_BYTES) or b"")
                if not piece:
                    break
                state.update(piece)
                while piece:
                    piece = piece[writer.write(piece) or 0 :]
            if fsync:
                os.fsync(writer.fileno())
    return state.hexdigest()


def digest_of(path: Path) -> str | None:
    """XXH3-128 of a file's bytes; None where it cannot be read, or is a link."""
    state = xxhash.xxh3_128()
    try:
        if path.is_symlink():
            return None
        with path.open("rb", buffering=0) as file:
            while piece := file.read(COPY_BYTES):
                state.update(piece)
    except OSError:
        return None
    return state.hexdigest()


@contextmanager
def _reading(source: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CheckpointError(Problem(str(source), f"cannot read it: {error.strerror}")) from error


def share_file(source: Path, target: Path, *, fsync: bool) -> str | None:
    """Have `source`'s bytes at `target` without a copy: says how, None where there is no way.

    A clone shares blocks until either side changes; a hard link is the same file.
    """
    source = source.resolve()  # a Hub cache links to its blobs
    with told(target):
        if _clone(source, target, fsync=fsync):
            return "cloned"
    with suppress(OSError):
        os.link(source, target)
        return "hard-linked"
    return None


def _clone(source: Path, target: Path, *, fsync: bool) -> bool:
    try:
        import fcntl
    except ImportError:
        return False
    try:
        with source.open("rb") as reader, target.open("xb") as writer:
            fcntl.ioctl(writer.fileno(), _FICLONE, reader.fileno())
            if fsync:
                os.fsync(writer.fileno())
            return True
    except OSError as error:
        with suppress(FileNotFoundError):
            target.unlink()
        if error.errno == errno.ENOSPC:
            raise
        return False


def write_file(path: Path, data: bytes, *, fsync: bool) -> None:
    """Write by way of a neighbour and a rename, so that `path` is whole or absent."""
    fresh = path.with_name(f".{path.name}.new")
    with told(path, len(data)):
        with fresh.open("wb") as writer:
            writer.write(data)
            writer.flush()
            if fsync:
                os.fsync(writer.fileno())
        fresh.rename(path)


def sync(path: Path) -> None:
    """Make a file's bytes, or the names in a folder, durable."""
    with told(path):
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def sync_folders(top: Path) -> None:
    """Make the names in `top` and in every folder below it durable."""
    for folder in (top, *(entry for entry in top.rglob("*") if entry.is_dir())):
        sync(folder)
