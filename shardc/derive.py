"""A manifest from a class's own TP plan, or from the names of its modules.

The only module that imports diffusers or transformers. The plan says which Linears are cut and how;
units and local attributes come from the head counts that modules declare. What it writes is a
proposal, marked as unproven.
"""

from __future__ import annotations

import json
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shardc import naming
from shardc.checkpoint import class_of
from shardc.errors import ManifestError, Problem
from shardc.header import parse_json

HEAD_COUNTS = ("heads", "num_heads", "num_attention_heads", "n_heads")
KV_HEAD_COUNTS = ("kv_heads", "num_key_value_heads", "num_kv_heads", "n_kv_heads")
WIDTHS = ("inner_dim", "embed_dim")
KV_WIDTHS = ("inner_kv_dim",)
CONTAINERS = ("ModuleList", "Sequential", "ModuleDict")
KV_NAMES = ("k_proj", "v_proj", "to_k", "to_v", "add_k_proj", "add_v_proj")
# transformers' words for what a manifest says; None: replicated, no rule needed.
TRANSFORMERS_STYLES = {
    "colwise": "colwise",
    "rowwise": "rowwise",
    "packed_colwise": "packed_colwise",
    "packed_rowwise": "packed_rowwise",
    "colwise_rep": "colwise_gather",
    "colwise_gather_output": "colwise_gather",
    "embedding_rowwise": "vocab_parallel",
    "rowwise_rep": "rowwise",
    "replicated_with_grad_allreduce": None,
    "replicate": None,
}


def derive(target: str, config: Path | None = None) -> str:
    """TOML text of a manifest for class `target`, from its TP plan or its modules' names.

    config: a config.json, or a case file, to build the class from (on the meta device), else its
    defaults. Raises ManifestError where the class is missing, or a style has no counterpart.
    """
    values = None if config is None else _read_config(config, target)
    model, library = _meta_model(target, values)
    plan = (
        dict(getattr(model, "_tp_plan", None) or {}) if library == "diffusers" else _hf_plan(model)
    )
    origin = "own TP plan" if plan else "module names: it has no TP plan of its own"
    plan = plan or naming.plan(model)
    if not plan:
        what = "the class has no TP plan of its own, and none of its modules has a name that tells"
        raise ManifestError(Problem(target, what, "write one: docs/new-model.md"))
    rules = list(_rules(model, plan, target))
    lines = [
        f"# Derived from {target}'s {origin}.",
        "# Unproven: check units and blocks, and whether all that follows from them is there, then",
        "# `shardc manifest check --prove` it (docs/new-model.md). Sizes are those of one config.",
        *(f"# Left whole, as its layout must be declared: {name}" for name in _fused(model, plan)),
        "schema = 1",
        f'library = "{library}"',
        f'class = "{target}"',
    ]
    alike: dict[str, tuple[list[str], dict[str, Any]]] = {}
    for match, fields in rules:
        alike.setdefault(json.dumps(fields), ([], fields))[0].append(match)
    for matches, fields in alike.values():
        lines += ["", "[[rule]]", f"match = {_listed(matches)}"]
        lines += [f"{key} = {json.dumps(value)}" for key, value in fields.items()]
    shares: dict[str, tuple[list[str], dict[str, str]]] = {}
    for match, told in _locals(model, plan).items():
        shares.setdefault(json.dumps(told), ([], told))[0].append(match)
    for matches, told in shares.values():
        lines += ["", "[[local]]", f"match = {_listed(matches)}"]
        lines += [f"set.{key} = {json.dumps(value)}" for key, value in told.items()]
    return "\n".join(lines) + "\n"


