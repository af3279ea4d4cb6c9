"""What a push sends: the files of a set that verified, each held to what it was when it did."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from shardc.checkpoint import INDEX_NAME, MODEL_INDEX
from shardc.errors import Problem, RemoteError, ShardSetError, VerifyError
from shardc.fileio import Snapshot
from shardc.folders import files_below
from shardc.index import Index
from shardc.reading import regular_file
from shardc.shardset import ShardSet, open_shard_set
from shardc.verifier import verify

Progress = Callable[[int], None]
CHUNK_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class ShippedFile:
    """A file of the set. `name` is relative to the set's folder; `stated`: a shard's digest."""

    name: str
    path: Path
    size_bytes: int
    stated: str | None

    def digest(self) -> str:
        """The index's digest of a shard; of any other file XXH3-128 over its bytes."""
        if self.stated is not None:
            return self.stated
        state = xxhash.xxh3_128()
        with regular_file(self.path) as (file, _):
            while chunk := file.read(CHUNK_BYTES):
                state.update(chunk)
        return state.hexdigest()


@dataclass(frozen=True, slots=True)
class Part:
    """What a rank takes of one component, in bytes: its own shard, and what all ranks take.

    kind: "sharded", "kept" (whole weights, the same for all ranks) or "files" (all else).
    """

    name: str
    kind: str
    own_bytes: tuple[int, ...]
    shared_bytes: int


@dataclass(frozen=True, slots=True)
class Shipment:
    """A verified set, ready to be sent."""

    shards: ShardSet
    tp: int
    files: tuple[ShippedFile, ...]
    parts: tuple[Part, ...]
    snapshot: Snapshot

    @property
    def path(self) -> Path:
        return self.shards.path

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)

    @property
    def rank_bytes(self) -> list[int]:
        """What each rank downloads: its shards, what is replicated, and all that is no shard."""
        shared = sum(part.shared_bytes for part in self.parts)
        own = [part.own_bytes for part in self.parts if part.own_bytes]
        return [shared + sum(ranks) for ranks in zip(*own, strict=True)]

    def check(self) -> None:
        """VerifyError naming each file that is another than the one that was verified."""
        if changes := self.snapshot.changes():
            raise VerifyError(
                Problem(
                    change.where,
                    change.what.replace("during the build", "since it was verified"),
                    "nothing of it was published; push again once nothing writes to it",
                )
                for change in changes
            )


@dataclass(frozen=True, slots=True)
class PushReport:
    """What a push did, or with `dry_run` would do. Bytes are those of files, as they lie here.

    sent: files that were not there, or were others. card: what became of README.md: "written",
    "updated", "unchanged", "kept" (not made by shardc), or None where there is none.
    """

    target: str
    tp: int
    rank_bytes: list[int]
    parts: tuple[Part, ...]
    sent: list[ShippedFile]
    unchanged: list[ShippedFile]
    deleted: list[str]
    created: bool = False
    card: str | None = None
    license: str | None = None
    base_model: str | None = None
    commit: str | None = None
    url: str | None = None
    dry_run: bool = False
    seconds: float = 0.0
    up_to_date: bool = field(init=False)

    def __post_init__(self) -> None:
        nothing = not self.sent and not self.deleted and self.card not in ("written", "updated")
        object.__setattr__(self, "up_to_date", nothing)

    def to_json(self) -> dict[str, Any]:
        return {
            "target": self.target,
            "tp": self.tp,
            "dry_run": self.dry_run,
            "up_to_date": self.up_to_date,
            "created": self.created,
            "commit": self.commit,
            "url": self.url,
            "card": self.card,
            "license": self.license,
            "base_model": self.base_model,
            "rank_bytes": self.rank_bytes,
            "parts": [
                {
                    "name": part.name,
                    "kind": part.kind,
                    "own_bytes": list(part.own_bytes),
                    "shared_bytes": part.shared_bytes,
                }
                for part in self.parts
            ],
            "sent_files": [file.name for file in self.sent],
            "sent_bytes": sum(file.size_bytes for file in self.sent),
            "unchanged_files": len(self.unchanged),
            "unchanged_bytes": sum(file.size_bytes for file in self.unchanged),
            "deleted_files": self.deleted,
            "seconds": round(self.seconds, 3),
        }


