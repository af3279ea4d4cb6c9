"""The shard set on disk: opening one, and reading it back as a checkpoint."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import xxhash

from shardc.checkpoint import (
    CONFIG,
    INDEX_NAME,
    MODEL_INDEX,
    Component,
    Origin,
    SourceFile,
    Stored,
    Tensor,
    sharded_components,
)
from shardc.errors import CheckpointError, Problem, ShardSetError
from shardc.folders import files_below
from shardc.header import Header, TensorInfo, read_header
from shardc.index import (
    Index,
    TensorEntry,
    file_digest,
    local_shape,
    metadata_problems,
    pieces_of,
    read_index,
)
from shardc.layout import Span, spans
from shardc.reading import read_json, regular_file
from shardc.remote import AnyFile, here

CHUNK_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class ShardSet:
    """An opened shard set: each sharded component's index, by folder name ("" for a bare one)."""

    path: Path
    components: Mapping[str, Index]

    def folder(self, component: str) -> Path:
        return self.path / component if component else self.path


def open_shard_set(path: Path) -> ShardSet:
    """Open a shard set folder; ShardSetError where it is none, or is not whole."""
    if not path.is_dir():
        raise ShardSetError(Problem(str(path), "no such folder"))
    found = sharded_components(path)
    if not found:
        hint = "`shardc build` makes one of it" if (path / MODEL_INDEX).is_file() else ""
        raise ShardSetError(
            Problem(
                str(path), f"not a shard set: there is no {INDEX_NAME}, or it is unfinished", hint
            )
        )
    return ShardSet(path, {name: read_index(path / name / INDEX_NAME) for name in found})


def read_shard_headers(
    folder: Path,
    index: Index,
    names: Iterable[str],
    *,
    rank: int | None = None,
    at: Callable[[Path], AnyFile] = here,
) -> tuple[dict[str, Header], list[Problem]]:
    """The headers of these files of a component, and all that stands against them.

    A problem is a file that is missing (`rank`: whose need of it to name), damaged, of another
    size than the index says, or another set's. at: what to read in the place of a file.
    """
    headers: dict[str, Header] = {}
    problems: list[Problem] = []
    for name in names:
        path, entry = folder / name, index.files[name]
        if not path.is_file():
            missing = Problem(str(path), "is missing")
            if rank is not None:
                what = f"is missing, and rank {rank} needs it"
                missing = Problem(str(path), what, "fetch it again")
            problems.append(missing)
            continue
        file = at(path)
        try:
            header = read_header(file)
        except CheckpointError as error:
            problems += error.problems
            continue
        if header.file_bytes != entry.size:
            what = f"has {header.file_bytes} bytes, the index says {entry.size}"
            problems.append(Problem(str(file), what))
        problems += [
            Problem(str(file), reason)
            for reason in metadata_problems(index, entry, header.metadata)
        ]
        headers[name] = header
    return headers, problems


def header_problems(
    folder: Path,
    index: Index,
    headers: Mapping[str, Header],
    *,
    at: Callable[[Path], AnyFile] = here,
) -> list[Problem]:
    """Headers that are not those that were built, told without a look at the data.

    A file's digest is over its header and its tensors' digests, and the index states both. at:
    what to read in the place of a file.
    """
    stated = stated_digests(index, headers)
    problems = []
    for name, header in headers.items():
        digests = [stated[name].get(tensor.name, "") for tensor in header.tensors]
        path = at(folder / name)
        with regular_file(path) as (file, _):
            raw = file.read(header.data_start)
        if file_digest(raw, digests) != index.files[name].digest:
            what = "its header does not have the digest that the index states"
            problems.append(Problem(str(path), what, "fetch it again"))
    return problems


def stated_digests(index: Index, files: Iterable[str]) -> dict[str, dict[str, str]]:
    """The digests of the tensors in each of these files, by the index."""
    stated: dict[str, dict[str, str]] = {name: {} for name in files}
    for name, tensor in index.tensors.items():
        for shard in tensor.shards:
            if shard.file in stated:
                stated[shard.file][name] = shard.digest
    return stated


def data_problems(path: Path, index: Index, name: str) -> list[Problem]:
    """What a file that should be the index's `name` has otherwise, by its digest: reads all of it.

    With the header and each tensor as they were built, nothing in it can be another.
    """
    try:
        header = read_header(path)
    except CheckpointError as error:
        return list(error.problems)
    found = []
    with regular_file(path) as (file, _):
        raw = file.read(header.data_start)
        for tensor in header.tensors:  # in the file's order, and without gaps
            state = xxhash.xxh3_128()
            for at in range(0, tensor.size_bytes, CHUNK_BYTES):
                state.update(file.read(min(CHUNK_BYTES, tensor.size_bytes - at)))
            found.append(state.hexdigest())
    if file_digest(raw, found) == index.files[name].digest:
        return []
    stated = stated_digests(index, [name])[name]
    wrong = [t.name for t, d in zip(header.tensors, found, strict=True) if stated.get(t.name) != d]
    what = "does not have the digest that the index states"
    return [Problem(str(path), f"{what}: {_some(wrong)}" if wrong else what)]


