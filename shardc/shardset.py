"""The shard set on disk: opening one, and reading it back as a checkpoint."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from shardc.checkpoint import (
    CONFIG,
    INDEX_NAME,
    MODEL_INDEX,
    Component,
    Origin,
    SourceFile,
    Span,
    Stored,
    Tensor,
    sharded_components,
    spans,
)
from shardc.errors import CheckpointError, Problem, ShardSetError
from shardc.header import TensorInfo, parse_json, read_header
from shardc.index import Index, TensorEntry, metadata_problems, pieces_of, read_index


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
    for number, (file_name, entry) in enumerate(index.files.items()):
        where = str(folder / file_name)
        if not (folder / file_name).is_file():
            problems.append(Problem(where, "is missing"))
            continue
        try:
            header = read_header(folder / file_name)
        except CheckpointError as error:
            problems += error.problems
            continue
        if header.file_bytes != entry.size:
            problems.append(
                Problem(where, f"has {header.file_bytes} bytes, the index says {entry.size}")
            )
        problems += [
            Problem(where, reason) for reason in metadata_problems(index, entry, header.metadata)
        ]
        numbers[file_name] = number
        files.append(
            SourceFile(file_name, folder / file_name, header.data_start, header.file_bytes)
        )
        infos.update(((file_name, tensor.name), tensor) for tensor in header.tensors)
    if problems:
        raise ShardSetError(problems)
    tensors = []
    for tensor_name, tensor in index.tensors.items():
        parts, reasons = _parts(tensor_name, tensor, numbers, infos)
        problems += [Problem(str(folder), reason) for reason in reasons]
        dim = tensor.placement.dim
        tensors.append(
            Tensor(tensor_name, tensor.dtype, tensor.shape, dim, tuple(parts), tensor.origin)
        )
    if problems:
        raise ShardSetError(problems)
    try:
        config = parse_json((folder / CONFIG).read_bytes(), str(folder / CONFIG))
    except OSError as error:
        raise ShardSetError(
            Problem(str(folder / CONFIG), f"cannot read it: {error.strerror}")
        ) from error
    origins = tuple(Origin(f.name, f.size, f.header) for f in index.source.files)
    extras = tuple(
        sorted(
            entry.relative_to(folder).as_posix()
            for entry in folder.rglob("*")
            if entry.is_file() and entry.name != INDEX_NAME and entry.name not in index.files
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
        expected = list(tensor.shape)
        if dim is not None:
            expected[dim] = sum(piece.length for piece in pieces_of(shard))
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
    """`held` less what is covered already (KV heads repeat), which grows by the result."""
    fresh: list[Span] = []
    for span in held:
        todo = [span]
        for start, stop in covered:
            todo = [
                part
                for piece in todo
                for part in (
                    Span(piece.start, min(piece.stop, start), piece.at),
                    Span(max(piece.start, stop), piece.stop, piece.at + max(0, stop - piece.start)),
                )
                if part.start < part.stop
            ]
        fresh += todo
        covered += [(part.start, part.stop) for part in todo]
    return tuple(fresh)
