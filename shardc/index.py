"""A component's shardc.index.json: every fact about a shard set, as checked types.

The format's spec is docs/format.md. The loaders share this module.
"""

from __future__ import annotations

import functools
import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import xxhash
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from shardc.errors import CheckpointError, Problem, ShardSetError
from shardc.header import DTYPE_BITS, MAX_DIMS, name_problem, tensor_bytes
from shardc.layout import (
    Block,
    FusedLayout,
    Piece,
    Placement,
    Replicate,
    Shard,
    padding,
)
from shardc.reading import parse_json, read_whole

_TAIL = re.compile(rb',\n "digest": "([0-9a-f]{32})"\n}\n\Z')

FORMAT_VERSION = "1.0"  # a reader refuses another major number
REPO_VERSION = "1.1"  # of an index that has source.repo, which 1.0 did not know
MAX_INDEX_BYTES = 500_000_000
REPLICATED = "replicated"

Count = Annotated[int, Field(ge=0, lt=2**63, strict=True)]
Text = Annotated[str, Field(pattern=r"^[^\x00-\x1f\x7f-\x9f]*$")]  # on one line, for a terminal
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]  # XXH3-128, big-endian hex
FileName = Annotated[
    str, Field(pattern=r"^(rank-\d{5}-of-\d{5}|replicated)(-part-\d{5})?\.safetensors$")
]
# What a merge writes again: names in its folder, of weights and of their index.
SourceName = Annotated[str, Field(pattern=r"^[^/\\\x00-\x1f\x7f-\x9f]+\.safetensors$")]
SourceIndex = Annotated[
    str, Field(pattern=r"^[^/\\\x00-\x1f\x7f-\x9f]+\.safetensors\.index(\.[^./\\]+)?\.json$")
]


class _Strict(BaseModel):
    # a later minor version may add keys; they are passed over
    model_config = ConfigDict(extra="ignore", frozen=True, populate_by_name=True, defer_build=True)


class BlockEntry(_Strict):
    size: Count
    unit: Annotated[int, Field(ge=1, lt=2**63, strict=True)] = 1
    repeat: bool = False
    groups: Annotated[int, Field(ge=1, lt=2**63, strict=True)] | None = None
    pad: bool = False


class PlacementEntry(_Strict):
    kind: Literal["replicate", "shard", "packed_shard"]
    dim: Count | None = None
    blocks: tuple[BlockEntry, ...] = ()
    padded: Count | None = None
    layout: FusedLayout | None = None
    deinterleave: bool | None = None


class Zeros(_Strict):
    zeros: Count


class ShardEntry(_Strict):
    """One stored part: its file, digest, and the global ranges along the dim in local order."""

    file: FileName
    digest: Digest
    ranges: tuple[tuple[Count, Count] | Zeros, ...] | None = None


class TensorEntry(_Strict):
    """One tensor. `shards`: a part a rank, or the one replicated part. `origin`: source file."""

    dtype: str
    shape: tuple[Count, ...]
    style: Text
    placement: PlacementEntry
    origin: Count
    digest: Digest
    shards: tuple[ShardEntry, ...]


class FileEntry(_Strict):
    rank: Count | None
    size: Count
    digest: Digest


class OriginEntry(_Strict):
    name: SourceName
    size: Count
    header: Digest


class SourceEntry(_Strict):
    class_: Annotated[Text, Field(alias="class")]
    config: Digest
    index: SourceIndex | None
    files: tuple[OriginEntry, ...]
    repo: Text | None = None  # since 1.1


class ManifestEntry(_Strict):
    name: str
    digest: Digest
    text: str


class Index(_Strict):
    """A component's shardc.index.json: the only home of per-tensor facts."""

    version: Text
    tool: Text
    tp: Annotated[int, Field(ge=1, le=99_999, strict=True)]  # a file's name has five digits
    profile: Literal["compact", "native"]
    dtype: Literal["keep", "bf16", "fp16", "fp32"]
    max_part_bytes: Count
    pad_heads: bool = False
    plan: Digest
    manifest: ManifestEntry
    source: SourceEntry
    files: dict[FileName, FileEntry]
    tensors: dict[str, TensorEntry]

    def dump(self) -> bytes:
        """Its JSON: a line a tensor, keys in a fixed order, and last the digest of all that."""
        document = self.model_dump(mode="json", by_alias=True, exclude_defaults=True)
        tables = {key: document.pop(key, {}) for key in ("files", "tensors")}
        lines = json.dumps(document, indent=1, ensure_ascii=False).removesuffix("\n}")
        for key, table in tables.items():
            rows = ",\n".join(
                f"  {json.dumps(name, ensure_ascii=False)}: {_compact(entry)}"
                for name, entry in table.items()
            )
            lines += f',\n "{key}": {{\n{rows}\n }}'
        body = lines.encode()
        if len(body) > MAX_INDEX_BYTES - 100:
            what = f"an index of {len(body)} bytes, readers take {MAX_INDEX_BYTES}"
            raise ShardSetError(Problem("shardc.index.json", what, "use a lower degree"))
        return body + f',\n "digest": "{xxhash.xxh3_128_hexdigest(body)}"\n}}\n'.encode()


