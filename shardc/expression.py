"""The small arithmetic of manifests: names, integers, + - * //, parentheses, sum(), local().

No `eval`. `name[2]` is an element of a list, `name[-1]` the last; of a number, that number.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any, TypeGuard

from shardc.layout import share_of

MAX_LENGTH = 200  # characters; also what keeps the parser's recursion shallow
MAX_MAGNITUDE = 2**62  # no dim is larger; stops towers of products early
MAX_TERMS = 10_000  # of a list to sum

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
        elif isinstance(node, ast.Call):
            for argument in node.args:
                collect(argument)
        elif _is_element(node):
            collect(node.value)
            collect(node.slice)
        elif (name := _name(node)) is not None:
            found.append(name)

    collect(_parse(text))
    return found


def evaluate(
    text: str, lookup: Callable[[str], Any], tp: int | None = None, pad: bool = False
) -> int:
    """The integer value of `text`; `lookup` gives a name's value, or raises ExpressionError.

    Fractions are exact on the way (an `mlp_ratio` of 2.5 is fine where the product is whole).
    `sum(name)` adds up a list of numbers.
    `local(count)` or `local(count, groups)` is one rank's share of a count of units, 1 where tp is
    a multiple of it; it has a value only where `tp` is given. pad: with zero units where needed.
    """
    value = _value(_parse(text), lookup, text, (tp, pad))
    if value.denominator != 1:
        raise ExpressionError(f"{text!r} is {float(value):g} here, not a whole number")
    return int(value)


def as_number(value: Any) -> Fraction:
    """A config value as an exact number; ExpressionError where it is none."""
    if isinstance(value, int | float | Fraction) and -MAX_MAGNITUDE < value < MAX_MAGNITUDE:
        return Fraction(value)
    raise ExpressionError(f"{value!r:.80} is not a number that a dim can be made of")


@functools.lru_cache(maxsize=1024)
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
    number = node.operand if _is_negative(node) else node
    if isinstance(number, ast.Constant) and type(number.value) is int:
        return
    if isinstance(node, ast.Call) and _name(node.func) == "sum":
        if len(node.args) == 1 and not node.keywords and _name(node.args[0]) is not None:
            return
        raise ExpressionError(f"{text!r}: sum() takes the name of a list")
    if isinstance(node, ast.Call) and _name(node.func) == "local":
        if len(node.args) in (1, 2) and not node.keywords:
            for argument in node.args:
                _check(argument, text)
            return
        raise ExpressionError(f"{text!r}: local() takes a count, or a count and its groups")
    if _is_element(node):
        _check(node.slice, text)
        return
    if _name(node) is not None:
        return
    raise ExpressionError(
        f"{text!r}: only names, integers, + - * //, parentheses, sum() and local() are known"
    )


def _is_negative(node: ast.expr) -> TypeGuard[ast.UnaryOp]:
    return isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub)


def _is_element(node: ast.expr) -> TypeGuard[ast.Subscript]:
    return isinstance(node, ast.Subscript) and _name(node.value) is not None


def _name(node: ast.expr) -> str | None:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (base := _name(node.value)) is not None:
        return f"{base}.{node.attr}"
    return None


def _value(
    node: ast.expr, lookup: Callable[[str], Any], text: str, ranks: tuple[int | None, bool]
) -> Fraction:
    if isinstance(node, ast.Constant):
        value = Fraction(int(node.value))  # type: ignore[arg-type]
    elif _is_negative(node):
        value = -_value(node.operand, lookup, text, ranks)
    elif isinstance(node, ast.BinOp):
        left, right = (
            _value(node.left, lookup, text, ranks),
            _value(node.right, lookup, text, ranks),
        )
        if isinstance(node.op, ast.FloorDiv) and right == 0:
            raise ExpressionError(f"{text!r} divides by zero")
        value = _OPERATORS[type(node.op)](left, right)
    elif isinstance(node, ast.Call) and _name(node.func) == "sum":
        name = _name(node.args[0])
        assert name is not None  # _check has seen to it
        terms = lookup(name)
        if not isinstance(terms, list | tuple):
            raise ExpressionError(f"{text!r}: {name} is no list")
        if len(terms) > MAX_TERMS:
            raise ExpressionError(f"{text!r}: {name} has {len(terms)} terms, {MAX_TERMS} are taken")
        value = sum(map(as_number, terms), Fraction())
    elif isinstance(node, ast.Call):
        value = _local([_value(a, lookup, text, ranks) for a in node.args], text, *ranks)
    elif _is_element(node):
        name = _name(node.value)
        assert name is not None  # _check has seen to it
        index = _value(node.slice, lookup, text, ranks)
        value = as_number(_element(lookup(name), index, name))
    else:
        name = _name(node)
        assert name is not None  # _check has seen to it
        value = as_number(lookup(name))
    if abs(value) >= MAX_MAGNITUDE:
        raise ExpressionError(f"{text!r} is too large to be a dim")
    return value


def _element(value: Any, index: Fraction, name: str) -> Any:
    if not isinstance(value, list | tuple):
        return value  # one for all
    if index.denominator != 1 or not -len(value) <= index < len(value):
        raise ExpressionError(f"{name} has {len(value)} elements, none of number {float(index):g}")
    return value[int(index)]


def _local(counts: list[Fraction], text: str, tp: int | None, pad: bool) -> Fraction:
    if tp is None:
        raise ExpressionError(f"{text!r}: local() has a value on a rank only, not in a size")
    if all(count.denominator == 1 and count > 0 for count in counts):
        units, groups = int(counts[0]), int(counts[-1])
        share = None if units % groups else share_of(units, tp, groups, repeat=True, pad=pad)
        if share is not None:
            return Fraction(share[0])
    raise ExpressionError(f"{text!r}: {float(counts[0]):g} units among {tp} ranks")
