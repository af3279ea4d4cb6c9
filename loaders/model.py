"""`load_model` and `load_pipeline`: built on meta, placed from the shards, checked, ready."""

from __future__ import annotations

import importlib
import json
import logging
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
import xxhash
from torch import nn

from shardc.checkpoint import CONFIG, MODEL_INDEX, Component, open_component
from shardc.errors import Problem, ShardSetError
from shardc.header import TensorInfo, read_header
from shardc.index import Index
from shardc.loaders import devices
from shardc.loaders.group import Ranks
from shardc.loaders.parallel import gather_tied, parallelize
from shardc.loaders.reads import Reads
from shardc.loaders.storage import (
    DTYPES,
    MappedFile,
    check_rank,
    choose_component,
    open_rank,
    place_on,
)
from shardc.manifest import Manifest, parse_manifest
from shardc.placing import Dims
from shardc.shardset import ShardSet, open_shard_set

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

log = logging.getLogger("shardc.loaders")

Held = Mapping[str, tuple[MappedFile, TensorInfo]]
# What a sharded model must not do: each would act on one rank's part as if it were the whole.
FORBIDDEN = {
    "save_pretrained": "`shardc merge` gives the full checkpoint back",
    "push_to_hub": "push the shard set's folder",
    "load_lora_adapter": "fuse the adapter into the checkpoint, then build",
    "load_adapter": "fuse the adapter into the checkpoint, then build",
    "add_adapter": "fuse the adapter into the checkpoint, then build",
    "load_lora_weights": "fuse the adapter into the checkpoint, then build",
    "enable_group_offload": "a shard is already a part; use a higher tp",
    "enable_model_cpu_offload": "a shard is already a part; use a higher tp",
    "enable_sequential_cpu_offload": "a shard is already a part; use a higher tp",
    "enable_layerwise_casting": "build with --dtype instead",
    "quantize": "quantise the checkpoint before it is built",
}
# What diffusers refuses by itself where a model has its own tensor parallelism.
GUARDED = frozenset(
    {
        "save_pretrained",
        "load_lora_adapter",
        "load_lora_weights",
        "enable_group_offload",
        "enable_model_cpu_offload",
        "enable_sequential_cpu_offload",
    }
)
Runtime = Literal["plain", "dtensor"]


@dataclass(slots=True)
class Timings:
    """Seconds of each phase of a load, and bytes."""

    open: float = 0.0
    build: float = 0.0
    place: float = 0.0
    wire: float = 0.0
    placed_bytes: int = 0

    @property
    def total(self) -> float:
        return self.open + self.build + self.place + self.wire


@dataclass(frozen=True, slots=True)
class Loaded:
    """`model.shardc`: which part of which shard set a model holds, and how long that took."""

    path: str
    component: str
    rank: int
    tp: int
    plan: str
    timings: Timings = field(default_factory=Timings)

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "seconds": self.timings.total}


@dataclass(frozen=True, slots=True)
class _Opened:
    """A sharded component, opened and checked: nothing of it is read yet."""

    name: str
    folder: Path
    index: Index
    manifest: Manifest
    config: Mapping[str, Any]
    held: Held


def load_model(
    path: str | Path,
    *,
    mesh: DeviceMesh | None = None,
    device: str | torch.device | None = None,
    component: str | None = None,
    runtime: Runtime = "plain",
    reads: Reads = "auto",
) -> nn.Module:
    """This rank's part of a sharded model, tensor-parallel and in eval mode.

    mesh: a 1-d DeviceMesh, or one axis of a larger one; default: all ranks of the default group,
    this process alone where there is none. device: default the mesh's, else cpu; on cpu the
    parameters are views of the mapped files. runtime: "plain" local tensors, or "dtensor", which
    is diffusers' own tensor parallelism, for its classes and sets of profile native. reads: as
    in load_state_dict. Every rank must call it. Raises ShardSetError on every rank where any rank
    cannot go on.
    """
    ranks = Ranks(mesh)
    timings = Timings()
    with _together(ranks) as facts, _timed(timings, "open"):
        where = devices.resolve(device, mesh)
        shard_set = open_shard_set(Path(path))
        name = choose_component(shard_set, component)
        check_rank(shard_set.components[name], ranks.rank, ranks.size, shard_set.folder(name))
        opened = _open(shard_set, name, ranks, runtime)
        facts += [opened.index.plan, runtime]
    return _load(opened, path, ranks, mesh, where, runtime, timings, reads)


def _open(shard_set: ShardSet, name: str, ranks: Ranks, runtime: Runtime) -> _Opened:
    index, folder = shard_set.components[name], shard_set.folder(name)
    held = open_rank(folder, index, ranks.rank)
    config = _config(folder, index)
    manifest = parse_manifest(index.manifest.text, index.manifest.name)
    if runtime == "dtensor":
        from shardc.loaders import dtensor

        dtensor.check(index, manifest.library, folder)
    elif runtime != "plain":
        raise ShardSetError(Problem(f"runtime {runtime!r}", "is none of 'plain', 'dtensor'"))
    return _Opened(name, folder, index, manifest, config, held)


