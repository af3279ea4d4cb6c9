"""Build, end to end: a plan becomes a shard set, which appears whole or not at all."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import xxhash

import shardc
from shardc.checkpoint import CONFIG, INDEX_NAME, Component
from shardc.current import carried, is_current
from shardc.errors import CheckpointError, Problem, ShardSetError
from shardc.execute import Digests, default_workers, execute
from shardc.fileio import Snapshot
from shardc.files import COPY_BYTES, check_space, nearest_folder, write_file
from shardc.header import TensorInfo, read_header
from shardc.index import (
    FORMAT_VERSION,
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
from shardc.planner import ComponentPlan, Move, OutFile, Plan
from shardc.workspace import (
    Workspace,
    allocated_bytes,
    check_apart,
    check_way,
    partial_folder,
    sweep,
    workspace,
)

DEFAULT_MEMORY_BYTES = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Resources:
    """How to build; none of it changes a byte of the result.

    expected: for each component the digests that its whole tensors must have, in order.
    """

    workers: int | None = None
    memory_bytes: int = DEFAULT_MEMORY_BYTES
    fsync: bool = True
    progress: Callable[[int], None] | None = None
    expected: Mapping[str, Sequence[str]] | None = None


@dataclass(frozen=True, slots=True)
class BuildReport:
    """What a build did. `kept` says for each unsharded component how its weights got there.

    resumed_tensors: those that an unfinished build had written. up_to_date: nothing was to do.
    """

    out: str
    tp: int
    files: int
    source_bytes: int
    written_bytes: int
    seconds: float
    peak_rss_bytes: int
    sharded: tuple[str, ...]
    kept: dict[str, str]
    resumed_tensors: int = 0
    up_to_date: bool = False

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def build(
    plan: Plan, out: Path, resources: Resources, *, force: bool = False, resume: bool = False
) -> BuildReport:
    """Carry out `plan` into folder `out`, or do nothing where it is up to date.

    force: replace a shard set there, and drop what an unfinished build left; resume: go on from
    that. Raises OutputError, CheckpointError; what stays for `resume` is said in the error.
    """
    started = time.monotonic()
    if not force and is_current(plan, out):
        sweep(out, lambda: _facts(plan, _snapshot(plan)))
        files, _ = count_files(out)
        return _report(plan, out, started, files, 0, {}, up_to_date=True)
    check_apart(plan.checkpoint.path, out)
    others = carried(plan)
    snapshot = _snapshot(plan)
    kept: dict[str, set[str]] = {component.name: set() for component, _ in plan.kept}
    with workspace(
        out,
        _facts(plan, snapshot),
        force=force,
        resume=resume,
        fsync=resources.fsync,
        at_rest=lambda: not snapshot.changes(),
    ) as work:
        check_space(out, _needed_bytes(plan, out), work.allocated_bytes())
        for part in plan.components:
            check_headers(part.component)
        for name, path in others.items():
            work.carry(path, name)
        for component, _ in plan.kept:
            for file in component.files:
                name = str(Path(component.name, file.name))
                kept[component.name].add(work.keep(file.path, name))
        taken = sum(_write_component(part, work, resources, snapshot) for part in plan.components)
        snapshot.check()
        files, written = count_files(work.folder)
    ways = {name: " and ".join(sorted(used)) for name, used in kept.items()}
    return _report(plan, out, started, files, written, ways, resumed_tensors=taken)


def _report(
    plan: Plan,
    out: Path,
    started: float,
    files: int,
    written_bytes: int,
    kept: dict[str, str],
    **more: Any,
) -> BuildReport:
    return BuildReport(
        out=str(out),
        tp=plan.options.tp,
        files=files,
        source_bytes=sum(c.component.size_bytes for c in plan.components),
        written_bytes=written_bytes,
        seconds=time.monotonic() - started,
        peak_rss_bytes=peak_rss_bytes(),
        sharded=tuple(c.component.name for c in plan.components),
        kept=kept,
        **more,
    )


def weights(components: Iterable[Component]) -> dict[str, Path]:
    """The weight files of `components` by their names in the checkpoint."""
    return {str(Path(c.name, file.name)): file.path for c in components for file in c.files}


def _snapshot(plan: Plan) -> Snapshot:
    return Snapshot({**weights(c.component for c in plan.components), **carried(plan)})


def _facts(plan: Plan, snapshot: Snapshot) -> dict[str, str | int | None]:
    """What an unfinished build must have been, for this one to go on from it."""
    options = plan.options
    facts: dict[str, str | int | None] = {
        "version": f"shardc {shardc.__version__}",
        "command": "build",
        "tp": options.tp,
        "profile": options.profile,
        "dtype": options.dtype,
        "max part size": options.max_part_bytes,
        "pad heads": options.pad_heads,
    }
    for part in plan.components:
        facts[f"manifest of {part.component.name or '.'}"] = part.manifest.name
    for component, _ in plan.kept:
        facts[f"component {component.name}"] = "kept whole"
    for part in plan.components:
        facts[f"plan of {part.component.name or '.'}"] = part.digest
    return facts | source_facts(snapshot)


def source_facts(snapshot: Snapshot) -> dict[str, str | int | None]:
    """The identities of a build's source files, as a journal records them."""
    return {f"source file {name}": str(known) for name, known in snapshot.identities.items()}


