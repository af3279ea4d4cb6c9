"""Whole files: copied, cloned or linked, and a folder that appears at once or not at all."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from shardc.checkpoint import is_shard_set
from shardc.errors import OutputError, Problem

_FICLONE = 0x40049409  # linux/fs.h


def partial_folder(out: Path) -> Path:
    """Where a build of `out` writes until it is whole."""
    return out.parent / f".{out.name}.shardc-partial"


@contextmanager
def new_folder(out: Path, *, force: bool) -> Iterator[Path]:
    """A folder to write into, which becomes `out` by rename when the block ends well.

    Where it ends in an error, nothing is left. Raises OutputError where `out` exists (with
    `force`, only where it is no shard set), or an unfinished build of it is in the way.
    """
    partial = partial_folder(out)
    if out.exists() or out.is_symlink():
        if not force:
            raise OutputError(
                Problem(str(out), "exists already", "--force replaces it, -o names another")
            )
        if not is_shard_set(out):
            raise OutputError(Problem(str(out), "is not a shard set: shardc will not replace it"))
    if partial.exists():
        if not force:
            raise OutputError(
                Problem(str(partial), "is left of an unfinished build", "--force removes it")
            )
        shutil.rmtree(partial)
    try:
        partial.mkdir(parents=True)
    except OSError as error:
        raise OutputError(Problem(str(partial), f"cannot make it: {error.strerror}")) from error
    try:
        yield partial
        old = out.parent / f".{out.name}.shardc-old"
        if out.exists():
            shutil.rmtree(old, ignore_errors=True)
            out.rename(old)
        partial.rename(out)
        shutil.rmtree(old, ignore_errors=True)
    except BaseException as error:
        shutil.rmtree(partial, ignore_errors=True)
        if isinstance(error, OSError):
            where = str(error.filename or out)
            raise OutputError(Problem(where, f"cannot write it: {error.strerror}")) from error
        raise


def copy_file(source: Path, target: Path, *, fsync: bool) -> None:
    """Copy bytes, through symlinks, with the umask's mode."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with source.open("rb") as reader, target.open("xb") as writer:
        shutil.copyfileobj(reader, writer, 1024 * 1024)
        if fsync:
            writer.flush()
            os.fsync(writer.fileno())


def keep_file(source: Path, target: Path, *, fsync: bool) -> str:
    """Have `source`'s bytes at `target` as cheaply as the filesystem can: says how.

    A clone shares blocks until either side changes; a hard link is the same file; else a copy.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    source = source.resolve()  # a Hub cache links to its blobs
    if _clone(source, target):
        return "cloned"
    with suppress(OSError):
        os.link(source, target)
        return "hard-linked"
    copy_file(source, target, fsync=fsync)
    return "copied"


def carry_file(source: Path, target: Path, *, fsync: bool) -> None:
    """Weights as `keep_file` does, anything else as a copy of its own."""
    if source.suffix == ".safetensors":
        keep_file(source, target, fsync=fsync)
    else:
        copy_file(source, target, fsync=fsync)


def _clone(source: Path, target: Path) -> bool:
    try:
        import fcntl
    except ImportError:
        return False
    try:
        with source.open("rb") as reader, target.open("xb") as writer:
            fcntl.ioctl(writer.fileno(), _FICLONE, reader.fileno())
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
    with fresh.open("xb") as writer:
        writer.write(data)
        if fsync:
            writer.flush()
            os.fsync(writer.fileno())
    fresh.rename(path)


def sync_folders(top: Path) -> None:
    """Make the names below `top` durable."""
    for folder in (top, *(entry for entry in top.rglob("*") if entry.is_dir())):
        fd = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
