"""The plan's checkers hold on sound plans, and each one sees the fault that it is there for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

import shardc
from shardc import check
from shardc.layout import Piece, Replicate
from shardc.planner import ComponentPlan, PlannedTensor
from tests.checkpoints import Data, component, manifest

RULES = [
    {
        "match": "attn.qkv",
        "style": "packed_colwise",
        "blocks": [8, 4, 4],
        "unit": 2,
        "repeat": [False, True, True],
    },
    {"match": "attn.out", "style": "rowwise", "unit": 2},
    {"match": "up", "style": "colwise"},
    {"match": "embed", "style": "vocab_parallel", "pad_to": 1},
    {
        "match": "fused",
        "style": "packed_colwise",
        "blocks": [2, 2],
        "layout": "per_head",
        "deinterleave": True,
    },
]
TENSORS = {
    "attn.qkv.weight": Data.count("F16", (16, 6)),
    "attn.qkv.bias": Data.count("F16", (16,)),
    "attn.out.weight": Data.count("F16", (6, 8)),
    "attn.out.bias": Data.count("F32", (6,)),
    "up.weight": Data.count("U8", (8, 3)),
    "up.bias": Data.count("U8", (8,)),
    "embed.weight": Data.count("F16", (7, 2)),
    "fused.weight": Data.count("F16", (16, 2)),
    "norm.weight": Data.count("F32", (6,)),
}


@pytest.fixture
def part(tmp_path: Path) -> ComponentPlan:
    src = component(tmp_path / "src", TENSORS)
    rules = manifest(tmp_path / "m.toml", RULES)
    return shardc.plan(src, 4, manifest=rules).components[0]


def find(part: ComponentPlan, name: str) -> PlannedTensor:
    return next(planned for planned in part.tensors if planned.tensor.name == name)


def test_a_sound_plan_has_no_problem(part: ComponentPlan) -> None:
    assert check.check_component(part) == []


def swapped(planned: PlannedTensor) -> PlannedTensor:
    """Every rank's pieces in reverse order, and the copies with them."""
    pieces = tuple(tuple(reversed(held)) for held in planned.pieces)
    return replace(planned, pieces=pieces)


def first_for_all(planned: PlannedTensor) -> PlannedTensor:
    return replace(planned, pieces=(planned.pieces[0],) * len(planned.pieces))


def shifted(planned: PlannedTensor) -> PlannedTensor:
    """The ranks cut one row further on, inside a unit."""
    pieces = tuple(
        tuple(Piece(p.start + (p.start > 0), p.stop + (p.stop < 16)) for p in held)
        for held in planned.pieces
    )
    return replace(planned, pieces=pieces)


def wrong_target(planned: PlannedTensor) -> PlannedTensor:
    """Rank 1's shard is filled from rank 0's local rows twice over."""
    one = planned.targets[1]
    assert one.spans is not None
    spans = tuple(replace(span, at=0) for span in one.spans)
    return replace(
        planned, targets=(planned.targets[0], replace(one, spans=spans), *planned.targets[2:])
    )


@pytest.mark.parametrize(
    ("checker", "name", "break_it", "says"),
    [
        (check.blocks_in_order, "attn.qkv.weight", swapped, "behind row"),
        (check.ranks_tile_source, "up.weight", first_for_all, "overlap"),
        (check.ranks_tile_source, "attn.qkv.weight", first_for_all, "on no rank"),
        (check.units_are_whole, "attn.qkv.weight", shifted, "cuts a unit"),
        (check.destinations_tile_shards, "attn.qkv.weight", wrong_target, "overlap"),
    ],
)
def test_each_checker_sees_its_fault(
    part: ComponentPlan,
    checker: Callable[[PlannedTensor], str | None],
    name: str,
    break_it: Callable[[PlannedTensor], PlannedTensor],
    says: str,
) -> None:
    planned = find(part, name)
    assert checker(planned) is None
    reason = checker(break_it(planned))
    assert reason is not None
    assert says in reason


def test_a_bias_cut_unlike_its_weight_is_seen(part: ComponentPlan) -> None:
    moved = [first_for_all(p) if p.tensor.name == "up.bias" else p for p in part.tensors]
    found = list(check.bias_follows_weight(replace(part, tensors=tuple(moved))))
    assert [name for name, _ in found] == ["up.bias"]


def test_a_header_that_says_something_else_is_seen(part: ComponentPlan) -> None:
    file = part.files[0]
    assert check.header_matches(file) is None
    assert check.header_matches(replace(file, tensors=file.tensors[:-1])) is not None
    # the same length, another name
    renamed = replace(file, header=file.header.replace(b'"up.weight"', b'"uq.weight"'))
    assert check.header_matches(renamed) is not None


def test_replicated_tensors_have_one_target(part: ComponentPlan) -> None:
    planned = find(part, "norm.weight")
    assert isinstance(planned.placement, Replicate)
    assert check.destinations_tile_shards(replace(planned, targets=planned.targets * 2)) is None
    assert len(planned.targets) == 1
