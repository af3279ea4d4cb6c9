"""What some ranks need of a shard set, by its indexes and the names and sizes of its files."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from shardc.errors import Problem, ShardSetError
from shardc.fetch import Item
from shardc.index import Index
from shardc.reading import read_json
from shardc.shardset import ShardSet, data_problems

_WEIGHT_INDEX = re.compile(r".*\.safetensors\.index(\.[^./]+)?\.json")


def is_weights(name: str) -> bool:
    """Whether a file holds weights: all others are small, and every rank needs them."""
    return name.endswith(".safetensors")


@dataclass(frozen=True, slots=True)
class Listing:
    """The files of a set, where it is to be had from.

    where: its address. sizes: of the files that are there, by name. absent: names of files that
    are the set's and are known not to be there. lacks, fix: how to say of a file that it is not.
    """

    where: str
    sizes: Mapping[str, int]
    absent: Collection[str] = ()
    lacks: str = "is missing"
    fix: str = "push the set again"

    def problem(self, name: str, what: str) -> Problem:
        return Problem(f"{self.where}/{name}", what, self.fix)


def wanted_ranks(
    shards: ShardSet, ranks: Collection[int] | None, tp: int | None, where: str
) -> tuple[int, ...]:
    """The ranks, all where none are named; ShardSetError where the set has none such."""
    problems = []
    for name, index in shards.components.items():
        at = f"{where}/{name}" if name else where
        if tp is not None and tp != index.tp:
            what = f"is cut for tp {index.tp}, {tp} was asked for"
            fix = f"run {index.tp} ranks, or `shardc reshard --tp {tp}`"
            problems.append(Problem(at, what, fix))
            continue
        problems += [
            Problem(at, f"rank {rank} is outside tp {index.tp}")
            for rank in ranks or ()
            if not 0 <= rank < index.tp
        ]
    if problems:
        raise ShardSetError(problems)
    degree = max(index.tp for index in shards.components.values())
    return tuple(range(degree) if ranks is None else sorted(set(ranks)))


def needed_weights(
    shards: ShardSet, ranks: Collection[int], listing: Listing, component: str | None = None
) -> tuple[Item, ...]:
    """The weight files that these ranks need: their shards, and what all ranks take.

    component: of this one alone. ShardSetError names each file, of these and of the small ones,
    that is not there or has another size.
    """
    items: list[Item] = []
    problems: list[Problem] = []
    for folder, index in shards.components.items():
        if component is not None and folder != component:
            continue
        start = f"{folder}/" if folder else ""
        for own, entry in index.files.items():
            if entry.rank is not None and entry.rank not in ranks:
                continue
            name = start + own
            check = partial(_data_problems, index, own)
            items.append(Item(name, entry.size, entry.rank, entry.digest, check))
            has = listing.sizes.get(name)
            if has is None:
                who = "every rank" if entry.rank is None else f"rank {entry.rank}"
                problems.append(listing.problem(name, f"{listing.lacks}, and {who} needs it"))
            elif has != entry.size:
                what = f"has {has} bytes, the index says {entry.size}"
                problems.append(listing.problem(name, what))
    kept = {n: s for n, s in listing.sizes.items() if _folder(n) not in shards.components}
    absent = [n for n in listing.absent if not is_weights(n) or _folder(n) not in shards.components]
    if component is not None:
        kept, absent = {}, [name for name in absent if not is_weights(name)]
    items += [Item(name, size) for name, size in kept.items() if is_weights(name)]
    listed: dict[str, str] = {
        part: name
        for name in kept
        if _WEIGHT_INDEX.fullmatch(name)
        for part in _parts_of(shards.path, name)
    }
    problems += [
        listing.problem(part, f"{listing.lacks}, and {name} lists it")
        for part, name in listed.items()
        if part not in listing.sizes and part not in listing.absent
    ]
    problems += [
        listing.problem(name, f"{listing.lacks}, and every rank needs it") for name in absent
    ]
    if problems:
        raise ShardSetError(problems)
    return tuple(items)


def _folder(name: str) -> str:
    return name.rpartition("/")[0]


def _data_problems(index: Index, name: str, path: Path) -> list[Problem]:
    return data_problems(path, index, name)


def _parts_of(path: Path, name: str) -> list[str]:
    """The files, by their names below the set's folder, that an index of weights lists."""
    document = read_json(path / name)
    listed = document.get("weight_map") if isinstance(document, dict) else None
    own = sorted({str(part) for part in listed.values()}) if isinstance(listed, dict) else []
    return [f"{_folder(name)}/{part}".lstrip("/") for part in own]
