"""The plan: a pure function of headers, manifest, config and tp. No byte of a weight is read.

It fixes every output header and, for each tensor, the region copies from source to shards.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import xxhash

from shardc.checkpoint import Checkpoint, Component, Stored, Tensor
from shardc.errors import ManifestError, PlanError, Problem
from shardc.header import DTYPE_BITS, MAX_HEADER_BYTES, TensorInfo, dump_header, lay_out
from shardc.index import FORMAT_VERSION, REPLICATED, placement_json, rank_stem
from shardc.layout import Piece, Placement, Replicate, rank_pieces, spans
from shardc.manifest import Manifest, Profile
from shardc.placing import Dims
from shardc.region import Region
from shardc.resolve import Resolution, placements, resolve

DEFAULT_PART_BYTES = 4_000_000_000
MAX_DEGREE = 1024
HEADER_ENTRY_BYTES = 256  # more than a tensor's entry takes beside its name

DtypeOption = Literal["keep", "bf16", "fp16", "fp32"]
CAST_TO: Mapping[str, str] = {"bf16": "BF16", "fp16": "F16", "fp32": "F32"}
CASTABLE = frozenset({"F64", "F32", "F16", "BF16"})


@dataclass(frozen=True, slots=True)
class Options:
    """What a build does beside cutting; all of it decides bytes, so all of it is recorded."""

    tp: int
    profile: Profile = "compact"
    dtype: DtypeOption = "keep"
    max_part_bytes: int = DEFAULT_PART_BYTES
    pad_heads: bool = False

    def __post_init__(self) -> None:
        problems = []
        if not isinstance(self.tp, int) or not 1 <= self.tp <= MAX_DEGREE:
            problems.append(Problem("tp", f"{self.tp} is not a degree from 1 to {MAX_DEGREE}"))
        for name, value, known in (
            ("profile", self.profile, get_args(Profile)),
            ("dtype", self.dtype, get_args(DtypeOption)),
        ):
            if value not in known:
                problems.append(Problem(name, f"{value!r} is none of {', '.join(known)}"))
        if self.max_part_bytes < 1:
            problems.append(Problem("max_part_bytes", f"{self.max_part_bytes} is less than a byte"))
        if problems:
            raise PlanError(problems)


@dataclass(frozen=True, slots=True)
class OutFile:
    """A file to write: its header bytes, and its tensors with offsets from the data's start."""

    name: str
    rank: int | None
    header: bytes
    tensors: tuple[TensorInfo, ...]

    @property
    def size_bytes(self) -> int:
        return len(self.header) + (self.tensors[-1].stop if self.tensors else 0)


@dataclass(frozen=True, slots=True)
class Move:
    """One tensor's way from where it is stored to where it goes.

    `dim` is the one along which either side is cut (0 where none is). `out_dtype` differs from
    `dtype` where the tensor is cast on the way.
    """

    name: str
    dtype: str
    out_dtype: str
    shape: tuple[int, ...]
    dim: int
    sources: tuple[Stored, ...]
    targets: tuple[Stored, ...]


@dataclass(frozen=True, slots=True)
class PlannedTensor:
    """A tensor's placement and, for each rank, its pieces of the global dim in local order."""

    tensor: Tensor
    dtype: str
    style: str
    placement: Placement
    pieces: tuple[tuple[Piece, ...], ...]
    targets: tuple[Stored, ...]


@dataclass(frozen=True, slots=True)
class ComponentPlan:
    """One component to shard."""

    component: Component
    manifest: Manifest
    options: Options
    tensors: tuple[PlannedTensor, ...]
    files: tuple[OutFile, ...]
    digest: str
    resolution: Resolution = field(repr=False)
    dims: Dims = field(repr=False)

    def moves(self) -> Iterator[Move]:
        """Every tensor's move, in the order of the source's tensors."""
        for planned in self.tensors:
            yield move_of(planned.tensor, planned.dtype, planned.placement, planned.targets)

    def rank_bytes(self) -> list[int]:
        """Bytes of weights that each rank holds: its own and the replicated ones."""
        held = [self.replicated_bytes()] * self.options.tp
        for file in self.files:
            if file.rank is not None:
                held[file.rank] += sum(t.size_bytes for t in file.tensors)
        return held

    def replicated_bytes(self) -> int:
        """Bytes of the tensors that every rank holds whole."""
        return sum(t.size_bytes for f in self.files if f.rank is None for t in f.tensors)