def count_files(folder: Path) -> tuple[int, int]:
    """How many files lie below `folder`, and their bytes."""
    sizes = [entry.stat().st_size for entry in folder.rglob("*") if entry.is_file()]
    return len(sizes), sum(sizes)


def peak_rss_bytes() -> int:
    """The process's peak resident memory so far."""
    with suppress(OSError):  # getrusage's includes that of the process that started this one
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def check_out(plan: Plan, out: Path, *, force: bool = False, resume: bool = False) -> bool:
    """What `build` would refuse, without writing: OutputError; whether `out` is up to date."""
    if not force and is_current(plan, out):
        return True
    check_apart(plan.checkpoint.path, out)
    check_way(out, _facts(plan, _snapshot(plan)), force=force, resume=resume)
    check_space(out, _needed_bytes(plan, out), allocated_bytes(partial_folder(out)))
    return False


def check_headers(component: Component) -> None:
    """CheckpointError where a weight file's header is not the one that was planned for."""
    planned: dict[int, set[TensorInfo]] = {number: set() for number in range(len(component.files))}
    for tensor in component.tensors:
        for part in tensor.stored:
            planned[part.file].add(part.info)
    for number, file in enumerate(component.files):
        if set(read_header(file.path).tensors) != planned[number]:
            what = "has another header than when it was planned for"
            raise CheckpointError(Problem(str(file.path), what, "plan and build again"))


def _needed_bytes(plan: Plan, out: Path) -> int:
    """What the set takes: shards, and what is copied; weights on the same disk are linked."""
    disk = nearest_folder(out).stat().st_dev
    copied = (
        status.st_size
        for status in (path.stat() for path in carried(plan).values())
        if status.st_dev != disk or status.st_size < COPY_BYTES
    )
    return sum(copied) + sum(f.size_bytes for c in plan.components for f in c.files)


def _write_component(
    plan: ComponentPlan, work: Workspace, resources: Resources, snapshot: Snapshot
) -> int:
    """Write one component's shards, then its index, which makes them count.

    How many tensors an earlier build had written.
    """
    component = plan.component
    digests, taken = write_shards(component, plan.files, plan.moves(), work, resources)
    snapshot.check()
    if resources.expected is not None:
        check_digests(component, digests, resources.expected[component.name])
    index = make_index(plan, digests)
    write_file(work.folder / component.name / INDEX_NAME, index.dump(), fsync=resources.fsync)
    return taken


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

    digests = execute(
        component.files,
        folder,
        files,
        moves,
        workers=resources.workers or default_workers(),
        memory_bytes=resources.memory_bytes,
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
        version=FORMAT_VERSION,
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
        ),
        files=files,
        tensors=tensors,
    )
