"""The Hub's own cache, filled by huggingface-hub: its locks, its Xet transfers, its layout.

What the library does not do is done here: a file's answer of 5xx is asked for again, what was
fetched is checked, and a set is known to be whole without a network.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from shardc import cache, hub
from shardc.errors import Problem, RemoteError
from shardc.fetch import Count, Item, Store, unlike, writing
from shardc.hub_branch import quiet_library
from shardc.location import HubLocation
from shardc.remote import Stopped, Transient, retried

if TYPE_CHECKING:
    from shardc.remote import RemoteFile

log = logging.getLogger("shardc.pull")

GONE = "try again once it does; HF_HUB_OFFLINE=1 uses what the cache has"


class HubCache(Store):
    """A folder of one commit's snapshot. `files`: None where the Hub may not be asked."""

    def __init__(
        self,
        location: HubLocation,
        commit: str,
        files: Mapping[str, RemoteFile] | None,
        token: str | None = None,
    ) -> None:
        from huggingface_hub import constants
        from huggingface_hub.file_download import repo_folder_name

        self._location, self._commit, self._token = location, commit, token
        self._files = files
        name = repo_folder_name(repo_id=location.repo, repo_type="model")
        self._repo = Path(constants.HF_HUB_CACHE, name)
        self._root = self._repo / "snapshots" / commit
        self.path = self._root / location.folder
        self._open = ExitStack()

    def __enter__(self) -> Self:
        self._open.enter_context(quiet_library())
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def has(self, item: Item) -> bool:
        path = self.path / item.name
        return path.is_file() and path.stat().st_size == item.size_bytes

    def get(self, item: Item, count: Count, stop: threading.Event) -> None:
        path = self.path / item.name
        if path.exists():
            problems = self._problems(item, path)
            if not problems:
                return
            if self._files is None:
                raise RemoteError(problems)
            log.warning("%s: it is fetched again", problems[0])
        if self._files is None:
            raise RemoteError(Problem(str(path), "is not in the Hub's cache"))
        file = self._files[item.name]
        fetched = 0

        def counted(size: int) -> None:
            nonlocal fetched
            if stop.is_set():
                raise Stopped
            fetched += size
            count(size)

        def attempt() -> None:
            if fetched:  # by one that failed, of which nothing is kept
                counted(-fetched)
            self._download(item, counted)

        with writing(path):
            retried(attempt, file.where, "fetching it")
        problems = self._problems(item, path)
        # what another process fetched, it checks
        if not problems and item.check is None and fetched and file.matches(path) is False:
            _remove(path)
            raise unlike(file, None)
        if problems:
            raise unlike(file, problems)

    def done(self) -> None:
        """Note that this commit is the revision's, for when the Hub cannot be asked.

        Only now: until all is there, an older commit may be whole. Source: the cache's layout,
        which huggingface-hub documents.
        """
        if self._files is None or self._location.revision == self._commit:
            return
        with suppress(OSError):  # of a cache that is read only
            note = self._repo / "refs" / self._location.revision
            if not note.is_file() or note.read_text() != self._commit:
                cache.write_whole(note, self._commit.encode())

    def _problems(self, item: Item, path: Path) -> list[Problem]:
        """What is wrong with a file that is there; while the Hub can be asked, it is removed."""
        if item.check is None and path.stat().st_size == item.size_bytes:
            return []
        with cache.locked("check", path):  # what ranks share is read once, and removed by one
            if not path.exists():
                return [Problem(str(path), "was removed by another process")]
            problems = self._wrong(item, path)
            if problems and self._files is not None:
                _remove(path)
            return problems

    def _wrong(self, item: Item, path: Path) -> list[Problem]:
        if (size := path.stat().st_size) != item.size_bytes:
            return [Problem(str(path), f"has {size} bytes, {item.size_bytes} are stated")]
        if item.check is None or cache.is_checked(path, item.digest):
            return []
        problems = item.check(path)
        if not problems:
            cache.mark_checked(path, item.digest)
        return problems

    def _download(self, item: Item, count: Count) -> None:
        from huggingface_hub import constants, hf_hub_download
        from huggingface_hub.errors import LocalEntryNotFoundError

        folder = self._location.folder
        ended: list[BaseException] = []

        def told(size: int) -> None:
            try:
                count(size)
            except BaseException as error:
                ended.append(error)
                raise

        try:
            with hub.translated(self._location):
                try:
                    hf_hub_download(
                        self._location.repo,
                        f"{folder}/{item.name}" if folder else item.name,
                        revision=self._commit,
                        endpoint=constants.ENDPOINT,
                        token=self._token,
                        library_name="shardc",
                        tqdm_class=_bar(told),
                    )
                except LocalEntryNotFoundError as error:  # it has asked several times
                    what = f"the Hub does not answer: {error.__cause__ or error}"
                    raise RemoteError(Problem(str(self._location), what, GONE)) from error
        except Exception as error:
            if ended:  # by what counts, whatever became of it on the way
                raise ended[0] from None
            if not isinstance(error, OSError) or error.errno is not None:  # of a file of ours
                raise
            raise Transient(str(error)) from error  # fewer bytes came than were announced


def _bar(count: Count) -> Any:
    """What huggingface-hub takes for a progress bar: it tells bytes."""

    class Bar:
        n = 0
        total = 0

        def __init__(self, *_: Any, **__: Any) -> None:
            """However the library would have it look."""

        def __enter__(self) -> Self:
            return self

        def __exit__(self, *_: object) -> None:
            """Nothing is shown."""

        def update(self, size: float | None = 1) -> None:
            count(int(size or 0))

        def update_transfer(self, _: float | None = 1) -> None:
            """Of Xet, bytes on the wire: the file's are counted."""

        def __getattr__(self, name: str) -> Any:
            return lambda *_, **__: None

    return Bar


def _remove(path: Path) -> None:
    """A file of the cache and what it is a link to."""
    blob = path.resolve()
    path.unlink(missing_ok=True)
    blob.unlink(missing_ok=True)
