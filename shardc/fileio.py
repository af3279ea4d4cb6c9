"""Positioned reads of sources and positioned writes of shards; every error names its file.

Nothing is mapped: a source that shrinks is a short read here, where a mapping would be a SIGBUS.
"""

from __future__ import annotations

import ctypes
import errno
import os
import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import xxhash

from shardc.checkpoint import SourceFile
from shardc.errors import CheckpointError, OutputError, Problem
from shardc.header import MAX_HEADER_BYTES
from shardc.mirror import Mirror
from shardc.planner import OutFile
from shardc.remote import AnyFile, RemoteFile

WRITE_BACK_BYTES = 32 * 1024 * 1024  # of one file, dirty, before the disk is to begin
SYNC_FILE_RANGE_WRITE = 2  # linux/fs.h

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Identity:
    """What a file is known by without reading its data; `header`: of a weight file, else empty."""

    size_bytes: int
    mtime_ns: int
    inode: int
    header: str

    def __str__(self) -> str:
        return ", ".join(f"{key} {value}" for key, value in asdict(self).items() if value != "")


def identify(path: Path) -> Identity:
    """The file that `path` leads to now; CheckpointError where it cannot be read."""
    try:
        with path.open("rb", buffering=0) as file:
            status = os.fstat(file.fileno())
            header = ""
            if path.suffix == ".safetensors":
                size = min(int.from_bytes(file.read(8), "little"), MAX_HEADER_BYTES)
                header = xxhash.xxh3_128_hexdigest(file.read(size))
    except OSError as error:
        raise CheckpointError(Problem(str(path), f"cannot open it: {error.strerror}")) from error
    return Identity(status.st_size, status.st_mtime_ns, status.st_ino, header)


class Snapshot:
    """What a build's source files were when it began: it fails where one is another at its end.

    mirror: of a remote source, whose files are known by what the server says of them.
    """

    def __init__(self, paths: Mapping[str, AnyFile], mirror: Mirror | None = None) -> None:
        self._paths = {name: path for name, path in paths.items() if isinstance(path, Path)}
        self._mirror = mirror
        if mirror is None:
            self.identities = {n: str(identify(path)) for n, path in self._paths.items()}
        else:
            self.identities = {name: mirror.identity(name) for name in paths}

    def at_rest(self) -> bool:
        """Whether all that was read is of the same files; a remote read always says of which."""
        return self._mirror is not None or not self.changes()

    def changes(self) -> list[Problem]:
        """A problem for each file that is another now."""
        if self._mirror is not None:
            return self._mirror.remote.changes(self.identities)
        problems = []
        for name, before in self.identities.items():
            try:
                now = str(identify(self._paths[name]))
            except CheckpointError as error:
                now = error.problems[0].what
            if now != before:
                problems.append(
                    Problem(
                        str(self._paths[name]),
                        f"changed during the build: it was {before}; now {now}",
                        "build again from a source at rest",
                    )
                )
        return problems

    def check(self) -> None:
        """CheckpointError naming each file that is another now."""
        if problems := self.changes():
            raise CheckpointError(problems)


class Source:
    """A weight file opened for positioned reads."""

    def __init__(self, file: SourceFile) -> None:
        self._file = file
        self._fd = -1

    def __enter__(self) -> Source:
        if isinstance(self._file.path, RemoteFile):
            return self
        try:
            self._fd = os.open(self._file.path, os.O_RDONLY)
        except OSError as error:
            raise CheckpointError(
                Problem(str(self._file.path), f"cannot open it: {error.strerror}")
            ) from error
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)
        return self

    def __exit__(self, *_: object) -> None:
        if self._fd >= 0:
            os.close(self._fd)

    @property
    def is_remote(self) -> bool:
        return self._file.remote

    def read(
        self, offset: int, into: Bytes, tensor: str, stop: threading.Event | None = None
    ) -> None:
        """Fill `into` from `offset` bytes into the data; Stopped, of a remote file's."""
        view = into.data
        at = self._file.data_start + offset
        if isinstance(self._file.path, RemoteFile):
            self._file.path.read(at, view, stop)
            return
        while view:
            try:
                count = os.preadv(self._fd, [view], at)
            except OSError as error:
                raise CheckpointError(
                    Problem(
                        str(self._file.path),
                        f"tensor {tensor!r}: reading {len(view)} bytes at {at} failed: "
                        f"{error.strerror}",
                    )
                ) from error
            if count == 0:
                raise CheckpointError(
                    Problem(
                        str(self._file.path),
                        f"tensor {tensor!r}: the file ends at byte {os.fstat(self._fd).st_size}, "
                        f"{len(view)} bytes are missing: it shrank since its header was read",
                    )
                )
            view, at = view[count:], at + count


