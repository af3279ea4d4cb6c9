"""Which files of a folder hold its weights: names, variants and indexes as the Hub's libraries do.

Names: `{stem}[.{variant}].safetensors`, or `{stem}.safetensors.index[.{variant}].json` and the
files it lists, with stem `diffusion_pytorch_model` (diffusers) or `model` (transformers).
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from shardc.errors import CheckpointError, Problem
from shardc.header import Header, name_problem, read_header
from shardc.reading import read_json
from shardc.remote import AnyFile

STEMS = ("diffusion_pytorch_model", "model")
# Weights in formats that shardc does not read; the pickles among them it never will.
PICKLES = frozenset({".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle"})
UNPICKLE = (
    "where you trust it, load the model with its own library, "
    "and save_pretrained(..., safe_serialization=True)"
)
FOREIGN = PICKLES | {".msgpack", ".h5", ".onnx", ".gguf", ".onnx_data", ".pb", ".tflite", ".ot"}

_RANKED = re.compile(
    r"-TP-(\d+|common)\b|tp\d+_sharded_checkpoint|model-rank-\d+-part-\d+|^rank-\d+-of-\d+|^rank\d+\."
    r"|^shard-\d+-model-\d+-of-\d+"
)
# Low-rank adapters: PEFT's names, diffusers' older ones, kohya's and LyCORIS's.
_ADAPTER = re.compile(
    r"(^|\.)(lora_(A|B|up|down|mid|embedding_[AB]|magnitude_vector)"
    r"|(\w*_)?lora(_linear_layer)?\.(up|down)|hada_w\d_[ab]|lokr_w\d(_[ab])?)(\.|$)"
)
ADAPTER_FILES = frozenset({"adapter_model.safetensors", "pytorch_lora_weights.safetensors"})
ADAPTER_CONFIG = "adapter_config.json"
_FUSE = "fuse the adapter into the weights, then build"
# What torch.compile, FSDP and activation checkpointing put into a name, wherever a module has them.
_WRAPPERS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
_INDEX = re.compile(r"^(?P<stem>.+)\.safetensors\.index(\.(?P<variant>[^.]+))?\.json$")
_PART = re.compile(r"-\d{5}-of-\d{5}")


@dataclass(frozen=True, slots=True)
class Weights:
    """The chosen weight files of a folder, in name order, and those passed over."""

    files: tuple[str, ...]
    index: str | None
    left_out: tuple[str, ...]
    variant: str | None


def variant_of(name: str) -> str | None:
    """`fp16` of model.fp16.safetensors and of both ways to name a part of it; else None."""
    body = _PART.sub("", name.removesuffix(".safetensors"))
    _, dot, variant = body.rpartition(".")
    return variant if dot else None


def find_weights(folder: Path, variant: str | None) -> Weights | None:
    """The weight files of a component folder; None where it has no safetensors at all.

    Raises CheckpointError: no such variant, a missing or escaping file, a stray extra weight
    file, a file that is one rank of somebody's sharded checkpoint. Every problem at once.
    """
    names = sorted(
        entry.name for entry in folder.iterdir() if entry.is_file() or entry.is_symlink()
    )
    tensors_files = [name for name in names if name.endswith(".safetensors")]
    indexes = {
        (match["stem"], match["variant"]): name for name in names if (match := _INDEX.match(name))
    }
    ranked = [name for name in tensors_files if _RANKED.search(name)]
    if ranked:
        raise CheckpointError(
            Problem(
                str(folder),
                f"{ranked[0]} is one rank of a checkpoint that is sharded already",
                "give the full checkpoint; `shardc reshard` takes shardc's own shard sets",
            )
        )
    if not tensors_files and not indexes:
        _refuse_pickles(folder, names)
        return None
    for stem in STEMS:
        index = indexes.get((stem, variant))
        single = f"{stem}.{variant}.safetensors" if variant else f"{stem}.safetensors"
        if index is not None:
            listed = _read_index(folder, index)
            return _complete(folder, sorted(set(listed.values())), index, tensors_files, variant)
        if single in tensors_files:
            return _complete(folder, [single], None, tensors_files, variant)
    known = {variant_of(name) for name in tensors_files} | {key[1] for key in indexes}
    raise CheckpointError(_nothing_chosen(folder, variant, known, tensors_files))


def _nothing_chosen(
    folder: Path, variant: str | None, known: set[str | None], names: list[str]
) -> Problem:
    variants = sorted(v for v in known if v)
    if any(_PART.search(name) for name in names) and variant in known:
        return Problem(
            str(folder), f"{names[0]} is one part of several, but there is no index.json for it"
        )
    if variant is None and variants:
        return Problem(
            str(folder), f"only variants are here: {', '.join(variants)}", "choose with --variant"
        )
    if variant is not None and variant not in known:
        have = ", ".join(v or "(none)" for v in sorted(known, key=str))
        return Problem(str(folder), f"no weights of variant {variant!r}; there are: {have}")
    if adapters := [name for name in names if name in ADAPTER_FILES]:
        return Problem(str(folder), f"{adapters[0]} is an adapter, not a model's weights", _FUSE)
    return Problem(
        str(folder),
        f"{names[0]} has no name that diffusers or transformers would load",
        "give the .safetensors file itself as SRC",
    )


def _refuse_pickles(folder: Path, names: Iterable[str]) -> None:
    pickled = [
        name
        for name in names
        if Path(name).suffix.lower() in PICKLES and name != "training_args.bin"
    ]
    if pickled:
        what = f"its weights are pickled ({pickled[0]}); shardc never unpickles"
        raise CheckpointError(Problem(str(folder), what, UNPICKLE))


def _read_index(folder: Path, name: str) -> Mapping[str, str]:
    where = str(folder / name)
    document = read_json(folder / name)
    weight_map = document.get("weight_map") if isinstance(document, dict) else None
    if not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()):
        raise CheckpointError(Problem(where, "has no weight_map of tensor names to file names"))
    if not weight_map:
        raise CheckpointError(Problem(where, "its weight_map is empty"))
    return weight_map


def _complete(
    folder: Path, chosen: list[str], index: str | None, present: list[str], variant: str | None
) -> Weights:
    problems = []
    for name in chosen:
        if "/" in name or "\\" in name or name in ("", ".", "..") or "\0" in name:
            problems.append(Problem(str(folder / str(index)), f"{name!r} leaves the folder"))
        elif not os.path.exists(folder / name):  # which takes any text for a name
            dangling = os.path.islink(folder / name)
            what = "is a link to a missing file" if dangling else "is missing"
            listed = f", but {index} lists it" if index else ""
            problems.append(Problem(str(folder), f"{name} {what}{listed}"))
        elif not name.endswith(".safetensors"):
            problems.append(
                Problem(str(folder / str(index)), f"{name!r} is not a safetensors file")
            )
    others = [name for name in present if name not in chosen]
    left_out = [name for name in others if variant_of(name) not in (None, variant)]
    if variant is not None:  # the plain weights beside the chosen variant
        left_out += [name for name in others if variant_of(name) is None and name.startswith(STEMS)]
    problems += [
        Problem(str(folder), f"{name} is an adapter: it would not be applied", _FUSE)
        if name in ADAPTER_FILES
        else Problem(
            str(folder),
            f"{name} is a stray weight file: {index or chosen[0]} does not account for it",
            "move it away if it is not part of the model",
        )
        for name in sorted(set(others) - set(left_out))
    ]
    if problems:
        raise CheckpointError(problems)
    return Weights(tuple(chosen), index, tuple(sorted(left_out)), variant)


def read_headers(
    folder: Path, weights: Weights, at: Callable[[Path], AnyFile]
) -> dict[str, Header]:
    """The headers of all chosen files, checked against the index; CheckpointError lists all.

    at: what to read in the place of a file of the folder.
    """
    headers: dict[str, Header] = {}
    problems: list[Problem] = []
    for name in weights.files:
        try:
            headers[name] = read_header(at(folder / name))
        except CheckpointError as error:
            problems += error.problems
    holder: dict[str, str] = {}
    for name, header in headers.items():
        problems += foreign_problems(folder / name, header)
        for tensor in header.tensors:
            if tensor.name in holder:
                problems.append(
                    Problem(
                        str(folder),
                        f"tensor {tensor.name!r} is in both {holder[tensor.name]} and {name}",
                    )
                )
            holder[tensor.name] = name
    if weights.index is not None and len(headers) == len(weights.files):
        problems += _index_problems(folder, weights.index, holder)
    if problems:
        raise CheckpointError(problems)
    return headers


def foreign_problems(path: Path, header: Header) -> list[Problem]:
    """What a file itself has against reading it as a full checkpoint's."""
    if "shardc" in header.metadata or "DCP_SHARDING_INFO" in header.metadata:
        return [Problem(str(path), "its metadata says that it is one rank's shard")]
    adapters = [tensor.name for tensor in header.tensors if _ADAPTER.search(tensor.name)]
    if adapters:
        what = f"tensor {adapters[0]!r} is an adapter's, one of {len(adapters)}"
        return [Problem(str(path), what, _FUSE)]
    return []


