"""The manifests' arithmetic: Python is the judge of values, and nothing else gets through."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardc.expression import ExpressionError, evaluate, names

CONFIG = {"heads": 24, "head_dim": 128, "mlp_ratio": 2.5, "text_config.hidden": 64, "zero": 0}
CONFIG["axes"] = [3, 4, 5]


def value(text: str) -> int:
    return evaluate(text, CONFIG.__getitem__)


EXPRESSIONS = st.recursive(
    st.one_of(st.integers(0, 50).map(str), st.sampled_from(["heads", "head_dim"])),
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from("+-*"), inner).map(" ".join),
        inner.map("({})".format),
        st.tuples(inner, st.integers(1, 9).map(str)).map(" // ".join),
    ),
    max_leaves=8,
)


@given(EXPRESSIONS)
def test_as_python(text: str) -> None:
    if len(text) <= 200:
        assert value(text) == eval(text, {"heads": 24, "head_dim": 128})


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("heads * head_dim", 3072),
        ("heads * head_dim * mlp_ratio", 7680),  # exact: no float on the way
        ("text_config.hidden // 3", 21),
        (" 7 ", 7),
        ("(heads - 4) // 7", 2),
        ("2 - 5", -3),
        ("sum(axes)", 12),
        ("axes[1] * heads", 96),
        ("axes[-1]", 5),
        ("axes[-1 - (heads - 23)]", 4),
        ("heads[3]", 24),  # one for all
    ],
)
def test_values(text: str, expected: int) -> None:
    assert value(text) == expected


def test_names() -> None:
    assert names("a * b.c - (a + 2) // d") == ["a", "b.c", "a", "d"]
    assert names("12") == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "'' is not an expression"),
        ("a +", "'a \\+' is not an expression"),
        ("a\0b", "is not an expression"),
        ("(" * 150 + "1" + ")" * 49, "is not an expression"),
        ("a" * 201, "longer than 200 characters"),
        ("a ** 2", "only names, integers, \\+ - \\* //"),
        ("a / 2", "only names, integers"),
        ("a % 2", "only names, integers"),
        ("-a", "only names, integers"),
        ("f(1)", "only names, integers"),
        ("a['b']", "only names, integers"),
        ("(a + b)[0]", "only names, integers"),
        ("1.5", "only names, integers"),
        ("True", "only names, integers"),
        ("'a'", "only names, integers"),
        ("(1).real", "only names, integers"),
        ("__import__('os')", "only names, integers"),
        ("a if b else c", "only names, integers"),
        ("sum()", r"sum\(\) takes the name of a list"),
        ("sum(1)", r"sum\(\) takes the name of a list"),
        ("local()", r"local\(\) takes a count"),
        ("local(a, b, c)", r"local\(\) takes a count"),
        ("local(x=a)", r"local\(\) takes a count"),
        ("local(-a)", "only names, integers"),
        ("x.local(a)", "only names, integers"),
        ("lambda: 1", "only names, integers"),
    ],
)
def test_refused(text: str, message: str) -> None:
    with pytest.raises(ExpressionError, match=message):
        names(text)
    with pytest.raises(ExpressionError, match=message):
        value(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("heads // zero", "'heads // zero' divides by zero"),
        ("mlp_ratio", "'mlp_ratio' is 2.5 here, not a whole number"),
        ("9999999999 * 9999999999", "is too large to be a dim"),
        ("99999999999999999999", "is too large to be a dim"),
    ],
)
def test_no_value(text: str, message: str) -> None:
    with pytest.raises(ExpressionError, match=message):
        value(text)


@pytest.mark.parametrize("bad", ["4", None, [4], float("inf"), float("nan"), 2**70])
def test_config_values_that_are_no_numbers(bad: object) -> None:
    with pytest.raises(ExpressionError, match="is not a number that a dim can be made of"):
        evaluate("x", lambda _: bad)


def test_fractions_are_exact() -> None:
    assert evaluate("x * 3", lambda _: Fraction(1, 3)) == 1


@pytest.mark.parametrize(
    ("text", "tp", "expected"),
    [
        ("local(heads)", 8, 3),
        ("local(heads) * head_dim", 4, 768),
        ("local(heads // 12)", 2, 1),
        ("local(heads // 12)", 4, 1),  # two units on four ranks repeat: a rank holds one
        ("local(heads)", 1, 24),
    ],
)
def test_a_ranks_share(text: str, tp: int, expected: int) -> None:
    assert evaluate(text, CONFIG.__getitem__, tp) == expected
    assert "heads" in names(text)


@pytest.mark.parametrize(
    ("text", "tp", "message"),
    [
        ("local(heads)", None, r"local\(\) has a value on a rank only, not in a size"),
        ("local(heads)", 16, "'local\\(heads\\)': 24 units among 16 ranks"),
        ("local(zero)", 2, "0 units among 2 ranks"),
        ("local(mlp_ratio)", 2, "2.5 units among 2 ranks"),
    ],
)
def test_no_share(text: str, tp: int | None, message: str) -> None:
    with pytest.raises(ExpressionError, match=message):
        evaluate(text, CONFIG.__getitem__, tp)
