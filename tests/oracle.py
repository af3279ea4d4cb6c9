"""What each rank must hold, written from the definition of each style. numpy only.

Shares no code with shardc: here arrays are split into heads and put together again, where shardc
computes with ranges.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


def shards(
    full: Array,
    tp: int,
    style: str,
    *,
    dim: int | None = None,
    blocks: Sequence[int] | None = None,
    units: Sequence[int] = (1,),
    repeats: Sequence[bool] = (False,),
    layout: str = "blocked",
    deinterleave: bool = False,
    padded: int | None = None,
    bias: bool = False,
) -> list[Array]:
    """Each rank's array. `units` and `repeats`: one for all blocks, or one a block."""
    if style == "replicate" or (bias and style in ("rowwise", "packed_rowwise")):
        return [full] * tp
    if bias:
        dim = 0
    elif dim is None:
        dim = 1 if style in ("rowwise", "packed_rowwise") else 0
    if padded is not None:
        extra = list(full.shape)
        extra[dim] = padded - full.shape[dim]
        return np.split(np.concatenate([full, np.zeros(extra, full.dtype)], axis=dim), tp, axis=dim)
    sizes = [full.shape[dim]] if blocks is None else list(blocks)
    many = len(sizes)
    units = list(units) * many if len(units) == 1 else list(units)
    repeats = list(repeats) * many if len(repeats) == 1 else list(repeats)
    if layout == "blocked":
        return [_of_blocks(full, dim, sizes, units, repeats, tp, rank) for rank in range(tp)]
    groups = np.split(full, full.shape[dim] // sum(sizes), axis=dim)
    found = []
    for rank in range(tp):
        if len(groups) % tp == 0:
            each = len(groups) // tp
            mine = [cut(g, dim, sizes) for g in groups[rank * each : (rank + 1) * each]]
            if deinterleave:
                ordered = [group[b] for b in range(many) for group in mine]
            else:
                ordered = [block for group in mine for block in group]
            found.append(np.concatenate(ordered, axis=dim))
        else:
            assert tp % len(groups) == 0, "ranks would share groups unevenly"
            sharers = tp // len(groups)
            group = groups[rank // sharers]
            found.append(_of_blocks(group, dim, sizes, units, repeats, sharers, rank % sharers))
    return found


def cut(array: Array, dim: int, sizes: Sequence[int]) -> list[Array]:
    """The blocks of `array` along `dim`."""
    return np.split(array, np.cumsum(sizes)[:-1], axis=dim)


def _of_blocks(
    array: Array,
    dim: int,
    sizes: Sequence[int],
    units: Sequence[int],
    repeats: Sequence[bool],
    tp: int,
    rank: int,
) -> Array:
    taken = []
    for block, unit, repeat in zip(cut(array, dim, sizes), units, repeats, strict=True):
        count = block.shape[dim] // unit
        heads = np.split(block, count, axis=dim) if count else []
        if count % tp:
            assert repeat, "units would be cut"
            assert count, "nothing to repeat"
            assert tp % count == 0, "units would repeat unevenly"
            heads = [head for head in heads for _ in range(tp // count)]
        each = len(heads) // tp
        taken += heads[rank * each : (rank + 1) * each]
    if not taken:
        empty = list(array.shape)
        empty[dim] = 0
        return np.zeros(empty, array.dtype)
    return np.concatenate(taken, axis=dim)
