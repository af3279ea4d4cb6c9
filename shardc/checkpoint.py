"""Sources: what a path holds, as components of tensors with headers read and nothing else."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Set
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from shardc.errors import CheckpointError, Problem, printable
from shardc.folders import check_links, files_below
from shardc.header import Header, TensorInfo, header_digest, read_header
from shardc.layout import Span
from shardc.mirror import Mirror
from shardc.reading import read_json
from shardc.remote import AnyFile, RemoteFile, here
from shardc.weights import (
    ADAPTER_CONFIG,
    FOREIGN,
    UNPICKLE,
    find_weights,
    foreign_problems,
    model_names,
    read_headers,
    twins,
)

INDEX_NAME = "shardc.index.json"
MODEL_INDEX = "model_index.json"
CONFIG = "config.json"

Kind = Literal["pipeline", "component", "file"]


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor, or a part of one, in a file. Spans are None for a whole tensor, () for padding."""

    file: int
    info: TensorInfo
    spans: tuple[Span, ...] | None


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor of a checkpoint: global shape, and where its parts along `dim` are stored.

    `dim` is None where it is stored whole. `origin` is the number of the file that it comes from
    in the original checkpoint's identity. `name` is the model's: without what torch's wrappers
    add; the name that the file has is in `stored`.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    dim: int | None
    stored: tuple[Stored, ...]
    origin: int


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A weight file to read. `data_start` is where its tensors' offsets count from."""

    name: str
    path: AnyFile
    data_start: int
    size_bytes: int

    @property
    def remote(self) -> bool:
        return isinstance(self.path, RemoteFile)


@dataclass(frozen=True, slots=True)
class Origin:
    """The identity of a source file: by these a shard set knows what it was built from."""

    name: str
    size_bytes: int
    header_digest: str


@dataclass(frozen=True, slots=True)
class Component:
    """One model of a checkpoint. `name` is its folder in the pipeline, "" for a bare one.

    repo: the Hub's repo and commit that it is of, where that is known.
    """

    name: str
    path: Path
    class_name: str | None
    config: Mapping[str, Any]
    files: tuple[SourceFile, ...]
    origins: tuple[Origin, ...]
    tensors: tuple[Tensor, ...]
    index: str | None
    extras: tuple[str, ...]
    left_out: tuple[str, ...]
    repo: str | None = None

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)

    @property
    def remote(self) -> bool:
        """Whether any of its weights is elsewhere."""
        return any(file.remote for file in self.files)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A full checkpoint; `extras` are non-weight files to carry over, relative to `path`.

    missing: components that model_index.json lists and that have no folder. mirror: what `path`
    stands for, where the checkpoint is elsewhere.
    """

    path: Path
    kind: Kind
    components: tuple[Component, ...]
    extras: tuple[str, ...]
    left_out: tuple[str, ...]
    missing: tuple[str, ...] = ()
    mirror: Mirror | None = field(default=None, repr=False)

    @property
    def where(self) -> str:
        """Its path or address, for people."""
        return str(self.path) if self.mirror is None else self.mirror.remote.where

    def told(self) -> AbstractContextManager[None]:
        """Errors that are raised meanwhile name the checkpoint by its own address."""
        return nullcontext() if self.mirror is None else self.mirror.told()


def sharded_components(path: Path) -> list[str]:
    """Names of the components of folder `path` that are sharded, "" for a bare one.

    A pipeline's components are those that its model_index.json lists: a shard set that merely
    lies below a folder is not the folder's.
    """
    if (path / INDEX_NAME).is_file():
        return [""]
    if not (path / MODEL_INDEX).is_file():
        return []
    return [name for name in listed_components(path) if os.path.isfile(path / name / INDEX_NAME)]


def listed_components(path: Path) -> dict[str, list[str]]:
    """model_index.json's components: (library, class) by folder name; CheckpointError."""
    where = str(path / MODEL_INDEX)
    document = read_json(path / MODEL_INDEX)
    if not isinstance(document, dict):
        raise CheckpointError(Problem(where, "is not a JSON object"))
    listed = {
        name: entry
        for name, entry in document.items()
        if not name.startswith("_") and isinstance(entry, list) and len(entry) == 2 and entry[0]
    }
    problems = [
        Problem(where, f"component {name!r:.200} is no plain name: it leaves the folder, or could")
        for name in listed
        if not name.isidentifier()  # as the pipeline's keyword argument that it is
    ]
    if problems:
        raise CheckpointError(problems)
    return listed


def open_checkpoint(
    path: Path, *, variant: str | None = None, at: Callable[[Path], AnyFile] = here
) -> Checkpoint:
    """Read what `path` holds: a pipeline folder, a component folder or a .safetensors file.

    at: what to read in the place of a weight file. Reads headers and JSON files only. Raises
    CheckpointError with every problem found.
    """
    if path.is_file():
        return _open_file(path, at)
    if not path.is_dir():
        raise CheckpointError(Problem(str(path), "no such file or folder"))
    if sharded_components(path):
        raise CheckpointError(
            Problem(
                str(path),
                "is a shard set, not a full checkpoint",
                "`shardc merge` makes one of it, `shardc reshard` cuts it anew",
            )
        )
    if (path / MODEL_INDEX).is_file():
        return _open_pipeline(path, variant, at)
    component = open_component(path, "", variant, at=at)
    if component is None:
        raise CheckpointError(
            Problem(str(path), f"holds neither {MODEL_INDEX} nor safetensors weights")
        )
    return Checkpoint(path, "component", (component,), (), ())


