"""A manifest's TOML, with what it extends merged in: one document that stands alone."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import tomli_w

from shardc.errors import ManifestError, Problem

MAX_MANIFEST_BYTES = 1_000_000
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
    try:
        values = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ManifestError(Problem(name, f"not valid TOML: {error}")) from error
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
