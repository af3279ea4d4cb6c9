"""The Python interface: `shardc.plan`, `build`, `verify`, `merge` and `reshard`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from shardc import convert, library, verifier
from shardc.builder import BuildReport
from shardc.builder import build as build_plan
from shardc.checkpoint import Checkpoint, Component
from shardc.errors import PlanError, Problem, ShardcError
from shardc.location import locate
from shardc.manifest import Manifest, Profile
from shardc.planner import (
    DEFAULT_PART_BYTES,
    ComponentPlan,
    DtypeOption,
    Options,
    Plan,
    no_manifest,
    plan_component,
)
from shardc.source import open_source
from shardc.verifier import VerifyReport
from shardc.writing import Resources

StrPath = str | Path


def plan(
    src: StrPath,
    tp: int,
    *,
    manifest: StrPath | None = None,
    components: Sequence[str] | None = None,
    variant: str | None = None,
    profile: Profile = "compact",
    dtype: DtypeOption = "keep",
    max_part_bytes: int = DEFAULT_PART_BYTES,
    pad_heads: bool = False,
    revision: str | None = None,
    token: str | None = None,
) -> Plan:
    """Plan how `src` is cut for `tp` ranks; reads headers and configs, no weights.

    src: a pipeline folder, a component folder or a .safetensors file; or a Hub repo (`org/name`,
    `hf://org/name@revision/folder`) or S3 prefix (`s3://bucket/prefix`) that holds one, of which a
    few ranges are read. revision, token: for the Hub. manifest: a bundled name or
    a TOML file; the components whose class it serves follow it, the others the bundled one for
    their class; an encoder whose heads do not allow `tp` is kept whole, and the plan says so.
    components: shard only these, keep the others whole. pad_heads: add zero heads and
    columns where `tp` does not divide.
    Raises CheckpointError, ManifestError or PlanError with every problem of every component.
    """
    checkpoint = open_source(locate(src, revision=revision), variant=variant, token=token)
    with checkpoint.told():
        return _plan(
            checkpoint, Options(tp, profile, dtype, max_part_bytes, pad_heads), manifest, components
        )


def _plan(
    checkpoint: Checkpoint,
    options: Options,
    manifest: StrPath | None,
    components: Sequence[str] | None,
) -> Plan:
    chosen = None if manifest is None else library.load(str(manifest))
    names = [component.name for component in checkpoint.components]
    unknown = [name for name in components or () if name not in names]
    if unknown:
        have = ", ".join(name or "(bare)" for name in names)
        raise PlanError(
            Problem(
                str(checkpoint.path),
                f"has no component {', '.join(unknown)}; it has {have}",
            )
        )
    planned: list[ComponentPlan] = []
    kept = []
    problems: list[Problem] = []
    if checkpoint.missing and components is None:
        problems += [
            Problem(
                str(checkpoint.path / name),
                "model_index.json lists this component, but there is no such folder",
                "download it, or choose what to shard with --component",
            )
            for name in checkpoint.missing
        ]
    for component in checkpoint.components:
        if components is not None and component.name not in components:
            kept.append((component, "not chosen"))
            continue
        own = chosen if chosen and component.class_name in chosen.classes else None
        own = own or library.for_class(component.class_name)
        if own is None:
            if chosen is None and (components is not None or len(names) == 1):
                problems += no_manifest(component).problems
            kept.append((component, f"no manifest for class {component.class_name}"))
            continue
        try:
            planned.append(plan_component(component, own, options))
        except ShardcError as error:
            if own.library == "transformers" and components is None and _fits(component, own):
                kept.append((component, f"not at tp {options.tp}: {error.problems[0].what}"))
                continue
            prefix = f"{component.name}: " if component.name else ""
            problems += [Problem(prefix + p.where, p.what, p.fix) for p in error.problems]
    classes = sorted({str(component.class_name) for component in checkpoint.components})
    if chosen is not None and not set(classes) & set(chosen.classes):
        problems.append(
            Problem(
                chosen.name,
                f"serves {', '.join(chosen.classes)}; {checkpoint.path} has {', '.join(classes)}",
            )
        )
    if not planned and not problems:
        for component, why in kept:
            if why.startswith("no manifest"):
                problems += no_manifest(component).problems
            else:
                problems.append(Problem(str(component.path), why))
    if problems:
        raise PlanError(problems)
    return Plan(checkpoint, options, tuple(planned), tuple(kept))


def _fits(component: Component, manifest: Manifest) -> bool:
    """Whether it is the degree alone that an encoder does not allow: then it is kept whole."""
    try:
        plan_component(component, manifest, Options(1))
    except ShardcError:
        return False
    return True


def build(
    src: StrPath,
    out: StrPath,
    tp: int,
    *,
    manifest: StrPath | None = None,
    components: Sequence[str] | None = None,
    variant: str | None = None,
    profile: Profile = "compact",
    dtype: DtypeOption = "keep",
    max_part_bytes: int = DEFAULT_PART_BYTES,
    pad_heads: bool = False,
    revision: str | None = None,
    token: str | None = None,
    resources: Resources | None = None,
    force: bool = False,
    resume: bool = False,
) -> BuildReport:
    """Plan `src` as `plan` does and write the shard set to folder `out`.

    What is remote is streamed: each byte is fetched once, and goes straight into the shards.
    `out` appears by rename when it is whole; where it is up to date, nothing is done. force:
    replace a shard set that stands there; resume: go on from what an interrupted build left.
    Raises what `plan` raises, and OutputError.
    """
    planned = plan(
        src,
        tp,
        manifest=manifest,
        components=components,
        variant=variant,
        profile=profile,
        dtype=dtype,
        max_part_bytes=max_part_bytes,
        pad_heads=pad_heads,
        revision=revision,
        token=token,
    )
    return build_plan(planned, Path(out), resources or Resources(), force=force, resume=resume)


def verify(
    out: StrPath,
    source: StrPath | None = None,
    *,
    variant: str | None = None,
    revision: str | None = None,
    token: str | None = None,
    rank: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> VerifyReport:
    """Re-read shard set `out`, against its index and, where given, bit for bit its `source`.

    Raises ShardSetError where it cannot be opened; what is wrong inside is in the report.
    """
    full = None
    if source is not None:
        full = open_source(locate(source, revision=revision), variant=variant, token=token)
    return verifier.verify(Path(out), source=full, rank=rank, progress=progress)


def merge(
    out: StrPath,
    full: StrPath,
    *,
    resources: Resources | None = None,
    force: bool = False,
    resume: bool = False,
) -> BuildReport:
    """Write the full checkpoint of shard set `out` to folder `full`, bit for bit."""
    return convert.merge(
        Path(out), Path(full), resources or Resources(), force=force, resume=resume
    )


def reshard(
    out: StrPath,
    new: StrPath,
    tp: int,
    *,
    resources: Resources | None = None,
    force: bool = False,
    resume: bool = False,
) -> BuildReport:
    """Write shard set `out` at degree `tp` to folder `new`: the bytes of a build at `tp`."""
    return convert.reshard(
        Path(out), Path(new), tp, resources or Resources(), force=force, resume=resume
    )
