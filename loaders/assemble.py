"""A model from its class and its tensors: built on meta, placed, tied, checked."""

from __future__ import annotations

import importlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import nn

from shardc.checkpoint import CONFIG
from shardc.errors import Problem, ShardSetError
from shardc.index import Index
from shardc.loaders import devices
from shardc.loaders.group import Ranks
from shardc.loaders.mapped import DTYPES, Held
from shardc.loaders.parallel import gather_rows, wire_embedding
from shardc.loaders.reads import Reads
from shardc.loaders.storage import place_on

LIBRARIES = ("diffusers", "transformers")


def read_config(folder: Path, index: Index) -> Mapping[str, Any]:
    raw = (folder / CONFIG).read_bytes()
    if xxhash.xxh3_128_hexdigest(raw) != index.source.config:
        raise ShardSetError(
            Problem(str(folder / CONFIG), "is not the one that the set was built with")
        )
    config: Mapping[str, Any] = json.loads(raw)
    return config


def build(
    library: str, class_name: str, folder: Path, config: Mapping[str, Any], held: Held
) -> nn.Module:
    """The model with its parameters on meta, buffers and other tensors computed for real."""
    builder = library_of(library)
    from accelerate import init_empty_weights  # type: ignore[import-untyped]

    with _default_dtype(held), init_empty_weights(include_buffers=False):
        model: nn.Module = builder.build(class_name, folder, config)
    return model


def library_of(name: str) -> Any:
    """The module that knows a model library."""
    if name not in LIBRARIES:
        raise ShardSetError(Problem(f"library {name!r}", "is none of 'diffusers', 'transformers'"))
    return importlib.import_module(f"shardc.loaders.{name}")


@contextmanager
def _default_dtype(held: Held) -> Iterator[None]:
    """Build in the dtype that most weights have, as from_pretrained would."""
    counts: Counter[str] = Counter()
    for _, info in held.values():
        counts[info.dtype] += info.size_bytes
    kinds = [DTYPES[name] for name, _ in counts.most_common() if name in ("F32", "F16", "BF16")]
    before = torch.get_default_dtype()
    torch.set_default_dtype(kinds[0] if kinds else before)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def place(
    model: nn.Module,
    held: Held,
    device: torch.device,
    shapes: Mapping[str, tuple[int, ...]],
    where: Path,
    reads: Reads = "auto",
) -> None:
    """Put every tensor where the model has it; `shapes` are the global ones that it must have."""
    modules = dict(model.named_modules())
    problems = []
    for name, tensor in place_on(held, device, reads):
        owner, _, leaf = name.rpartition(".")
        module = modules.get(owner)
        table: dict[str, Any] = {}
        if module is not None:
            table = module._parameters if leaf in module._parameters else module._buffers
        own = table.get(leaf)
        if own is None or tuple(own.shape) != tuple(shapes[name]):
            has = "no such tensor" if own is None else f"it as {list(own.shape)}"
            what = f"tensor {name!r} {list(shapes[name])}: {type(model).__name__} has {has}"
            problems.append(Problem(str(where), what))
        elif module is not None and table is module._parameters:
            table[leaf] = nn.Parameter(tensor, requires_grad=False)
        else:
            table[leaf] = tensor
    if problems:
        raise ShardSetError(problems)


def renamed(
    model: nn.Module, library: str, index: Index, held: Held, where: Path
) -> tuple[Index, Held]:
    """The same under the names that the model has: a library may rename a checkpoint's."""
    names = library_of(library).names(model, index.tensors)
    if names is None:
        what = f"this {library} would convert tensors of {type(model).__name__} as it loads"
        raise ShardSetError(Problem(str(where), what, "save the model with it, then build"))
    tensors = {names[name]: entry for name, entry in index.tensors.items()}
    return index.model_copy(update={"tensors": tensors}), {names[n]: h for n, h in held.items()}


def tie(model: nn.Module, library: str) -> dict[str, str]:
    if library != "transformers":
        return {}
    from shardc.loaders import transformers

    found = {}
    for absent, present in transformers.tied(model).items():
        owner, _, leaf = absent.rpartition(".")
        holder, _, held = present.rpartition(".")
        pair = [model.get_submodule(owner)._parameters, model.get_submodule(holder)._parameters]
        one, other = pair[0].get(leaf), pair[1].get(held)
        if one is not None and one.is_meta:
            pair[0][leaf] = other
            found[absent] = present
        elif other is not None and other.is_meta:  # the checkpoint has the other twin
            pair[1][held] = one
            found[present] = absent
    return found


def tie_heads(model: nn.Module, library: str, index: Index, ranks: Ranks) -> None:
    """What a checkpoint leaves out shares its twin's rows: a head, or a second embedding."""
    assert ranks.group is not None
    for absent, present in tie(model, library).items():
        entry = index.tensors[present]
        twin = model.get_submodule(absent.rpartition(".")[0])
        if entry.style == "vocab_parallel" and isinstance(twin, nn.Embedding):
            wire_embedding(twin, entry, ranks.rank, ranks.group)
        elif entry.style == "vocab_parallel":
            gather_rows(twin, entry.shape[0], ranks.group)
        elif entry.placement.dim is not None:
            what = f"shares its weight with {present}, which is sharded {entry.style}"
            raise ShardSetError(Problem(absent, what, "rename it in the checkpoint, then build"))


def finish(model: nn.Module, device: torch.device, where: Path) -> None:
    """Nothing may be left on meta or off the device; the model is for inference."""
    problems = []
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            problems.append(Problem(str(where), f"has no tensor {name!r} that the model needs"))
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.device != device:
                module._buffers[name] = devices.put(buffer, device)
    if problems:
        raise ShardSetError(problems)
    model.eval()
    model.requires_grad_(False)
