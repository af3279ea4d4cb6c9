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


@pytest.mark.slow
@pytest.mark.parametrize("case", cases(), ids=lambda case: case.name)
def test_proven(case: Case, tmp_path: Path) -> None:
    """A class's first case whole, its options briefly."""
    prove(case, tmp_path, briefly=FIRST[case.class_name] is not case).check()


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


@pytest.mark.slow
@pytest.mark.parametrize("one", entries(), ids=lambda one: f"{one.class_name} {one.repo}")
def test_the_document_has_the_plan_of_the_weights(one: Published) -> None:
    assert weight_rows({one.class_name: [measure(one)]})[-1] in DOCUMENT.read_text().splitlines()
