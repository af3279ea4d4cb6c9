"""Build, end to end: a plan becomes a shard set, which appears whole or not at all."""

from __future__ import annotations

import resource
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import xxhash

import shardc
from shardc.checkpoint import CONFIG, INDEX_NAME, Component
from shardc.errors import OutputError, Problem, ShardSetError
from shardc.execute import Digests, default_workers, execute
from shardc.files import (
    carry_file,
    check_replaceable,
    copy_file,
    keep_file,
    new_folder,
    sync_folders,
    write_file,
)
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
from shardc.planner import ComponentPlan, Plan

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
    """What a build did. `kept` says for each unsharded component how its weights got there."""

    out: str
    tp: int
    files: int
    source_bytes: int
    written_bytes: int
    seconds: float
    peak_rss_bytes: int
    sharded: tuple[str, ...]
    kept: dict[str, str]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def build(plan: Plan, out: Path, resources: Resources, *, force: bool = False) -> BuildReport:
    """Carry out `plan` into folder `out`. Raises OutputError, CheckpointError; nothing is left."""
    started = time.monotonic()
    check_out(plan, out, force=force)
    kept: dict[str, str] = {}
    with new_folder(out, force=force) as folder:
        for extra in plan.checkpoint.extras:
            carry_file(plan.checkpoint.path / extra, folder / extra, fsync=resources.fsync)
        for component, _ in plan.kept:
            kept[component.name] = _keep(component, folder / component.name, resources)
        for part in plan.components:
            target = folder / part.component.name if part.component.name else folder
            write_component(part, target, resources)
        if resources.fsync:
            sync_folders(folder)
        files, written = count_files(folder)
    return BuildReport(
        out=str(out),
        tp=plan.options.tp,
        files=files,
        source_bytes=sum(c.component.size_bytes for c in plan.components),
        written_bytes=written,
        seconds=time.monotonic() - started,
        peak_rss_bytes=peak_rss_bytes(),
        sharded=tuple(c.component.name for c in plan.components),
        kept=kept,
    )


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


def check_out(plan: Plan, out: Path, *, force: bool = False) -> None:
    """OutputError where `out` exists, overlaps the source, or has no room for `plan`."""
    check_replaceable(out, force=force)
    check_apart(plan.checkpoint.path, out)
    check_space(out, sum(f.size_bytes for c in plan.components for f in c.files))


def check_apart(source: Path, out: Path) -> None:
    """OutputError where one lies inside the other: the next build would take the output in."""
    inner, outer = out.resolve(), source.resolve()
    if source.is_dir() and (inner.is_relative_to(outer) or outer.is_relative_to(inner)):
        raise OutputError(
            Problem(str(out), f"overlaps its source {source}", "name a folder beside it with -o")
        )


def check_space(out: Path, needed_bytes: int) -> None:
    """Refuse before anything is written where the filesystem has not the room."""
    parent = out.absolute().parent
    while not parent.exists():
        parent = parent.parent
    free = shutil.disk_usage(parent).free
    if free < needed_bytes:
        raise OutputError(
            Problem(str(out), f"needs {needed_bytes} bytes, {free} are free", "choose another -o")
        )


def _keep(component: Component, folder: Path, resources: Resources) -> str:
    ways = [
        keep_file(file.path, folder / file.name, fsync=resources.fsync) for file in component.files
    ]
    names = [*component.extras, *([component.index] if component.index else [])]
    for name in names:
        copy_file(component.path / name, folder / name, fsync=resources.fsync)
    return " and ".join(sorted(set(ways)))


def write_component(plan: ComponentPlan, folder: Path, resources: Resources) -> None:
    """Write one component's shards, then its index, which makes them count."""
    folder.mkdir(parents=True, exist_ok=True)
    for extra in plan.component.extras:
        copy_file(plan.component.path / extra, folder / extra, fsync=resources.fsync)
    workers = resources.workers or default_workers()
    digests = execute(
        plan.component.files,
        folder,
        plan.files,
        plan.moves(),
        workers=workers,
        memory_bytes=resources.memory_bytes,
        fsync=resources.fsync,
        progress=resources.progress,
    )
    ordered = [digests[number] for number in range(len(plan.tensors))]
    if resources.expected is not None:
        check_digests(plan.component, ordered, resources.expected[plan.component.name])
    index = make_index(plan, ordered)
    write_file(folder / INDEX_NAME, index.dump(), fsync=resources.fsync)


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