def open_shipment(path: Path, progress: Progress | None = None) -> Shipment:
    """Verify a set and take stock of its files; `progress` is told bytes verified.

    Raises ShardSetError where it is none or is not whole, VerifyError where it is not sound.
    """
    shards = open_shard_set(path)
    degrees = {index.tp for index in shards.components.values()}
    if len(degrees) > 1:
        what = f"its components are cut for {' and '.join(map(str, sorted(degrees)))} ranks"
        raise ShardSetError(Problem(str(path), what, "push sets of one degree each"))
    names, problems = files_below(path, path)
    if problems:
        raise ShardSetError(problems)
    snapshot = Snapshot({name: path / name for name in names})
    sizes = {name: (path / name).stat().st_size for name in names}
    if problems := list(verify(path, progress=progress).problems):
        raise VerifyError([*problems, Problem(str(path), "is not pushed: it is not sound")])
    stated = {
        f"{component}/{name}" if component else name: entry.digest
        for component, index in shards.components.items()
        for name, entry in index.files.items()
    }
    files = tuple(
        ShippedFile(name, path / name, size, stated.get(name)) for name, size in sizes.items()
    )
    return Shipment(shards, degrees.pop(), files, _parts(shards, files), snapshot)


def _parts(shards: ShardSet, files: tuple[ShippedFile, ...]) -> tuple[Part, ...]:
    sharded = [_sharded(name, index) for name, index in shards.components.items()]
    kept: dict[str, int] = {}
    others = 0
    for file in files:
        if file.stated is not None:
            continue
        folder = file.name.rpartition("/")[0]
        if file.name.endswith(".safetensors"):
            kept[folder] = kept.get(folder, 0) + file.size_bytes
        else:
            others += file.size_bytes
    return (
        *sharded,
        *(Part(name, "kept", (), size) for name, size in kept.items()),
        Part("", "files", (), others),
    )


def _sharded(name: str, index: Index) -> Part:
    own = [0] * index.tp
    shared = 0
    for entry in index.files.values():
        if entry.rank is None:
            shared += entry.size
        else:
            own[entry.rank] += entry.size
    return Part(name, "sharded", tuple(own), shared)


def is_set(names: Collection[str]) -> bool:
    """Whether a folder with these files is a shard set, as a reader of it would decide."""
    if INDEX_NAME in names:
        return True
    return MODEL_INDEX in names and any(_is_component_index(name) for name in names)


def _is_component_index(name: str) -> bool:
    return name.count("/") == 1 and name.endswith(f"/{INDEX_NAME}")


def stale_files(
    there: Collection[str], mine: Collection[str], where: str, *, interrupted: bool = False
) -> list[str]:
    """The files of an earlier set that the new one does not have, and that have to go.

    there: what lies in the folder that the set goes to; `interrupted`: a push left it, so that it
    need not look like a set. Raises RemoteError where anything else would be lost or mixed in.
    """
    if not there:
        return []
    if not interrupted and not is_set(there):
        what = f"holds {len(there)} files that are no shard set, such as {min(there)!r}"
        raise RemoteError(Problem(where, what, "push to another folder, or empty this one"))
    pipeline = MODEL_INDEX in there or any(_is_component_index(name) for name in mine)
    nested = [
        name
        for name in there
        if name.endswith(f"/{INDEX_NAME}") and not (pipeline and _is_component_index(name))
    ]
    if nested:
        what = f"has another shard set in it, at {min(nested).rpartition('/')[0]!r}"
        raise RemoteError(Problem(where, what, "push to a folder of its own"))
    return sorted(set(there) - set(mine))
