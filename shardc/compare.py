"""Shards against the definition of their placement, byte by byte. Independent of the planner.

What a rank must hold is worked out here row by row, as an index array.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import xxhash

from shardc.errors import Problem, VerifyError
from shardc.header import DTYPE_BITS, TensorInfo
from shardc.index import PlacementEntry, Zeros
from shardc.remote import AnyFile, RemoteFile

CHUNK_BYTES = 4 * 1024 * 1024
PADDING = -1
CASTABLE: Mapping[str, Any] = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
}

Rows = npt.NDArray[np.int64]
Progress = Callable[[int], None]


def expected_rows(placement: PlacementEntry, size: int, tp: int, rank: int) -> Rows:
    """The global indices along the dim that `rank` holds, in order; PADDING for zero rows.

    Written from the definitions in docs/manifest.md. Raises ValueError where the units do not
    divide.
    """
    if any(block.pad for block in placement.blocks):
        return _padded_rows(placement, size, tp, rank)
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


def _padded_rows(placement: PlacementEntry, size: int, tp: int, rank: int) -> Rows:
    """The same where blocks may get zero units: each group's, or whole groups at the end."""
    held = []
    at = 0
    for block in placement.blocks:
        rows = np.arange(at, at + block.size, dtype=np.int64)
        at += block.size
        count = block.size // block.unit
        units = rows.reshape(block.groups or count, -1, block.unit)  # group, member, element
        if len(units) % tp and tp % len(units) == 0:  # ranks share a group
            sharers = tp // len(units)
            if block.repeat and units.shape[1] == 1:
                units = np.repeat(units, sharers, axis=1)
            missing = -units.shape[1] % sharers
            units = np.pad(units, ((0, 0), (0, missing), (0, 0)), constant_values=PADDING)
        else:
            missing = -len(units) % tp
            units = np.pad(units, ((0, missing), (0, 0), (0, 0)), constant_values=PADDING)
        held.append(units.reshape(tp, -1)[rank])
    if at != size:
        raise ValueError(f"blocks of {at} for a dim of {size}")
    return np.concatenate(held)


@dataclass(frozen=True, slots=True)
class StoredRows:
    """A tensor in an open file, read by pieces of its (outer, dim, inner) view."""

    path: AnyFile
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
        return read_bytes(self.path, self.at + self.info.start + offset, size)


def read_bytes(path: AnyFile, offset: int, size: int) -> npt.NDArray[np.uint8]:
    if isinstance(path, RemoteFile):
        data = np.empty(size, np.uint8)
        path.read(offset, data.data)
        return data
    with path.open("rb", buffering=0) as file:
        file.seek(offset)
        data = np.fromfile(file, np.uint8, size)
    if data.size != size:
        raise VerifyError(Problem(str(path), f"ends {size - data.size} bytes early"))
    return data


def first_difference(
    whole: StoredRows, part: StoredRows, rows: Rows | None, dtype: str, count: Progress
) -> str | None:
    """Where a shard is not its rows of the source; None where it is."""
    if DTYPE_BITS[dtype] < 8:
        rows = None
    wanted_mid = whole.mid if rows is None else len(rows)
    if (part.outer, part.mid) != (whole.outer, wanted_mid):
        return f"in shape: {part.info.shape}"
    if not whole.info.size_bytes:
        return None
    for expected, found, where in _pairs(whole, part, rows):
        cast = _cast(expected, whole.info.dtype, dtype)
        count(found.size)
        if not np.array_equal(cast, found):
            return where
    return None


def whole_digest(whole: StoredRows, dtype: str) -> str:
    """XXH3-128 of a tensor as a set of `dtype` would hold it, read front to back."""
    state = xxhash.xxh3_128()
    for at in range(0, whole.info.size_bytes, CHUNK_BYTES):
        size = min(CHUNK_BYTES, whole.info.size_bytes - at)
        piece = read_bytes(whole.path, whole.at + whole.info.start + at, size)
        state.update(_cast(piece, whole.info.dtype, dtype).data)
    return state.hexdigest()


def _pairs(
    whole: StoredRows, part: StoredRows, rows: Rows | None
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
                read_bytes(whole.path, whole.at + whole.info.start + at, end - at),
                read_bytes(part.path, part.at + part.info.start + first, last - first),
                f"in bytes {first} to {last}",
            )
        return
    row_bytes = whole.mid * whole.inner_bytes
    if whole.outer > 1 and row_bytes <= CHUNK_BYTES:
        step = max(1, CHUNK_BYTES // row_bytes)
        for outer in range(0, whole.outer, step):
            count = min(step, whole.outer - outer)
            block = whole.read(outer, count, 0, whole.mid).reshape(count, whole.mid, -1)
            # a zero row behind the last one is what PADDING (-1) takes
            padded = np.concatenate([block, np.zeros_like(block[:, :1])], axis=1)
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


def global_rows(ranges: Sequence[tuple[int, int] | Zeros]) -> Rows:
    parts = [
        np.full(r.zeros, PADDING, np.int64)
        if isinstance(r, Zeros)
        else np.arange(*r, dtype=np.int64)
        for r in ranges
    ]
    return np.concatenate(parts) if parts else np.empty(0, np.int64)


def brief(rows: Rows) -> str:
    shown = ", ".join(map(str, rows[:12].tolist()))
    return f"rows [{shown}{', ...' if rows.size > 12 else ''}] ({rows.size})"


def _cast(data: npt.NDArray[np.uint8], dtype: str, wanted: str) -> npt.NDArray[np.uint8]:
    """The bytes as `wanted`: by float32, which holds every narrower value exactly."""
    if dtype == wanted:
        return data
    with np.errstate(over="ignore", invalid="ignore"):
        single = data.view(CASTABLE[dtype]).astype(np.float32)
        cast: npt.NDArray[np.uint8] = single.astype(CASTABLE[wanted]).view(np.uint8)
    return cast


def copies_difference(parts: Sequence[tuple[StoredRows, Rows]]) -> str | None:
    """Where two ranks hold different bytes of the same global row; None where all copies agree."""
    owner: dict[int, tuple[int, int]] = {}
    for rank, (part, rows) in enumerate(parts):
        again = [(local, *owner[row]) for local, row in enumerate(rows.tolist()) if row in owner]
        for first, last in _copy_runs(again):
            local, other, at = again[first]
            for outer in range(part.outer):
                mine = part.read(outer, 1, local, local + last - first)
                theirs = parts[other][0].read(outer, 1, at, at + last - first)
                if not np.array_equal(mine, theirs):
                    row = int(rows[local])
                    return f"ranks {other} and {rank} hold different copies of rows from {row}"
        for local, row in enumerate(rows.tolist()):
            if row != PADDING:
                owner.setdefault(row, (rank, local))
    return None


def _copy_runs(again: Sequence[tuple[int, int, int]]) -> Iterator[tuple[int, int]]:
    """[first, last) of copies that lie side by side in both ranks."""
    start = 0
    for index in range(1, len(again) + 1):
        if index < len(again):
            (a, rank_a, at_a), (b, rank_b, at_b) = again[index - 1], again[index]
            if rank_a == rank_b and (b - a, at_b - at_a) == (1, 1):
                continue
        if start < len(again):
            yield start, index
        start = index