def _read_config(path: Path, target: str) -> dict[str, Any]:
    if path.suffix == ".py":
        return dict(runpy.run_path(str(path))["config"])
    try:
        values = parse_json(path.read_bytes(), str(path))
    except OSError as error:
        raise ManifestError(Problem(str(path), f"cannot read it: {error.strerror}")) from error
    if not isinstance(values, dict):
        raise ManifestError(Problem(str(path), "is not a JSON object"))
    named = class_of(values)  # a config saved without its model names none
    if named not in (None, target):
        raise ManifestError(Problem(str(path), f"is a config of {named}, not of {target}"))
    return dict(values)


def _meta_model(target: str, values: dict[str, Any] | None) -> tuple[Any, str]:
    try:
        import torch
    except ImportError as error:
        raise ManifestError(
            Problem(target, "deriving needs torch", "pip install 'shardc[runtime]'")
        ) from error
    for library in ("diffusers", "transformers"):
        try:
            module = __import__(library)
        except ImportError:
            continue
        cls = getattr(module, target, None)
        if cls is None:
            continue
        with torch.device("meta"):
            if library == "diffusers":
                return (cls() if values is None else cls.from_config(values)), library
            config_class = cls.config_class
            return cls(config_class() if values is None else config_class(**values)), library
    raise ManifestError(
        Problem(target, "neither diffusers nor transformers has this class, or they are missing")
    )


def _hf_plan(model: Any) -> dict[str, Any]:
    plan = getattr(model, "tp_plan", None)
    return dict(plan() if callable(plan) else plan or {})


def _rules(model: Any, plan: dict[str, Any], target: str) -> Iterator[tuple[str, dict[str, Any]]]:
    modules = dict(model.named_modules())
    problems = []
    for match, style in plan.items():
        name = _first(match, modules)
        if name is None:
            continue  # a plan may cover modules that this config lacks (a tied lm_head, say)
        known = type(style).__name__ if not isinstance(style, str) else style
        word = {
            "PackedColwiseParallel": "packed_colwise",
            "PackedRowwiseParallel": "packed_rowwise",
        }
        wanted = word.get(known, TRANSFORMERS_STYLES.get(known, ""))
        if wanted == "":
            problems.append(Problem(f"{target}: {match}", f"style {known!r} has no counterpart"))
        elif wanted is not None:
            yield match, _fields(modules, name, style, wanted)
    if problems:
        raise ManifestError(problems)


def _listed(matches: list[str]) -> str:
    if len(matches) == 1:
        return json.dumps(matches[0])
    return "[\n" + "".join(f"  {json.dumps(match)},\n" for match in matches) + "]"


def _fused(model: Any, plan: dict[str, Any]) -> list[str]:
    return [name for name in naming.fused(model) if name not in plan]


def _locals(model: Any, plan: dict[str, Any]) -> dict[str, dict[str, str]]:
    """What attention modules around cut Linears count by: a rank's own share of it, by pattern."""
    modules = dict(model.named_modules())
    found: dict[str, dict[str, str]] = {}
    for match in plan:
        name = _first(match, modules)
        owner = "" if name is None else name.rpartition(".")[0]
        while owner and type(modules[owner]).__name__ in CONTAINERS:
            owner = owner.rpartition(".")[0]
        if not owner:
            continue
        module = modules[owner]
        heads, kv = _integer(module, HEAD_COUNTS), _integer(module, KV_HEAD_COUNTS)
        config = getattr(module, "config", None)
        told: dict[str, str] = {}
        for attribute, value in vars(module).items():
            if type(value) is not int:
                continue
            if attribute in (*HEAD_COUNTS, *KV_HEAD_COUNTS):
                told[attribute] = f"local({value})"
            elif attribute in WIDTHS and heads and value % heads == 0:
                told[attribute] = f"local({heads}) * {value // heads}"
            elif attribute in KV_WIDTHS and (kv or heads) and value % (kv or heads or 1) == 0:
                count = kv or heads or 1
                told[attribute] = f"local({count}) * {value // count}"
            elif attribute == "num_key_value_groups":
                every = _integer(config, HEAD_COUNTS), _integer(config, KV_HEAD_COUNTS)
                told[attribute] = f"local({every[0]}) // local({every[1]})"
        if told:
            found[naming.generalised(f"{owner}.x")[:-2]] = told
    return found


