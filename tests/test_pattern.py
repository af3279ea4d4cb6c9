"""Module patterns: what they expand to, and that the index finds what trying each would."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardc.pattern import Index, PatternError, expand

PREFIXES = {"decoder": ["model", "", "a.b"]}


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("a.b", ["a.b"]),
        ("blocks.*.attn", ["blocks.*.attn"]),
        ("a.{b,c}", ["a.b", "a.c"]),
        ("{a, b}.{c,d}", ["a.c", "a.d", "b.c", "b.d"]),
        ("a.to_{q,k.0}", ["a.to_q", "a.to_k.0"]),
        ("$decoder.x", ["model.x", "x", "a.b.x"]),
        ("{x.y,z}", ["x.y", "z"]),
        ("net.0.proj-in", ["net.0.proj-in"]),
    ],
)
def test_expand(pattern: str, expected: list[str]) -> None:
    assert [".".join(components) for _, components in expand(pattern, PREFIXES)] == expected


def test_spelling_of_the_prefix() -> None:
    assert [spelling for spelling, _ in expand("$decoder.x", PREFIXES)] == ["model", "", "a.b"]
    assert [spelling for spelling, _ in expand("x", PREFIXES)] == [""]


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("", "'' is no name component"),
        ("a..b", "'' is no name component"),
        ("a.b*", "'b\\*' is no name component: `\\*` stands for a whole one"),
        ("a.**", "is no name component"),
        ("a.{b", "'{b' is no name component"),
        ("a.{b,{c,d}}", "is no name component"),
        ("a.[0]", "is no name component"),
        ("a b", "is no name component"),
        ("$other.x", "prefix \\$other is not declared in \\[prefix\\]"),
        ("{a,b}" * 9, "512 alternatives, the limit is 256"),
        ("{a,b,c,d,e,f,g,h}.{a,b,c,d,e,f,g,h}.{a,b,c,d,e}", "320 alternatives, the limit is 256"),
    ],
)
def test_refused(pattern: str, message: str) -> None:
    with pytest.raises(PatternError, match=message):
        expand(pattern, PREFIXES)


WORDS = st.sampled_from(["a", "b", "c", "0", "1"])
NAMES = st.lists(WORDS, max_size=4).map(tuple)
PATTERNS = st.lists(st.one_of(WORDS, st.just("*")), min_size=1, max_size=4).map(tuple)


@given(st.lists(PATTERNS, max_size=8), NAMES)
def test_index_finds_all(patterns: list[tuple[str, ...]], name: tuple[str, ...]) -> None:
    expected = [
        number
        for number, pattern in enumerate(patterns)
        if len(pattern) == len(name)
        and all(p in ("*", n) for p, n in zip(pattern, name, strict=True))
    ]
    assert sorted(Index(patterns).matches(name)) == expected


def test_a_star_is_one_component() -> None:
    index = Index([("a", "*", "b"), ("*",)])
    assert list(index.matches(("a", "0", "b"))) == [0]
    assert list(index.matches(("a", "0", "1", "b"))) == []
    assert list(index.matches(("a", "b"))) == []
    assert list(index.matches(())) == []
