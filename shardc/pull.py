"""A shard set fetched: its small files, and the weights of the ranks that are wanted.

prepare   finds the set, fetches what is small, and knows all that is needed and that it exists
Pull.run  fetches the weights
"""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shardc import cache
from shardc.errors import OutputError, Problem, RemoteError, ShardSetError
from shardc.fetch import Count, Folder, Item, Store
from shardc.find import choose_folder, degrees_in, find_set, inside
from shardc.hub import cached_snapshot, is_offline
from shardc.location import HubLocation, Location, LocationError, locate
from shardc.mirror import visible
from shardc.needs import Listing, is_weights, needed_weights, wanted_ranks
from shardc.remote import finish, in_background
from shardc.shardset import ShardSet, open_shard_set

FILES_AT_ONCE = 8
IN_CACHE = "pull it once while online"


@dataclass(frozen=True, slots=True)
class PullReport:
    """What a pull did. `path`: the set's folder here, ready to be loaded.

    fetched_bytes came over the network, present_bytes of the needed files were here already, or
    were fetched by another process meanwhile.
    """

    source: str
    path: str
    tp: int
    ranks: tuple[int, ...]
    files: int
    fetched_bytes: int
    present_bytes: int
    seconds: float

    def to_json(self) -> dict[str, Any]:
        return {
            "source": self.source,
            "path": self.path,
            "tp": self.tp,
            "ranks": list(self.ranks),
            "files": self.files,
            "fetched_bytes": self.fetched_bytes,
            "present_bytes": self.present_bytes,
            "seconds": round(self.seconds, 3),
        }


def pull(
    where: str,
    *,
    ranks: Iterable[int] | None = None,
    tp: int | None = None,
    out: str | Path | None = None,
    revision: str | None = None,
    token: str | None = None,
    progress: Count | None = None,
) -> PullReport:
    """Fetch a shard set, or some ranks' part of it, from the Hub or from S3.

    where: org/name[/folder], hf://org/name[@revision][/folder] or s3://bucket/prefix: a set, or
    what holds sets in folders tpN. ranks: whose files to fetch (default: all ranks'); what all
    ranks need comes with them. tp: which degree, where there are several. out: a folder to fetch
    into; default is the Hub's cache, or for S3 shardc's own. progress: told bytes as they come;
    what it raises ends the pull. Files that are there already are not fetched again. Raises
    LocationError, RemoteError, ShardSetError, OutputError.
    """
    location = locate(where, revision=revision)
    if isinstance(location, Path):
        what = "is no address of the Hub or of S3"
        raise LocationError(Problem(where, what, "what is here already need not be pulled"))
    return prepare(location, ranks=ranks, tp=tp, out=out, token=token, count=progress).run(progress)


def prepare(
    location: Location,
    *,
    ranks: Iterable[int] | None = None,
    tp: int | None = None,
    out: str | Path | None = None,
    token: str | None = None,
    count: Count | None = None,
    part: Callable[[ShardSet], str] | None = None,
) -> Pull:
    """Find the set, fetch its small files, and see that every file that is needed exists.

    As `pull`. count: told bytes of the small files. part: which component's weights alone.
    """
    started = time.monotonic()
    bytes_in = _Bytes(count)
    if isinstance(location, HubLocation) and is_offline():
        source, store, listing = _cached(location, tp, out)
    else:
        source, store, listing = _remote(location, tp, out, token)
    small = [Item(name, size) for name, size in listing.sizes.items() if not is_weights(name)]
    with store:
        _get_all(store, small, bytes_in)
    shards = open_shard_set(store.path)
    wanted = wanted_ranks(shards, None if ranks is None else tuple(ranks), tp, listing.where)
    component = None if part is None else part(shards)
    weights = needed_weights(shards, wanted, listing, component)
    degree = max(index.tp for index in shards.components.values())
    return Pull(source, store, degree, wanted, tuple(small), weights, bytes_in, started)


def _remote(
    location: Location, tp: int | None, out: str | Path | None, token: str | None
) -> tuple[str, Store, Listing]:
    """(what is pulled, where to, its files) of a set on a server."""
    remote, place = find_set(location, tp=tp, token=token)
    files = dict(visible(remote))
    degrees = {f"tp{degree}" for degree in degrees_in(files)}  # beside a set: others
    files = {n: file for n, file in files.items() if n.partition("/")[0] not in degrees}
    sizes = {name: file.size_bytes for name, file in files.items()}
    listing = Listing(str(place), sizes)
    store: Store
    if isinstance(place, HubLocation):
        from shardc.hub_cache import HubCache

        assert remote.commit is not None
        source = str(replace(place, revision=remote.commit))
        cache.save_listing(sizes, place.repo, remote.commit, place.folder)
        store = HubCache(place, remote.commit, files, token)
    else:
        source = str(place)
        # all but shards, which the indexes know: with any of it another, so is the folder
        known = [f"{n} {f.identity}" for n, f in sorted(files.items()) if not _is_shard(n)]
        store = Folder(cache.s3_folder(place.bucket, place.prefix, *known), files)
    if out is not None:
        _check_out(Path(out), files)
        store = Folder(Path(out), files)
    return source, store, listing


