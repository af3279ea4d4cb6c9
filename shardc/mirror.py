"""A remote folder as a local one, for who reads names and JSON; its weights stay where they are.

Every file has its name here. What a plan reads is whole, weight files are empty and read by
`at`, and anything else is empty until `fill`.
"""

from __future__ import annotations

import re
import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from shardc.errors import Problem, RemoteError, ShardcError, printable
from shardc.location import HubLocation, Location
from shardc.remote import AnyFile, Remote, RemoteFile

READERS = 8  # small files fetched at once
MAX_SMALL_BYTES = 1_000_000_000  # of a file that is no weight file
# What a plan or an opened shard set is made of.
_PLANNED = re.compile(r"(config|model_index|shardc\.index|.*\.safetensors\.index(\..*)?)\.json")


def open_mirror(location: Location, *, token: str | None = None) -> Mirror:
    """A remote folder, or the folder of a remote .safetensors file, listed and mirrored.

    Raises RemoteError.
    """
    remote: Remote
    if isinstance(location, HubLocation):
        from shardc import hub

        remote = hub.open_repo(location, token)
    else:
        from shardc import s3

        remote = s3.open_bucket(location)
    return Mirror(remote, location)


class Mirror:
    """The local folder that stands for a remote one, for as long as this object lives."""

    def __init__(self, remote: Remote, location: Location) -> None:
        self.remote = remote
        self.root = Path(tempfile.mkdtemp(prefix="shardc-")).resolve()
        weakref.finalize(self, shutil.rmtree, self.root, ignore_errors=True)
        tail = location.folder if isinstance(location, HubLocation) else location.prefix
        one = tail.rpartition("/")[2] if tail.endswith(".safetensors") else ""
        self.where = remote.where.removesuffix(f"/{one}") if one else remote.where
        self.path = self.root / one
        self._files = {self.root / name: file for name, file in _visible(remote)}
        if one and self.path not in self._files:
            raise RemoteError(Problem(remote.where, "there is no such file"))
        for path in self._files:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
        self._empty = {p for p in self._files if p.suffix != ".safetensors"}
        self._fetch(path for path in self._empty if _PLANNED.fullmatch(path.name))

    def at(self, path: Path) -> AnyFile:
        """What to read in the place of a weight file of the mirror."""
        if path.suffix != ".safetensors":
            return path
        return self._files[path].cached() or self._files[path]

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

    def _fetch(self, paths: Iterable[Path]) -> None:
        todo = list(paths)
        with ThreadPoolExecutor(READERS, "shardc-fetch") as pool:
            for path, data in zip(
                todo, pool.map(lambda p: _small(self._files[p]), todo), strict=True
            ):
                path.write_bytes(data)
                self._empty.discard(path)


def _small(file: RemoteFile) -> bytes:
    if file.size_bytes > MAX_SMALL_BYTES:
        what = f"has {file.size_bytes} bytes, the limit for a file beside weights is"
        raise RemoteError(Problem(file.where, f"{what} {MAX_SMALL_BYTES}"))
    found = file.cached()
    return file.whole() if found is None else found.read_bytes()


def _visible(remote: Remote) -> Iterator[tuple[str, RemoteFile]]:
    """The files that are not hidden; RemoteError for a name that would leave the folder."""
    names: Mapping[str, RemoteFile] = remote.files
    for name, file in names.items():
        parts = name.split("/")
        if any(part.startswith(".") and part.strip(".") for part in parts):
            continue
        if any(not part.strip(".") or "\\" in part or part != printable(part) for part in parts):
            raise RemoteError(Problem(remote.where, f"{name!r:.200} is no plain name for a file"))
        yield name, file
