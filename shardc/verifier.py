"""An independent re-check of a shard set: by its index, and bit for bit by its source.

Shares nothing with the planner: what a rank must hold is worked out here from the placement's
definition, row by row, as an index array.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import xxhash

from shardc.checkpoint import CONFIG, Checkpoint, Component, open_checkpoint
from shardc.errors import CheckpointError, Problem, VerifyError
from shardc.header import DTYPE_BITS, Header, TensorInfo, read_header
from shardc.shardset import (
    Index,
    PlacementEntry,
    ShardSet,
    Zeros,
    file_digest,
    metadata_problems,
    open_shard_set,
)

CHUNK_BYTES = 4 * 1024 * 1024
PADDING = -1

Rows = npt.NDArray[np.int64]
Progress = Callable[[int], None]


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
    source: Path | None = None,
    variant: str | None = None,
    rank: int | None = None,
    progress: Progress | None = None,
) -> VerifyReport:
    """Re-read a shard set and compare it with its index and, where given, with its source.

    rank: only that rank's files and the replicated ones. Raises ShardSetError where it cannot be
    opened; what is wrong inside is reported, all of it.
    """
    started = time.monotonic()
    shard_set = open_shard_set(path)
    checkpoint = None if source is None else open_checkpoint(source, variant=variant)
    check = _Check(shard_set, rank, progress or (lambda _: None))
    for name, index in shard_set.components.items():
        if rank is not None and rank >= index.tp:
            raise VerifyError(f"rank {rank} is outside tp {index.tp}")
        opened = check.files(name, index)
        check.ranges(name, index)
        check.digests(name, index, opened)
        if checkpoint is not None:
            check.source(name, index, opened, checkpoint)
    return VerifyReport(
        path=str(path),
        source=None if source is None else str(source),
        tensors=sum(len(index.tensors) for index in shard_set.components.values()),
        files=check.file_count,
        checked_bytes=check.checked_bytes,
        seconds=time.monotonic() - started,
        problems=tuple(check.problems),
    )


def expected_rows(placement: PlacementEntry, size: int, tp: int, rank: int) -> Rows:
    """The global indices along the dim that `rank` holds, in order; PADDING for zero rows.

    Written from the definitions in docs/manifest.md. Raises ValueError where the units do not
    divide.
    """
    if placement.kind == "shard" and placement.padded is not None and placement.padded != size:
        rows = np.full(placement.padded, PADDING, np.int64)
        rows[:size] = np.arange(size)
        share = placement.padded // tp
        return rows[rank * share : (rank + 1) * share]
    widths = [block.size for block in placement.blocks]
    groups = 1
    if placement.layout in ("per_head", "per_kv_head"):
        groups = size // sum(widths)
    table = np.arange(size, dtype=np.int64).reshape(groups, sum(widths))
    if groups > 1 and groups % tp == 0:
        mine, sharers, slot = np.split(table, tp)[rank], 1, 0
    elif groups > 1:
        sharers = tp // groups
        mine, slot = table[rank // sharers : rank // sharers + 1], rank % sharers
    else:
        mine, sharers, slot = table, tp, rank
    columns = []
    for block, columns_of_block in zip(
        placement.blocks, np.split(mine, np.cumsum(widths)[:-1], axis=1), strict=True
    ):
        units = columns_of_block.reshape(len(mine), -1, block.unit)
        count = units.shape[1]
        if count % sharers:
            if not block.repeat or count == 0 or sharers % count:
                raise ValueError(f"{count} units among {sharers} ranks")
            units = np.repeat(units, sharers // count, axis=1)
            count = sharers
        share = count // sharers
        taken = units[:, slot * share : (slot + 1) * share]
        columns.append(taken.reshape(len(mine), share * block.unit))
    if placement.deinterleave:
        return np.concatenate([column.reshape(-1) for column in columns])
    return np.concatenate(columns, axis=1).reshape(-1)


@dataclass(frozen=True, slots=True)
class _Stored:
    """A tensor in an open file, read by pieces of its (outer, dim, inner) view."""

    path: Path
    at: int
    info: TensorInfo
    dim: int

    @property
    def outer(self) -> int:
        return math.prod(self.info.shape[: self.dim])

    @property
    def mid(self) -> int:
        return self.info.shape[self.dim] if self.info.shape else 1

    @property
    def inner_bytes(self) -> int:
        count = self.outer * self.mid
        return self.info.size_bytes // count if count else 0

    def read(self, outer: int, count: int, start: int, stop: int) -> npt.NDArray[np.uint8]:
        """Rows [start, stop) of `count` outer rows; several only where they are whole."""
        offset = (outer * self.mid + start) * self.inner_bytes
        size = count * (stop - start) * self.inner_bytes
        return _read(self.path, self.at + self.info.start + offset, size)


def _read(path: Path, offset: int, size: int) -> npt.NDArray[np.uint8]:
    with path.open("rb", buffering=0) as file:
        file.seek(offset)
        data = np.fromfile(file, np.uint8, size)
    if data.size != size:
        raise VerifyError(Problem(str(path), f"ends {size - data.size} bytes early"))
    return data


class _Check:
    def __init__(self, shard_set: ShardSet, rank: int | None, progress: Progress) -> None:
        self._set = shard_set
        self._rank = rank
        self._progress = progress
        self.problems: list[Problem] = []
        self.file_count = 0
        self.checked_bytes = 0

    def _say(self, where: Path | str, what: str) -> None:
        self.problems.append(Problem(str(where), what))

    def _wanted(self, rank: int | None) -> bool:
        return self._rank is None or rank is None or rank == self._rank

    def files(self, name: str, index: Index) -> dict[str, Header]:
        """Names, sizes, headers, config and manifest against the index."""
        folder = self._set.folder(name)
        opened: dict[str, Header] = {}
        present = {entry.name for entry in folder.iterdir()}
        for stray in sorted(present - set(index.files)):
            if stray.endswith((".safetensors", ".safetensors.index.json")):
                self._say(folder / stray, "does not belong to the shard set")
        for file_name, entry in index.files.items():
            if not self._wanted(entry.rank):
                continue
            self.file_count += 1
            path = folder / file_name
            if file_name not in present:
                self._say(path, "is missing")
                continue
            try:
                header = read_header(path)
            except CheckpointError as error:
                self.problems += error.problems
                continue
            if header.file_bytes != entry.size:
                self._say(path, f"has {header.file_bytes} bytes, the index says {entry.size}")
            for reason in metadata_problems(index, entry, header.metadata):
                self._say(path, reason)
            opened[file_name] = header
        self._headers(folder, index, opened)
        if not (folder / CONFIG).is_file():
            self._say(folder / CONFIG, "is missing")
        elif xxhash.xxh3_128_hexdigest((folder / CONFIG).read_bytes()) != index.source.config:
            self._say(folder / CONFIG, "is not the one that the set was built with")
        if xxhash.xxh3_128_hexdigest(index.manifest.text.encode()) != index.manifest.digest:
            self._say(folder, "the index's manifest does not have the digest it states")
        return opened

    def _headers(self, folder: Path, index: Index, opened: dict[str, Header]) -> None:
        expected: dict[str, dict[str, tuple[str, tuple[int, ...]]]] = {f: {} for f in opened}
        for tensor_name, tensor in index.tensors.items():
            for shard in tensor.shards:
                shape = list(tensor.shape)
                if tensor.placement.dim is not None:
                    shape[tensor.placement.dim] = len(_rows(shard.ranges or ()))
                if shard.file in expected:
                    expected[shard.file][tensor_name] = (tensor.dtype, tuple(shape))
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
            if dim is None:
                continue
            size = tensor.shape[dim]
            seen = np.zeros(size, bool)
            for rank, shard in enumerate(tensor.shards):
                rows = _rows(shard.ranges or ())
                seen[rows[rows != PADDING]] = True
                try:
                    wanted = expected_rows(tensor.placement, size, index.tp, rank)
                except (ValueError, ZeroDivisionError) as error:
                    self._say(folder, f"tensor {tensor_name!r}: its placement is void: {error}")
                    break
                if not np.array_equal(rows, wanted):
                    self._say(
                        folder,
                        f"tensor {tensor_name!r}: rank {rank} holds {_brief(rows)}, "
                        f"its placement means {_brief(wanted)}",
                    )
            if not seen.all():
                lost = np.flatnonzero(~seen)
                self._say(folder, f"tensor {tensor_name!r}: {_brief(lost)} are on no rank")

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
                    state.update(_read(path, header.data_start + tensor.start + at, size).data)
                    self._count(size)
                found.append(state.hexdigest())
                if found[-1] != stated.get((file_name, tensor.name)):
                    self._say(
                        path,
                        f"tensor {tensor.name!r}: digest {found[-1]}, "
                        f"the index says {stated.get((file_name, tensor.name))}",
                    )
            head = _read(path, 0, header.data_start).tobytes()
            if file_digest(head, found) != index.files[file_name].digest:
                self._say(path, "does not have the digest that the index states")

    def _count(self, size: int) -> None:
        self.checked_bytes += size
        self._progress(size)

    def source(
        self, name: str, index: Index, opened: dict[str, Header], checkpoint: Checkpoint
    ) -> None:
        """Every rank's bytes against its rows of the source, cast where the set was cast."""
        component = next((c for c in checkpoint.components if c.name == name), None)
        if component is None and len(checkpoint.components) == 1 == len(self._set.components):
            component = checkpoint.components[0]
        if component is None:
            self._say(checkpoint.path, f"has no component {name!r}")
            return
        if not self._same_source(index, component):
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
            dim = tensor.placement.dim or 0
            file = component.files[full.stored[0].file]
            whole = _Stored(file.path, file.data_start, full.stored[0].info, dim)
            for rank, shard in enumerate(tensor.shards):
                header = opened.get(shard.file)
                if header is None or not self._wanted(index.files[shard.file].rank):
                    continue
                info = next((t for t in header.tensors if t.name == tensor_name), None)
                if info is None:
                    continue
                part = _Stored(folder / shard.file, header.data_start, info, dim)
                rows: Rows | None = None
                if tensor.placement.dim is not None:
                    rows = expected_rows(tensor.placement, tensor.shape[dim], index.tp, rank)
                where = self._first_difference(whole, part, rows, tensor.dtype)
                if where is not None:
                    self._say(
                        folder / shard.file,
                        f"tensor {tensor_name!r} differs from the source {where}",
                    )

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

    def _first_difference(
        self, whole: _Stored, part: _Stored, rows: Rows | None, dtype: str
    ) -> str | None:
        """Where a shard is not its rows of the source; None where it is."""
        if DTYPE_BITS[dtype] < 8 or whole.outer * whole.mid == 0 or rows is None:
            rows = None
        wanted_mid = whole.mid if rows is None else len(rows)
        if (part.outer, part.mid) != (whole.outer, wanted_mid):
            return f"in shape: {part.info.shape}"
        for expected, found, where in _pairs(whole, part, rows):
            cast = _cast(expected, whole.info.dtype, dtype)
            self._count(found.size)
            if not np.array_equal(cast, found):
                return where
        return None


