"""Every reader under damaged input: an error of shardc's, or what the judge says, and soon.

SHARDC_FUZZ=20000 pytest tests/test_fuzz.py tries that many inputs a target, new ones each time.
"""

from __future__ import annotations

import os
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fuzz import mutate, targets

COUNT = int(os.environ.get("SHARDC_FUZZ", "200"))
LONG = "SHARDC_FUZZ" in os.environ
HEAVY = ("loader",)  # those that need torch


def names() -> list[str]:
    return sorted(targets.TARGETS)


@pytest.mark.parametrize("name", names())
def test_seeds_are_accepted(name: str) -> None:
    if name in HEAVY:
        pytest.importorskip("torch")
    assert all(targets.TARGETS[name](seed) for seed in targets.seeds(name))


@pytest.mark.parametrize("name", names())
def test_damage(name: str) -> None:
    if name in HEAVY:
        pytest.importorskip("torch")
    target, seeds = targets.TARGETS[name], targets.seeds(name)
    accepted = 0

    @settings(max_examples=COUNT, derandomize=not LONG, database=None)
    @given(st.sampled_from(range(len(seeds))), st.randoms(use_true_random=True))
    def check(number: int, chance: random.Random) -> None:
        nonlocal accepted
        accepted += target(mutate.mutated(name, seeds[number], chance))

    check()
    assert all(target(seed) for seed in seeds)  # nothing is left damaged
    if name in ("header", "manifest", "config"):  # else hardly anything but the seed is sound
        assert accepted > COUNT // 50


@settings(max_examples=COUNT)
@given(st.binary(max_size=200))
def test_any_bytes(data: bytes) -> None:
    for name in names():
        if name not in HEAVY:
            targets.TARGETS[name](data)
