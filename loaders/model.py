"""`load_model`: one component's shard, from files to a model that is ready to run."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from shardc.errors import Problem, ShardSetError
from shardc.index import Index
from shardc.loaders import devices
from shardc.loaders.assemble import build, finish, place, read_config, renamed, tie, tie_heads
from shardc.loaders.group import Ranks
from shardc.loaders.mapped import Held
from shardc.loaders.opening import Opening
from shardc.loaders.parallel import parallelize
from shardc.loaders.reads import Reads
from shardc.loaders.refusals import GUARDED, forbid
from shardc.loaders.storage import check_rank, choose_component, open_rank
from shardc.manifest import Manifest, parse_manifest
from shardc.placing import Dims
from shardc.shardset import ShardSet

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

log = logging.getLogger("shardc.loaders")

Runtime = Literal["plain", "dtensor"]


@dataclass(slots=True)
class Timings:
    """Seconds of each phase of a load, and bytes. pull: of a set that is elsewhere."""

    pull: float = 0.0
    open: float = 0.0
    build: float = 0.0
    place: float = 0.0
    wire: float = 0.0
    placed_bytes: int = 0

    @property
    def total(self) -> float:
        return self.pull + self.open + self.build + self.place + self.wire


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
class Opened:
    """A sharded component, opened and checked: nothing of it is read yet."""

    opening: Opening
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
    revision: str | None = None,
    token: str | None = None,
    cache: bool = True,
) -> nn.Module:
    """This rank's part of a sharded model, tensor-parallel and in eval mode.

    path, revision, token, cache: as in load_state_dict; of an address that holds several degrees
    the one of as many ranks is taken.
    mesh: a 1-d DeviceMesh, or one axis of a larger one; default: all ranks of the default group,
    this process alone where there is none. device: default the mesh's, else cpu; on cpu the
    parameters are views of the mapped files. runtime: "plain" local tensors, or "dtensor", which
    is diffusers' own tensor parallelism, for its classes and sets of profile native. reads: as
    in load_state_dict. Every rank must call it. Raises ShardSetError on every rank where any rank
    cannot go on.
    """
    ranks = Ranks(mesh)
    timings = Timings()
    part = partial(choose_component, component=component)
    with Opening(path, revision=revision, token=token, cache=cache, part=part) as opening:
        opening.fetch_together(ranks, lambda: devices.resolve(device, mesh))
        timings.pull = opening.seconds
        with together(ranks) as facts, opening.told(), timed(timings, "open"):
            where = devices.resolve(device, mesh)
            shard_set = opening.open()
            name = choose_component(shard_set, component)
            check_rank(shard_set.components[name], ranks.rank, ranks.size, shard_set.folder(name))
            opened = open_part(shard_set, name, ranks, runtime, opening)
            facts += [("shard set", opened.index.plan), ("runtime", runtime)]
        return load_part(opened, path, ranks, mesh, where, runtime, timings, reads)


def open_part(
    shard_set: ShardSet, name: str, ranks: Ranks, runtime: Runtime, opening: Opening
) -> Opened:
    index, folder = shard_set.components[name], shard_set.folder(name)
    held = open_rank(folder, index, ranks.rank, opening.at)
    config = read_config(folder, index)
    manifest = parse_manifest(index.manifest.text, index.manifest.name)
    if runtime == "dtensor":
        from shardc.loaders import dtensor

        dtensor.check(index, manifest.library, folder)
    elif runtime != "plain":
        raise ShardSetError(Problem(f"runtime {runtime!r}", "is none of 'plain', 'dtensor'"))
    return Opened(opening, name, folder, index, manifest, config, held)


def load_part(
    opened: Opened,
    path: str | Path,
    ranks: Ranks,
    mesh: DeviceMesh | None,
    where: torch.device,
    runtime: Runtime,
    timings: Timings,
    reads: Reads = "auto",
) -> nn.Module:
    index, folder, held, library = opened.index, opened.folder, opened.held, opened.manifest.library
    with together(ranks), opened.opening.told():
        with timed(timings, "build"):
            model = build(library, index.source.class_, folder, opened.config, held)
            index, held = renamed(model, library, index, held, folder)
            if runtime == "dtensor":
                from shardc.loaders import dtensor

                mesh = dtensor.mesh_for(ranks, mesh, where)
                plan = dtensor.specs(model, index, ranks.rank, folder)
        with timed(timings, "place"):
            shapes = {n: t.shape for n, t in index.tensors.items()}
            place(model, held, where, shapes, folder, reads)
            timings.placed_bytes = sum(info.size_bytes for _, info in held.values())
        with timed(timings, "wire"):
            if runtime == "dtensor":
                assert mesh is not None
                dtensor.parallelize(model, plan, mesh, where, folder)
            elif ranks.group is not None and ranks.size > 1:
                dims = Dims(opened.manifest, opened.config, ranks.size, pad_heads=index.pad_heads)
                parallelize(model, index, opened.manifest, dims, ranks.rank, ranks.group)
                tie_heads(model, library, index, ranks)
            else:
                tie(model, library)
            finish(model, where, folder)
    loaded = Loaded(str(path), opened.name, ranks.rank, ranks.size, index.plan, timings)
    object.__setattr__(model, "shardc", loaded)
    forbid(model, GUARDED if runtime == "dtensor" else ())
    log.info(
        "rank %d of %d: %d bytes of %s in %.2f s (pull %.2f, open %.2f, build %.2f, place %.2f, "
        "wire %.2f)",
        ranks.rank,
        ranks.size,
        timings.placed_bytes,
        opened.name or path,
        timings.total,
        timings.pull,
        timings.open,
        timings.build,
        timings.place,
        timings.wire,
    )
    return model


@contextmanager
def together(ranks: Ranks) -> Iterator[list[Any]]:
    """Do this on every rank, or fail on every rank. What is yielded must be the same on all."""
    facts: list[Any] = []
    error: Exception | None = None
    try:
        yield facts
    except Exception as failure:
        error = failure
    ranks.agree(error, facts)


@contextmanager
def timed(timings: Timings, phase: str) -> Iterator[None]:
    started = time.perf_counter()
    try:
        yield
    finally:
        setattr(timings, phase, getattr(timings, phase) + time.perf_counter() - started)
