"""An independent re-check of a shard set: by its index, and bit for bit by its source.

Shares nothing with the planner.
"""

from __future__ import annotations

import time
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from shardc.checkpoint import CONFIG, Checkpoint, Component
from shardc.compare import (
    CASTABLE,
    CHUNK_BYTES,
    PADDING,
    Progress,
    Rows,
    StoredRows,
    brief,
    copies_difference,
    expected_rows,
    first_difference,
    global_rows,
    read_bytes,
    whole_digest,
)
from shardc.errors import CheckpointError, Problem, VerifyError
from shardc.header import Header, TensorInfo
from shardc.index import Index, ShardEntry, TensorEntry, file_digest, local_shape
from shardc.kept import carried_problems, kept_problems
from shardc.reading import MAX_JSON_BYTES, read_whole
from shardc.shardset import ShardSet, open_shard_set, read_shard_headers

VOID = (ValueError, ZeroDivisionError, IndexError)  # what a placement that cannot be raises


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """What was checked and what was found; `problems` is empty where the set is right."""

    path: str
    source: str | None
    tensors: int
    files: int
    checked_bytes: int
    seconds: float
    problems: tuple[Problem, ...] = field(default=())

    @property
    def ok(self) -> bool:
        return not self.problems

    def to_json(self) -> dict[str, Any]:
        return {
            "path": self.path,
            "source": self.source,
            "ok": self.ok,
            "tensors": self.tensors,
            "files": self.files,
            "checked_bytes": self.checked_bytes,
            "seconds": round(self.seconds, 3),
            "problems": [str(problem) for problem in self.problems],
        }


def verify(
    path: Path,
    *,
    source: Checkpoint | None = None,
    rank: int | None = None,
    progress: Progress | None = None,
) -> VerifyReport:
    """Re-read a shard set and compare it with its index and, where given, with its source.

    rank: only that rank's files and the replicated ones. Raises ShardSetError where it cannot be
    opened; what is wrong inside is reported, all of it.
    """
    started = time.monotonic()
    shard_set = open_shard_set(path)
    with source.told() if source is not None else nullcontext():
        return _verify(path, shard_set, source, rank, progress, started)


def _verify(
    path: Path,
    shard_set: ShardSet,
    checkpoint: Checkpoint | None,
    rank: int | None,
    progress: Progress | None,
    started: float,
) -> VerifyReport:
    if checkpoint is not None and checkpoint.mirror is not None:
        checkpoint.mirror.fill()
    check = _Check(shard_set, rank, progress or (lambda _: None))
    if checkpoint is not None:
        check.identify(checkpoint)
    for name, index in shard_set.components.items():
        if rank is not None and not 0 <= rank < index.tp:
            raise VerifyError(f"rank {rank} is outside tp {index.tp}")
        opened = check.files(name, index)
        check.ranges(name, index)
        check.digests(name, index, opened)
        check.copies(name, index, opened)
        check.source(name, index, opened)
    check.problems += kept_problems(shard_set)
    if checkpoint is not None:
        check.problems += carried_problems(shard_set, checkpoint, check.count)
    mirror = None if checkpoint is None else checkpoint.mirror
    if mirror is not None:
        check.problems = [mirror.renamed(problem) for problem in check.problems]
    return VerifyReport(
        path=str(path),
        source=None if checkpoint is None else checkpoint.where,
        tensors=sum(len(index.tensors) for index in shard_set.components.values()),
        files=check.file_count,
        checked_bytes=check.checked_bytes,
        seconds=time.monotonic() - started,
        problems=tuple(check.problems),
    )


def copy_problems(shard_set: ShardSet) -> list[Problem]:
    """What stands against taking one copy of each row: files amiss, or copies that differ."""
    check = _Check(shard_set, None, lambda _: None)
    for name, index in shard_set.components.items():
        check.copies(name, index, check.files(name, index))
    return check.problems