class Output:
    """A shard file: made at its full size, header first, then written by position.

    One that an earlier build left is taken as it is (`fresh` is false then): it may hold anything.
    durable: it will be synced, so the disk is to begin early.
    """

    def __init__(self, path: Path, file: OutFile, *, durable: bool = False) -> None:
        self._path = path
        self._durable = durable
        self._dirty_bytes = 0
        self._plan = file
        self._data_start = len(file.header)
        self.fresh = True

    def __enter__(self) -> Output:
        try:
            self._open()
        except OSError as error:
            raise self._failed(error) from error
        return self

    def _open(self) -> None:
        flags = os.O_RDWR | os.O_NOFOLLOW
        try:
            self._fd = os.open(self._path, flags | os.O_CREAT | os.O_EXCL, 0o666)
        except FileExistsError:
            self._fd = os.open(self._path, flags)
            self.fresh = False
        try:
            _allocate(self._fd, self._plan.size_bytes)
            self._write_at(0, memoryview(self._plan.header))
        except BaseException:
            os.close(self._fd)
            raise

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)

    def write(self, offset: int, data: Bytes) -> None:
        try:
            self._write_at(self._data_start + offset, data.data)
        except OSError as error:
            raise self._failed(error) from error
        if self._durable:
            self._dirty_bytes += data.nbytes  # by several threads: about so many will do
            if self._dirty_bytes >= WRITE_BACK_BYTES:
                self._dirty_bytes = 0
                write_back(self._fd)

    def read_back(self, offset: int, into: Bytes) -> None:
        view, at = into.data, self._data_start + offset
        try:
            while view:
                count = os.preadv(self._fd, [view], at)
                if count == 0:
                    raise OSError(errno.EIO, "the file ends early")
                view, at = view[count:], at + count
        except OSError as error:
            raise self._failed(error) from error

    def sync(self) -> None:
        try:
            os.fsync(self._fd)
        except OSError as error:
            raise self._failed(error) from error

    def _write_at(self, at: int, view: memoryview) -> None:
        while view:
            count = os.pwrite(self._fd, view, at)
            if count == 0:
                raise OSError(errno.EIO, "nothing could be written")
            view, at = view[count:], at + count

    def _failed(self, error: OSError) -> OutputError:
        return OutputError(write_problem(self._path, error, self._plan.size_bytes))


def write_back(fd: int) -> None:
    """Have the kernel begin to write what it has of a file, without waiting for the disk.

    Source: sync_file_range(2), which is Linux's; elsewhere nothing is begun early.
    """
    try:
        call = ctypes.CDLL(None).sync_file_range
    except (OSError, AttributeError, TypeError):
        return
    call(fd, ctypes.c_int64(0), ctypes.c_int64(0), ctypes.c_uint(SYNC_FILE_RANGE_WRITE))


def write_problem(path: Path, error: OSError, size_bytes: int | None = None) -> Problem:
    """Why `path`, of that many bytes, could not be written; of a full disk also what is free."""
    size = "it" if size_bytes is None else f"its {size_bytes} bytes"
    what = f"cannot write {size}: {error.strerror or error}"
    if error.errno not in (errno.ENOSPC, errno.EDQUOT):
        return Problem(str(path), what)
    try:
        disk = os.statvfs(path.parent)
        what += f", {disk.f_bavail * disk.f_frsize} are free"
    except OSError:
        pass  # the folder is gone: the error itself has to do
    return Problem(str(path), what, "free some space, or choose another -o")


def _allocate(fd: int, size: int) -> None:
    """Reserve the blocks now, so that a full disk shows before any work is done."""
    if hasattr(os, "posix_fallocate") and size:
        try:
            os.posix_fallocate(fd, 0, size)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
                raise
    os.ftruncate(fd, size)
