"""From a shard set, without its source: back to the full checkpoint, or to another degree."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path

import shardc
from shardc.builder import (
    BuildReport,
    build,
    count_files,
    peak_rss_bytes,
    source_facts,
)
from shardc.checkpoint import Checkpoint, Component, Stored
from shardc.current import weights
from shardc.errors import ShardSetError
from shardc.fileio import Snapshot
from shardc.files import check_space, write_file
from shardc.header import dump_header, lay_out, tensor_bytes
from shardc.index import Index
from shardc.manifest import parse_manifest
from shardc.planner import ComponentPlan, Move, Options, OutFile, Plan, plan_component
from shardc.shardset import ShardSet, as_component, open_shard_set
from shardc.verifier import copy_problems
from shardc.workspace import Workspace, check_apart, workspace
from shardc.writing import Resources, check_digests, write_shards


def reshard(
    path: Path,
    out: Path,
    tp: int,
    resources: Resources,
    *,
    force: bool = False,
    resume: bool = False,
) -> BuildReport:
    """The shard set at another degree: the same bytes as a build of its source at that degree.

    Raises ShardSetError, PlanError (the degree is not legal) or OutputError.
    """
    shard_set = open_shard_set(path)
    if problems := copy_problems(shard_set):
        raise ShardSetError(problems)
    plans: list[ComponentPlan] = []
    for name, index in shard_set.components.items():
        manifest = parse_manifest(index.manifest.text, index.manifest.name)
        options = Options(tp, index.profile, index.dtype, index.max_part_bytes, index.pad_heads)
        plans.append(plan_component(as_component(shard_set, name), manifest, options))
    checkpoint = Checkpoint(
        path, "pipeline", tuple(p.component for p in plans), _rest(shard_set), ()
    )
    plan = Plan(checkpoint, plans[0].options, tuple(plans), ())
    expected = {
        name: [tensor.digest for tensor in index.tensors.values()]
        for name, index in shard_set.components.items()
    }
    return build(plan, out, replace(resources, expected=expected), force=force, resume=resume)


def merge(
    path: Path, out: Path, resources: Resources, *, force: bool = False, resume: bool = False
) -> BuildReport:
    """The full checkpoint again: the source's files, names and tensors, bit for bit.

    A set built with --dtype gives back what it holds, the cast tensors. Where ranks hold copies
    of the same rows the first is taken. Raises ShardSetError where the result is not what was
    built, OutputError where it cannot be written.
    """
    started = time.monotonic()
    shard_set = open_shard_set(path)
    components = {name: as_component(shard_set, name) for name in shard_set.components}
    if problems := copy_problems(shard_set):
        raise ShardSetError(problems)
    check_apart(path, out)
    others = {extra: path / extra for extra in _rest(shard_set)}
    for name, component in components.items():
        others.update({str(Path(name, e)): component.path / e for e in component.extras})
    snapshot = Snapshot({**weights(components.values()), **others})
    facts: dict[str, str | int | None] = {
        "version": f"shardc {shardc.__version__}",
        "command": "merge",
        **{f"plan of {name or '.'}": i.plan for name, i in shard_set.components.items()},
        **source_facts(snapshot),
    }
    source_bytes = sum(component.size_bytes for component in components.values())
    with workspace(
        out,
        facts,
        force=force,
        resume=resume,
        fsync=resources.fsync,
        at_rest=snapshot.at_rest,
    ) as work:
        check_space(out, source_bytes, work.allocated_bytes())
        for name, source in others.items():
            work.carry(source, name)
        taken = sum(
            _merge_component(component, shard_set.components[name], work, resources)
            for name, component in components.items()
        )
        snapshot.check()
        files, written = count_files(work.folder)
    return BuildReport(
        out=str(out),
        tp=1,
        files=files,
        source_bytes=source_bytes,
        written_bytes=written,
        seconds=time.monotonic() - started,
        peak_rss_bytes=peak_rss_bytes(),
        sharded=(),
        kept={},
        resumed_tensors=taken,
    )


def _rest(shard_set: ShardSet) -> tuple[str, ...]:
    """Every file of a pipeline's folder that is in no sharded component's."""
    if "" in shard_set.components:
        return ()
    return tuple(
        entry.relative_to(shard_set.path).as_posix()
        for entry in sorted(shard_set.path.rglob("*"))
        if entry.is_file()
        and entry.relative_to(shard_set.path).parts[0] not in shard_set.components
    )


def _merge_component(
    component: Component, index: Index, work: Workspace, resources: Resources
) -> int:
    """One component's files as they were; how many tensors an earlier merge had written."""
    files = []
    targets: dict[str, Stored] = {}
    for number, origin in enumerate(component.origins):
        members = [t for t in component.tensors if t.origin == number]
        placed = lay_out((t.name, t.dtype, t.shape) for t in members)
        header = dump_header(placed, {"format": "pt"}, alignment=8)
        files.append(OutFile(origin.name, None, header, placed))
        targets.update((info.name, Stored(number, info, None)) for info in placed)
    moves = (
        Move(t.name, t.dtype, t.dtype, t.shape, t.dim or 0, t.stored, (targets[t.name],))
        for t in component.tensors
    )
    digests, taken = write_shards(component, files, moves, work, resources)
    check_digests(component, digests, [tensor.digest for tensor in index.tensors.values()])
    if component.index is not None:
        document = {
            "metadata": {
                "total_size": sum(tensor_bytes(t.dtype, t.shape) or 0 for t in component.tensors)
            },
            "weight_map": {t.name: component.origins[t.origin].name for t in component.tensors},
        }
        raw = json.dumps(document, indent=2, sort_keys=True) + "\n"
        where = work.folder / component.name / component.index
        write_file(where, raw.encode(), fsync=resources.fsync)
    return taken