def _load(
    opened: _Opened,
    path: str | Path,
    ranks: Ranks,
    mesh: DeviceMesh | None,
    where: torch.device,
    runtime: Runtime,
    timings: Timings,
    reads: Reads = "auto",
) -> nn.Module:
    index, folder, held, library = opened.index, opened.folder, opened.held, opened.manifest.library
    with _together(ranks):
        with _timed(timings, "build"):
            model = _build(library, index.source.class_, folder, opened.config, held)
            index, held = _renamed(model, library, index, held, folder)
            if runtime == "dtensor":
                from shardc.loaders import dtensor

                mesh = dtensor.mesh_for(ranks, mesh, where)
                plan = dtensor.specs(model, index, ranks.rank, folder)
        with _timed(timings, "place"):
            shapes = {n: t.shape for n, t in index.tensors.items()}
            _place(model, held, where, shapes, folder, reads)
            timings.placed_bytes = sum(info.size_bytes for _, info in held.values())
        with _timed(timings, "wire"):
            if runtime == "dtensor":
                assert mesh is not None
                dtensor.parallelize(model, plan, mesh, where, folder)
            elif ranks.group is not None and ranks.size > 1:
                dims = Dims(opened.manifest, opened.config, ranks.size)
                parallelize(model, index, opened.manifest, dims, ranks.rank, ranks.group)
                _tie_heads(model, library, index, ranks)
            else:
                _tie(model, library)
            _finish(model, where, folder)
    loaded = Loaded(str(path), opened.name, ranks.rank, ranks.size, index.plan, timings)
    object.__setattr__(model, "shardc", loaded)
    _forbid(model, GUARDED if runtime == "dtensor" else ())
    log.info(
        "rank %d of %d: %d bytes of %s in %.2f s (open %.2f, build %.2f, place %.2f, wire %.2f)",
        ranks.rank,
        ranks.size,
        timings.placed_bytes,
        opened.name or path,
        timings.total,
        timings.open,
        timings.build,
        timings.place,
        timings.wire,
    )
    return model


def load_pipeline(
    path: str | Path,
    *,
    mesh: DeviceMesh | None = None,
    device: str | torch.device | None = None,
    runtime: Runtime = "plain",
) -> Any:
    """The diffusers pipeline of a shard set: sharded components sharded, whole ones mapped.

    Scheduler, tokenizers and processors load as diffusers does. runtime: that of the components
    that diffusers itself can shard; the others are always plain. Every rank must call it. Raises
    ShardSetError on every rank where any rank cannot go on, before anything is read where the
    shards are at fault.
    """
    path = Path(path)
    ranks = Ranks(mesh)
    opened: list[tuple[_Opened, Runtime, Timings]] = []
    components: dict[str, nn.Module] = {}
    with _together(ranks) as facts:
        where = devices.resolve(device, mesh)
        shard_set = open_shard_set(path)
        listed = _listed(path)
        _check_ranks(shard_set, ranks)
        for name in listed:
            if name in shard_set.components:
                timings = Timings()
                own = _runtime_of(shard_set.components[name], runtime)
                with _timed(timings, "open"):
                    opened.append((_open(shard_set, name, ranks, own), own, timings))
                facts += [opened[-1][0].index.plan, own]
    with _together(ranks):
        for name, (library, class_name) in listed.items():
            if name not in shard_set.components:
                whole = open_component(path / name, name, None)
                if whole is not None:
                    components[name] = _load_whole(whole, library, class_name, where)
    for part, own, timings in opened:
        components[part.name] = _load(part, path, ranks, mesh, where, own, timings)
    with _together(ranks):
        from shardc.loaders import diffusers

        pipeline = diffusers.pipeline(path, components)
    _forbid(pipeline, GUARDED if any(own == "dtensor" for _, own, _ in opened) else ())
    return pipeline


def _listed(path: Path) -> dict[str, tuple[str, str]]:
    """The components that a pipeline has: library and class by name."""
    if not (path / MODEL_INDEX).is_file():
        raise ShardSetError(
            Problem(str(path), f"has no {MODEL_INDEX}: one component, not a pipeline", "load_model")
        )
    document = json.loads((path / MODEL_INDEX).read_bytes())
    return {
        name: (entry[0], entry[1])
        for name, entry in document.items()
        if not name.startswith("_") and isinstance(entry, list) and entry[0]
    }


def _check_ranks(shard_set: ShardSet, ranks: Ranks) -> None:
    problems: list[Problem] = []
    for name, index in shard_set.components.items():
        try:
            check_rank(index, ranks.rank, ranks.size, shard_set.folder(name))
        except ShardSetError as error:
            problems += error.problems
    if problems:
        raise ShardSetError(problems)


