"""Build, end to end: a plan becomes a shard set, which appears whole or not at all."""

from __future__ import annotations

import resource
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import shardc
from shardc.checkpoint import INDEX_NAME, Component
from shardc.current import carried, is_current, taken_over, weights
from shardc.errors import CheckpointError, Problem
from shardc.fileio import Snapshot
from shardc.files import COPY_BYTES, check_space, nearest_folder, write_file
from shardc.header import TensorInfo, read_header
from shardc.planner import ComponentPlan, Plan
from shardc.remote import RemoteFile, size_of
from shardc.workspace import (
    Workspace,
    allocated_bytes,
    check_apart,
    check_way,
    partial_folder,
    sweep,
    workspace,
)
from shardc.writing import Resources, check_digests, fetch_component, make_index, write_shards


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
    with plan.checkpoint.told():
        return _build(plan, out, resources, force=force, resume=resume)


def _build(
    plan: Plan, out: Path, resources: Resources, *, force: bool, resume: bool
) -> BuildReport:
    started = time.monotonic()
    if plan.checkpoint.mirror is not None:
        plan.checkpoint.mirror.fill()
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
        at_rest=snapshot.at_rest,
    ) as work:
        check_space(out, _needed_bytes(plan, out), work.allocated_bytes())
        for part in plan.components:
            check_headers(part.component)
        for name, path in others.items():
            work.carry(path, name)
        taken = 0
        for component, _ in plan.kept:
            if component.remote:
                taken += fetch_component(component, work, resources)
                kept[component.name].add("fetched")
                continue
            for name, where in weights([component]).items():
                assert isinstance(where, Path)
                kept[component.name].add(work.keep(where, name))
        taken += sum(_write_component(part, work, resources, snapshot) for part in plan.components)
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
        source_bytes=source_bytes(plan),
        written_bytes=written_bytes,
        seconds=time.monotonic() - started,
        peak_rss_bytes=peak_rss_bytes(),
        sharded=tuple(c.component.name for c in plan.components),
        kept=kept,
        **more,
    )


def _snapshot(plan: Plan) -> Snapshot:
    read = {**weights(part.component for part in plan.components), **taken_over(plan)}
    return Snapshot(read, plan.checkpoint.mirror)


def source_bytes(plan: Plan) -> int:
    """The bytes of weights that a build reads, as its progress tells them."""
    fetched = (component.size_bytes for component, _ in plan.kept if component.remote)
    return sum(part.component.size_bytes for part in plan.components) + sum(fetched)


def _facts(plan: Plan, snapshot: Snapshot) -> dict[str, str | int | None]:
    """What an unfinished build must have been, for this one to go on from it."""
    options = plan.options
    facts: dict[str, str | int | None] = {
        "version": f"shardc {shardc.__version__}",
        "command": "build",
        "source": None if plan.checkpoint.mirror is None else plan.checkpoint.mirror.remote.pinned,
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
    with plan.checkpoint.told():
        return _check_out(plan, out, force=force, resume=resume)


def _check_out(plan: Plan, out: Path, *, force: bool, resume: bool) -> bool:
    if plan.checkpoint.mirror is not None:
        plan.checkpoint.mirror.fill()
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
        if file.remote:
            continue  # each of its reads says which file it must be
        if set(read_header(file.path).tensors) != planned[number]:
            what = "has another header than when it was planned for"
            raise CheckpointError(Problem(str(file.path), what, "plan and build again"))


def _needed_bytes(plan: Plan, out: Path) -> int:
    """What the set takes: shards, and what is copied; weights on the same disk are linked."""
    disk = nearest_folder(out).stat().st_dev
    copied = (
        size_of(path)
        for path in taken_over(plan).values()
        if isinstance(path, RemoteFile) or path.stat().st_dev != disk or size_of(path) < COPY_BYTES
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