def _compact(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def rank_stem(rank: int, tp: int) -> str:
    """The name of a rank's file, without part and ending."""
    return f"rank-{rank:05d}-of-{tp:05d}"


@functools.lru_cache(maxsize=4096)  # a model's blocks are alike
def placement_entry(placement: Placement) -> PlacementEntry:
    if isinstance(placement, Replicate):
        return PlacementEntry(kind="replicate")
    if isinstance(placement, Shard):
        blocks = (_block_entry(placement.block),)
        return PlacementEntry(
            kind="shard", dim=placement.dim, blocks=blocks, padded=placement.padded
        )
    return PlacementEntry(
        kind="packed_shard",
        dim=placement.dim,
        blocks=tuple(map(_block_entry, placement.blocks)),
        layout=placement.layout,
        deinterleave=placement.deinterleave,
    )


def _block_entry(block: Block) -> BlockEntry:
    return BlockEntry(
        size=block.size,
        unit=block.unit,
        repeat=block.repeat,
        groups=block.groups,
        pad=block.pad,
    )


def placement_json(placement: Placement) -> dict[str, Any]:
    return placement_entry(placement).model_dump(exclude_defaults=True)


@functools.lru_cache(maxsize=4096)
def range_entries(pieces: tuple[Piece, ...]) -> tuple[tuple[int, int] | Zeros, ...]:
    return tuple(
        Zeros(zeros=piece.stop) if piece.zeros else (piece.start, piece.stop) for piece in pieces
    )


def pieces_of(shard: ShardEntry) -> tuple[Piece, ...]:
    return _pieces(shard.ranges or ())


@functools.lru_cache(maxsize=4096)  # the shards of a model's blocks are alike
def _pieces(ranges: tuple[tuple[int, int] | Zeros, ...]) -> tuple[Piece, ...]:
    return tuple(padding(r.zeros) if isinstance(r, Zeros) else Piece(*r) for r in ranges)


def local_shape(tensor: TensorEntry, shard: ShardEntry) -> list[int]:
    """The shape that one shard of a tensor has, padding included."""
    shape = list(tensor.shape)
    if tensor.placement.dim is not None:
        shape[tensor.placement.dim] = sum(piece.length for piece in pieces_of(shard))
    return shape


def file_digest(header: bytes, tensor_digests: Iterable[str]) -> str:
    """A shard file's digest: XXH3-128 of its header, then of its tensors' digests in data order.

    So it follows from one pass in any order, and changes with any byte of the file.
    """
    state = xxhash.xxh3_128(header)
    for digest in tensor_digests:
        state.update(bytes.fromhex(digest))
    return state.hexdigest()


def read_index(path: Path) -> Index:
    """Parse a component's index; ShardSetError lists every problem with its key."""
    where = str(path)
    try:
        raw = read_whole(path, MAX_INDEX_BYTES)
        document = parse_json(raw, where)
    except CheckpointError as error:
        raise ShardSetError(error.problems) from error
    version = document.get("version") if isinstance(document, dict) else None
    if not isinstance(version, str):
        raise ShardSetError(Problem(where, "has no format version: not a shardc index"))
    if version.split(".")[0] != FORMAT_VERSION.split(".")[0]:
        raise ShardSetError(
            Problem(
                where,
                f"format version {version}, this release reads {FORMAT_VERSION}",
                "rebuild it, or install the release that wrote it",
            )
        )
    tail = _TAIL.search(raw)
    if tail is None or xxhash.xxh3_128_hexdigest(raw[: tail.start()]) != tail[1].decode():
        raise ShardSetError(Problem(where, "is damaged: it does not have the digest it states"))
    try:
        index = Index.model_validate(document)
    except ValidationError as error:
        raise ShardSetError(
            Problem(where, f"{'.'.join(map(str, item['loc']))}: {item['msg']}")
            for item in error.errors(include_url=False, include_context=False)
        ) from error
    problems = [Problem(where, reason) for reason in _index_problems(index)]
    if problems:
        raise ShardSetError(problems)
    return index


def _index_problems(index: Index) -> list[str]:
    reasons = []
    for name, entry in index.files.items():
        expected = REPLICATED if entry.rank is None else rank_stem(entry.rank, index.tp)
        if name.removesuffix(".safetensors").split("-part-")[0] != expected:
            reasons.append(f"file {name} is said to hold rank {entry.rank} of {index.tp}")
    names = Counter(origin.name for origin in index.source.files)
    reasons += [f"source file {name!r} is listed twice" for name in names if names[name] > 1]
    held = dict.fromkeys(index.files, 0)
    for name, tensor in index.tensors.items():
        found = _tensor_problems(index, tensor)
        reasons += [f"tensor {name!r:.200}{reason}" for reason in found]
        if reason := name_problem(name):
            reasons.append(f"tensor {name!r:.200}: {reason}")
        if not found:
            for shard in tensor.shards:
                held[shard.file] += tensor_bytes(tensor.dtype, local_shape(tensor, shard)) or 0
    for name, size in held.items():  # so that no figure in here is larger than the files are
        if size > index.files[name].size:
            stated = index.files[name].size
            reasons.append(
                f"file {name}: its tensors take {size} bytes, it is said to have {stated}"
            )
    return reasons


def _tensor_problems(index: Index, tensor: TensorEntry) -> list[str]:
    """What an index's entry of a tensor has against itself, each to follow the tensor's name."""
    placement = tensor.placement
    count = 1 if placement.kind == "replicate" else index.tp
    if len(tensor.shards) != count:
        return [f" has {len(tensor.shards)} shards, {count} expected"]
    reasons = []
    if tensor.origin >= len(index.source.files):
        reasons.append(f" comes from file {tensor.origin}, which is not listed")
    if tensor.dtype not in DTYPE_BITS or len(tensor.shape) > MAX_DIMS:
        return [*reasons, f" is {tensor.dtype!r:.200} of {len(tensor.shape)} dims"]
    dim = placement.dim
    if (dim is None) != (placement.kind == "replicate") or (
        dim is not None and dim >= len(tensor.shape)
    ):
        return [*reasons, f" of shape {list(tensor.shape)} is cut along {dim}"]
    held = [pieces_of(shard) for shard in tensor.shards]
    for rank, (shard, pieces) in enumerate(zip(tensor.shards, held, strict=True)):
        holder = index.files.get(shard.file)
        owner = None if dim is None else rank
        if holder is None or holder.rank != owner:
            reasons.append(f": shard {rank} cannot be in {shard.file}")
        if (shard.ranges is None) != (dim is None):
            reasons.append(f": shard {rank} lacks ranges, or has them in vain")
        elif dim is not None and any(
            not piece.zeros and not piece.start <= piece.stop <= tensor.shape[dim]
            for piece in pieces
        ):
            reasons.append(f": ranges of shard {rank} leave {tensor.shape[dim]}")
    if dim is not None:
        size = tensor.shape[dim]
        if (total := sum(block.size for block in placement.blocks)) > size:
            reasons.append(f": its blocks take {total}, the dim has {size}")
        rows = sum(piece.length for pieces in held for piece in pieces)
        zeros = sum(piece.length for pieces in held for piece in pieces if piece.zeros)
        if (stored := rows - zeros) < size:
            reasons.append(f": the ranks hold {stored} rows of {size}")
        if placement.padded is not None and placement.padded > max(rows, size):
            reasons.append(f": padded to {placement.padded}, the ranks hold {rows}")
    return reasons


def metadata_problems(index: Index, entry: FileEntry, metadata: Mapping[str, str]) -> list[str]:
    """A shard that belongs to another set, or sits in another rank's place."""
    try:
        facts = parse_json(metadata.get("shardc", "null").encode(), "")
    except CheckpointError:
        facts = None
    if not isinstance(facts, dict):
        return ["its metadata lacks the shardc key"]
    expected = {"tp": index.tp, "rank": entry.rank, "plan": index.plan}
    return [
        f"its metadata says {key} {facts.get(key)!s:.200}, the index says {value}"
        for key, value in expected.items()
        if facts.get(key) != value or isinstance(facts.get(key), bool)
    ]
