"""`load_pipeline`: a shard set's sharded components sharded, its whole ones mapped."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from shardc.checkpoint import MODEL_INDEX, Component, listed_components, open_component
from shardc.errors import Problem, ShardSetError
from shardc.header import read_header
from shardc.index import Index
from shardc.loaders import devices
from shardc.loaders.assemble import LIBRARIES, build, finish, library_of, place, tie
from shardc.loaders.group import Ranks
from shardc.loaders.mapped import MappedFile
from shardc.loaders.model import Opened, Runtime, Timings, load_part, open_part, timed, together
from shardc.loaders.opening import Opening
from shardc.loaders.reads import Reads
from shardc.loaders.refusals import GUARDED, forbid
from shardc.loaders.storage import check_rank
from shardc.shardset import ShardSet

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

log = logging.getLogger("shardc.loaders")


def load_pipeline(
    path: str | Path,
    *,
    mesh: DeviceMesh | None = None,
    device: str | torch.device | None = None,
    runtime: Runtime = "plain",
    reads: Reads = "auto",
    revision: str | None = None,
    token: str | None = None,
    cache: bool = True,
) -> Any:
    """The diffusers pipeline of a shard set: sharded components sharded, whole ones mapped.

    path, revision, token, cache: as in load_model. Scheduler, tokenizers and processors load as
    diffusers does. runtime: that of the components that diffusers itself can shard; the others are
    always plain. reads: as in load_state_dict. Every rank must call it. Raises ShardSetError on
    every rank where any rank cannot go on, before anything is read where the shards are at fault.
    """
    ranks = Ranks(mesh)
    with Opening(path, revision=revision, token=token, cache=cache) as opening:
        opening.fetch_together(ranks, lambda: devices.resolve(device, mesh))
        return _load(opening, path, ranks, mesh, device, runtime, reads)


def _load(
    opening: Opening,
    path: str | Path,
    ranks: Ranks,
    mesh: DeviceMesh | None,
    device: str | torch.device | None,
    runtime: Runtime,
    reads: Reads,
) -> Any:
    opened: list[tuple[Opened, Runtime, Timings]] = []
    components: dict[str, nn.Module] = {}
    with together(ranks) as facts, opening.told():
        where = devices.resolve(device, mesh)
        shard_set = opening.open()
        root = shard_set.path
        if not (root / MODEL_INDEX).is_file():
            what = f"has no {MODEL_INDEX}: one component, not a pipeline"
            raise ShardSetError(Problem(str(root), what, "load_model"))
        listed = listed_components(root)
        _check_ranks(shard_set, ranks)
        for name in listed:
            if name in shard_set.components:
                timings = Timings(pull=0 if opened else opening.seconds)
                own = _runtime_of(shard_set.components[name], runtime)
                with timed(timings, "open"):
                    part = open_part(shard_set, name, ranks, own, opening)
                opened.append((part, own, timings))
                facts += [("shard set", part.index.plan), ("runtime", own)]
        opening.fill()
    with together(ranks), opening.told():
        for name, (library, class_name) in listed.items():
            if name in shard_set.components:
                continue
            whole = None
            # what is of neither library (a pipeline's own module), diffusers loads
            if library in LIBRARIES:
                whole = open_component(root / name, name, None, at=opening.at)
            if whole is not None:
                components[name] = _load_whole(whole, library, class_name, where, reads, opening)
            else:
                opening.whole(root / name)
    for part, own, timings in opened:
        components[part.name] = load_part(part, path, ranks, mesh, where, own, timings, reads)
    with together(ranks), opening.told():
        from shardc.loaders import diffusers

        pipeline = diffusers.pipeline(root, components)
    forbid(pipeline, GUARDED if any(own == "dtensor" for _, own, _ in opened) else ())
    return pipeline


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


def _load_whole(
    component: Component,
    library: str,
    class_name: str,
    device: torch.device,
    reads: Reads,
    opening: Opening,
) -> nn.Module:
    """An unsharded component, its parameters mapped: the ranks of a host share the pages."""
    files = [MappedFile.open(f.path, read_header(f.path)) for f in component.files]
    held = {
        tensor.name: (files[tensor.stored[0].file], tensor.stored[0].info)
        for tensor in component.tensors
    }
    model = build(library, class_name, component.path, component.config, held)
    shapes = {tensor.name: tensor.shape for tensor in component.tensors}
    names = library_of(library).names(model, held)
    if names is None:
        opening.whole(component.path)
        model = library_of(library).load(class_name, component.path).to(device)
        log.info("%s: %s converts its tensors: not mapped, but copied", component.path, library)
    else:
        own = model.state_dict()
        extra = sorted(name for name, new in names.items() if new not in own)
        if extra:  # as its library does
            log.warning("%s: %s has no use for %s", component.path, class_name, ", ".join(extra))
        kept = {name: new for name, new in names.items() if new in own}
        held = {new: held[name] for name, new in kept.items()}
        shapes = {new: shapes[name] for name, new in kept.items()}
        place(model, held, device, shapes, component.path, reads)
        tie(model, library)
    finish(model, device, component.path)
    return model