@dataclass(frozen=True, slots=True)
class Plan:
    """What a build will do: components to shard, and those to keep whole with the reason."""

    checkpoint: Checkpoint
    options: Options
    components: tuple[ComponentPlan, ...]
    kept: tuple[tuple[Component, str], ...]


def move_of(
    tensor: Tensor, out_dtype: str, placement: Placement, targets: tuple[Stored, ...]
) -> Move:
    dim = 0 if isinstance(placement, Replicate) else placement.dim
    if tensor.dim is not None:
        dim = tensor.dim
    return Move(tensor.name, tensor.dtype, out_dtype, tensor.shape, dim, tensor.stored, targets)


def region_copies(move: Move) -> Iterator[tuple[int, Region, int, Region]]:
    """(source part, its region, target part, its region) of every copy that a move makes."""
    for i, source in enumerate(move.sources):
        for j, target in enumerate(move.targets):
            for a0, a1, a_at in part_spans(source, move):
                for b0, b1, b_at in part_spans(target, move):
                    start, stop = max(a0, b0), min(a1, b1)
                    if start < stop or (not move.shape):
                        yield (
                            i,
                            _span_region(
                                source.info.shape, move.dim, a_at + start - a0, stop - start
                            ),
                            j,
                            _span_region(
                                target.info.shape, move.dim, b_at + start - b0, stop - start
                            ),
                        )


def _span_region(shape: Sequence[int], dim: int, start: int, length: int) -> Region:
    return Region.span(shape, dim, start, start + length) if shape else Region.whole(shape)


def part_spans(part: Stored, move: Move) -> list[tuple[int, int, int]]:
    """(global start, global stop, local start) of what a part holds along the move's dim."""
    if part.spans is None:
        return [(0, move.shape[move.dim] if move.shape else 1, 0)]
    return [(span.start, span.stop, span.at) for span in part.spans]


def plan_component(component: Component, manifest: Manifest, options: Options) -> ComponentPlan:
    """Plan one component; PlanError lists every tensor and rule that does not fit."""
    problems: list[Problem] = []
    if not component.tensors:
        problems.append(Problem(str(component.path), "holds no tensor: there is nothing to shard"))
    if component.class_name not in manifest.classes:
        problems.append(
            Problem(
                str(component.path),
                f"config.json names class {component.class_name}, "
                f"{manifest.name} serves {', '.join(manifest.classes)}",
            )
        )
    if problems:
        raise PlanError(problems)
    dims = Dims(manifest, component.config, pad_heads=options.pad_heads)
    problems += dims.problems()
    problems += [
        Problem(f"{manifest.name}: local {number}", "a slice needs its `unit` to be padded")
        for number, local in enumerate(manifest.locals, 1)
        if options.pad_heads and local.slice_ is not None and local.unit is None
    ]
    if problems:
        raise PlanError(problems)
    resolution = resolve(component, manifest, dims, options.profile)
    placed, misfits = placements(resolution.matches, manifest, dims, options.tp)
    problems += [*resolution.problems, *misfits]
    if problems:
        raise PlanError(problems)
    return _lay_out(component, manifest, options, resolution, dims, placed)


def _lay_out(
    component: Component,
    manifest: Manifest,
    options: Options,
    resolution: Resolution,
    dims: Dims,
    placed: Sequence[Placement | None],
) -> ComponentPlan:
    tp = options.tp
    dtypes = [_out_dtype(m.tensor, manifest, options.dtype) for m in resolution.matches]
    styles = [
        "replicate" if match.rule is None else manifest.rules[match.rule].style
        for match in resolution.matches
    ]
    pieces: list[tuple[tuple[Piece, ...], ...]] = []
    replicated: list[int] = []
    sharded: list[int] = []
    for number, (match, placement) in enumerate(zip(resolution.matches, placed, strict=True)):
        if placement is None or isinstance(placement, Replicate):
            pieces.append(())
            replicated.append(number)
        else:
            size = match.tensor.shape[placement.dim]
            pieces.append(rank_pieces(placement, size, tp))
            sharded.append(number)

    def local_shape(number: int, rank: int | None) -> tuple[int, ...]:
        shape = list(resolution.matches[number].tensor.shape)
        placement = placed[number]
        if rank is not None and placement is not None and not isinstance(placement, Replicate):
            shape[placement.dim] = sum(piece.length for piece in pieces[number][rank])
        return tuple(shape)

    digest = _digest(component, manifest, options, resolution, dtypes, placed)
    # Widest elements first, so that every tensor is aligned to its own element size.
    order = {n: (-DTYPE_BITS[dtypes[n]], n) for n in range(len(dtypes))}
    files: list[OutFile] = []
    targets: list[list[Stored]] = [[] for _ in resolution.matches]
    for rank in (*range(tp), None):
        members = sorted(replicated if rank is None else sharded, key=order.__getitem__)
        rows = [
            (resolution.matches[n].tensor.name, dtypes[n], local_shape(n, rank)) for n in members
        ]
        metadata = shard_metadata(tp, rank, digest)
        stem = REPLICATED if rank is None else rank_stem(rank, tp)
        at = 0
        for file in split_files(stem, rank, rows, metadata, options.max_part_bytes):
            for info in file.tensors:
                number = members[at]
                at += 1
                held = None if rank is None else spans(pieces[number][rank])
                targets[number].append(Stored(len(files), info, held))
            files.append(file)
    tensors = tuple(
        PlannedTensor(
            match.tensor,
            dtypes[n],
            styles[n],
            placed[n] or Replicate(),
            pieces[n],
            tuple(targets[n]),
        )
        for n, match in enumerate(resolution.matches)
    )
    return ComponentPlan(
        component, manifest, options, tensors, tuple(files), digest, resolution, dims
    )


