"""Which rule of a manifest each tensor of a checkpoint falls under. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from shardc import expression, pattern
from shardc.checkpoint import Component, Tensor
from shardc.errors import Problem
from shardc.header import DTYPE_BITS
from shardc.layout import (
    REPLICATE,
    Placement,
    Replicate,
    blocks_of,
    degree_problem,
    share_of,
)
from shardc.manifest import Manifest, Rule, as_tuple
from shardc.placing import Dims, place

TensorKind = Literal["weight", "bias", "raw"]

# Linears whose output is chunked along the sharded dim right after: AdaLN and modulation.
_CHUNKED = re.compile(r"(^|\.)(\w*modulation\w*(\.(\d+|linear))?|\w*_mod\.\d+|norm\w*\.linear)$")

# All that decides where a tensor goes: its rule, what it is to it, its shape, and its block's
# number where the rule's sizes depend on that.
_Sort = tuple[int | None, TensorKind, tuple[int, ...], int | None]


@dataclass(frozen=True, slots=True)
class Match:
    """A tensor with its rule's number and what it is to that rule; rule None is replicate."""

    tensor: Tensor
    rule: int | None
    kind: TensorKind


@dataclass(frozen=True, slots=True)
class Resolution:
    """Every tensor's match, the optional patterns that found nothing, and all problems."""

    matches: tuple[Match, ...]
    unused: tuple[str, ...]
    problems: tuple[Problem, ...]


def resolve(component: Component, manifest: Manifest, dims: Dims, profile: str) -> Resolution:
    """Match every tensor with exactly one rule that applies, or with none (replicate)."""
    owners: list[tuple[int, str, str]] = []  # rule, spelling of its prefix, text
    compiled: list[pattern.Components] = []
    for number, rule in enumerate(manifest.rules):
        if rule.profile not in (None, profile) or not dims.applies(rule):
            continue
        for text in rule.patterns:
            for spelling, components in pattern.expand(text, manifest.prefixes):
                prefix = f"{text.split('.')[0]}={spelling}" if text.startswith("$") else ""
                owners.append((number, prefix, ".".join(components)))
                compiled.append(components)
    index = pattern.Index(compiled)
    problems: list[Problem] = []
    matches = []
    used: set[int] = set()
    for tensor in component.tensors:
        parts = tuple(tensor.name.split("."))
        # A pattern that names the parameter itself goes before one that names its module.
        kind: TensorKind = "raw"
        found = list(index.matches(parts))
        if not found:
            found = list(index.matches(parts[:-1]))
            kind = "bias" if parts[-1] == "bias" else "weight"
        used.update(found)
        rules = sorted({owners[number][0] for number in found})
        if len(rules) > 1:
            names = " and ".join(manifest.where(rule) for rule in rules)
            problems.append(Problem(tensor.name, f"matches more than one rule: {names}"))
        if rules and kind != "raw" and parts[-1] not in ("weight", "bias"):
            problems.append(
                Problem(
                    tensor.name,
                    f"{manifest.where(rules[0])} covers the weight and the bias of its module, "
                    f"but says nothing of {parts[-1]!r}",
                    "give it a rule of its own",
                )
            )
        matches.append(Match(tensor, rules[0] if rules else None, kind))
    unmatched, ambiguous = _unmatched(manifest, owners, used)
    problems += ambiguous
    problems += [
        Problem(manifest.where(rule), f"{text} matches no tensor of {component.path}")
        for rule, text in unmatched
        if not manifest.rules[rule].optional
    ]
    unused = tuple(text for rule, text in unmatched if manifest.rules[rule].optional)
    return Resolution(tuple(matches), unused, tuple(problems))


def _unmatched(
    manifest: Manifest, owners: list[tuple[int, str, str]], used: set[int]
) -> tuple[list[tuple[int, str]], list[Problem]]:
    """Patterns that found nothing under the spelling in use, and prefixes spelled two ways."""
    spelled: dict[str, set[str]] = {}
    for number in used:
        prefix = owners[number][1]
        if prefix:
            spelled.setdefault(prefix.split("=")[0], set()).add(prefix)
    problems = [
        Problem(manifest.name, f"prefix {name} is spelled more than one way: {sorted(found)}")
        for name, found in spelled.items()
        if len(found) > 1
    ]
    unmatched = []
    absent: set[tuple[int, str]] = set()
    for number, (rule, prefix, text) in enumerate(owners):
        if number in used:
            continue
        name = prefix.split("=")[0]
        if not prefix or prefix in spelled.get(name, ()):
            unmatched.append((rule, text))
        elif name not in spelled and (rule, name) not in absent:
            absent.add((rule, name))  # no spelling is in use: one complaint a rule, not one each
            unmatched.append((rule, f"{text} (nor any other spelling of {name})"))
    return unmatched, problems


