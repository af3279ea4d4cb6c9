"""What a shard set carries beside its shards: components kept whole, and non-weight files."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from shardc.checkpoint import MODEL_INDEX, Checkpoint, listed_components
from shardc.errors import CheckpointError, Problem
from shardc.header import read_header
from shardc.reading import regular_file
from shardc.remote import AnyFile, size_of
from shardc.shardset import ShardSet

CHUNK_BYTES = 1024 * 1024


def kept_problems(shard_set: ShardSet) -> Iterator[Problem]:
    """Components kept whole that are empty, or have a broken weight file.

    One that has no folder at all may never have been there: only its source can tell.
    """
    if not (shard_set.path / MODEL_INDEX).is_file():
        return
    for name in listed_components(shard_set.path):
        folder = shard_set.path / name
        if name in shard_set.components:
            continue
        if folder.is_dir() and next(folder.iterdir(), None) is None:
            yield Problem(str(folder), "model_index.json lists it, but it is empty")
        for path in sorted(folder.glob("*.safetensors")):
            try:
                read_header(path)
            except CheckpointError as error:
                yield from error.problems


def carried_problems(
    shard_set: ShardSet, checkpoint: Checkpoint, count: Callable[[int], None]
) -> Iterator[Problem]:
    """Files that should be the source's byte for byte and are not; `count` is told bytes read."""
    for source, target in _carried(shard_set, checkpoint):
        if not target.is_file():
            yield Problem(str(target), f"is missing, the source has {source}")
        elif size_of(source) != target.stat().st_size:
            yield Problem(
                str(target),
                f"has {target.stat().st_size} bytes, the source's {size_of(source)}",
            )
        elif (at := _first_difference(source, target, count)) is not None:
            yield Problem(
                str(target), f"differs from {source} within the {CHUNK_BYTES} bytes at {at}"
            )


def _carried(shard_set: ShardSet, checkpoint: Checkpoint) -> Iterator[tuple[AnyFile, Path]]:
    for extra in checkpoint.extras:
        yield checkpoint.path / extra, shard_set.path / extra
    alone = len(checkpoint.components) == 1 == len(shard_set.components)
    for component in checkpoint.components:
        name = next(iter(shard_set.components)) if alone else component.name
        names = list(component.extras)
        if name not in shard_set.components:
            for file in component.files:
                yield file.path, shard_set.folder(name) / file.name
            names += [component.index] if component.index else []
        for extra in names:
            yield component.path / extra, shard_set.folder(name) / extra


def _first_difference(one: AnyFile, other: Path, count: Callable[[int], None]) -> int | None:
    with regular_file(one) as (a, _), other.open("rb") as b:
        at = 0
        while chunk := a.read(CHUNK_BYTES):
            if b.read(len(chunk)) != chunk:
                return at
            at += len(chunk)
            count(len(chunk))
    return None
