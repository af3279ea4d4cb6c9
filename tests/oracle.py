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
    zero_heads: bool = False,
    groups: Sequence[int | None] = (None,),
    bias: bool = False,
) -> list[Array]:
    """Each rank's array. `units`, `repeats` and `groups`: one for all blocks, or one a block.

    zero_heads: each group gets as many as make the ranks that share it equal; where ranks do not
    share groups, zero groups come last.
    """
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
    if layout == "blocked" and zero_heads:
        groups = list(groups) * many if len(groups) == 1 else list(groups)
        full, sizes, repeats = _with_zero_heads(full, dim, sizes, units, repeats, groups, tp)
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


def _with_zero_heads(
    full: Array,
    dim: int,
    sizes: Sequence[int],
    units: Sequence[int],
    repeats: Sequence[bool],
    groups: Sequence[int | None],
    tp: int,
) -> tuple[Array, list[int], list[bool]]:
    """The array as it would be with heads that divide, its block sizes, and what still repeats."""
    made, still = [], []
    for block, unit, repeat, count in zip(
        cut(full, dim, sizes), units, repeats, groups, strict=True
    ):
        heads = np.split(block, block.shape[dim] // unit, axis=dim)
        zero = np.zeros_like(heads[0])
        count = count or len(heads)
        each = len(heads) // count
        families = [heads[i * each : (i + 1) * each] for i in range(count)]
        if count % tp and tp % count == 0:
            if not (repeat and each == 1):
                for family in families:
                    family += [zero] * (-each % (tp // count))
                repeat = False
        else:
            families += [[zero] * each for _ in range(-count % tp)]
            repeat = False
        made.append(np.concatenate([head for family in families for head in family], axis=dim))
        still.append(repeat)
    return np.concatenate(made, axis=dim), [m.shape[dim] for m in made], still


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
