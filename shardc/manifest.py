"""Manifests: one architecture's rules as data. Parsed and checked here, with every problem at once.

The vocabulary is specified in docs/manifest.md.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import xxhash
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from shardc import expression, pattern
from shardc.errors import ManifestError, Problem
from shardc.layout import FusedLayout

MAX_MANIFEST_BYTES = 1_000_000

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

ROWWISE: frozenset[str] = frozenset({"rowwise", "packed_rowwise"})
PACKED: frozenset[str] = frozenset({"packed_colwise", "packed_rowwise"})
PADDED: frozenset[str] = frozenset({"vocab_parallel", "colwise_gather"})


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)


class Rule(_Strict):
    """Which modules (or raw parameters) lie how. Field by field: docs/manifest.md."""

    match: str | tuple[str, ...]
    style: Style
    blocks: tuple[Size, ...] | None = None
    unit: Size | tuple[Size, ...] = 1
    repeat: bool | tuple[bool, ...] = False
    layout: FusedLayout = "blocked"
    deinterleave: bool = False
    dim: Annotated[int, Field(strict=True)] | None = None
    pad_to: Size | None = None
    optional: bool = False
    profile: Profile | None = None

    @property
    def patterns(self) -> tuple[str, ...]:
        return (self.match,) if isinstance(self.match, str) else self.match


class Local(_Strict):
    """Integer attributes of modules that a rank must see as its own share. docs/manifest.md."""

    match: str | tuple[str, ...]
    set_: Annotated[dict[str, Size], Field(alias="set", min_length=1)]
    optional: bool = False

    @property
    def patterns(self) -> tuple[str, ...]:
        return (self.match,) if isinstance(self.match, str) else self.match


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
    rule_lines: tuple[int, ...]

    def where(self, rule: int) -> str:
        """A rule's location, for messages: file, line and number."""
        return f"{self.name}:{self.rule_lines[rule]} (rule {rule + 1})"


def parse_manifest(text: str, name: str) -> Manifest:
    """Parse TOML text; ManifestError lists every problem with its line or key."""
    if len(text.encode()) > MAX_MANIFEST_BYTES:
        raise ManifestError(Problem(name, f"larger than {MAX_MANIFEST_BYTES} bytes"))
    try:
        raw = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ManifestError(Problem(name, f"not valid TOML: {error}")) from error
    lines = tuple(
        number
        for number, line in enumerate(text.splitlines(), 1)
        if re.match(r"\s*\[\[\s*rule\s*\]\]", line)
    )
    try:
        document = _Document.model_validate(raw)
    except ValidationError as error:
        raise ManifestError(_schema_problems(error, name, lines)) from error
    classes = document.class_
    manifest = Manifest(
        name=name,
        text=text,
        digest=xxhash.xxh3_128_hexdigest(text.encode()),
        library=document.library,
        classes=(classes,) if isinstance(classes, str) else classes,
        keep_in_fp32=document.keep_in_fp32,
        defaults=document.defaults,
        dims=document.dims,
        prefixes=document.prefix,
        rules=document.rule,
        locals=document.local,
        rule_lines=lines if len(lines) == len(document.rule) else (1,) * len(document.rule),
    )
    problems = _meaning_problems(manifest)
    if problems:
        raise ManifestError(problems)
    return manifest


def _schema_problems(error: ValidationError, name: str, lines: tuple[int, ...]) -> list[Problem]:
    """pydantic's errors, one a place: a union reports every branch that did not fit."""
    seen: dict[str, list[str]] = {}
    for item in error.errors(include_url=False, include_context=False, include_input=True):
        location = [part for part in item["loc"] if isinstance(part, int) or _is_key(str(part))]
        line = ""
        if location[:1] == ["rule"] and len(location) > 1 and isinstance(location[1], int):
            index = location[1]
            line = f":{lines[index]}" if index < len(lines) else ""
            location[1] = index + 1
        where = ".".join(str(part) for part in location)
        seen.setdefault(f"{name}{line}: {where}", []).append(str(item["msg"]))
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
        for value in local.set_.values():
            expect(value, where)
        problems += _pattern_problems(local.patterns, manifest, where)
    for index, rule in enumerate(manifest.rules):
        where = manifest.where(index)
        problems += [Problem(where, reason) for reason in _rule_problems(rule)]
        for value in (*(rule.blocks or ()), *as_tuple(rule.unit), *as_tuple(rule.pad_to)):
            expect(value, where)
        problems += _pattern_problems(rule.patterns, manifest, where)
    return problems


def _pattern_problems(
    patterns: tuple[str, ...], manifest: Manifest, where: str
) -> Iterator[Problem]:
    if not patterns:
        yield Problem(where, "match names nothing")
    for text in patterns:
        try:
            pattern.expand(text, manifest.prefixes)
        except pattern.PatternError as error:
            yield Problem(where, f"match {text!r}: {error}")


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
    for key in ("unit", "repeat"):
        value = getattr(rule, key)
        if isinstance(value, tuple) and len(value) != count:
            reasons.append(f"{len(value)} values of {key} for {count} blocks")
    if rule.pad_to is not None and rule.style not in PADDED:
        reasons.append(f"pad_to goes with {' or '.join(sorted(PADDED))}, not with {rule.style}")
    if rule.pad_to is not None and (set(as_tuple(rule.unit)) != {1} or any(as_tuple(rule.repeat))):
        reasons.append("pad_to shares out single rows: it goes with neither unit nor repeat")
    if rule.style == "replicate":
        extra = rule.model_fields_set - {"match", "style", "optional", "profile"}
        if extra:
            reasons.append(f"replicate takes no {', '.join(sorted(extra))}")
    return reasons
