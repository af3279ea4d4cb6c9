"""Where a load's shard set is: a path, or an address whose files are pulled first, or streamed."""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Self

from shardc.errors import ShardcError
from shardc.location import HubLocation, Location, locate
from shardc.shardset import ShardSet, open_shard_set

if TYPE_CHECKING:
    from shardc.loaders.group import Ranks, Tick
    from shardc.mirror import Mirror
    from shardc.remote import AnyFile

log = logging.getLogger("shardc.loaders")


class Opening:
    """The shard set that an argument of a loader names, for as long as it is being loaded.

    path: a folder, or an address of the Hub or of S3. revision, token: of the Hub. cache: fetch
    the ranks' files into a cache and load them from there; else they are read from where they
    are, and nothing stays behind. part: which component alone is to be loaded. `open` gives the
    set, after `fetch` or `fetch_together`.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        revision: str | None = None,
        token: str | None = None,
        cache: bool = True,
        part: Callable[[ShardSet], str] | None = None,
    ) -> None:
        self._path = locate(path, revision=revision)
        self._part = part
        self._token = token
        self._cache = cache
        self._mirror: Mirror | None = None
        self._collects = False  # again, once the load is over
        self.seconds = 0.0  # that the fetch took

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._collects:
            gc.enable()
        if self._mirror is not None:
            self._mirror.close()

    def fetch(self, ranks: Sequence[int] | None, tp: int | None) -> None:
        """Have these ranks' files (None: all) in a cache, where the set is elsewhere."""
        if not isinstance(self._path, Path):
            self._pull(self._path, ranks, tp, lambda _: None)

    def fetch_together(self, ranks: Ranks, ready: Callable[[], object]) -> None:
        """The same for each rank's own files. Collective: all ranks fail as soon as one does.

        ready: raises where this rank could not load them anyhow.
        """
        where = self._path
        if isinstance(where, Path):
            return
        error: Exception | None = None
        try:
            ready()
        except Exception as failure:
            error = failure
        ranks.agree(error)
        ranks.attend(
            lambda tick: self._pull(where, [ranks.rank], ranks.size, tick), [("source", str(where))]
        )

    def _pull(
        self, where: Location, ranks: Sequence[int] | None, tp: int | None, tick: Tick
    ) -> None:
        from shardc import hub
        from shardc.find import find_set
        from shardc.mirror import Mirror
        from shardc.pull import prepare

        started = time.perf_counter()
        if self._cache or (isinstance(where, HubLocation) and hub.is_offline()):
            found = prepare(
                where, ranks=ranks, tp=tp, token=self._token, count=tick, part=self._part
            )
            report = found.run(tick)
            self._path = Path(report.path)
            came = report.fetched_bytes
        else:
            self._mirror = Mirror(*find_set(where, tp=tp, token=self._token))
            self._path = self._mirror.path
            came = 0
        self.seconds = time.perf_counter() - started
        log.info("%s: %d bytes came in %.2f s", where, came, self.seconds)

    def open(self) -> ShardSet:
        """The set. Of one that is read from where it is, only the JSON files are whole.

        From here to the end of the load no objects are collected: a load makes many, few of them
        in circles, and to look at all those of a process that has imported diffusers takes 0.2 s.
        """
        assert isinstance(self._path, Path), "fetch comes first"
        if self._mirror is None:  # what clients of servers leave may hold buffers
            self._collects |= gc.isenabled()
            gc.disable()
        return open_shard_set(self._path)

    def at(self, path: Path) -> AnyFile:
        """What to read in the place of a weight file of the set."""
        return path if self._mirror is None else self._mirror.at(path)

    def whole(self, folder: Path) -> None:
        """Have all files below a folder of the set, weights too, where a library is to read them.

        They go where the set's small files are, and with them.
        """
        from shardc.fetch import copy
        from shardc.remote import RemoteFile

        if self._mirror is None:
            return
        self._mirror.fill()
        for path in sorted(folder.rglob("*.safetensors")):
            file = self.at(path)
            if isinstance(file, RemoteFile):
                copy(file, path)
            else:
                path.unlink()
                path.symlink_to(file)

    def fill(self) -> None:
        """Have the set's files that are no weights."""
        if self._mirror is not None:
            self._mirror.fill()

    @contextmanager
    def told(self) -> Iterator[None]:
        """Errors that are raised meanwhile name files by their own address."""
        try:
            yield
        except ShardcError as error:
            if self._mirror is None:
                raise
            renamed = map(self._mirror.renamed, error.problems)
            raise type(error)(renamed) from error