def _pairs(
    whole: _Stored, part: _Stored, rows: Rows | None
) -> Iterator[tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8], str]]:
    """(source bytes, shard bytes, where) that must agree, a few MiB at a time."""
    if rows is None:
        size, own = whole.info.size_bytes, part.info.size_bytes
        step = CHUNK_BYTES
        ratio_in, ratio_out = max(size, 1), max(own, 1)
        for at in range(0, size, step):
            end = min(at + step, size)
            first, last = at * ratio_out // ratio_in, end * ratio_out // ratio_in
            yield (
                _read(whole.path, whole.at + whole.info.start + at, end - at),
                _read(part.path, part.at + part.info.start + first, last - first),
                f"in bytes {first} to {last}",
            )
        return
    row_bytes = whole.mid * whole.inner_bytes
    if whole.outer > 1 and row_bytes <= CHUNK_BYTES:
        step = max(1, CHUNK_BYTES // row_bytes)
        for outer in range(0, whole.outer, step):
            count = min(step, whole.outer - outer)
            source = whole.read(outer, count, 0, whole.mid).reshape(count, whole.mid, -1)
            # a zero row behind the last one is what PADDING (-1) takes
            padded = np.concatenate([source, np.zeros_like(source[:, :1])], axis=1)
            yield (
                np.take(padded, rows, axis=1).reshape(-1),
                part.read(outer, count, 0, part.mid),
                f"in rows {outer} to {outer + count}",
            )
        return
    for outer in range(whole.outer):
        for first, last in _runs(rows, max(1, CHUNK_BYTES // max(1, whole.inner_bytes))):
            found = part.read(outer, 1, first, last)
            start = int(rows[first])
            if start == PADDING:
                source = np.zeros((last - first) * whole.inner_bytes, np.uint8)
            else:
                source = whole.read(outer, 1, start, start + last - first)
            yield source, found, f"at {outer}, local rows {first} to {last}, global from {start}"


def _runs(rows: Rows, longest: int) -> Iterator[tuple[int, int]]:
    """[first, last) of each run of consecutive global rows (or of padding), cut to `longest`."""
    if not rows.size:
        return
    steps = np.diff(rows)
    padding = rows == PADDING
    breaks = np.flatnonzero(((steps != 1) | padding[:-1]) & ~(padding[:-1] & padding[1:])) + 1
    edges = [0, *breaks.tolist(), len(rows)]
    for start, stop in itertools.pairwise(edges):
        for first in range(start, stop, longest):
            yield first, min(first + longest, stop)


def _rows(ranges: Sequence[tuple[int, int] | Zeros]) -> Rows:
    parts = [
        np.full(r.zeros, PADDING, np.int64)
        if isinstance(r, Zeros)
        else np.arange(*r, dtype=np.int64)
        for r in ranges
    ]
    return np.concatenate(parts) if parts else np.empty(0, np.int64)


def _brief(rows: Rows) -> str:
    shown = ", ".join(map(str, rows[:12].tolist()))
    return f"rows [{shown}{', ...' if rows.size > 12 else ''}] ({rows.size})"


def _cast(data: npt.NDArray[np.uint8], dtype: str, wanted: str) -> npt.NDArray[np.uint8]:
    """The bytes as `wanted`: by float32, which holds every narrower value exactly."""
    if dtype == wanted:
        return data
    kinds: dict[str, Any] = {
        "F64": np.float64,
        "F32": np.float32,
        "F16": np.float16,
        "BF16": ml_dtypes.bfloat16,
    }
    with np.errstate(over="ignore", invalid="ignore"):
        single = data.view(kinds[dtype]).astype(np.float32)
        cast: npt.NDArray[np.uint8] = single.astype(kinds[wanted]).view(np.uint8)
    return cast
