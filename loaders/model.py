"""`load_model` and `load_pipeline`: built on meta, placed from the shards, checked, ready."""

from __future__ import annotations

import importlib
import json
import logging
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import xxhash
from torch import nn

from shardc.checkpoint import CONFIG, MODEL_INDEX, Component, open_component
from shardc.errors import Problem, ShardcError, ShardSetError
from shardc.header import TensorInfo, read_header
from shardc.index import Index
from shardc.loaders import devices
from shardc.loaders.group import Ranks
from shardc.loaders.parallel import gather_tied, parallelize
from shardc.loaders.storage import (
    DTYPES,
    MappedFile,
    check_rank,
    choose_component,
    open_rank,
    place_on,
)
from shardc.manifest import parse_manifest
from shardc.placing import Dims
from shardc.shardset import open_shard_set

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
    "enable_group_offload": "a shard is already a part; use a higher tp",
    "enable_layerwise_casting": "build with --dtype instead",
    "quantize": "quantise the checkpoint before it is built",
}


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


def load_model(
    path: str | Path,
    *,
    mesh: DeviceMesh | None = None,
    device: str | torch.device | None = None,
    component: str | None = None,
) -> nn.Module:
    """This rank's part of a sharded model, tensor-parallel and in eval mode.

    mesh: a 1-d DeviceMesh, or one axis of a larger one; default: all ranks of the default group,
    this process alone where there is none. device: default the mesh's, else cpu; on cpu the
    parameters are views of the mapped files. Every rank must call it. Raises ShardSetError on
    every rank where any rank cannot go on.
    """
    ranks = Ranks(mesh)
    timings = Timings()
    index: Index | None = None
    error: ShardcError | None = None
    try:
        where = devices.resolve(device, mesh)
        with _timed(timings, "open"):
            shard_set = open_shard_set(Path(path))
            name = choose_component(shard_set, component)
            index, folder = shard_set.components[name], shard_set.folder(name)
            check_rank(index, ranks.rank, ranks.size, folder)
            held = open_rank(folder, index, ranks.rank)
            config = _config(folder, index)
    except ShardcError as failure:
        error = failure
    ranks.agree(error, None if index is None else index.plan)
    assert index is not None
    try:
        manifest = parse_manifest(index.manifest.text, index.manifest.name)
        with _timed(timings, "build"):
            model = _build(manifest.library, index.source.class_, folder, config, held)
        with _timed(timings, "place"):
            _place(model, held, where, {n: t.shape for n, t in index.tensors.items()}, folder)
            timings.placed_bytes = sum(info.size_bytes for _, info in held.values())
        with _timed(timings, "wire"):
            if ranks.group is not None and ranks.size > 1:
                dims = Dims(manifest, config, ranks.size)
                parallelize(model, index, manifest, dims, ranks.rank, ranks.group)
                _tie_heads(model, manifest.library, index, ranks)
            _finish(model, where, folder)
    except ShardcError as failure:
        error = failure
    ranks.agree(error)
    loaded = Loaded(str(path), name, ranks.rank, ranks.size, index.plan, timings)
    object.__setattr__(model, "shardc", loaded)
    _forbid(model)
    log.info(
        "rank %d of %d: %d bytes of %s in %.2f s (open %.2f, build %.2f, place %.2f, wire %.2f)",
        ranks.rank,
        ranks.size,
        timings.placed_bytes,
        name or path,
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
) -> Any:
    """The diffusers pipeline of a shard set: sharded components sharded, whole ones mapped.

    Scheduler, tokenizers and processors load as diffusers does. Every rank must call it.
    """
    path = Path(path)
    where = devices.resolve(device, mesh)
    shard_set = open_shard_set(path)
    if not (path / MODEL_INDEX).is_file():
        raise ShardSetError(
            Problem(str(path), f"has no {MODEL_INDEX}: one component, not a pipeline", "load_model")
        )
    components: dict[str, nn.Module] = {}
    for name, entry in json.loads((path / MODEL_INDEX).read_bytes()).items():
        if name.startswith("_") or not isinstance(entry, list) or not entry[0]:
            continue
        if name in shard_set.components:
            components[name] = load_model(path, mesh=mesh, device=where, component=name)
        elif (whole := open_component(path / name, name, None)) is not None:
            components[name] = _load_whole(whole, entry[0], entry[1], where)
    from shardc.loaders import diffusers

    return diffusers.pipeline(path, components)


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
    _place(model, held, device, shapes, component.path)
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
    builder = importlib.import_module(f"shardc.loaders.{library}")
    from accelerate import init_empty_weights  # type: ignore[import-untyped]

    with _default_dtype(held), init_empty_weights(include_buffers=False):
        model: nn.Module = builder.build(class_name, folder, config)
    return model


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
) -> None:
    """Put every tensor where the model has it; `shapes` are the global ones that it must have."""
    modules = dict(model.named_modules())
    problems = []
    for name, tensor in place_on(held, device):
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


def _tie(model: nn.Module, library: str) -> dict[str, str]:
    if library != "transformers":
        return {}
    from shardc.loaders import transformers

    found = {}
    for absent, present in transformers.tied(model).items():
        owner, _, leaf = absent.rpartition(".")
        holder, _, held = present.rpartition(".")
        module = model.get_submodule(owner)
        own = module._parameters.get(leaf)
        if own is not None and own.is_meta:
            module._parameters[leaf] = model.get_submodule(holder)._parameters[held]
            found[absent] = present
    return found


def _tie_heads(model: nn.Module, library: str, index: Index, ranks: Ranks) -> None:
    """A head that a checkpoint leaves out shares the embedding's rows, this rank's part of them."""
    assert ranks.group is not None
    for absent, present in _tie(model, library).items():
        entry = index.tensors[present]
        if entry.style == "vocab_parallel":
            gather_tied(model.get_submodule(absent.rpartition(".")[0]), entry.shape[0], ranks.group)


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


def _forbid(model: nn.Module) -> None:
    for name, instead in FORBIDDEN.items():
        if hasattr(type(model), name):
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
