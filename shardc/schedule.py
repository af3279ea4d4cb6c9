"""The plan's moves in source order, grouped under a memory bound, and cut into chunks. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from shardc.checkpoint import Stored
from shardc.header import DTYPE_BITS
from shardc.planner import Move, part_spans

MIN_CHUNK_BYTES = 64 * 1024
MAX_CHUNK_BYTES = 1024 * 1024  # beyond this the CPU's cache no longer holds a worker's buffers
MAX_RANGE_BYTES = 8 * 1024 * 1024  # of a remote source, where each read is a request
BUFFERS_A_WORKER = 4  # read, stage, cast, gather


@dataclass(frozen=True, slots=True)
class Batch:
    """Moves done by one worker, one after another.

    `run`: their sources lie in one file without gaps and fit one chunk, so one read gets all.
    """

    moves: tuple[tuple[int, Move], ...]
    run: tuple[int, int, int] | None  # file, start, stop in bytes of its data


@dataclass(frozen=True, slots=True)
class Part:
    """A stored part in bytes: `row` of it for each row of the global tensor, and its spans."""

    file: int
    start: int
    row: int
    spans: tuple[tuple[int, int, int], ...]

    @property
    def whole_row(self) -> bool:
        """One span fills the part's row."""
        return len(self.spans) == 1 and self.spans[0][1] - self.spans[0][0] == self.row

    @property
    def padded(self) -> bool:
        """The spans leave a part of the row out: zeros."""
        return sum(stop - start for start, stop, _ in self.spans) != self.row


@dataclass(frozen=True, slots=True)
class Geometry:
    """A move as `outer` rows of `row` elements; spans are [start, stop) of a row, in elements."""

    outer: int
    row: int
    in_bytes: int
    out_bytes: int
    sources: tuple[Part, ...]
    targets: tuple[Part, ...]

    def chunks(self, limit_bytes: int) -> Iterator[tuple[int, int, int, int]]:
        """(first row, end row, first element, end element): whole rows, or a part of one row."""
        if self.outer == 0 or self.row == 0:
            return
        widest = max(self.row, *(part.row for part in (*self.sources, *self.targets)))
        limit = limit_bytes // max(self.in_bytes, self.out_bytes)
        if widest <= limit:
            rows = limit // widest
            for first in range(0, self.outer, rows):
                yield first, min(first + rows, self.outer), 0, self.row
            return
        for row in range(self.outer):
            for first in range(0, self.row, limit):
                yield row, row + 1, first, min(first + limit, self.row)


def chunk_bytes(memory_bytes: int, workers: int, *, remote: bool = False) -> int:
    """The chunk size with which `workers` stay under `memory_bytes` of buffers."""
    largest = MAX_RANGE_BYTES if remote else MAX_CHUNK_BYTES
    share = memory_bytes // (workers * BUFFERS_A_WORKER)
    return max(MIN_CHUNK_BYTES, min(largest, share // 4096 * 4096))


def geometry(move: Move) -> Geometry:
    """The move's rows and spans. A sub-byte tensor, never cut, moves as plain bytes."""
    bits, out_bits = DTYPE_BITS[move.dtype], DTYPE_BITS[move.out_dtype]
    if bits < 8:
        size = move.sources[0].info.size_bytes
        source = Part(move.sources[0].file, move.sources[0].info.start, size, ((0, size, 0),))
        targets = tuple(Part(t.file, t.info.start, size, ((0, size, 0),)) for t in move.targets)
        return Geometry(1, size, 1, 1, (source,), targets)
    dim = move.dim if move.shape else 0
    outer = math.prod(move.shape[:dim])
    inner = math.prod(move.shape[dim + 1 :])
    row = inner * (move.shape[dim] if move.shape else 1)

    def parts(stored: Iterable[Stored]) -> tuple[Part, ...]:
        found = []
        for part in stored:
            local = part.info.shape[dim] * inner if move.shape else 1
            held = tuple((a * inner, b * inner, at * inner) for a, b, at in part_spans(part, move))
            found.append(Part(part.file, part.info.start, local, held))
        return tuple(found)

    return Geometry(outer, row, bits // 8, out_bits // 8, parts(move.sources), parts(move.targets))


def schedule(moves: Iterable[tuple[int, Move]], limit_bytes: int) -> Iterator[Batch]:
    """Batches of numbered moves in source order: neighbours that fit one chunk share one read."""
    ordered = sorted(
        moves, key=lambda item: (item[1].sources[0].file, item[1].sources[0].info.start)
    )
    pending: list[tuple[int, Move]] = []
    run: tuple[int, int, int] | None = None
    for number, move in ordered:
        source = move.sources[0]
        wide = max(source.info.size_bytes, max(t.info.size_bytes for t in move.targets))
        small = len(move.sources) == 1 and wide <= limit_bytes
        # Only a part in the tensor's own order stands for it: not a deinterleaved or padded one.
        small = small and geometry(move).sources[0].whole_row
        joins = (
            small
            and run is not None
            and run[0] == source.file
            and run[2] == source.info.start
            and source.info.stop - run[1] <= limit_bytes
        )
        if joins and run is not None:
            pending.append((number, move))
            run = (run[0], run[1], source.info.stop)
            continue
        if pending:
            yield Batch(tuple(pending), run)
        pending = [(number, move)]
        run = (source.file, source.info.start, source.info.stop) if small else None
    if pending:
        yield Batch(tuple(pending), run)
