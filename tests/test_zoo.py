"""Every class that has a manifest, run on ranks; and docs/models.md, which says so."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("diffusers")
pytest.importorskip("transformers")

from shardc.loaders.prove import TOLERANCE
from tests.zoo.case import Case, Published, cases
from tests.zoo.proof import prove
from tests.zoo.sizes import measure
from tests.zoo.table import DOCUMENT, documented, entries, unserved, weight_rows

FIRST = {case.class_name: case for case in reversed(list(cases()))}


OPTIONS = [case for case in cases() if FIRST[case.class_name] is not case]
SIZED = {one.class_name: one for one in reversed(entries())}


@pytest.mark.slow
@pytest.mark.parametrize("case", FIRST.values(), ids=lambda case: case.name)
def test_proven(case: Case, tmp_path: Path) -> None:
    """A class's first case, and all its degrees where eight ranks are one of them."""
    prove(case, tmp_path, briefly=8 not in case.ranks).check()


@pytest.mark.slow
@pytest.mark.parametrize("case", [c for c in OPTIONS if c.padded], ids=lambda case: case.name)
def test_proven_with_zero_heads(case: Case, tmp_path: Path) -> None:
    prove(case, tmp_path, briefly=True).check()


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("case", cases(), ids=lambda case: case.name)
def test_proven_whole(case: Case, tmp_path: Path) -> None:
    prove(case, tmp_path).check()


def test_names_are_unique() -> None:
    names = [case.name for case in cases()]
    assert len(names) == len(set(names))


def test_every_class_served_is_proven() -> None:
    assert unserved() == []


def test_the_document_lists_what_is_proven() -> None:
    """Its errors are those of the machine that wrote it; what else it says is checked here."""
    said = documented()
    assert said.keys() == FIRST.keys()
    assert all(error <= TOLERANCE for error in said.values())
    text = DOCUMENT.read_text()
    for case in cases():
        row = next(line for line in text.splitlines() if line.startswith(f"| `{case.class_name}` "))
        assert case.option in row
    libraries = [case.library for case in FIRST.values()]
    assert libraries.count("diffusers") >= 60
    assert libraries.count("transformers") >= 12


def in_the_document(one: Published) -> bool:
    return weight_rows({one.class_name: [measure(one)]})[-1] in DOCUMENT.read_text().splitlines()


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(SIZED)[::6])
def test_the_document_has_the_plan_of_the_weights(name: str) -> None:
    assert in_the_document(SIZED[name])


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("one", entries(), ids=lambda one: f"{one.class_name} {one.repo}")
def test_the_document_has_every_plan(one: Published) -> None:
    assert in_the_document(one)
