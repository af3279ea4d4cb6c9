"""A rule applied: sizes out of config.json, and where a tensor that it matches goes. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

from shardc import expression
from shardc.errors import Problem
from shardc.layout import REPLICATE, Block, PackedShard, Placement, Shard, size_problem
from shardc.manifest import PACKED, PADDED, ROWWISE, Local, Manifest, Rule, Value, as_tuple

MAX_NESTED = 32  # dims that are made of other dims
NULL = "null"  # how conditions spell a key that is null or missing


class Dims:
    """The sizes that a manifest's expressions see for one config.json; with `tp`, on a rank.

    pad_heads: where heads do not divide, there are zero heads.
    """

    def __init__(
        self,
        manifest: Manifest,
        config: Mapping[str, Any],
        tp: int | None = None,
        *,
        pad_heads: bool = False,
    ) -> None:
        self._tp = tp
        self.pad_heads = pad_heads
        self._manifest = manifest
        self._config = config
        self._open: list[str] = []
        self._known: dict[str, int] = {}  # without it, sizes made of sizes take exponential time

    def value(
        self,
        size: int | str,
        own: Mapping[str, Any] | None = None,
        number: int | None = None,
    ) -> int:
        """A plain integer, or the value of an expression; ExpressionError says why not.

        own: what `self.NAME` stands for. number: what `number` does.
        """
        if isinstance(size, int):
            return size

        def lookup(name: str) -> Any:
            if own is not None and name.startswith("self."):
                return own.get(name.removeprefix("self."))
            if number is not None and name == "number":
                return number
            return self._lookup(name)

        return expression.evaluate(size, lookup, self._tp, self.pad_heads)

    def problems(self) -> list[Problem]:
        """Every dim of the manifest that has no value for this config."""
        found = []
        for key, size in self._manifest.dims.items():
            try:
                self.value(size)
            except expression.ExpressionError as error:
                found.append(Problem(f"{self._manifest.name}: dims.{key}", str(error)))
        return found

    def applies(self, entry: Rule | Local) -> bool:
        """Whether this config is one that a rule or a local is for: `when` and `unless`."""
        return all(self._is(k, v) for k, v in entry.when.items()) and not any(
            self._is(k, v) for k, v in entry.unless.items()
        )

    def _is(self, name: str, wanted: Value | tuple[Value, ...]) -> bool:
        value = self._configured(name)
        if value is None:
            value = self._manifest.defaults.get(name, NULL)
        return value in as_tuple(wanted)

    def _configured(self, name: str) -> Any:
        value: Any = self._config
        for part in name.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        return value

    def _lookup(self, name: str) -> Any:
        if name in self._manifest.dims:
            return self._nested(name, self._manifest.dims[name])
        value = self._configured(name)
        if value is None and name in self._manifest.defaults:
            default = self._manifest.defaults[name]
            if isinstance(default, str) and isinstance(self._configured(default), list):
                return self._configured(default)  # an alias of a list, to sum
            return self._nested(name, default)
        if value is None:
            raise expression.ExpressionError(f"config.json has no {name!r}")
        if isinstance(value, list):
            return value
        try:
            return expression.as_number(value)
        except expression.ExpressionError as error:
            raise expression.ExpressionError(f"config.json's {name!r}: {error}") from error

    def _nested(self, name: str, size: int | str) -> int:
        if name in self._open:
            raise expression.ExpressionError(f"{' -> '.join([*self._open, name])} is a circle")
        if len(self._open) == MAX_NESTED:
            raise expression.ExpressionError(f"{name!r} is {MAX_NESTED} sizes made of sizes deep")
        if name in self._known:
            return self._known[name]
        self._open.append(name)
        try:
            self._known[name] = self.value(size)
            return self._known[name]
        finally:
            self._open.pop()


def place(
    rule: Rule,
    dims: Dims,
    *,
    shape: tuple[int, ...],
    kind: Literal["weight", "bias", "raw"],
    tp: int,
    number: int | None = None,
) -> Placement | str:
    """How a tensor that `rule` matches lies across `tp` ranks, or why the rule does not fit it.

    `kind`: weight or bias of a matched module, or a parameter that the pattern names itself.
    `number`: the first number in its name, such as its block's.
    The degree matters only for padding; whether it divides is `layout.degree_problem`'s to say.
    """
    if rule.style == "replicate" or (kind == "bias" and rule.style in ROWWISE):
        return REPLICATE
    dim = _dim(rule, shape, kind)
    if isinstance(dim, str):
        return dim
    size = shape[dim]

    def values(given: Any) -> list[int]:
        return [dims.value(one, number=number) for one in as_tuple(given)]

    try:
        sizes = [size] if rule.blocks is None else values(rule.blocks)
        units = values(rule.unit)
        groups: list[int | None] = [*values(rule.groups)] or [None]
        pad_to = None if rule.pad_to is None else dims.value(rule.pad_to)
    except expression.ExpressionError as error:
        return str(error)
    if pad_to is None and dims.pad_heads and rule.style in PADDED and set(units) == {1}:
        pad_to = 1
    if min((*units, 1 if pad_to is None else pad_to)) < 1:
        return f"unit {units} and pad_to {pad_to} must be at least 1"
    if any(count is not None and count < 1 for count in groups):
        return f"groups {groups} must be at least 1"
    if min(sizes) < 0:
        return f"blocks {sizes} must not be negative"
    repeats = as_tuple(rule.repeat)
    blocks = tuple(
        Block(
            block,
            units[i % len(units)],
            repeats[i % len(repeats)],
            groups[i % len(groups)],
            dims.pad_heads and pad_to is None and rule.layout == "blocked",
        )
        for i, block in enumerate(sizes)
    )
    placement: Placement
    if rule.style in PACKED:
        placement = PackedShard(dim, blocks, rule.layout, rule.deinterleave)
    else:
        multiple = 1 if pad_to is None else math.lcm(pad_to, tp)
        padded = size if pad_to is None else -(-size // multiple) * multiple
        placement = Shard(dim, blocks[0], padded)
    reason = size_problem(placement, size)
    return placement if reason is None else f"along dim {dim}, {reason}"


def _dim(rule: Rule, shape: tuple[int, ...], kind: str) -> int | str:
    if kind == "bias":
        return 0 if len(shape) == 1 else f"a bias of shape {list(shape)} is not 1-d"
    if rule.dim is not None:
        dim = rule.dim + len(shape) if rule.dim < 0 else rule.dim
        if not 0 <= dim < len(shape):
            return f"dim {rule.dim} is outside shape {list(shape)}"
        return dim
    if kind == "raw" and len(shape) > 1:
        return f"a raw parameter of shape {list(shape)} needs a declared `dim`"
    if rule.style == "sharded_norm" or (kind == "raw" and len(shape) == 1):
        return 0 if len(shape) == 1 else f"a norm's weight of shape {list(shape)} is not 1-d"
    if len(shape) < 2:
        return f"{rule.style} needs a weight of 2 dims or more, this one has shape {list(shape)}"
    return 1 if rule.style in ROWWISE else 0