def model_names(folder: Path, headers: Mapping[str, Header]) -> dict[str, str]:
    """What the model calls each stored tensor: its name without what torch's wrappers add to it.

    CheckpointError where two tensors are one to the model.
    """
    names: dict[str, str] = {}
    stored: dict[str, str] = {}
    problems = []
    for file, header in headers.items():
        for tensor in header.tensors:
            name = names[tensor.name] = _unwrapped(tensor.name)
            if name in stored:
                what = f"tensors {stored[name]!r} and {tensor.name!r} are both the model's {name!r}"
                problems.append(Problem(str(folder / file), what, "keep the right one"))
            if reason := name_problem(name):
                what = f"tensor {tensor.name!r:.200} is the model's {name!r:.200}: {reason}"
                problems.append(Problem(str(folder / file), what))
            stored[name] = tensor.name
    if problems:
        raise CheckpointError(problems)
    return names


def _unwrapped(name: str) -> str:
    parts = [part for part in name.split(".") if part not in _WRAPPERS]
    while len(parts) > 1 and parts[0] == "module":  # DataParallel's, which wraps the whole model
        del parts[0]
    return ".".join(parts) or name


def twins(headers: Mapping[str, Header], names: Mapping[str, str]) -> dict[str, list[str]]:
    """The other names of stored tensors, as the model has them, that their files' metadata states.

    Source: safetensors.torch.save_model, which stores tied tensors once and notes the others.
    """
    found: dict[str, list[str]] = {}
    present = set(names.values())
    for header in headers.values():
        held = {tensor.name for tensor in header.tensors}
        for other, name in header.metadata.items():
            alias = _unwrapped(other)
            if name not in held or other == "format" or name_problem(alias):
                continue  # a note of another kind
            if alias not in present:
                present.add(alias)
                found.setdefault(name, []).append(alias)
    return found


def _index_problems(folder: Path, index: str, holder: Mapping[str, str]) -> list[Problem]:
    where = str(folder / index)
    weight_map = _read_index(folder, index)
    problems = []
    for tensor, name in weight_map.items():
        if tensor not in holder:
            problems.append(Problem(where, f"lists tensor {tensor!r} in {name}, which lacks it"))
        elif holder[tensor] != name:
            problems.append(
                Problem(where, f"lists tensor {tensor!r} in {name}, it is in {holder[tensor]}")
            )
    problems += [
        Problem(where, f"does not list tensor {tensor!r} of {name}")
        for tensor, name in holder.items()
        if tensor not in weight_map
    ]
    return problems