def _runtime_of(index: Index, runtime: Runtime) -> Runtime:
    """What a pipeline's component runs with: dtensor only where diffusers has a plan for it."""
    if runtime == "dtensor" and index.source.class_:
        from shardc.loaders import dtensor

        return "dtensor" if dtensor.serves(index.source.class_) else "plain"
    return runtime


@contextmanager
def _together(ranks: Ranks) -> Iterator[list[Any]]:
    """Do this on every rank, or fail on every rank. What is yielded must be the same on all."""
    facts: list[Any] = []
    error: Exception | None = None
    try:
        yield facts
    except Exception as failure:
        error = failure
    ranks.agree(error, facts)


def _load_whole(
    component: Component, library: str, class_name: str, device: torch.device
) -> nn.Module:
    """An unsharded component, its parameters mapped: the ranks of a host share the pages."""
    files = [MappedFile.open(f.path, read_header(f.path)) for f in component.files]
    held = {
        tensor.name: (files[tensor.stored[0].file], tensor.stored[0].info)
        for tensor in component.tensors
    }
    model = _build(library, class_name, component.path, component.config, held)
    shapes = {tensor.name: tensor.shape for tensor in component.tensors}
    names = _library(library).names(model, held)
    if names is None:
        model = _library(library).load(class_name, component.path).to(device)
        log.info("%s: %s converts its tensors: not mapped, but copied", component.path, library)
    else:
        own = model.state_dict()
        extra = sorted(name for name, new in names.items() if new not in own)
        if extra:  # as its library does
            log.warning("%s: %s has no use for %s", component.path, class_name, ", ".join(extra))
        kept = {name: new for name, new in names.items() if new in own}
        held = {new: held[name] for name, new in kept.items()}
        _place(model, held, device, {new: shapes[n] for n, new in kept.items()}, component.path)
        _tie(model, library)
    _finish(model, device, component.path)
    return model


def _config(folder: Path, index: Index) -> Mapping[str, Any]:
    raw = (folder / CONFIG).read_bytes()
    if xxhash.xxh3_128_hexdigest(raw) != index.source.config:
        raise ShardSetError(
            Problem(str(folder / CONFIG), "is not the one that the set was built with")
        )
    config: Mapping[str, Any] = json.loads(raw)
    return config


def _build(
    library: str, class_name: str, folder: Path, config: Mapping[str, Any], held: Held
) -> nn.Module:
    """The model with its parameters on meta, buffers and other tensors computed for real."""
    builder = _library(library)
    from accelerate import init_empty_weights  # type: ignore[import-untyped]

    with _default_dtype(held), init_empty_weights(include_buffers=False):
        model: nn.Module = builder.build(class_name, folder, config)
    return model


def _library(name: str) -> Any:
    """The module that knows a model library."""
    if name not in ("diffusers", "transformers"):
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


def _place(
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


def _renamed(
    model: nn.Module, library: str, index: Index, held: Held, where: Path
) -> tuple[Index, Held]:
    """The same under the names that the model has: a library may rename a checkpoint's."""
    names = _library(library).names(model, index.tensors)
    if names is None:
        what = f"this {library} would convert tensors of {type(model).__name__} as it loads"
        raise ShardSetError(Problem(str(where), what, "save the model with it, then build"))
    tensors = {names[name]: entry for name, entry in index.tensors.items()}
    return index.model_copy(update={"tensors": tensors}), {names[n]: h for n, h in held.items()}


def _tie(model: nn.Module, library: str) -> dict[str, str]:
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


def _tie_heads(model: nn.Module, library: str, index: Index, ranks: Ranks) -> None:
    """A head that a checkpoint leaves out shares the embedding's rows, this rank's part of them."""
    assert ranks.group is not None
    for absent, present in _tie(model, library).items():
        entry = index.tensors[present]
        if entry.style == "vocab_parallel":
            gather_tied(model.get_submodule(absent.rpartition(".")[0]), entry.shape[0], ranks.group)
        elif entry.placement.dim is not None:
            what = f"shares its weight with {present}, which is sharded {entry.style}"
            raise ShardSetError(Problem(absent, what, "rename it in the checkpoint, then build"))


def _finish(model: nn.Module, device: torch.device, where: Path) -> None:
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


def _forbid(model: object, guarded: Collection[str]) -> None:
    """Refuse what acts on the whole model; `guarded`: what the library refuses by itself."""
    for name, instead in FORBIDDEN.items():
        if name not in guarded and hasattr(type(model), name):
            object.__setattr__(model, name, _Refusal(name, instead))


@dataclass(frozen=True, slots=True)
class _Refusal:
    name: str
    instead: str

    def __call__(self, *_: Any, **__: Any) -> Any:
        raise ShardSetError(
            Problem(self.name, "this model holds one rank's shard, not the whole", self.instead)
        )


@contextmanager
def _timed(timings: Timings, phase: str) -> Iterator[None]:
    started = time.perf_counter()
    try:
        yield
    finally:
        setattr(timings, phase, getattr(timings, phase) + time.perf_counter() - started)
