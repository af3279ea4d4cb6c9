"""Manifests that extend others: what is taken, replaced and added, and what is refused."""

from __future__ import annotations

import tomllib

import pytest

from shardc.errors import ManifestError
from shardc.manifest import parse_manifest

BASE = """
schema = 1
library = "diffusers"
class = "Base"
keep_in_fp32 = ["norm"]
[dims]
inner = "heads * 8"
mlp = 64
[[rule]]
match = "a"
style = "colwise"
[[rule]]
match = "b"
style = "rowwise"
[[local]]
match = "attn"
set = { heads = "local(heads)" }
"""
CHILD = """
extends = "Base"
class = "Child"
[dims]
mlp = 128
[[rule]]
match = "c"
style = "colwise"
[[rule]]
match = "a"
style = "replicate"
"""


def texts(**more: str) -> dict[str, str]:
    return {"Base": BASE, **more}


def test_own_entries_go_before_inherited_ones() -> None:
    found = parse_manifest(CHILD, "Child.toml", texts().get)
    assert found.classes == ("Child",)
    assert found.keep_in_fp32 == ("norm",)
    assert found.dims == {"inner": "heads * 8", "mlp": 128}
    assert [(r.match, r.style) for r in found.rules] == [
        ("b", "rowwise"),
        ("c", "colwise"),
        ("a", "replicate"),
    ]
    assert [local.match for local in found.locals] == ["attn"]


def test_places_are_those_of_the_file_that_says_it() -> None:
    found = parse_manifest(CHILD, "Child.toml", texts().get)
    assert [found.where(number) for number in range(3)] == [
        "Base.toml:12 (rule 2)",
        "Child.toml:6 (rule 1)",
        "Child.toml:9 (rule 2)",
    ]


def test_the_text_stands_alone() -> None:
    found = parse_manifest(CHILD, "Child.toml", texts().get)
    assert "extends" not in tomllib.loads(found.text)
    again = parse_manifest(found.text, "Child.toml")
    assert (again.rules, again.locals, again.dims) == (found.rules, found.locals, found.dims)
    assert again.digest == found.digest


def test_a_chain_of_three() -> None:
    grandchild = 'extends = "Child"\nclass = "Third"\n'
    found = parse_manifest(grandchild, "Third.toml", texts(Child=CHILD).get)
    assert [r.match for r in found.rules] == ["b", "c", "a"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('extends = "Gone"\n', "x.toml: extends 'Gone', which is no bundled manifest"),
        ("extends = 3\n", "x.toml: extends 3, which is no bundled manifest"),
        ('extends = "Loop"\n', "Loop.toml: is 4 manifests deep: a circle?"),
        ('extends = "Base"\nrule = 3\n', "x.toml: rule: input should be a valid tuple"),
        (
            'extends = "Base"\n[[rule]]\nmatch = "z"\nstyle = "bent"\n',
            "x.toml:2 (rule 1): style: input should be 'colwise'",
        ),
    ],
)
def test_refused(text: str, message: str) -> None:
    with pytest.raises(ManifestError) as caught:
        parse_manifest(text, "x.toml", texts(Loop='extends = "Loop"\n').get)
    assert message in str(caught.value)