def _some(names: list[str]) -> str:
    """The tensors that a message is about, the first of many."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"tensor {', '.join(map(repr, names[:3]))}{more}"


def as_component(shard_set: ShardSet, name: str) -> Component:
    """A sharded component as a checkpoint's: each tensor stored in parts, copies left out.

    Reads the shards' headers. Raises ShardSetError where a file is missing, has another size, or
    another header than the index says.
    """
    index = shard_set.components[name]
    folder = shard_set.folder(name)
    files: list[SourceFile] = []
    numbers: dict[str, int] = {}
    infos: dict[tuple[str, str], TensorInfo] = {}
    problems: list[Problem] = []
    headers, found = read_shard_headers(folder, index, list(index.files))
    if found:
        raise ShardSetError(found)
    for number, (file_name, header) in enumerate(headers.items()):
        numbers[file_name] = number
        files.append(
            SourceFile(file_name, folder / file_name, header.data_start, header.file_bytes)
        )
        infos.update(((file_name, tensor.name), tensor) for tensor in header.tensors)
    tensors = []
    for tensor_name, tensor in index.tensors.items():
        parts, reasons = _parts(tensor_name, tensor, numbers, infos)
        problems += [Problem(str(folder), reason) for reason in reasons]
        dim = tensor.placement.dim
        tensors.append(
            Tensor(tensor_name, tensor.dtype, tensor.shape, dim, tuple(parts), tensor.origin)
        )
    problems += files_below(shard_set.path, shard_set.path)[1]
    if problems := problems or header_problems(folder, index, headers):
        raise ShardSetError(problems)
    try:
        config = read_json(folder / CONFIG)
    except CheckpointError as error:
        raise ShardSetError(error.problems) from error
    origins = tuple(Origin(f.name, f.size, f.header) for f in index.source.files)
    extras = tuple(
        sorted(
            extra
            for extra in files_below(folder, shard_set.path)[0]
            if (own := Path(extra).name) != INDEX_NAME and own not in index.files
        )
    )
    return Component(
        name,
        folder,
        index.source.class_,
        config,
        tuple(files),
        origins,
        tuple(tensors),
        index.source.index,
        extras,
        (),
        index.source.repo,
    )


def _parts(
    name: str,
    tensor: TensorEntry,
    numbers: Mapping[str, int],
    infos: Mapping[tuple[str, str], TensorInfo],
) -> tuple[list[Stored], list[str]]:
    parts: list[Stored] = []
    reasons: list[str] = []
    covered: list[tuple[int, int]] = []
    dim = tensor.placement.dim
    for shard in tensor.shards:
        info = infos.get((shard.file, name))
        if info is None:
            reasons.append(f"{shard.file} lacks tensor {name!r}")
            continue
        expected = local_shape(tensor, shard)
        if info.dtype != tensor.dtype or list(info.shape) != expected:
            reasons.append(
                f"{shard.file} holds {name!r} as {info.dtype} {list(info.shape)}, "
                f"the index says {tensor.dtype} {expected}"
            )
            continue
        held = None if dim is None else _not_covered(spans(pieces_of(shard)), covered)
        parts.append(Stored(numbers[shard.file], info, held))
    if dim is not None and not reasons:
        missing = tensor.shape[dim] - sum(stop - start for start, stop in covered)
        if missing:
            reasons.append(f"{missing} of {tensor.shape[dim]} rows of {name!r} are on no rank")
    return parts, reasons


def _not_covered(held: Iterable[Span], covered: list[tuple[int, int]]) -> tuple[Span, ...]:
    """`held` less what is covered already (KV heads repeat), which grows by the result.

    covered: disjoint and in order.
    """
    fresh: list[Span] = []
    for span in held:
        first = bisect_left(covered, span.start, key=lambda part: part[1])
        last = bisect_right(covered, span.stop, key=lambda part: part[0])
        met = covered[first:last]
        at = span.start
        for start, stop in [*met, (span.stop, span.stop)]:
            if at < start:
                fresh.append(Span(at, start, span.at + at - span.start))
            at = max(at, stop)
        low, high = zip(*met, (span.start, span.stop), strict=True)
        covered[first:last] = [(min(low), max(high))]
    return tuple(fresh)
