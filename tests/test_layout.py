"""Placements to pieces, against the oracle; and why some do not fit."""

from __future__ import annotations

import math
from contextlib import suppress
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardc.compare import expected_rows
from shardc.index import placement_entry
from shardc.layout import (
    Block,
    PackedShard,
    Piece,
    Replicate,
    Shard,
    blocks_of,
    degree_problem,
    padding,
    rank_pieces,
    size_problem,
)
from tests import oracle


def rows(pieces: tuple[Piece, ...]) -> list[int]:
    found: list[int] = []
    for piece in pieces:
        found += [-1] * piece.length if piece.zeros else range(piece.start, piece.stop)
    return found


@st.composite
def cases(draw: st.DrawFn) -> tuple[Shard | PackedShard, int, int]:
    """A placement that may or may not fit, its dim's size, and a degree."""
    tp = draw(st.integers(1, 8))
    if draw(st.integers(0, 3)) == 0:
        size = draw(st.integers(1, 12))
        pad_to = draw(st.sampled_from([1, 2, 8]))
        multiple = math.lcm(pad_to, tp)
        return Shard(0, Block(size), -(-size // multiple) * multiple), size, tp
    blocks = []
    if draw(st.integers(0, 2)) == 0:  # zero heads
        for _ in range(draw(st.integers(1, 3))):
            unit, groups, each = (draw(st.integers(1, n)) for n in (3, 9, 4))
            size = unit * groups * each
            named = groups if each > 1 else draw(st.sampled_from([groups, None]))
            blocks.append(Block(size, unit, draw(st.booleans()), named, pad=True))
        return PackedShard(0, tuple(blocks)), sum(block.size for block in blocks), tp
    for _ in range(draw(st.integers(1, 4))):
        unit = draw(st.integers(1, 3))
        blocks.append(Block(unit * draw(st.integers(0, 8)), unit, draw(st.booleans())))
    layout = draw(st.sampled_from(["blocked", "per_head", "per_kv_head"]))
    size = sum(block.size for block in blocks)
    if layout == "blocked":
        return PackedShard(0, tuple(blocks)), size, tp
    deinterleave = draw(st.booleans())
    size *= draw(st.integers(1, 4))
    return PackedShard(0, tuple(blocks), layout, deinterleave), size, tp


def refused(placement: Shard | PackedShard, size: int, tp: int) -> bool:
    """Ranks share a group only where some block of it is declared to repeat."""
    blocks = blocks_of(placement)
    if isinstance(placement, Shard) or placement.layout == "blocked":
        return False
    groups = size // max(1, sum(block.size for block in blocks))
    return bool(groups % tp) and not any(block.repeat for block in blocks)


@settings(max_examples=400)
@given(cases())
def test_pieces_are_what_the_oracle_says(case: tuple[Shard | PackedShard, int, int]) -> None:
    placement, size, tp = case
    blocks = blocks_of(placement)
    told: dict[str, Any] = {
        "units": [block.unit for block in blocks],
        "repeats": [block.repeat for block in blocks],
        "groups": [block.groups for block in blocks],
        "zero_heads": any(block.pad for block in blocks),
    }
    if isinstance(placement, PackedShard):
        told["blocks"] = [block.size for block in blocks]
        told.update(layout=placement.layout, deinterleave=placement.deinterleave)
    elif placement.padded != size:
        told["padded"] = placement.padded
    full = np.arange(1, size + 1)
    expected = None
    if size or isinstance(placement, Shard) or placement.layout == "blocked":
        with suppress(AssertionError):  # the oracle's word for what cannot be
            expected = oracle.shards(full, tp, "packed_colwise", **told)
    if expected is None or refused(placement, size, tp):
        with pytest.raises(ValueError, match=r"% \d+ != 0|ranks share|take 0 each"):
            rank_pieces(placement, size, tp)
        return
    found = rank_pieces(placement, size, tp)
    assert [rows(pieces) for pieces in found] == [(part - 1).tolist() for part in expected]
    for pieces in found:  # neighbours are joined, nothing is empty
        assert all(piece.length for piece in pieces)
        for one, two in pairwise(pieces):
            assert one.stop != two.start or one.zeros or two.zeros
    # and verify's own definition says the same
    entry = placement_entry(placement)
    for rank, part in enumerate(expected):
        assert expected_rows(entry, size, tp, rank).tolist() == (part - 1).tolist()


def packed(
    *sizes: int, unit: int = 1, repeat: bool = False, layout: str = "blocked"
) -> PackedShard:
    return PackedShard(0, tuple(Block(s, unit, repeat) for s in sizes), layout)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("placement", "size", "reason"),
    [
        (packed(4, 4), 8, None),
        (packed(4, 4), 9, "blocks [4, 4] sum to 8, the dim has 9"),
        (packed(6, 4, unit=4), 10, "block of 6 is not whole units of 4"),
        (
            packed(2, 2, layout="per_head"),
            10,
            "groups of [2, 2] take 4 each, which does not divide",
        ),
        (packed(0, layout="per_head"), 10, "groups of [0] take 0 each"),
        (Shard(0, Block(8), 8), 6, "blocks [8] sum to 8, the dim has 6"),
    ],
)
def test_size_problem(placement: Shard | PackedShard, size: int, reason: str | None) -> None:
    found = size_problem(placement, size)
    assert found is None if reason is None else reason in str(found)


@pytest.mark.parametrize(
    ("placement", "size", "tp", "reason"),
    [
        (Replicate(), 7, 3, None),
        (Shard(0, Block(12, 4), 12), 12, 3, None),
        (Shard(0, Block(12, 4), 12), 12, 2, "3 units of 4 % 2 != 0"),
        (Shard(0, Block(12), 12), 12, 8, "12 units % 8 != 0"),
        (Shard(0, Block(8, 4, True), 8), 8, 4, None),
        (Shard(0, Block(12, 4, True), 12), 12, 4, "3 units of 4 % 4 != 0 and 4 % 3 != 0"),
        (Shard(0, Block(7), 8), 7, 3, "padded size 8 % 3 != 0"),
        (Shard(0, Block(7), 8), 7, 4, None),
        (packed(8, 6), 14, 4, "6 units % 4 != 0"),
        (packed(2, 2, layout="per_head"), 12, 2, "3 interleaved groups % 2 != 0"),
        (
            packed(2, 2, repeat=True, layout="per_kv_head"),
            12,
            4,
            "3 interleaved groups % 4 != 0 and 4 % 3 != 0",
        ),
        (
            PackedShard(0, (Block(6, 2), Block(2, 2, True)), "per_kv_head"),
            16,
            4,
            "3 units of 2 in a group that 2 ranks share",
        ),
    ],
)
def test_degree_problem(
    placement: Shard | PackedShard | Replicate, size: int, tp: int, reason: str | None
) -> None:
    assert degree_problem(placement, size, tp) == reason


def test_twelve_heads_over_eight() -> None:
    """The dim divides, the heads do not: 12 heads of 128."""
    assert degree_problem(Shard(0, Block(1536), 1536), 1536, 8) is None
    reason = degree_problem(Shard(0, Block(1536, 128), 1536), 1536, 8)
    assert reason == "12 units of 128 % 8 != 0"


@pytest.mark.parametrize(("size", "unit"), [(-1, 1), (4, 0)])
def test_not_a_block(size: int, unit: int) -> None:
    with pytest.raises(ValueError, match=f"size {size}, unit {unit}"):
        Block(size, unit)


def test_padding() -> None:
    piece = padding(3)
    assert piece.zeros
    assert piece.length == 3
    assert not Piece(0, 3).zeros
