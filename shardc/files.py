"""Whole files: copied, cloned or linked, and a folder that appears at once or not at all."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from shardc.checkpoint import sharded_components
from shardc.errors import CheckpointError, OutputError, Problem

_FICLONE = 0x40049409  # linux/fs.h


def partial_folder(out: Path) -> Path:
    """Where a build of `out` writes until it is whole."""
    return out.parent / f".{out.name}.shardc-partial"


def check_replaceable(out: Path, *, force: bool) -> None:
    """OutputError where something stands at `out` that may not be replaced."""
    partial = partial_folder(out)
    if out.exists() or out.is_symlink():
        replaceable = out.is_dir() and bool(sharded_components(out))
        if not replaceable:
            what = "exists already" if not force else "is not a shard set"
            raise OutputError(
                Problem(str(out), f"{what}, and shardc will not replace it", "name another with -o")
            )
        if not force:
            raise OutputError(
                Problem(str(out), "exists already", "--force replaces it, -o names another")
            )
    if partial.exists() and not force:
        raise OutputError(
            Problem(str(partial), "is left of an unfinished build", "--force removes it")
        )


@contextmanager
def new_folder(out: Path, *, force: bool) -> Iterator[Path]:
    """A folder to write into, which becomes `out` by rename when the block ends well.

    Where it ends in an error, nothing is left, and what stood at `out` stands there still. Raises
    OutputError where `out` exists (with `force`, only where it is no shard set; of a link the link
    alone is replaced), or an unfinished build of it is in the way.
    """
    check_replaceable(out, force=force)
    partial, old = partial_folder(out), out.parent / f".{out.name}.shardc-old"
    with _told(out):
        _remove(partial)
        partial.mkdir(parents=True)
    try:
        with _told(out):
            yield partial
            _remove(old)
            replaced = out.exists() or out.is_symlink()
            if replaced:
                out.rename(old)
            try:
                partial.rename(out)
            except OSError:
                if replaced:
                    old.rename(out)
                raise
            _remove(old)
    except BaseException:
        with suppress(OSError):
            _remove(partial)
        raise


@contextmanager
def _told(out: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        where = str(error.filename or out)
        raise OutputError(Problem(where, f"cannot write it: {error.strerror}")) from error


def _remove(path: Path) -> None:
    """Whatever is there: a folder with all in it, a file, a link (never what it leads to)."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def copy_file(source: Path, target: Path, *, fsync: bool) -> None:
    """Copy bytes, through symlinks, with the umask's mode."""
    try:
        reader = source.open("rb")
    except OSError as error:
        raise CheckpointError(Problem(str(source), f"cannot read it: {error.strerror}")) from error
    with reader, _told(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.open("xb") as writer:
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
    with _told(path):
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