def _is_shard(name: str) -> bool:
    return name.rpartition("/")[2].startswith("rank-")


def _check_out(path: Path, names: Collection[str]) -> None:
    """OutputError where the folder holds what is not of the set, and would be taken for it."""
    if path.is_file():
        raise OutputError(Problem(str(path), "is a file, not a folder"))
    there = (p.relative_to(path) for p in sorted(path.rglob("*")) if p.is_file())
    seen = (p for p in there if not any(part.startswith(".") for part in p.parts))
    alien = [p for p in seen if p.as_posix() not in names]
    if alien:
        what = f"holds files that are not of the set, such as {alien[0]}"
        raise OutputError(Problem(str(path), what, "choose another -o, or empty it"))


def _cached(
    location: HubLocation, tp: int | None, out: str | Path | None
) -> tuple[str, Store, Listing]:
    """The same of a set in the Hub's cache, asking nobody."""
    from shardc.hub_cache import HubCache

    if out is not None:
        what = "offline, nothing can be fetched into a folder"
        raise RemoteError(Problem(str(location), what, "unset HF_HUB_OFFLINE"))
    whole = cached_snapshot(replace(location, folder=""))
    top = whole / location.folder
    present = {p.relative_to(top).as_posix(): p for p in top.rglob("*") if p.is_file()}
    try:
        folder = choose_folder(present, tp, str(location))
    except ShardSetError as error:
        raise ShardSetError(
            replace(p, what=f"of what the cache has, it {p.what}", fix=IN_CACHE)
            for p in error.problems
        ) from error
    place = inside(location, folder)
    start = f"{folder}/" if folder else ""
    sizes = {
        name.removeprefix(start): path.stat().st_size
        for name, path in present.items()
        if name.startswith(start)
    }
    # None where it was not shardc that fetched it: then what is there is all that is known
    listed = cache.read_listing(place.repo, whole.name, place.folder) or {}
    absent = [name for name in listed if name not in sizes]
    listing = Listing(str(place), sizes, absent, "is not in the cache", IN_CACHE)
    source = str(replace(place, revision=whole.name))
    return source, HubCache(place, whole.name, None), listing


class Pull:
    """A set that was found: what it needs is known to exist, its weights may still be elsewhere."""

    def __init__(
        self,
        source: str,
        store: Store,
        tp: int,
        ranks: tuple[int, ...],
        small: tuple[Item, ...],
        items: tuple[Item, ...],
        bytes_in: _Bytes,
        started: float,
    ) -> None:
        self.source, self.path, self.tp, self.ranks = source, store.path, tp, ranks
        self._store, self._small, self._items = store, small, items
        self._bytes, self._started = bytes_in, started
        missing = [item for item in items if not store.has(item)]
        self.missing_bytes = sum(item.size_bytes for item in missing)

    def run(self, count: Count | None = None) -> PullReport:
        """Fetch what is missing. `count` is told bytes. RemoteError, ShardSetError, OutputError."""
        self._bytes.tell(count)
        self._check_room()
        with self._store:
            _get_all(self._store, self._items, self._bytes)
        self._store.done()
        whole = sum(item.size_bytes for item in (*self._small, *self._items))
        return PullReport(
            source=self.source,
            path=str(self.path),
            tp=self.tp,
            ranks=self.ranks,
            files=len(self._small) + len(self._items),
            fetched_bytes=self._bytes.total,
            present_bytes=max(0, whole - self._bytes.total),
            seconds=time.monotonic() - self._started,
        )

    def _check_room(self) -> None:
        free_bytes = shutil.disk_usage(self.path).free
        if self.missing_bytes > free_bytes:
            what = f"{self.missing_bytes} bytes are to come, {free_bytes} are free"
            fix = "free some space, or choose another place"
            raise OutputError(Problem(str(self.path), what, fix))


class _Bytes:
    """Counts what comes in, for all threads."""

    def __init__(self, count: Count | None) -> None:
        self.total = 0
        self._lock = threading.Lock()
        self.tell(count)

    def tell(self, count: Count | None) -> None:
        self._count: Callable[[int], None] = count or (lambda _: None)

    def __call__(self, size: int) -> None:
        with self._lock:
            self.total += size
        self._count(size)


def _get_all(store: Store, items: Iterable[Item], count: Count) -> None:
    """All of these, several at once, the largest first; the first that fails ends it all."""
    todo = sorted(items, key=lambda item: item.size_bytes)
    stop = threading.Event()

    def work() -> None:
        while not stop.is_set():
            try:
                item = todo.pop()
            except IndexError:
                return
            store.get(item, count, stop)

    try:
        finish([in_background(work) for _ in range(min(FILES_AT_ONCE, len(todo)))])
    finally:
        stop.set()
