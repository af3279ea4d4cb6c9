"""Module patterns of manifests: dotted names, where `*` is one component and `{a,b}` either.

`$name` as the first component stands for one of the spellings of a declared prefix.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping

MAX_ALTERNATIVES = 256  # of one pattern, after its braces are expanded
MAX_LENGTH = 1000  # characters of a pattern, and of a spelling of a prefix

_COMPONENT = re.compile(r"\*|[A-Za-z0-9_\-]+")
_BRACES = re.compile(r"\{([^{}]*)\}")

Components = tuple[str, ...]


class PatternError(ValueError):
    """The text is not a pattern."""


def expand(pattern: str, prefixes: Mapping[str, Iterable[str]]) -> list[tuple[str, Components]]:
    """(spelling of the prefix or "", components) of every alternative of `pattern`.

    Raises PatternError for bad syntax, an unknown prefix, or too many or too long alternatives.
    """
    spellings: list[str] = [""]
    rest = pattern
    if pattern.startswith("$"):
        head, _, rest = pattern[1:].partition(".")
        if head not in prefixes:
            raise PatternError(f"prefix ${head} is not declared in [prefix]")
        spellings = list(prefixes[head])
    if max(map(len, [pattern, *spellings])) > MAX_LENGTH:
        raise PatternError(f"longer than {MAX_LENGTH} characters")
    parts = _BRACES.split(rest)  # text, braces, text, ...
    choices = [
        [part] if index % 2 == 0 else [choice.strip() for choice in part.split(",")]
        for index, part in enumerate(parts)
    ]
    count = len(spellings)
    for choice in choices:
        count *= len(choice)
    if count > MAX_ALTERNATIVES:
        raise PatternError(f"{count} alternatives, the limit is {MAX_ALTERNATIVES}")
    found = []
    for spelling, texts in itertools.product(spellings, itertools.product(*choices)):
        body = "".join(texts)
        components = tuple(
            (f"{spelling}.{body}" if spelling and body else spelling + body).split(".")
        )
        for component in components:
            if not _COMPONENT.fullmatch(component):
                raise PatternError(
                    f"{component!r} is no name component: `*` stands for a whole one, "
                    "alternatives stand in braces"
                )
        found.append((spelling, components))
    return found


class Index:
    """Finds which of many patterns match a name, without trying each."""

    def __init__(self, patterns: Iterable[Components]) -> None:
        self._buckets: dict[tuple[int, str], list[tuple[int, Components]]] = {}
        for number, components in enumerate(patterns):
            key = (len(components), components[-1])
            self._buckets.setdefault(key, []).append((number, components))

    def matches(self, name: Components) -> Iterator[int]:
        """Numbers of the patterns that match all components of `name`."""
        if not name:
            return
        for last in (name[-1], "*"):
            for number, components in self._buckets.get((len(name), last), ()):
                if all(c in ("*", n) for c, n in zip(components, name, strict=True)):
                    yield number