def placements(
    matches: Sequence[Match], manifest: Manifest, dims: Dims, tp: int
) -> tuple[list[Placement | None], list[Problem]]:
    """Each tensor's placement at `tp` (None where it has a problem), and all problems."""
    placed: list[Placement | None] = []
    misfits: dict[tuple[int, str], list[Tensor]] = {}
    weights: dict[str, int] = {}  # module -> size of its weight's sharded dim
    biases: list[tuple[Tensor, int, int]] = []
    pads: dict[int, dict[int, str]] = {}  # unpadded vocabulary -> pad_to -> tensor
    known: dict[_Sort, Placement | str] = {}
    for match, sort in zip(matches, _sorts(matches, manifest), strict=True):
        tensor = match.tensor
        if match.rule is None:
            placed.append(REPLICATE)
            continue
        rule = manifest.rules[match.rule]
        if sort not in known:
            known[sort] = place(
                rule, dims, shape=tensor.shape, kind=match.kind, tp=tp, number=sort[3]
            )
        found = known[sort]
        reason = found if isinstance(found, str) else _misfit(match, rule, found, tp)
        if reason is not None:
            misfits.setdefault((match.rule, reason), []).append(tensor)
        placed.append(None if isinstance(found, str) or reason else found)
        if isinstance(found, str | Replicate):
            continue
        size = tensor.shape[found.dim]
        if match.kind == "weight":
            weights[tensor.name.rpartition(".")[0]] = size
        elif match.kind == "bias":
            biases.append((tensor, size, match.rule))
        if rule.style == "vocab_parallel" or rule.pad_to is not None:
            pad = 0 if rule.pad_to is None else dims.value(rule.pad_to)
            pads.setdefault(size, {}).setdefault(pad, tensor.name)
    problems = [
        Problem(_where(tensors, manifest.where(rule)), reason)
        for (rule, reason), tensors in misfits.items()
    ]
    for tensor, size, number in biases:
        weight = weights.get(tensor.name.rpartition(".")[0], size)
        if weight != size:
            where = _where([tensor], manifest.where(number))
            problems.append(Problem(where, f"the bias has {size} elements, its weight {weight}"))
    for size, by_pad in pads.items():
        if len(by_pad) > 1:
            told = ", ".join(f"{name} pad_to {pad or 'unset'}" for pad, name in by_pad.items())
            problems.append(
                Problem(manifest.name, f"one vocabulary of {size} is padded two ways: {told}")
            )
    if dims.pad_heads:
        problems += _ungrouped(matches, placed, manifest, tp)
    return placed, problems


def number_in(name: str) -> int | None:
    """The first component of a name that is a number: the number of its block."""
    return next((int(part) for part in name.split(".") if part.isdecimal()), None)


def _depends_on_number(rule: Rule) -> bool:
    sizes = (*as_tuple(rule.blocks), *as_tuple(rule.unit), *as_tuple(rule.groups))
    return any("number" in expression.names(size) for size in sizes if isinstance(size, str))


def _sorts(matches: Iterable[Match], manifest: Manifest) -> Iterator[_Sort]:
    numbered = {n for n, rule in enumerate(manifest.rules) if _depends_on_number(rule)}
    for match in matches:
        number = number_in(match.tensor.name) if match.rule in numbered else None
        yield match.rule, match.kind, match.tensor.shape, number


def _ungrouped(
    matches: Iterable[Match], placed: Iterable[Placement | None], manifest: Manifest, tp: int
) -> Iterator[Problem]:
    """Rules of heads that might not meet their keys and values once there are zero heads.

    Where head counts differ (grouped queries, towers), each rule must say what it pads by.
    """
    counts: set[int] = set()
    padded = False
    silent: dict[int, Tensor] = {}
    for match, placement in zip(matches, placed, strict=True):
        if placement is None or isinstance(placement, Replicate) or match.rule is None:
            continue
        for block in blocks_of(placement):
            share = share_of(block.units, tp, block.groups, block.repeat, block.pad)
            if block.unit == 1 or share is None:
                continue
            counts.add(block.units)
            repeated = block.repeat and share[1] > 1
            padded |= share[0] * tp != block.units and not repeated
            if block.groups is None and not block.repeat:
                silent.setdefault(match.rule, match.tensor)
    if padded and len(counts) > 1:
        for rule, tensor in silent.items():
            yield Problem(
                _where([tensor], manifest.where(rule)),
                f"zero heads among {sorted(counts)} heads: the rule must say its `groups`",
            )


def _where(tensors: list[Tensor], rule: str) -> str:
    """The first of the tensors that share one problem, how many more there are, and their rule."""
    first = tensors[0]
    more = f" and {len(tensors) - 1} more" if len(tensors) > 1 else ""
    return f"{first.name} {first.dtype} {list(first.shape)}{more}, {rule}"


def _misfit(match: Match, rule: Rule, placement: Placement, tp: int) -> str | None:
    tensor = match.tensor
    if isinstance(placement, Replicate):
        return None
    if DTYPE_BITS[tensor.dtype] < 8:
        return f"{tensor.dtype} packs several elements into a byte, and is carried whole only"
    module = tensor.name.rpartition(".")[0]
    if (
        rule.style in ("colwise", "packed_colwise")
        and match.kind != "raw"
        and _CHUNKED.search(module)
    ):
        return (
            f"{module} is a modulation whose output is chunked: {rule.style} would scramble it; "
            "colwise_gather or replicate it"
        )
    reason = degree_problem(placement, tensor.shape[placement.dim], tp)
    return None if reason is None else f"cannot be cut at tp {tp}: {reason}"


def legal_degrees(
    resolution: Resolution, manifest: Manifest, dims: Dims, limit: int = 64
) -> dict[int, str | None]:
    """For each degree to `limit`: None where it is legal, else the first reason why not."""
    distinct: dict[_Sort, Match] = {}
    for match, sort in zip(resolution.matches, _sorts(resolution.matches, manifest), strict=True):
        distinct.setdefault(sort, match)
    degrees: dict[int, str | None] = {}
    for tp in range(1, limit + 1):
        _, problems = placements(list(distinct.values()), manifest, dims, tp)
        degrees[tp] = None if not problems else str(problems[0])
    return degrees
