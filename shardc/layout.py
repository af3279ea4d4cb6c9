"""How one tensor lies across the ranks: placements, and the pieces of each rank along the dim.

Pure arithmetic on sizes; one home for head counts, so that plan, writer and loader agree.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

# blocked: the blocks one after another, [Q|K|V].
# per_head: the blocks once per head, [q0 k0 v0|q1 k1 v1|...].
# per_kv_head: the blocks once per KV head, [q0 q1 k0 v0|q2 q3 k1 v1|...].
FusedLayout = Literal["blocked", "per_head", "per_kv_head"]


@dataclass(frozen=True, slots=True)
class Block:
    """One fused piece: `size` elements, never cut inside a `unit`.

    `repeat`: where the degree exceeds the block's units, unit u goes to the tp // units
    consecutive ranks from u * (tp // units) on (repeat-interleave), as grouped-query attention
    needs for its KV heads.
    """

    size: int
    unit: int = 1
    repeat: bool = False

    def __post_init__(self) -> None:
        if self.size < 0 or self.unit < 1:
            raise ValueError(f"not a block: size {self.size}, unit {self.unit}")


@dataclass(frozen=True, slots=True)
class Replicate:
    """Every rank holds the whole tensor."""


@dataclass(frozen=True, slots=True)
class Shard:
    """Contiguous, equal shares along `dim`; `padded` is the dim's size with its zero rows."""

    dim: int
    block: Block
    padded: int


@dataclass(frozen=True, slots=True)
class PackedShard:
    """Each fused block along `dim` is shared out on its own; a rank holds its share of each.

    `deinterleave`: an interleaved layout becomes [Q|K|V] in the rank's shard.
    """

    dim: int
    blocks: tuple[Block, ...]
    layout: FusedLayout = "blocked"
    deinterleave: bool = False


Placement = Replicate | Shard | PackedShard
REPLICATE = Replicate()


@dataclass(frozen=True, slots=True)
class Piece:
    """[start, stop) of the global dim; a piece with start -1 is `stop` rows of zero padding."""

    start: int
    stop: int

    @property
    def zeros(self) -> bool:
        return self.start < 0

    @property
    def length(self) -> int:
        return self.stop if self.zeros else self.stop - self.start


def padding(length: int) -> Piece:
    """Padding of `length` rows."""
    return Piece(-1, length)


def size_problem(placement: Shard | PackedShard, size: int) -> str | None:
    """Why the blocks do not describe a dim of `size` elements, at any degree; None if they do."""
    blocks = blocks_of(placement)
    total = sum(block.size for block in blocks)
    declared = [block.size for block in blocks]
    for block in blocks:
        if block.size % block.unit:
            return f"block of {block.size} is not whole units of {block.unit}"
    if isinstance(placement, PackedShard) and placement.layout != "blocked":
        if total == 0 or size % total:
            return f"groups of {declared} take {total} each, which does not divide {size}"
    elif total != size:
        return f"blocks {declared} sum to {total}, the dim has {size}"
    return None


def blocks_of(placement: Shard | PackedShard) -> tuple[Block, ...]:
    return placement.blocks if isinstance(placement, PackedShard) else (placement.block,)


def degree_problem(placement: Placement, size: int, tp: int) -> str | None:
    """Why a dim of `size` elements cannot be shared among `tp` ranks; None if it can."""
    if isinstance(placement, Replicate):
        return None
    if isinstance(placement, Shard) and placement.padded != size:
        if placement.padded % tp:
            return f"padded size {placement.padded} % {tp} != 0"
        return None
    if isinstance(placement, PackedShard) and placement.layout != "blocked":
        return _grouped_problem(placement, size, tp)
    for block in blocks_of(placement):
        units = block.size // block.unit
        if units % tp == 0 or (block.repeat and units and tp % units == 0):
            continue
        what = "" if block.unit == 1 else f" of {block.unit}"
        hint = f" and {tp} % {units} != 0" if block.repeat and units else ""
        return f"{units} units{what} % {tp} != 0{hint}"
    return None


def _grouped_problem(placement: PackedShard, size: int, tp: int) -> str | None:
    groups = size // sum(block.size for block in placement.blocks)
    if groups % tp == 0:
        return None
    if not any(block.repeat for block in placement.blocks):
        return f"{groups} interleaved groups % {tp} != 0"
    if not groups or tp % groups:
        return f"{groups} interleaved groups % {tp} != 0 and {tp} % {groups} != 0"
    sharing = tp // groups
    for block in placement.blocks:
        units = block.size // block.unit
        if units % sharing and not (block.repeat and sharing % units == 0):
            return f"{units} units of {block.unit} in a group that {sharing} ranks share"
    return None


def rank_pieces(placement: Shard | PackedShard, size: int, tp: int) -> list[tuple[Piece, ...]]:
    """For each rank, its pieces of the dim in local order, neighbours joined.

    Raises ValueError where `size_problem` or `degree_problem` has a reason.
    """
    unpadded = isinstance(placement, Shard) and placement.padded != size
    problem = (None if unpadded else size_problem(placement, size)) or degree_problem(
        placement, size, tp
    )
    if problem:
        raise ValueError(problem)
    if isinstance(placement, Shard) and placement.padded != size:
        return [_padded_share(size, placement.padded // tp, rank) for rank in range(tp)]
    if isinstance(placement, PackedShard) and placement.layout != "blocked":
        return [_join(_grouped_share(placement, size, tp, rank)) for rank in range(tp)]
    return [_join(_blocked_share(blocks_of(placement), tp, rank)) for rank in range(tp)]


def _share(block: Block, tp: int, rank: int) -> tuple[int, int]:
    """The rank's [start, stop) inside one block."""
    units = block.size // block.unit
    if units % tp == 0:
        each = block.size // tp
        return rank * each, (rank + 1) * each
    unit = rank * units // tp  # repeat-interleave: tp // units ranks in a row hold the same unit
    return unit * block.unit, (unit + 1) * block.unit


def _blocked_share(blocks: tuple[Block, ...], tp: int, rank: int) -> list[Piece]:
    pieces, at = [], 0
    for block in blocks:
        start, stop = _share(block, tp, rank)
        pieces.append(Piece(at + start, at + stop))
        at += block.size
    return pieces


def _padded_share(size: int, each: int, rank: int) -> tuple[Piece, ...]:
    start = min(rank * each, size)
    stop = min(start + each, size)
    pieces = [Piece(start, stop)] if stop > start else []
    if stop - start < each:
        pieces.append(padding(each - (stop - start)))
    return tuple(pieces)


def _grouped_share(placement: PackedShard, size: int, tp: int, rank: int) -> list[Piece]:
    width = sum(block.size for block in placement.blocks)
    groups = size // width
    if groups % tp == 0:
        each, sharing, slot = groups // tp, 1, 0
        mine = range(rank * each, (rank + 1) * each)
    else:  # several ranks share one group: they divide its queries and repeat its keys and values
        sharing = tp // groups
        slot = rank % sharing
        mine = range(rank // sharing, rank // sharing + 1)
    columns: list[list[Piece]] = []
    at = 0
    for block in placement.blocks:
        start, stop = _share(block, sharing, slot)
        columns.append([Piece(g * width + at + start, g * width + at + stop) for g in mine])
        at += block.size
    if placement.deinterleave:
        return [piece for column in columns for piece in column]
    return [piece for group in zip(*columns, strict=True) for piece in group]


def _join(pieces: list[Piece]) -> tuple[Piece, ...]:
    joined: list[Piece] = []
    for piece in pieces:
        if joined and not piece.zeros and joined[-1].stop == piece.start:
            joined[-1] = Piece(joined[-1].start, piece.stop)
        elif piece.length:
            joined.append(piece)
    return tuple(joined)
