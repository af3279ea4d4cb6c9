"""Manifests: one architecture's rules as data. Parsed and checked here, with every problem at once.

The vocabulary is specified in docs/manifest.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import xxhash
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from shardc import document, expression, pattern
from shardc.errors import ManifestError, Problem
from shardc.layout import FusedLayout

Style = Literal[
    "colwise",
    "rowwise",
    "packed_colwise",
    "packed_rowwise",
    "colwise_gather",
    "vocab_parallel",
    "sharded_norm",
    "replicate",
]
Profile = Literal["compact", "native"]
Size = Annotated[int, Field(ge=0, strict=True)] | Annotated[str, Field(min_length=1)]
# A value of config.json, or several; null and a missing key are both "null".
Value = bool | Annotated[int, Field(strict=True)] | float | str
Condition = dict[str, Value | tuple[Value, ...]]

ROWWISE: frozenset[str] = frozenset({"rowwise", "packed_rowwise"})
PACKED: frozenset[str] = frozenset({"packed_colwise", "packed_rowwise"})
PADDED: frozenset[str] = frozenset({"vocab_parallel", "colwise_gather"})
MAX_PATTERNS = 2000  # of all rules and locals, their alternatives counted; a large one has 100


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True, populate_by_name=True)


class _Entry(_Strict):
    """What rules and locals have in common."""

    match: str | tuple[str, ...]
    optional: bool = False
    profile: Profile | None = None
    when: Condition = {}
    unless: Condition = {}

    @property
    def patterns(self) -> tuple[str, ...]:
        return (self.match,) if isinstance(self.match, str) else self.match


class Rule(_Entry):
    """Which modules (or raw parameters) lie how. Field by field: docs/manifest.md."""

    style: Style
    blocks: tuple[Size, ...] | None = None
    unit: Size | tuple[Size, ...] = 1
    repeat: bool | tuple[bool, ...] = False
    groups: Size | tuple[Size, ...] | None = None
    layout: FusedLayout = "blocked"
    deinterleave: bool = False
    dim: Annotated[int, Field(strict=True)] | None = None
    pad_to: Size | None = None


class Local(_Entry):
    """What modules must compute on a rank beside what a style says. docs/manifest.md."""

    set_: Annotated[dict[str, Size], Field(alias="set")] = {}
    slice_: Annotated[int | None, Field(alias="slice", strict=True)] = None
    unit: Size | None = None
    gather: Annotated[int | None, Field(strict=True)] = None
    reduce: Annotated[bool, Field(strict=True)] = False


class _Document(_Strict):
    schema_: Annotated[Literal[1], Field(alias="schema")]
    library: Literal["diffusers", "transformers"]
    class_: Annotated[str | tuple[str, ...], Field(alias="class")]
    keep_in_fp32: tuple[str, ...] = ()
    defaults: dict[str, Size] = {}
    dims: dict[str, Size] = {}
    prefix: dict[str, tuple[str, ...]] = {}
    rule: tuple[Rule, ...]
    local: tuple[Local, ...] = ()


@dataclass(frozen=True, slots=True)
class Manifest:
    """A checked manifest. `text` is its TOML, `digest` the XXH3-128 of that."""

    name: str
    text: str
    digest: str
    library: str
    classes: tuple[str, ...]
    keep_in_fp32: tuple[str, ...]
    defaults: Mapping[str, int | str]
    dims: Mapping[str, int | str]
    prefixes: Mapping[str, tuple[str, ...]]
    rules: tuple[Rule, ...]
    locals: tuple[Local, ...]
    places: tuple[str, ...]

    def where(self, rule: int) -> str:
        """A rule's location, for messages: file, line and number."""
        return self.places[rule]


def _nothing(name: str) -> None:
    return None


def parse_manifest(text: str, name: str, find: Callable[[str], str | None] = _nothing) -> Manifest:
    """Parse TOML text; ManifestError lists every problem with its line or key.

    find: the text of a manifest by the name that `extends` uses. A manifest's own `text` has
    what it extends merged in, so it stands alone.
    """
    source = document.read(text, name, find)
    try:
        parsed = _Document.model_validate(source.values)
    except ValidationError as error:
        raise ManifestError(_schema_problems(error, name, source.places)) from error
    classes = parsed.class_
    manifest = Manifest(
        name=name,
        text=source.text,
        digest=xxhash.xxh3_128_hexdigest(source.text.encode()),
        library=parsed.library,
        classes=(classes,) if isinstance(classes, str) else classes,
        keep_in_fp32=parsed.keep_in_fp32,
        defaults=parsed.defaults,
        dims=parsed.dims,
        prefixes=parsed.prefix,
        rules=parsed.rule,
        locals=parsed.local,
        places=source.places,
    )
    problems = _meaning_problems(manifest)
    if problems:
        raise ManifestError(problems)
    return manifest


