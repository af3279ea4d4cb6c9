"""Files elsewhere: read by ranges, again where a server fails, pinned to what they were."""

from __future__ import annotations

import io
import random
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, TypeVar

from shardc.errors import Problem, RemoteError

if TYPE_CHECKING:
    from typing_extensions import Buffer

S = TypeVar("S")
T = TypeVar("T")

ATTEMPTS = 7  # in a row without a byte: with the pauses between them about half a minute
PAUSE_S = 0.25  # after the first failure; twice as long after each other
MAX_PAUSE_S = 8.0
MAX_RETRY_AFTER_S = 300.0  # of a server that says when: the Hub counts requests by five minutes
TICK_S = 0.5
HEAD_BYTES = 256 * 1024  # that a look at a file's header asks for at once


class Transient(Exception):
    """A failure that may be gone at the next attempt. `after_s`: when the server says to come."""

    def __init__(self, what: str, after_s: float | None = None) -> None:
        super().__init__(what)
        self.after_s = after_s


class Stopped(Exception):
    """Another thread failed, or the user interrupted: this one's work is no longer wanted."""


def in_background(action: Callable[[], T]) -> Future[T]:
    """Begin `action` on a thread that nothing waits for, not even the interpreter at its end.

    A server that stalls holds a thread for up to a minute; Ctrl-C is not to wait for that.
    """
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(action())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="shardc", daemon=True).start()
    return future


def finish(running: Sequence[Future[T]]) -> None:
    """Wait for all of them, or until the first fails: raises what it did."""
    waiting = True
    while waiting:  # awake now and then: a signal just before a wait does not end it
        done, pending = wait(running, timeout=TICK_S, return_when=FIRST_EXCEPTION)
        waiting = bool(pending) and all(future.exception() is None for future in done)
    for future in running:
        if future.done():
            future.result()


def spread(
    action: Callable[[S], T], items: Iterable[S], workers: int, stop: threading.Event | None = None
) -> list[T]:
    """What `action` returns for each of the items, several at once; raises as the first did.

    stop: is set in the end, for those that an error or Ctrl-C leaves behind.
    """
    todo = list(enumerate(items))[::-1]
    done: dict[int, T] = {}
    ended = stop or threading.Event()

    def work() -> None:
        while not ended.is_set():
            try:
                number, item = todo.pop()
            except IndexError:
                return
            done[number] = action(item)

    running = [in_background(work) for _ in range(min(workers, len(todo)))]
    try:
        finish(running)
    finally:
        ended.set()
    return [done[number] for number in sorted(done)]


def interruptible(action: Callable[[], T]) -> T:
    """What `action` returns, which Ctrl-C may cut short although it is not Python that waits."""
    if threading.current_thread() is threading.main_thread():
        future = in_background(action)
        finish([future])
        return future.result()
    return action()


def retried(action: Callable[[], T], where: str, what: str) -> T:
    """What `action` returns, tried again where it raises Transient; RemoteError in the end."""
    failures = 0
    while True:
        try:
            return action()
        except Transient as error:
            failures += 1
            _pause(failures, error, where, what, None)


def _pause(
    failures: int, error: Transient, where: str, what: str, stop: threading.Event | None
) -> None:
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
        pause_s = min(error.after_s, MAX_RETRY_AFTER_S)
    else:
        longest = min(PAUSE_S * 2 ** (failures - 1), MAX_PAUSE_S)
        pause_s = longest * random.uniform(0.5, 1)  # not all workers at one moment
    if stop is None:
        time.sleep(pause_s)
    elif stop.wait(pause_s):
        raise Stopped


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

    def read(self, start: int, into: memoryview, stop: threading.Event | None = None) -> None:
        """Fill `into` from byte `start` on; a cut answer is continued where it ended.

        stop: once set, this gives up at the next bytes that come, or do not: Stopped.
        """
        done = failures = 0
        what = f"reading bytes {start} to {start + len(into)} of {self.size_bytes}"
        if start + len(into) > self.size_bytes:
            raise RemoteError(Problem(self.where, f"{what}: it has not that many"))
        while done < len(into):
            try:
                for piece in self.fetch(start + done, start + len(into)):
                    if stop is not None and stop.is_set():
                        raise Stopped
                    with memoryview(piece) as view:
                        if done + len(view) > len(into):
                            raise RemoteError(
                                Problem(self.where, f"{what}: the answer has more than that")
                            )
                        into[done : done + len(view)] = view
                        done += len(view)
                        failures = 0 if len(view) else failures
                if done < len(into):
                    raise Transient(f"the answer ended {len(into) - done} bytes early")
            except Transient as error:
                failures += 1
                _pause(failures, error, self.where, what, stop)

    def cached(self) -> Path | None:
        """Where this machine has it already."""
        return None

    def matches(self, path: Path) -> bool | None:
        """Whether a file here has its bytes, as far as its server says what they are."""
        return None if path.stat().st_size == self.size_bytes else False

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


def here(path: Path) -> AnyFile:
    """The file itself, where one could also be elsewhere."""
    return path


class Remote(ABC):
    """A folder that is elsewhere: its files by their names below it.

    `where` is its address; `pinned` its repo's with the `commit`, for a record, where it has one.
    """

    where: str
    pinned: str | None
    commit: str | None = None
    files: Mapping[str, RemoteFile]

    @abstractmethod
    def changes(self, names: Iterable[str]) -> list[Problem]:
        """What of these files is no longer as it was when this was opened."""


class Below(Remote):
    """A folder of a remote one."""

    def __init__(self, remote: Remote, folder: str) -> None:
        start = f"{folder}/"
        self._remote, self._start = remote, start
        self.where = f"{remote.where}/{folder}"
        self.pinned, self.commit = remote.pinned, remote.commit
        self.files = {
            name.removeprefix(start): file
            for name, file in remote.files.items()
            if name.startswith(start)
        }

    def changes(self, names: Iterable[str]) -> list[Problem]:
        return self._remote.changes(self._start + name for name in names)
