"""Half-open n-d boxes of elements, and the checks on sets of them that every plan must pass."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Region:
    """A half-open box: elements with `start[d] <= index[d] < stop[d]` in every dim."""

    start: tuple[int, ...]
    stop: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.start) != len(self.stop):
            raise ValueError(f"start {self.start} and stop {self.stop} differ in length")
        if any(not 0 <= a <= b for a, b in zip(self.start, self.stop, strict=True)):
            raise ValueError(f"not a box: start {self.start}, stop {self.stop}")

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(b - a for a, b in zip(self.start, self.stop, strict=True))

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Region:
        return cls((0,) * len(shape), tuple(shape))

    @classmethod
    def span(cls, shape: Sequence[int], dim: int, start: int, stop: int) -> Region:
        """All of `shape`, but only [start, stop) along `dim`."""
        low, high = [0] * len(shape), list(shape)
        low[dim], high[dim] = start, stop
        return cls(tuple(low), tuple(high))

    def within(self, shape: Sequence[int]) -> bool:
        return len(shape) == len(self.stop) and all(
            b <= n for b, n in zip(self.stop, shape, strict=True)
        )

    def intersect(self, other: Region) -> Region | None:
        """The common box, or None where it has no element."""
        start = tuple(map(max, self.start, other.start))
        stop = tuple(map(min, self.stop, other.stop))
        if any(a >= b for a, b in zip(start, stop, strict=True)):
            return None
        return Region(start, stop)


def tiling_problem(regions: Iterable[Region], shape: Sequence[int]) -> str | None:
    """Why `regions` do not tile `shape` exactly once, or None where they do."""
    boxes = [box for box in regions if box.size]
    for box in boxes:
        if not box.within(shape):
            return f"{box} leaves shape {tuple(shape)}"
    boxes.sort(key=lambda box: box.start)
    for index, box in enumerate(boxes):
        for other in boxes[index + 1 :]:
            # Sorted by start: no later box can overlap once dim 0 is past this one's end.
            if box.stop and other.start[0] >= box.stop[0]:
                break
            if box.intersect(other) is not None:
                return f"{box} and {other} overlap"
    covered = sum(box.size for box in boxes)
    if covered != math.prod(shape):
        return f"{covered} of {math.prod(shape)} elements are covered"
    return None