def _first(match: str, modules: dict[str, Any]) -> str | None:
    parts = match.split(".")
    for name in modules:
        own = name.split(".")
        if len(own) == len(parts) and all(p in ("*", o) for p, o in zip(parts, own, strict=True)):
            return name
    return None


def _fields(modules: dict[str, Any], name: str, style: Any, word: str) -> dict[str, Any]:
    module = modules[name]
    if word == "sharded_norm":
        size = module.weight.shape[0]
        query = next(n for n in modules if n.rpartition(".")[0] == name.rpartition(".")[0])
        unit = _head_size(modules, query, size)[0]
        return {"style": word, **({"unit": unit} if unit else {})}
    rows, columns = module.weight.shape[0], module.weight.shape[1]
    rowwise = word in ("rowwise", "packed_rowwise")
    size = columns if rowwise else rows
    fields: dict[str, Any] = {"style": word}
    blocks = [size]
    if word.startswith("packed"):
        side = "row" if rowwise else "col"
        declared = getattr(style, "blocks", None) or getattr(
            module, f"_tp_packed_{side}_blocks", None
        )
        if isinstance(style, str) and not declared and not rowwise:  # by its name: [gate | up]
            declared = (1, 1)
        if not declared:
            raise ManifestError(Problem(name, f"{word}, but neither plan nor module names blocks"))
        share = size // sum(declared)
        blocks = [share * block for block in declared]
        fields["blocks"] = blocks
    head, repeat = _head_size(modules, name, rows if not rowwise else columns)
    if head is not None and word != "vocab_parallel":
        units = [head if _is_heads(modules, name, block, head) else 1 for block in blocks]
        if units != [1] * len(blocks):
            fields["unit"] = units if word.startswith("packed") else units[0]
    if repeat:
        fields["repeat"] = True
    if word == "vocab_parallel":
        fields["pad_to"] = 1
    return fields


def _owners(modules: dict[str, Any], name: str) -> Iterator[Any]:
    """The modules around `name`, inmost first, bare containers passed over."""
    while "." in name:
        name = name.rpartition(".")[0]
        if type(modules[name]).__name__ not in CONTAINERS:
            yield modules[name]


def _head_size(modules: dict[str, Any], name: str, size: int) -> tuple[int | None, bool]:
    """Elements a head, and whether these are KV heads that may repeat, by what modules declare."""
    owner = next(_owners(modules, name), None)
    if owner is None:
        return None, False
    config = getattr(owner, "config", None)
    head = _integer(owner, ("head_dim", "attention_head_dim")) or _integer(config, ("head_dim",))
    heads = _integer(owner, HEAD_COUNTS)
    kv = _integer(owner, KV_HEAD_COUNTS) or _integer(config, KV_HEAD_COUNTS)
    is_attention = head is not None or heads is not None
    heads = heads or (_integer(config, HEAD_COUNTS) if is_attention else None)
    last = name.rpartition(".")[2]
    if head is None and heads:
        head = size // heads if size % heads == 0 else None
    repeats = bool(last in KV_NAMES and kv and heads and kv < heads)
    return head, repeats


def _is_heads(modules: dict[str, Any], name: str, block: int, head: int) -> bool:
    """A block counts in heads where it is as wide as the attention is, or as its keys are."""
    for owner in _owners(modules, name):
        for counts in (HEAD_COUNTS, KV_HEAD_COUNTS):
            for holder in (owner, getattr(owner, "config", None)):
                heads = _integer(holder, counts)
                if heads and block == heads * head:
                    return True
    return False


def _integer(holder: Any, names: tuple[str, ...]) -> int | None:
    for name in names:
        value = getattr(holder, name, None)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    return None
