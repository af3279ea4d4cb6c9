"""Boxes, and what counts as a tiling; numpy is the judge."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardc.region import Region, tiling_problem


@st.composite
def boxes(draw: st.DrawFn) -> tuple[Region, tuple[int, ...]]:
    shape = tuple(draw(st.lists(st.integers(0, 4), max_size=4)))
    pairs = [sorted(draw(st.tuples(st.integers(0, n), st.integers(0, n)))) for n in shape]
    return Region(tuple(a for a, _ in pairs), tuple(b for _, b in pairs)), shape


def at(array: np.ndarray[Any, Any], region: Region) -> np.ndarray[Any, Any]:
    return array[tuple(slice(a, b) for a, b in zip(region.start, region.stop, strict=True))]


@given(boxes(), boxes())
def test_intersection(one: tuple[Region, tuple[int, ...]], two: tuple[Region, Any]) -> None:
    a, b = one[0], two[0]
    if len(a.start) != len(b.start):
        return
    shape = tuple(map(max, one[1], two[1]))
    marks = np.zeros((*shape, 1), int)  # one dim more, so that a slice is never a scalar
    at(marks, a)[...] += 1
    at(marks, b)[...] += 1
    common = a.intersect(b)
    assert (marks == 2).sum() == (0 if common is None else common.size)
    if common is not None:
        assert (at(marks, common) == 2).all()


def test_whole_and_span() -> None:
    assert Region.whole((2, 3)) == Region((0, 0), (2, 3))
    span = Region.span((2, 6, 4), 1, 2, 5)
    assert span == Region((0, 2, 0), (2, 5, 4))
    assert (span.shape, span.size) == ((2, 3, 4), 24)
    assert span.within((2, 5, 4))
    assert not span.within((2, 4, 4))
    assert not span.within((2, 5))
    assert Region.whole(()).size == 1


@pytest.mark.parametrize(
    ("start", "stop", "message"),
    [
        ((0,), (1, 2), "differ in length"),
        ((2,), (1,), "not a box"),
        ((-1,), (1,), "not a box"),
    ],
)
def test_not_a_box(start: tuple[int, ...], stop: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Region(start, stop)


@st.composite
def grids(draw: st.DrawFn) -> tuple[list[Region], tuple[int, ...]]:
    """A true tiling: a shape cut by a grid."""
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)))
    edges = [sorted({0, n, *draw(st.lists(st.integers(0, n), max_size=2))}) for n in shape]
    cells = itertools.product(*(list(itertools.pairwise(e)) for e in edges))
    found = [Region(tuple(a for a, _ in c), tuple(b for _, b in c)) for c in cells]
    return draw(st.permutations(found)), shape


@given(grids(), st.data())
def test_tiling(case: tuple[list[Region], tuple[int, ...]], data: st.DataObject) -> None:
    regions, shape = case
    assert tiling_problem(regions, shape) is None
    number = data.draw(st.integers(0, len(regions) - 1))
    missing = [r for i, r in enumerate(regions) if i != number]
    reason = tiling_problem(missing, shape)
    total = math.prod(shape)
    assert reason == f"{total - regions[number].size} of {total} elements are covered"
    assert "overlap" in str(tiling_problem([*regions, regions[number]], shape))
    bigger = tuple(n + 1 for n in shape)
    assert "elements are covered" in str(tiling_problem(regions, bigger))
    outside = Region(shape, tuple(n + 1 for n in shape))
    assert "leaves shape" in str(tiling_problem([*regions, outside], shape))


def test_overlap_is_found_behind_the_first_dim() -> None:
    """Two boxes that start apart in dim 1 and overlap there; the sum of sizes would fit."""
    regions = [Region((0, 0), (2, 2)), Region((0, 1), (2, 3)), Region((0, 3), (1, 4))]
    assert "overlap" in str(tiling_problem(regions, (2, 4)))


def test_empty_boxes_do_not_count() -> None:
    assert tiling_problem([Region((0, 0), (0, 3))], (0, 3)) is None
    assert tiling_problem([Region.whole(())], ()) is None
    assert tiling_problem([], (2,)) == "0 of 2 elements are covered"
