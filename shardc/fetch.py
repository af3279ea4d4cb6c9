"""Files fetched into a folder: by parallel ranges, once a host, checked before they are there.

Until then a file is a hidden `.NAME.ID.part`, with the numbers of the chunks that it has beside it:
there a pull that was killed goes on. ID is of what the file is, so that processes which no lock
keeps apart write the same bytes to the same place.
"""

from __future__ import annotations

import errno
import mmap
import shutil
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path
from queue import SimpleQueue
from typing import Self

from shardc import cache
from shardc.errors import OutputError, Problem, RemoteError
from shardc.remote import RemoteFile, finish, in_background

CONNECTIONS = 8  # ranges read at once
CHUNK_BYTES = 8 << 20  # with CONNECTIONS the memory that a fetch takes

Count = Callable[[int], None]  # told bytes as they arrive; what it raises ends the fetch
Check = Callable[[Path], list[Problem]]


@dataclass(frozen=True, slots=True)
class Item:
    """A file to have. `name`: below the set's folder.

    check: what is wrong with a file that should be it, by the set's own index; `digest` is what
    that proves. Both are left out for what the index does not know. rank: whose it is.
    """

    name: str
    size_bytes: int
    rank: int | None = None
    digest: str = ""
    check: Check | None = field(default=None, repr=False)


class Store(ABC):
    """Where files are fetched to: a set's folder at `path`. Open while it is fetched into."""

    path: Path

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return

    @abstractmethod
    def has(self, item: Item) -> bool:
        """Whether the file is there, as far as can be told at once."""

    @abstractmethod
    def get(self, item: Item, count: Count, stop: threading.Event) -> None:
        """Have the file there, and checked; no longer once `stop` is set. RemoteError, OutputError.

        It may then go on for a moment, on threads that nothing waits for.
        """

    def done(self) -> None:
        """Told once all that was wanted is there."""
        return


def unlike(file: RemoteFile, problems: list[Problem] | None) -> RemoteError:
    """The error of a file that is not what it should be, and that was removed."""
    fix = "it was removed: pull again; where that does not help, push the set again"
    found = problems or [Problem("", "does not have the digest that its server states")]
    return RemoteError(Problem(file.where, problem.what, fix) for problem in found)


class Folder(Store):
    """A plain folder that gets the files of a remote one."""

    def __init__(self, path: Path, files: Mapping[str, RemoteFile]) -> None:
        self.path = path
        self._files = files
        self._buffers = _buffers()

    def has(self, item: Item) -> bool:
        path = self.path / item.name
        return path.is_file() and path.stat().st_size == item.size_bytes

    def get(self, item: Item, count: Count, stop: threading.Event) -> None:
        target, file = self.path / item.name, self._files[item.name]
        proof = f"{file.identity} {item.digest}"
        with cache.locked(target.absolute()), writing(target):
            if cache.is_checked(target, proof):
                return
            if not self.has(item) or not _proven(item, file, target):
                self._fetch(item, file, target, count, stop)
            cache.mark_checked(target, proof)

    def _fetch(
        self, item: Item, file: RemoteFile, target: Path, count: Count, stop: threading.Event
    ) -> None:
        target.parent.mkdir(parents=True, exist_ok=True)
        own = cache.key_of(file.where, file.identity)[:8]
        part = target.with_name(f".{target.name}.{own}.part")
        log = part.with_suffix(".chunks")
        here = file.cached()
        if here is not None:
            log.unlink(missing_ok=True)
            shutil.copyfile(here, part)
        if here is None or _wrong(item, file, part) is not None:
            if item.check is None:  # nothing would prove what an earlier fetch left of it
                log.unlink(missing_ok=True)
            _download(file, part, log, self._buffers, count, stop)
            if (wrong := _wrong(item, file, part)) is not None:
                part.unlink(missing_ok=True)
                log.unlink(missing_ok=True)
                raise wrong
        try:
            part.replace(target)
        except FileNotFoundError:  # another process, kept apart by no lock, was as fast
            if not self.has(item):
                raise
        log.unlink(missing_ok=True)


def copy(file: RemoteFile, to: Path) -> None:
    """Write a remote file's bytes to a path of this process's own."""
    stop, log = threading.Event(), to.with_name(f".{to.name}.chunks")
    with writing(to):
        try:
            _download(file, to, log, _buffers(), lambda _: None, stop)
        finally:
            stop.set()
        log.unlink(missing_ok=True)


def _download(
    file: RemoteFile,
    part: Path,
    log: Path,
    buffers: SimpleQueue[mmap.mmap],
    count: Count,
    stop: threading.Event,
) -> None:
    """Write the chunks that are not in `log`, as many at once as there are `buffers` free.

    Each thread has files of its own: one that comes too late to be waited for writes nowhere else.
    """
    done = _chunks_in(part, log, file.size_bytes)
    if not done:  # what it may say is of a part that is gone
        log.unlink(missing_ok=True)
    with part.open("ab") as made:
        made.truncate(file.size_bytes)
    numbers = [n for n in range(-(-file.size_bytes // CHUNK_BYTES)) if n not in done]
    todo = numbers[::-1]

    def work() -> None:
        with part.open("r+b", buffering=0) as out, log.open("ab", buffering=0) as notes:
            while not stop.is_set():
                try:
                    number = todo.pop()
                except IndexError:
                    return
                start = number * CHUNK_BYTES
                size = min(CHUNK_BYTES, file.size_bytes - start)
                buffer = buffers.get()
                try:
                    with memoryview(buffer) as whole, whole[:size] as data:
                        file.read(start, data, stop)
                        _write(out, start, data)
                finally:
                    buffers.put(buffer)
                notes.write(b"%d\n" % number)
                count(size)

    finish([in_background(work) for _ in range(min(CONNECTIONS, len(todo)))])


def _write(out: FileIO, start: int, data: memoryview) -> None:
    out.seek(start)
    done = 0
    while done < len(data):
        done += out.write(data[done:])


def _buffers() -> SimpleQueue[mmap.mmap]:
    """Memory for chunks. A mapping takes none before it is used, and gives all of it back."""
    made: SimpleQueue[mmap.mmap] = SimpleQueue()
    for _ in range(CONNECTIONS):
        made.put(mmap.mmap(-1, CHUNK_BYTES))
    return made


def _chunks_in(part: Path, log: Path, size_bytes: int) -> set[int]:
    """The chunks that an earlier fetch wrote. A last line that was cut short is no number."""
    try:
        if part.stat().st_size != size_bytes:
            return set()
        lines = log.read_text().split("\n")[:-1]
    except (OSError, ValueError):
        return set()
    return {int(line) for line in lines if line.isdigit()}


def _wrong(item: Item, file: RemoteFile, path: Path) -> RemoteError | None:
    """Why what was fetched is not the file; None where nothing says so."""
    if item.check is not None:
        problems = item.check(path)
        return unlike(file, problems) if problems else None
    return unlike(file, None) if file.matches(path) is False else None


def _proven(item: Item, file: RemoteFile, path: Path) -> bool:
    """Whether a file that is there already is the wanted one."""
    if item.check is not None:
        return not item.check(path)
    return file.matches(path) is True


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """OutputError where the file cannot be written."""
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        fix = "free some space, or choose another place" if full else ""
        what = f"cannot write it: {error.strerror or error}"
        raise OutputError(Problem(str(path), what, fix)) from error
