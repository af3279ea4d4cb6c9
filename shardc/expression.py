"""The small arithmetic of manifests: names, integers, + - * // and parentheses. Never `eval`."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

MAX_LENGTH = 200  # characters; also what keeps the parser's recursion shallow
MAX_MAGNITUDE = 2**62  # no dim is larger; stops towers of products early

_OPERATORS: Mapping[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
    ast.FloorDiv: lambda a, b: Fraction(a // b),
}


class ExpressionError(ValueError):
    """The text is not such an expression, or has no integer value here."""


def names(text: str) -> list[str]:
    """The (dotted) names that an expression reads; ExpressionError where it is malformed."""
    found: list[str] = []

    def collect(node: ast.expr) -> None:
        if isinstance(node, ast.BinOp):
            collect(node.left)
            collect(node.right)
        elif (name := _name(node)) is not None:
            found.append(name)

    collect(_parse(text))
    return found


def evaluate(text: str, lookup: Callable[[str], Any]) -> int:
    """The integer value of `text`; `lookup` gives a name's number, or raises ExpressionError.

    Fractions are exact on the way (an `mlp_ratio` of 2.5 is fine where the product is whole).
    """
    value = _value(_parse(text), lookup, text)
    if value.denominator != 1:
        raise ExpressionError(f"{text!r} is {float(value):g} here, not a whole number")
    return int(value)


def as_number(value: Any) -> Fraction:
    """A config value as an exact number; ExpressionError where it is none."""
    if isinstance(value, int | float | Fraction) and -MAX_MAGNITUDE < value < MAX_MAGNITUDE:
        return Fraction(value)
    raise ExpressionError(f"{value!r:.80} is not a number that a dim can be made of")


def _parse(text: str) -> ast.expr:
    if len(text) > MAX_LENGTH:
        raise ExpressionError(f"longer than {MAX_LENGTH} characters")
    try:
        body = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ExpressionError(f"{text!r} is not an expression") from error
    _check(body, text)
    return body


def _check(node: ast.expr, text: str) -> None:
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        _check(node.left, text)
        _check(node.right, text)
        return
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return
    if _name(node) is not None:
        return
    raise ExpressionError(f"{text!r}: only names, integers, + - * // and parentheses are known")


def _name(node: ast.expr) -> str | None:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (base := _name(node.value)) is not None:
        return f"{base}.{node.attr}"
    return None


def _value(node: ast.expr, lookup: Callable[[str], Any], text: str) -> Fraction:
    if isinstance(node, ast.Constant):
        value = Fraction(int(node.value))  # type: ignore[arg-type]
    elif isinstance(node, ast.BinOp):
        left, right = _value(node.left, lookup, text), _value(node.right, lookup, text)
        if isinstance(node.op, ast.FloorDiv) and right == 0:
            raise ExpressionError(f"{text!r} divides by zero")
        value = _OPERATORS[type(node.op)](left, right)
    else:
        name = _name(node)
        assert name is not None  # _check has seen to it
        value = as_number(lookup(name))
    if abs(value) >= MAX_MAGNITUDE:
        raise ExpressionError(f"{text!r} is too large to be a dim")
    return value
