"""A component's files, written: shards by a plan's moves, whole files as they are, its index."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import xxhash

import shardc
from shardc.checkpoint import CONFIG, Component, Stored
from shardc.compare import read_bytes
from shardc.errors import Problem, ShardSetError
from shardc.execute import Digests, execute
from shardc.index import (
    FORMAT_VERSION,
    REPO_VERSION,
    FileEntry,
    Index,
    ManifestEntry,
    OriginEntry,
    ShardEntry,
    SourceEntry,
    TensorEntry,
    file_digest,
    placement_entry,
    range_entries,
)
from shardc.layout import Replicate
from shardc.planner import ComponentPlan, Move, OutFile
from shardc.workspace import Workspace

DEFAULT_MEMORY_BYTES = 64 * 1024 * 1024
REMOTE_MEMORY_BYTES = 96 * 1024 * 1024
REMOTE_WORKERS = 8  # each waits for a server most of its time, with a range in flight
# Two threads keep a disk busy while a third computes; more only contend.
LOCAL_WORKERS = min(3, max(2, os.cpu_count() or 1))


@dataclass(frozen=True, slots=True)
class Resources:
    """How to build; none of it changes a byte of the result.

    expected: for each component the digests that its whole tensors must have, in order.
    """

    workers: int | None = None
    memory_bytes: int | None = None
    fsync: bool = True
    progress: Callable[[int], None] | None = None
    expected: Mapping[str, Sequence[str]] | None = None


def fetch_component(component: Component, work: Workspace, resources: Resources) -> int:
    """The weight files of a component that is kept whole, fetched tensor by tensor.

    How many tensors an earlier build had fetched.
    """
    files, targets = [], []
    for number, file in enumerate(component.files):
        stored = {part.info for t in component.tensors for part in t.stored if part.file == number}
        infos = tuple(sorted(stored, key=lambda info: (info.start, info.stop)))
        header = read_bytes(file.path, 0, file.data_start).tobytes()
        files.append(OutFile(file.name, None, header, infos))
        targets += [Stored(number, info, None) for info in infos]
    moves = (
        Move(t.info.name, t.info.dtype, t.info.dtype, t.info.shape, 0, (t,), (t,)) for t in targets
    )
    return write_shards(component, files, moves, work, resources)[1]


def write_shards(
    component: Component,
    files: Sequence[OutFile],
    moves: Iterable[Move],
    work: Workspace,
    resources: Resources,
) -> tuple[list[Digests], int]:
    """Write a component's weight files; each move's digests, and how many were taken over."""
    folder = work.folder / component.name
    folder.mkdir(parents=True, exist_ok=True)
    fresh = 0

    def record(done: Mapping[int, Digests]) -> None:
        nonlocal fresh
        fresh += len(done)
        work.journal.add_tensors(component.name, done)

    workers = REMOTE_WORKERS if component.remote else LOCAL_WORKERS
    memory_bytes = REMOTE_MEMORY_BYTES if component.remote else DEFAULT_MEMORY_BYTES
    digests = execute(
        component.files,
        folder,
        files,
        moves,
        workers=resources.workers or workers,
        memory_bytes=resources.memory_bytes or memory_bytes,
        fsync=resources.fsync,
        progress=resources.progress,
        held=work.journal.past.tensors.get(component.name),
        record=record,
    )
    if resources.fsync:
        work.journal.sync()
    return [digests[number] for number in range(len(digests))], len(digests) - fresh


def check_digests(
    component: Component, digests: Sequence[Digests], expected: Sequence[str]
) -> None:
    """ShardSetError naming each tensor that is not what the set's index says was built."""
    problems = [
        Problem(str(component.path), f"tensor {tensor.name!r}: its shards are not what was built")
        for tensor, found, wanted in zip(component.tensors, digests, expected, strict=True)
        if found.whole != wanted
    ]
    if problems:
        raise ShardSetError(problems)


def make_index(plan: ComponentPlan, digests: Sequence[Digests]) -> Index:
    """The index of a written component, from its plan and the digests of what was written."""
    by_file: list[dict[str, str]] = [{} for _ in plan.files]
    tensors = {}
    for planned, digest in zip(plan.tensors, digests, strict=True):
        shards = []
        for rank, (target, own) in enumerate(zip(planned.targets, digest.targets, strict=True)):
            by_file[target.file][target.info.name] = own
            whole = isinstance(planned.placement, Replicate)
            ranges = None if whole else range_entries(planned.pieces[rank])
            shards.append(ShardEntry(file=plan.files[target.file].name, digest=own, ranges=ranges))
        tensors[planned.tensor.name] = TensorEntry(
            dtype=planned.dtype,
            shape=planned.tensor.shape,
            style=planned.style,
            placement=placement_entry(planned.placement),
            origin=planned.tensor.origin,
            digest=digest.whole,
            shards=tuple(shards),
        )
    files = {
        file.name: FileEntry(
            rank=file.rank,
            size=file.size_bytes,
            digest=file_digest(file.header, (held[info.name] for info in file.tensors)),
        )
        for file, held in zip(plan.files, by_file, strict=True)
    }
    component, manifest, options = plan.component, plan.manifest, plan.options
    return Index(
        version=FORMAT_VERSION if component.repo is None else REPO_VERSION,
        tool=f"shardc {shardc.__version__}",
        tp=options.tp,
        profile=options.profile,
        dtype=options.dtype,
        max_part_bytes=options.max_part_bytes,
        pad_heads=options.pad_heads,
        plan=plan.digest,
        manifest=ManifestEntry(name=manifest.name, digest=manifest.digest, text=manifest.text),
        source=SourceEntry(
            class_=str(component.class_name),
            config=xxhash.xxh3_128_hexdigest((component.path / CONFIG).read_bytes()),
            index=component.index,
            files=tuple(
                OriginEntry(name=o.name, size=o.size_bytes, header=o.header_digest)
                for o in component.origins
            ),
            repo=component.repo,
        ),
        files=files,
        tensors=tensors,
    )
