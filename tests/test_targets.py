"""The Neuron checks: degrees, memory a core, dtypes."""

from __future__ import annotations

from pathlib import Path

import pytest

import shardc
from shardc import targets
from shardc.planner import Plan
from tests.checkpoints import Data, component, manifest


def planned(tmp_path: Path, tp: int, dtype: str = "BF16") -> Plan:
    src = component(
        tmp_path / "src",
        {"up.weight": Data.count("BF16", (16, 4)), "norm.weight": Data.count(dtype, (4,))},
    )
    rules = manifest(tmp_path / "m.toml", [{"match": "up", "style": "colwise"}])
    return shardc.plan(src, tp, manifest=rules)


@pytest.mark.parametrize(
    ("target", "tp", "legal"),
    [
        ("trn1", 8, True),
        ("trn1", 4, False),
        ("inf2", 4, True),
        ("inf2", 16, False),
        ("trn2", 16, True),
        ("trn3", 16, True),
    ],
)
def test_degrees(tmp_path: Path, target: str, tp: int, legal: bool) -> None:
    problems = targets.check(planned(tmp_path, tp), targets.TARGETS[target])
    assert (problems == []) == legal
    assert legal or f"tp {tp}" in str(problems[0])


def test_memory_names_both_numbers(tmp_path: Path) -> None:
    plan = planned(tmp_path, 2)
    assert targets.rank_bytes(plan) == 16 * 4 * 2 // 2 + 4 * 2
    small = targets.Target("small", "small.1", None, 80, frozenset())
    (problem,) = targets.check(plan, small)
    assert "72 bytes, 64 of a core's 80" in str(problem)
    roomy = targets.Target("small", "small.1", None, 90, frozenset())
    assert targets.check(plan, roomy) == []


@pytest.mark.parametrize(
    ("dtype", "target", "lacks"),
    [
        ("F64", "trn2", True),
        ("F8_E4M3", "trn2", True),
        ("F8_E4M3", "trn3", False),
        ("C64", "trn3", True),
        ("I64", "trn1", False),
    ],
)
def test_dtypes_that_a_device_lacks(tmp_path: Path, dtype: str, target: str, lacks: bool) -> None:
    problems = targets.check(planned(tmp_path, 8, dtype), targets.TARGETS[target])
    assert [problem.where for problem in problems] == ["norm.weight"] * lacks
