"""A remote folder as a local one, for who reads names and JSON; its weights stay where they are.

Every file has its name here. What a plan reads is whole, weight files are empty and read by
`at`, and anything else is empty until `fill`.
"""

from __future__ import annotations

import re
import shutil
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from shardc.errors import Problem, RemoteError, ShardcError, printable
from shardc.location import HubLocation, Location
from shardc.remote import AnyFile, Remote, RemoteFile, Stopped, spread

READERS = 8  # files fetched at once, a piece of each
PIECE_BYTES = 4 << 20
MAX_SMALL_BYTES = 1_000_000_000  # of a file that is no weight file
# What a plan or an opened shard set is made of.
_PLANNED = re.compile(r"(config|model_index|shardc\.index|.*\.safetensors\.index(\..*)?)\.json")


def open_mirror(location: Location, *, token: str | None = None) -> Mirror:
    """A remote folder, or the folder of a remote .safetensors file, listed and mirrored.

    Raises RemoteError.
    """
    return Mirror(open_remote(location, token=token), location)


def open_remote(location: Location, *, token: str | None = None) -> Remote:
    """A remote folder's files, as they are listed now; RemoteError."""
    if isinstance(location, HubLocation):
        from shardc import hub

        return hub.open_repo(location, token)
    from shardc import s3

    return s3.open_bucket(location)


class Mirror:
    """The local folder that stands for a remote one, for as long as this object lives."""

    def __init__(self, remote: Remote, location: Location) -> None:
        self.remote = remote
        self.root = Path(tempfile.mkdtemp(prefix="shardc-")).resolve()
        self._remove = weakref.finalize(self, shutil.rmtree, self.root, ignore_errors=True)
        tail = location.folder if isinstance(location, HubLocation) else location.prefix
        one = tail.rpartition("/")[2] if tail.endswith(".safetensors") else ""
        self.where = remote.where.removesuffix(f"/{one}") if one else remote.where
        self.path = self.root / one
        self._files = {self.root / name: file for name, file in visible(remote)}
        if one and self.path not in self._files:
            raise RemoteError(Problem(remote.where, "there is no such file"))
        for path, file in self._files.items():
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.touch()
            except OSError as error:  # such as a name that is a file's and a folder's
                what = f"cannot be a file here: {error.strerror}"
                raise RemoteError(Problem(file.where, what)) from error
        self._empty = {p for p in self._files if p.suffix != ".safetensors"}
        self._fetch(path for path in self._empty if _PLANNED.fullmatch(path.name))

    def at(self, path: Path) -> AnyFile:
        """What to read in the place of a weight file of the mirror."""
        if path.suffix != ".safetensors":
            return path
        return self._files[path].cached() or self._files[path]

    def narrow(self, paths: Iterable[Path]) -> None:
        """Never fetch others than these: repos hold weights in other formats, too."""
        self._empty.intersection_update(paths)

    def fill(self, wanted: Callable[[Path], bool] = lambda _: True) -> None:
        """Fetch the files that are no weights and were not fetched yet; RemoteError."""
        self._fetch(path for path in self._empty if wanted(path))

    def identity(self, name: str) -> str:
        """What the file of this name is known by at its own place."""
        return self._files[self.root / name].identity

    @contextmanager
    def told(self) -> Iterator[None]:
        """Errors that are raised meanwhile with their problems `renamed`."""
        try:
            yield
        except ShardcError as error:
            raise type(error)([self.renamed(problem) for problem in error.problems]) from error

    def renamed(self, problem: Problem) -> Problem:
        """The problem with the remote address in the place of the mirror's path."""
        texts = (problem.where, problem.what, problem.fix)
        return Problem(*(text.replace(str(self.root), self.where) for text in texts))

    def close(self) -> None:
        """Remove the folder."""
        self._remove()

    def _fetch(self, paths: Iterable[Path]) -> None:
        stop = threading.Event()

        def bring(path: Path) -> None:
            _bring(self._files[path], path, stop)
            self._empty.discard(path)

        spread(bring, list(paths), READERS, stop)


def _bring(file: RemoteFile, path: Path, stop: threading.Event) -> None:
    """Fetch a file that is no weight file; one in the cache has to be the server's."""
    if file.size_bytes > MAX_SMALL_BYTES:
        what = f"has {file.size_bytes} bytes, the limit for a file beside weights is"
        raise RemoteError(Problem(file.where, f"{what} {MAX_SMALL_BYTES}"))
    found = file.cached()
    try:
        if found is not None and file.matches(found) is not False:
            shutil.copyfile(found, path)
            return
        with path.open("wb") as out:
            for start in range(0, file.size_bytes, PIECE_BYTES):
                piece = bytearray(min(PIECE_BYTES, file.size_bytes - start))
                file.read(start, memoryview(piece), stop)
                out.write(piece)
    except Stopped:
        return
    except OSError as error:
        what = f"cannot be written below {tempfile.gettempdir()}: {error.strerror}"
        raise RemoteError(Problem(file.where, what, "TMPDIR names another folder")) from error


def visible(remote: Remote) -> Iterator[tuple[str, RemoteFile]]:
    """The files that are not hidden; RemoteError for a name that would leave the folder."""
    names: Mapping[str, RemoteFile] = remote.files
    for name, file in names.items():
        parts = name.split("/")
        if any(part.startswith(".") and part.strip(".") for part in parts):
            continue
        if any(not part.strip(".") or "\\" in part or part != printable(part) for part in parts):
            raise RemoteError(Problem(remote.where, f"{name!r:.200} is no plain name for a file"))
        yield name, file