def _open_file(path: Path, at: Callable[[Path], AnyFile]) -> Checkpoint:
    if path.suffix != ".safetensors":
        raise CheckpointError(
            Problem(str(path), "not a .safetensors file; shardc never unpickles", UNPICKLE)
        )
    if "\\" in path.name or path.name != printable(path.name):
        raise CheckpointError(Problem(str(path), "its name has a backslash or control characters"))
    headers = {path.name: read_header(at(path))}
    if problems := foreign_problems(path, headers[path.name]):
        raise CheckpointError(problems)
    check_links([path.parent / CONFIG], path.parent)
    config = _read_config(path.parent, required=True)
    component = _component("", path.parent, config, headers, None, (CONFIG,), (), at)
    return Checkpoint(path, "file", (component,), (), ())


def _open_pipeline(path: Path, variant: str | None, at: Callable[[Path], AnyFile]) -> Checkpoint:
    listed = listed_components(path)
    names = [name for name in listed if os.path.isdir(path / name)]
    missing = [name for name in listed if name not in names]
    check_links([path / name for name in names], path)
    problems: list[Problem] = []
    components = []
    plain_too = variant is not None and _any_variant(path, names, variant)
    for name in names:
        try:
            component = open_component(
                path / name, name, variant, plain_too=plain_too, root=path, at=at
            )
        except CheckpointError as error:
            problems += error.problems
            continue
        if component is not None:
            components.append(component)
    if not components and not problems:
        problems.append(Problem(str(path), "no component holds safetensors weights"))
    if problems:
        raise CheckpointError(problems)
    folders = {component.name for component in components}
    extras, left_out = _other_files(path, path, skip=folders)
    return Checkpoint(path, "pipeline", tuple(components), extras, left_out, tuple(missing))


def _any_variant(path: Path, names: Iterable[str], variant: str) -> bool:
    return any(f".{variant}." in f.name for name in names for f in (path / name).iterdir())


def open_component(
    path: Path,
    name: str,
    variant: str | None,
    *,
    plain_too: bool = False,
    root: Path | None = None,
    at: Callable[[Path], AnyFile] = here,
) -> Component | None:
    """A component folder's tensors, None where it has no weights; `name` is what to call it.

    plain_too: without the variant, its plain weights are taken, as diffusers does. root: the
    pipeline's folder, which no link may leave (default: `path`). at: what to read in the place of
    a weight file.
    """
    try:
        weights = find_weights(path, variant)
    except CheckpointError:
        if not plain_too or _any_variant(path.parent, [name], str(variant)):
            raise
        weights = find_weights(path, None)
    if weights is None:
        return None
    extras, left_out = _other_files(path, root or path)
    config = _read_config(path, required=False)
    headers = read_headers(path, weights, at)
    # Index files of any variant describe full checkpoints; they go with the weights.
    extras = tuple(extra for extra in extras if ".safetensors.index" not in extra)
    left_out = tuple(sorted(set(left_out) - set(weights.files)))
    return _component(name, path, config, headers, weights.index, extras, left_out, at)


def _component(
    name: str,
    path: Path,
    config: Mapping[str, Any],
    headers: Mapping[str, Header],
    index: str | None,
    extras: tuple[str, ...],
    left_out: tuple[str, ...],
    at: Callable[[Path], AnyFile],
) -> Component:
    files, origins, tensors = [], [], []
    names = model_names(path, headers)
    others = twins(headers, names)
    for number, (file_name, header) in enumerate(sorted(headers.items())):
        where = at(path / file_name)
        files.append(SourceFile(file_name, where, header.data_start, header.file_bytes))
        origins.append(Origin(file_name, header.file_bytes, header_digest(header)))
        for info in header.tensors:
            stored = (Stored(number, info, None),)
            tensors += [
                Tensor(called, info.dtype, info.shape, None, stored, number)
                for called in (names[info.name], *others.get(info.name, ()))
            ]
    return Component(
        name,
        path,
        class_of(config),
        config,
        tuple(files),
        tuple(origins),
        tuple(tensors),
        index,
        extras,
        left_out,
    )


def class_of(config: Mapping[str, Any]) -> str | None:
    """The model class that a config.json names: `_class_name`, else the first architecture."""
    name = config.get("_class_name")
    if name is None:
        architectures = config.get("architectures")
        name = architectures[0] if isinstance(architectures, list) and architectures else None
    return name if isinstance(name, str) and name == printable(name) else None


def _read_config(path: Path, *, required: bool) -> Mapping[str, Any]:
    where = path / CONFIG
    if not where.is_file():
        if required:
            raise CheckpointError(
                Problem(
                    str(path), f"there is no {CONFIG} beside the weights to name the model class"
                )
            )
        return {}
    config = read_json(where)
    if not isinstance(config, dict):
        raise CheckpointError(Problem(str(where), "is not a JSON object"))
    return config


def _other_files(
    path: Path, root: Path, *, skip: Set[str] = frozenset()
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(files to carry over, weights left out) below `path`; CheckpointError for bad links."""
    found, problems = files_below(path, root, skip=skip)
    if problems:
        raise CheckpointError(problems)
    extras: list[str] = []
    left_out: list[str] = []
    for name in found:
        entry = Path(name)
        is_weights = entry.suffix == ".safetensors" or entry.suffix in FOREIGN
        is_weights |= entry.name == ADAPTER_CONFIG  # a library would look for the adapter's
        (left_out if is_weights else extras).append(name)
    return tuple(extras), tuple(left_out)
