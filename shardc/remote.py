"""Files elsewhere: read by ranges, again where a server fails, pinned to what they were."""

from __future__ import annotations

import io
import random
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, TypeVar

from shardc.errors import Problem, RemoteError

if TYPE_CHECKING:
    from typing_extensions import Buffer

T = TypeVar("T")

ATTEMPTS = 7  # in a row without a byte: with the pauses between them about half a minute
PAUSE_S = 0.25  # after the first failure; twice as long after each other
MAX_PAUSE_S = 8.0
MAX_RETRY_AFTER_S = 300.0  # of a server that says when: the Hub counts requests by five minutes
HEAD_BYTES = 256 * 1024  # that a look at a file's header asks for at once


class Transient(Exception):
    """A failure that may be gone at the next attempt. `after_s`: when the server says to come."""

    def __init__(self, what: str, after_s: float | None = None) -> None:
        super().__init__(what)
        self.after_s = after_s


def retried(action: Callable[[], T], where: str, what: str) -> T:
    """What `action` returns, tried again where it raises Transient; RemoteError in the end."""
    failures = 0
    while True:
        try:
            return action()
        except Transient as error:
            failures += 1
            _pause(failures, error, where, what)


def _pause(failures: int, error: Transient, where: str, what: str) -> None:
    """Wait before the next attempt; RemoteError where there have been enough."""
    if failures >= ATTEMPTS:
        raise RemoteError(
            Problem(
                where,
                f"{what} failed {failures} times: {error}",
                "try again once it can be reached",
            )
        ) from error
    if error.after_s is not None:
        time.sleep(min(error.after_s, MAX_RETRY_AFTER_S))
    else:
        longest = min(PAUSE_S * 2 ** (failures - 1), MAX_PAUSE_S)
        time.sleep(longest * random.uniform(0.5, 1))  # not all workers at one moment


class RemoteFile(ABC):
    """A file of a Hub repo or of a bucket, as it was when it was listed.

    `where` is its address, for people; `identity` changes with its bytes.
    """

    def __init__(self, where: str, size_bytes: int, identity: str) -> None:
        self.where = where
        self.size_bytes = size_bytes
        self.identity = identity

    def __str__(self) -> str:
        return self.where

    @abstractmethod
    def fetch(self, start: int, stop: int) -> Iterator[Buffer]:
        """Bytes [start, stop) by one request, as they come. Transient, RemoteError."""

    def read(self, start: int, into: memoryview) -> None:
        """Fill `into` from byte `start` on; a cut answer is continued where it ended."""
        done = failures = 0
        what = f"reading bytes {start} to {start + len(into)} of {self.size_bytes}"
        if start + len(into) > self.size_bytes:
            raise RemoteError(Problem(self.where, f"{what}: it has not that many"))
        while done < len(into):
            try:
                for piece in self.fetch(start + done, start + len(into)):
                    with memoryview(piece) as view:
                        into[done : done + len(view)] = view
                        done += len(view)
                        failures = 0 if len(view) else failures
                if done < len(into):
                    raise Transient(f"the answer ended {len(into) - done} bytes early")
            except Transient as error:
                failures += 1
                _pause(failures, error, self.where, what)

    def cached(self) -> Path | None:
        """Where this machine has it already."""
        return None

    def whole(self) -> bytes:
        """All its bytes, of a small file."""
        data = bytearray(self.size_bytes)
        self.read(0, memoryview(data))
        return bytes(data)

    def stream(self) -> BinaryIO:
        """It as an open file whose first reads are one request."""
        return io.BufferedReader(_Raw(self), HEAD_BYTES)


AnyFile = Path | RemoteFile  # one that is here, or elsewhere


def size_of(file: AnyFile) -> int:
    """The bytes of a file, here or elsewhere."""
    return file.size_bytes if isinstance(file, RemoteFile) else file.stat().st_size


class _Raw(io.RawIOBase):
    def __init__(self, file: RemoteFile) -> None:
        self._file = file
        self._at = 0

    def readable(self) -> bool:
        return True

    def readinto(self, into: Buffer) -> int:
        with memoryview(into) as view:
            count = min(len(view), self._file.size_bytes - self._at)
            self._file.read(self._at, view[:count])
        self._at += count
        return count


class Remote(ABC):
    """A folder that is elsewhere: its files by their names below it.

    `where` is its address; `pinned` the same with the commit, for a record, where it has one.
    """

    where: str
    pinned: str | None
    files: Mapping[str, RemoteFile]

    @abstractmethod
    def changes(self, names: Iterable[str]) -> list[Problem]:
        """What of these files is no longer as it was when this was opened."""