class _Check:
    def __init__(self, shard_set: ShardSet, rank: int | None, progress: Progress) -> None:
        self._set = shard_set
        self._rank = rank
        self._progress = progress
        self.problems: list[Problem] = []
        self.file_count = 0
        self.checked_bytes = 0
        self._sources: dict[str, Component] = {}
        self._suspected: set[str] = set()
        self._infos: dict[Path, dict[str, TensorInfo]] = {}

    def _say(self, where: Path | str, what: str) -> None:
        self.problems.append(Problem(str(where), what))

    def _wanted(self, rank: int | None) -> bool:
        return self._rank is None or rank is None or rank == self._rank

    def files(self, name: str, index: Index) -> dict[str, Header]:
        """Names, sizes, headers, config and manifest against the index."""
        folder = self._set.folder(name)
        present = {entry.name for entry in folder.iterdir()}
        for stray in sorted(present - set(index.files)):
            if stray.endswith((".safetensors", ".safetensors.index.json")):
                self._say(folder / stray, "does not belong to the shard set")
        wanted = [n for n, entry in index.files.items() if self._wanted(entry.rank)]
        self.file_count += len(wanted)
        opened, problems = read_shard_headers(folder, index, wanted)
        self.problems += problems
        self._headers(folder, index, opened)
        self._config(folder, index)
        if xxhash.xxh3_128_hexdigest(index.manifest.text.encode()) != index.manifest.digest:
            self._say(folder, "the index's manifest does not have the digest it states")
        return opened

    def _config(self, folder: Path, index: Index) -> None:
        try:
            raw = read_whole(folder / CONFIG, MAX_JSON_BYTES)
        except CheckpointError as error:
            if (folder / CONFIG).exists():
                self.problems += error.problems
            else:
                self._say(folder / CONFIG, "is missing")
            return
        if xxhash.xxh3_128_hexdigest(raw) != index.source.config:
            self._say(folder / CONFIG, "is not the one that the set was built with")

    def _headers(self, folder: Path, index: Index, opened: dict[str, Header]) -> None:
        expected: dict[str, dict[str, tuple[str, tuple[int, ...]]]] = {f: {} for f in opened}
        for tensor_name, tensor in index.tensors.items():
            for shard in tensor.shards:
                if shard.file in expected:
                    shape = tuple(local_shape(tensor, shard))
                    expected[shard.file][tensor_name] = (tensor.dtype, shape)
        for file_name, header in opened.items():
            held = {t.name: (t.dtype, t.shape) for t in header.tensors}
            for tensor_name in sorted(held.keys() | expected[file_name].keys()):
                has, wants = held.get(tensor_name), expected[file_name].get(tensor_name)
                if has != wants:
                    self._say(
                        folder / file_name,
                        f"tensor {tensor_name!r}: the header has {has}, the index {wants}",
                    )

    def ranges(self, name: str, index: Index) -> None:
        """The recorded ranges against the placement's definition, and that no row is lost."""
        folder = self._set.folder(name)
        for tensor_name, tensor in index.tensors.items():
            dim = tensor.placement.dim
            if dim is None or 0 in tensor.shape:  # what has no element may have any number of rows
                continue
            size = tensor.shape[dim]
            seen = np.zeros(size, bool)
            for rank, shard in enumerate(tensor.shards):
                rows = global_rows(shard.ranges or ())
                seen[rows[rows != PADDING]] = True
                try:
                    wanted = expected_rows(tensor.placement, size, index.tp, rank)
                except VOID as error:
                    self._say(folder, f"tensor {tensor_name!r}: its placement is void: {error}")
                    break
                if not np.array_equal(rows, wanted):
                    self._say(
                        folder,
                        f"tensor {tensor_name!r}: rank {rank} holds {brief(rows)}, "
                        f"its placement means {brief(wanted)}",
                    )
            if not seen.all():
                lost = np.flatnonzero(~seen)
                self._say(folder, f"tensor {tensor_name!r}: {brief(lost)} are on no rank")

    def digests(self, name: str, index: Index, opened: dict[str, Header]) -> None:
        """Every stored byte against its tensor's and its file's digest."""
        folder = self._set.folder(name)
        stated = {
            (shard.file, tensor_name): shard.digest
            for tensor_name, tensor in index.tensors.items()
            for shard in tensor.shards
        }
        for file_name, header in opened.items():
            path = folder / file_name
            found = []
            for tensor in header.tensors:
                state = xxhash.xxh3_128()
                for at in range(0, tensor.size_bytes, CHUNK_BYTES):
                    size = min(CHUNK_BYTES, tensor.size_bytes - at)
                    state.update(read_bytes(path, header.data_start + tensor.start + at, size).data)
                    self.count(size)
                found.append(state.hexdigest())
                if found[-1] != stated.get((file_name, tensor.name)):
                    self._say(
                        path,
                        f"tensor {tensor.name!r}: digest {found[-1]}, "
                        f"the index says {stated.get((file_name, tensor.name))}",
                    )
            head = read_bytes(path, 0, header.data_start).tobytes()
            if file_digest(head, found) != index.files[file_name].digest:
                self._say(path, "does not have the digest that the index states")

    def copies(self, name: str, index: Index, opened: dict[str, Header]) -> None:
        """Rows that several ranks hold (repeated KV heads) must be the same bytes in each."""
        folder = self._set.folder(name)
        for tensor_name, tensor in index.tensors.items():
            dim = tensor.placement.dim
            repeats = any(block.repeat for block in tensor.placement.blocks)
            if dim is None or not repeats or 0 in tensor.shape:
                continue
            parts = []
            for shard in tensor.shards:
                stored = self._stored(folder, opened, tensor_name, tensor, shard)
                if stored is not None:
                    parts.append((stored, global_rows(shard.ranges or ())))
            reason = copies_difference(parts)
            if reason is not None:
                self._say(folder, f"tensor {tensor_name!r}: {reason}")

    def _stored(
        self,
        folder: Path,
        opened: dict[str, Header],
        name: str,
        tensor: TensorEntry,
        shard: ShardEntry,
    ) -> StoredRows | None:
        """A tensor in one of the opened files; None where it is not there as the index says."""
        header = opened.get(shard.file)
        if header is None:
            return None
        path = folder / shard.file
        infos = self._infos.get(path)
        if infos is None:
            infos = self._infos[path] = {info.name: info for info in header.tensors}
        info = infos.get(name)
        wanted = (tensor.dtype, local_shape(tensor, shard))
        if info is None or (info.dtype, list(info.shape)) != wanted:
            return None
        return StoredRows(path, header.data_start, info, tensor.placement.dim or 0)

    def count(self, size: int) -> None:
        self.checked_bytes += size
        self._progress(size)

    def identify(self, checkpoint: Checkpoint) -> None:
        """Which component of the source is which of the set's; before all else, who is another."""
        for name, index in self._set.components.items():
            component = next((c for c in checkpoint.components if c.name == name), None)
            if component is None and len(checkpoint.components) == 1 == len(self._set.components):
                component = checkpoint.components[0]
            if component is None:
                self._say(checkpoint.path, f"has no component {name!r}")
            elif self._same_source(index, component):
                self._sources[name] = component

    def source(self, name: str, index: Index, opened: dict[str, Header]) -> None:
        """Every rank's bytes against its rows of the source, cast where the set was cast."""
        component = self._sources.get(name)
        if component is None:
            return
        folder = self._set.folder(name)
        tensors = {tensor.name: tensor for tensor in component.tensors}
        for absent in sorted(tensors.keys() - index.tensors.keys()):
            self._say(folder, f"lacks tensor {absent!r} of the source")
        for tensor_name, tensor in index.tensors.items():
            full = tensors.get(tensor_name)
            if full is None or full.shape != tensor.shape:
                has = None if full is None else full.shape
                self._say(folder, f"tensor {tensor_name!r} is {tensor.shape}, in the source {has}")
                continue
            if full.dtype != tensor.dtype and not {full.dtype, tensor.dtype} <= CASTABLE.keys():
                what = f"tensor {tensor_name!r} is {tensor.dtype}, in the source {full.dtype}"
                self._say(folder, what)
                continue
            dim = tensor.placement.dim or 0
            file = component.files[full.stored[0].file]
            whole = StoredRows(file.path, file.data_start, full.stored[0].info, dim)
            for rank, shard in enumerate(tensor.shards):
                part = self._stored(folder, opened, tensor_name, tensor, shard)
                if part is None or 0 in tensor.shape:
                    continue
                rows: Rows | None = None
                if tensor.placement.dim is not None:
                    with suppress(*VOID):  # `ranges` has said so
                        rows = expected_rows(tensor.placement, tensor.shape[dim], index.tp, rank)
                where = first_difference(whole, part, rows, tensor.dtype, self.count)
                if where is not None:
                    self._suspect(component, tensor_name, tensor, whole)
                    self._say(
                        folder / shard.file,
                        f"tensor {tensor_name!r} differs from the source {where}",
                    )

    def _suspect(
        self, component: Component, name: str, tensor: TensorEntry, whole: StoredRows
    ) -> None:
        """Where it is the source that changed, not the shard: said first, and once."""
        if component.name in self._suspected:
            return
        self._suspected.add(component.name)
        digest = whole_digest(whole, tensor.dtype)
        if digest != tensor.digest:
            what = (
                f"is not the source that the set was built from, or has changed since: its tensor "
                f"{name!r} has digest {digest}, the one built from had {tensor.digest}"
            )
            self.problems.insert(0, Problem(str(component.path), what))

    def _same_source(self, index: Index, component: Component) -> bool:
        stated = {(f.name, f.size, f.header) for f in index.source.files}
        given = {(o.name, o.size_bytes, o.header_digest) for o in component.origins}
        if stated != given:
            names = sorted({item[0] for item in stated ^ given})
            self._say(
                component.path,
                f"is not the source that the set was built from: {', '.join(names)} differ",
            )
        return stated == given
