"""Positioned reads of sources and positioned writes of shards; every error names its file."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import numpy.typing as npt

from shardc.checkpoint import SourceFile
from shardc.errors import CheckpointError, OutputError, Problem
from shardc.planner import OutFile

Bytes = npt.NDArray[np.uint8]


class Source:
    """A weight file opened for positioned reads."""

    def __init__(self, file: SourceFile) -> None:
        self._file = file

    def __enter__(self) -> Source:
        try:
            self._fd = os.open(self._file.path, os.O_RDONLY)
        except OSError as error:
            raise CheckpointError(
                Problem(str(self._file.path), f"cannot open it: {error.strerror}")
            ) from error
        self._first = os.fstat(self._fd)
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)

    def read(self, offset: int, into: Bytes, tensor: str) -> None:
        """Fill `into` from `offset` bytes into the data."""
        view = into.data
        at = self._file.data_start + offset
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

    def check_unchanged(self) -> None:
        """The open file must still be the one that was planned for."""
        now, first = os.fstat(self._fd), self._first
        if (now.st_size, now.st_mtime_ns) != (first.st_size, first.st_mtime_ns) or (
            now.st_size != self._file.size_bytes
        ):
            raise CheckpointError(
                Problem(
                    str(self._file.path),
                    f"changed during the build ({self._file.size_bytes} bytes, now {now.st_size})",
                    "build again from a source at rest",
                )
            )


class Output:
    """A shard file: made at its full size, header first, then written by position."""

    def __init__(self, path: Path, file: OutFile) -> None:
        self._path = path
        self._plan = file
        self._data_start = len(file.header)

    def __enter__(self) -> Output:
        with self._errors():
            self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
            try:
                _allocate(self._fd, self._plan.size_bytes)
                self._write_at(0, memoryview(self._plan.header))
            except BaseException:
                os.close(self._fd)
                raise
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)

    def write(self, offset: int, data: Bytes) -> None:
        with self._errors():
            self._write_at(self._data_start + offset, data.data)

    def read_back(self, offset: int, into: Bytes) -> None:
        with self._errors():
            view, at = into.data, self._data_start + offset
            while view:
                count = os.preadv(self._fd, [view], at)
                if count == 0:
                    raise OSError(errno.EIO, "the file ends early")
                view, at = view[count:], at + count

    def sync(self) -> None:
        with self._errors():
            os.fsync(self._fd)

    def _write_at(self, at: int, view: memoryview) -> None:
        while view:
            count = os.pwrite(self._fd, view, at)
            view, at = view[count:], at + count

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            hint = "free some space, or choose another -o" if error.errno == errno.ENOSPC else ""
            raise OutputError(
                Problem(
                    str(self._path),
                    f"cannot write its {self._plan.size_bytes} bytes: {error.strerror}",
                    hint,
                )
            ) from error


def _allocate(fd: int, size: int) -> None:
    """Reserve the blocks now, so that a full disk shows before any work is done."""
    if hasattr(os, "posix_fallocate") and size:
        try:
            os.posix_fallocate(fd, 0, size)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
                raise
    os.ftruncate(fd, size)