def shard_metadata(tp: int, rank: int | None, digest: str) -> dict[str, str]:
    """The `__metadata__` of a shard file: `format` and one `shardc` key, a JSON document."""
    facts = {"version": FORMAT_VERSION, "tp": tp, "rank": rank, "plan": digest}
    return {"format": "pt", "shardc": json.dumps(facts, separators=(",", ":"))}


def split_files(
    stem: str,
    rank: int | None,
    rows: Sequence[tuple[str, str, tuple[int, ...]]],
    metadata: Mapping[str, str],
    max_part_bytes: int,
) -> list[OutFile]:
    """One file, or parts of at most `max_part_bytes` of data each (a tensor is never cut).

    A part's header stays well under what a safetensors reader accepts, too.
    """
    parts: list[list[tuple[str, str, tuple[int, ...]]]] = [[]]
    held = header = 0
    for row in rows:
        size = lay_out([row])[0].size_bytes
        entry = len(row[0].encode()) * 2 + HEADER_ENTRY_BYTES  # escapes may double a name
        if parts[-1] and (held + size > max_part_bytes or header + entry > MAX_HEADER_BYTES // 2):
            parts.append([])
            held = header = 0
        parts[-1].append(row)
        held += size
        header += entry
    if not rows and rank is None:
        return []  # nothing is replicated: no file of that name
    files = []
    for number, part in enumerate(parts):
        name = f"{stem}.safetensors" if len(parts) == 1 else f"{stem}-part-{number:05d}.safetensors"
        placed = lay_out(part)
        files.append(OutFile(name, rank, dump_header(placed, metadata), placed))
    return files


def _out_dtype(tensor: Tensor, manifest: Manifest, option: DtypeOption) -> str:
    if option == "keep" or tensor.dtype not in CASTABLE:
        return tensor.dtype
    if any(part in manifest.keep_in_fp32 for part in tensor.name.split(".")):
        return tensor.dtype
    return CAST_TO[option]


def _digest(
    component: Component,
    manifest: Manifest,
    options: Options,
    resolution: Resolution,
    dtypes: Sequence[str],
    placed: Sequence[Placement | None],
) -> str:
    """XXH3-128 of all that decides a set's bytes, bar the weights: two sets of one plan mix."""
    document: dict[str, Any] = {
        "version": FORMAT_VERSION,
        "tp": options.tp,
        "profile": options.profile,
        "dtype": options.dtype,
        "max_part_bytes": options.max_part_bytes,
        "manifest": manifest.digest,
        "source": [[o.name, o.size_bytes, o.header_digest] for o in component.origins],
        "tensors": [
            [m.tensor.name, d, list(m.tensor.shape), placement_json(p or Replicate())]
            for m, d, p in zip(resolution.matches, dtypes, placed, strict=True)
        ],
    }
    if options.pad_heads:
        document["pad_heads"] = True
    raw = json.dumps(document, sort_keys=True, separators=(",", ":")).encode()
    return xxhash.xxh3_128_hexdigest(raw)


def no_manifest(component: Component) -> ManifestError:
    if component.class_name is None:
        return ManifestError(
            Problem(str(component.path), "no config.json there names the model class")
        )
    return ManifestError(
        Problem(
            str(component.path),
            f"no manifest is known for class {component.class_name}",
            "write one (docs/manifest.md), or `shardc manifest derive` it, and pass --manifest",
        )
    )