def _schema_problems(error: ValidationError, name: str, places: tuple[str, ...]) -> list[Problem]:
    """pydantic's errors, one a place: a union reports every branch that did not fit."""
    seen: dict[str, list[str]] = {}
    for item in error.errors(include_url=False, include_context=False, include_input=True):
        location = [part for part in item["loc"] if isinstance(part, int) or _is_key(str(part))]
        place = name
        if location[:1] == ["rule"] and len(location) > 1 and isinstance(location[1], int):
            place, location = places[location[1]], location[2:]
        elif location[:1] == ["local"] and len(location) > 1 and isinstance(location[1], int):
            place, location = f"{name}: local {location[1] + 1}", location[2:]
        where = ".".join(str(part) for part in location)
        seen.setdefault(f"{place}: {where}", []).append(str(item["msg"]))
    return [
        Problem(where, " or ".join(dict.fromkeys(m[:1].lower() + m[1:] for m in messages)))
        for where, messages in seen.items()
    ]


def _is_key(part: str) -> bool:
    # pydantic adds the union branch ("tuple[...]", "constrained-str") to a location
    return not any(mark in part for mark in "[(") and part not in (
        "str",
        "int",
        "bool",
        "constrained-str",
        "constrained-int",
    )


def _meaning_problems(manifest: Manifest) -> list[Problem]:
    problems = []

    def expect(value: int | str, where: str) -> None:
        if isinstance(value, str):
            try:
                expression.names(value)
            except expression.ExpressionError as error:
                problems.append(Problem(where, str(error)))

    for table, values in (("dims", manifest.dims), ("defaults", manifest.defaults)):
        for key, value in values.items():
            expect(value, f"{manifest.name}: {table}.{key}")
    if not manifest.classes:
        problems.append(Problem(f"{manifest.name}: class", "names no class"))
    for index, local in enumerate(manifest.locals):
        where = f"{manifest.name}: local {index + 1}"
        said = [local.slice_ is not None, local.gather is not None, local.reduce]
        if not local.set_ and not any(said):
            problems.append(Problem(where, "says nothing: set, slice, gather or reduce"))
        if sum(said) > 1:
            problems.append(Problem(where, "takes one of slice, gather and reduce"))
        if local.gather is not None and local.gather >= 0:
            problems.append(Problem(where, "gather counts its dim from the end: a negative number"))
        if local.unit is not None and local.slice_ is None:
            problems.append(Problem(where, "unit goes with slice"))
        for value in (*local.set_.values(), *as_tuple(local.unit)):
            expect(value, where)
    for index, rule in enumerate(manifest.rules):
        where = manifest.where(index)
        problems += [Problem(where, reason) for reason in _rule_problems(rule)]
        for value in (
            *(rule.blocks or ()),
            *as_tuple(rule.unit),
            *as_tuple(rule.groups),
            *as_tuple(rule.pad_to),
        ):
            expect(value, where)
    return [*problems, *_pattern_problems(manifest)]


def _pattern_problems(manifest: Manifest) -> Iterator[Problem]:
    entries: list[tuple[str, _Entry]] = [
        *((f"{manifest.name}: local {n}", local) for n, local in enumerate(manifest.locals, 1)),
        *((manifest.where(n), rule) for n, rule in enumerate(manifest.rules)),
    ]
    total = 0
    for where, entry in entries:
        if not entry.patterns:
            yield Problem(where, "match names nothing")
        for text in entry.patterns:
            try:
                total += len(pattern.expand(text, manifest.prefixes))
            except pattern.PatternError as error:
                yield Problem(where, f"match {text!r:.200}: {error}")
            if total > MAX_PATTERNS:
                yield Problem(where, f"more than {MAX_PATTERNS} alternatives of patterns in all")
                return


def as_tuple(value: Any) -> tuple[Any, ...]:
    """A scalar as a 1-tuple, None as none."""
    if value is None:
        return ()
    return value if isinstance(value, tuple) else (value,)


def _rule_problems(rule: Rule) -> list[str]:
    reasons = []
    count = len(rule.blocks) if rule.blocks is not None else 1
    if rule.style in PACKED:
        if not rule.blocks:
            reasons.append(f"{rule.style} needs blocks: the fused pieces along the dim, in order")
    elif count != 1:
        reasons.append(f"{rule.style} takes one block, {count} are declared")
    if rule.style not in PACKED and rule.layout != "blocked":
        reasons.append(f"layout {rule.layout} goes with a packed style")
    if rule.deinterleave and rule.layout == "blocked":
        reasons.append("deinterleave goes with layout per_head or per_kv_head")
    if rule.groups is not None and (rule.layout != "blocked" or rule.pad_to is not None):
        reasons.append("groups goes with neither an interleaved layout nor pad_to")
    for key in ("unit", "repeat", "groups"):
        value = getattr(rule, key)
        if isinstance(value, tuple) and len(value) != count:
            reasons.append(f"{len(value)} values of {key} for {count} blocks")
    if rule.pad_to is not None and rule.style not in PADDED:
        reasons.append(f"pad_to goes with {' or '.join(sorted(PADDED))}, not with {rule.style}")
    if rule.pad_to is not None and (set(as_tuple(rule.unit)) != {1} or any(as_tuple(rule.repeat))):
        reasons.append("pad_to shares out single rows: it goes with neither unit nor repeat")
    if rule.style == "replicate":
        said = {"match", "style", "optional", "profile", "when", "unless"}
        extra = rule.model_fields_set - said
        if extra:
            reasons.append(f"replicate takes no {', '.join(sorted(extra))}")
    return reasons
