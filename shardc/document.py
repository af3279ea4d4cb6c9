"""A manifest's TOML, with what it extends merged in: one document that stands alone."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import tomli_w

from shardc.errors import ManifestError, Problem
from shardc.reading import nested_deeper

MAX_MANIFEST_BYTES = 1_000_000
MAX_LINE = 4000  # characters: to parse a dotted key takes time quadratic in its length
MAX_NESTING = 16  # of tables and arrays
MAX_DEPTH = 4  # of manifests that extend one another

TABLES = ("defaults", "dims", "prefix")  # an own entry replaces an inherited one of its key
ARRAYS = ("rule", "local")  # an own entry replaces an inherited one of its `match`


@dataclass(frozen=True, slots=True)
class Document:
    """`text` is TOML without `extends`; `places` say where each of its rules is written."""

    text: str
    values: Mapping[str, Any]
    places: tuple[str, ...]


def read(text: str, name: str, find: Callable[[str], str | None], depth: int = 1) -> Document:
    """Parse TOML text; `find` gives the text of a manifest by the name that `extends` uses.

    Raises ManifestError where it is no TOML, or extends what is not there.
    """
    if len(text.encode()) > MAX_MANIFEST_BYTES:
        raise ManifestError(Problem(name, f"larger than {MAX_MANIFEST_BYTES} bytes"))
    for number, line in enumerate(text.splitlines(), 1):
        if len(line) > MAX_LINE:
            what = f"a line of {len(line)} characters, the limit is {MAX_LINE}"
            raise ManifestError(Problem(f"{name}:{number}", what))
    try:
        values = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # a number may be too long for Python, too
        raise ManifestError(Problem(name, f"not valid TOML: {error}")) from error
    if nested_deeper(values, MAX_NESTING):
        raise ManifestError(Problem(name, f"tables nested more than {MAX_NESTING} deep"))
    if (large := _too_large(values)) is not None:
        what = f"{hex(large):.40} is outside the 64 bits of a TOML integer"
        raise ManifestError(Problem(name, what))
    places = _places(text, name, values)
    if "extends" not in values:
        return Document(text, values, places)
    base = values.pop("extends")
    found = find(base) if isinstance(base, str) else None
    if found is None:
        raise ManifestError(Problem(name, f"extends {base!r}, which is no bundled manifest"))
    if depth == MAX_DEPTH:
        raise ManifestError(Problem(name, f"is {depth} manifests deep: a circle?"))
    merged = _merge(read(found, f"{base}.toml", find, depth + 1), values, places)
    return Document(tomli_w.dumps(merged.values), merged.values, merged.places)


def _too_large(value: Any) -> int | None:
    """An integer that TOML does not know, which tomllib reads all the same; None without one."""
    if isinstance(value, dict | list):
        inner = value.values() if isinstance(value, dict) else value
        return next((found for v in inner if (found := _too_large(v)) is not None), None)
    return value if isinstance(value, int) and not -(2**63) <= value < 2**63 else None


def _places(text: str, name: str, values: Mapping[str, Any]) -> tuple[str, ...]:
    rules = values.get("rule")
    count = len(rules) if isinstance(rules, list) else 0
    lines = [
        number
        for number, line in enumerate(text.splitlines(), 1)
        if re.match(r"\s*\[\[\s*rule\s*\]\]", line)
    ]
    if len(lines) != count:  # written as an inline array
        lines = [1] * count
    return tuple(f"{name}:{line} (rule {number})" for number, line in enumerate(lines, 1))


def _merge(base: Document, own: Mapping[str, Any], places: tuple[str, ...]) -> Document:
    """`own` over `base`. What has an unexpected type is left for the schema to complain of."""
    values = {**base.values, **own}
    for key in TABLES:
        mine = own.get(key, {})
        if isinstance(mine, dict):
            values[key] = {**base.values.get(key, {}), **mine}
    kept = list(base.places)
    for key in ARRAYS:
        mine = own.get(key, [])
        if not isinstance(mine, list) or not all(isinstance(entry, dict) for entry in mine):
            continue
        again = [entry.get("match") for entry in mine]
        inherited = base.values.get(key, [])
        survives = [entry.get("match") not in again for entry in inherited]
        values[key] = [e for e, keep in zip(inherited, survives, strict=True) if keep] + mine
        if key == "rule":
            kept = [p for p, keep in zip(base.places, survives, strict=True) if keep]
    return Document("", values, (*kept, *places))
