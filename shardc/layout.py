"""How one tensor lies across the ranks: placements, and the pieces of each rank along the dim.

Pure arithmetic on sizes; one home for head counts, so that plan, writer and loader agree.
"""

from __future__ import annotations

import functools
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
    needs for its KV heads. `groups`: how many groups the units belong to (queries, to their KV
    heads); None where each stands alone. `pad`: where the degree does not divide, ranks hold zero
    units, each group's share of them in that group.
    """

    size: int
    unit: int = 1
    repeat: bool = False
    groups: int | None = None
    pad: bool = False

    def __post_init__(self) -> None:
        if self.size < 0 or self.unit < 1 or (self.groups is not None and self.groups < 1):
            raise ValueError(f"not a block: size {self.size}, unit {self.unit}")

    @property
    def units(self) -> int:
        return self.size // self.unit

    @property
    def whole(self) -> int:
        """How many there are of what ranks share out first: groups, else units."""
        return self.units if self.groups is None else self.groups


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


@dataclass(frozen=True, slots=True)
class Span:
    """[start, stop) of a global dim, found at local index `at` of a stored tensor."""

    start: int
    stop: int
    at: int


@functools.lru_cache(maxsize=4096)  # the ranks of a model's blocks are alike
def spans(pieces: tuple[Piece, ...]) -> tuple[Span, ...]:
    """Pieces in local order, with where each begins; padding holds nothing of the tensor."""
    found = []
    at = 0
    for piece in pieces:
        if not piece.zeros:
            found.append(Span(piece.start, piece.stop, at))
        at += piece.length
    return tuple(found)


def size_problem(placement: Shard | PackedShard, size: int) -> str | None:
    """Why the blocks do not describe a dim of `size` elements, at any degree; None if they do."""
    blocks = blocks_of(placement)
    total = sum(block.size for block in blocks)
    declared = [block.size for block in blocks]
    for block in blocks:
        if block.size % block.unit:
            return f"block of {block.size} is not whole units of {block.unit}"
        if block.whole and block.units % block.whole:
            return f"{block.units} units of {block.unit} are not {block.whole} equal groups"
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
        if share_of(block.units, tp, block.groups, block.repeat, block.pad) is not None:
            continue
        what = f" of {block.unit}" if block.unit > 1 and block.groups is None else ""
        kind = "units" if block.groups is None else "groups"
        hint = f" and {tp} % {block.whole} != 0" if block.repeat and block.whole else ""
        return f"{block.whole} {kind}{what} % {tp} != 0{hint}"
    return None


def share_of(
    units: int, tp: int, groups: int | None = None, repeat: bool = False, pad: bool = False
) -> tuple[int, int] | None:
    """(units that each rank holds, ranks that share a group); None where tp does not divide.

    The one home of head counts: the shards are cut by it, and the runtime's `local()` counts by it.
    """
    whole = units if groups is None else groups
    per = units // whole if whole else 0
    if whole % tp == 0:
        return units // tp, 1
    if tp % whole == 0:
        sharers = tp // whole
        if per % sharers == 0 or pad or (repeat and per == 1):
            return -(-per // sharers), sharers
    elif pad:
        return -(-whole // tp) * per, 1
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
        if share_of(block.units, sharing, repeat=block.repeat) is None:
            return f"{block.units} units of {block.unit} in a group that {sharing} ranks share"
    return None


@functools.lru_cache(maxsize=4096)  # a model's blocks are alike
def rank_pieces(
    placement: Shard | PackedShard, size: int, tp: int
) -> tuple[tuple[Piece, ...], ...]:
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
        return tuple(_padded_share(size, placement.padded // tp, rank) for rank in range(tp))
    if isinstance(placement, PackedShard) and placement.layout != "blocked":
        return tuple(_join(_grouped_share(placement, size, tp, rank)) for rank in range(tp))
    return tuple(_join(_blocked_share(blocks_of(placement), tp, rank)) for rank in range(tp))


def _share(block: Block, tp: int, rank: int) -> tuple[int, int, int]:
    """The rank's [start, stop) inside one block, and how many zero elements follow."""
    share = share_of(block.units, tp, block.groups, block.repeat, block.pad)
    assert share is not None  # the caller has asked degree_problem
    count, sharers = share
    if sharers == 1:
        start, end = rank * count, block.units
    else:
        per = block.units // block.whole
        first, slot = rank // sharers * per, rank % sharers
        start = first if block.repeat and per == 1 else first + slot * count
        end = first + per
    start, stop = min(start, end), min(start + count, end)
    return start * block.unit, stop * block.unit, (count - (stop - start)) * block.unit


def _blocked_share(blocks: tuple[Block, ...], tp: int, rank: int) -> list[Piece]:
    pieces, at = [], 0
    for block in blocks:
        start, stop, zeros = _share(block, tp, rank)
        pieces += [Piece(at + start, at + stop), padding(zeros)]
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
        start, stop, _ = _share(block, sharing, slot)
        columns.append([Piece(g * width + at + start, g * width + at + stop) for g in mine])
        at += block.size
    if placement.deinterleave:
        return [piece for column in columns for piece in column]
    return [piece for group in zip(*columns, strict=True) for piece in group]


def _join(pieces: list[Piece]) -> tuple[Piece, ...]:
    joined: list[Piece] = []
    for piece in pieces:
        if not piece.length:
            continue
        if joined and piece.zeros and joined[-1].zeros:
            joined[-1] = padding(joined[-1].length + piece.length)
        elif joined and not piece.zeros and joined[-1].stop == piece.start:
            joined[-1] = Piece(joined[-1].start, piece.stop)
        else:
            joined.append(piece)
    return tuple(joined)
