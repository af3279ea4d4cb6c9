"""Whether what stands at OUT is already what a plan would make of its source.

Two checkpoints of one architecture have the same headers and so the same plan. So the index is not
enough: the first bytes of every tensor are compared with the source's, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

import numpy as np
import xxhash

from shardc.checkpoint import CONFIG, INDEX_NAME, Component
from shardc.compare import read_bytes
from shardc.errors import ShardcError
from shardc.execute import cast
from shardc.index import read_index
from shardc.planner import ComponentPlan, Move, Plan
from shardc.remote import AnyFile, RemoteFile, size_of, spread
from shardc.schedule import Part, geometry

T = TypeVar("T")

SAMPLE_BYTES = 4096
PIECE_BYTES = 64 * 1024
SAMPLES = 256
REMOTE_READERS = 16  # each sample of a remote file is a request


def is_current(plan: Plan, out: Path) -> bool:
    """The set at `out` has this plan's files, index and headers, and samples of its weights.

    Reads a few KiB a tensor: damage further in is for verify to find. False where in doubt.
    """
    try:
        return (
            _files(out) == _planned_files(plan)
            and all(_same_file(path, out / name) for name, path in taken_over(plan).items())
            and all(_is_current(part, out / part.component.name) for part in plan.components)
        )
    except (OSError, ShardcError):
        return False


def taken_over(plan: Plan) -> dict[str, AnyFile]:
    """What a build takes over as it is: the name that it gets, and where it is."""
    return {**carried(plan), **weights(component for component, _ in plan.kept)}


def weights(components: Iterable[Component]) -> dict[str, AnyFile]:
    """The weight files of `components` by their names in the checkpoint."""
    return {str(Path(c.name, file.name)): file.path for c in components for file in c.files}


def carried(plan: Plan) -> dict[str, Path]:
    """The files beside weights that a build takes over: the name that it gets, and where it is."""
    names = {extra: plan.checkpoint.path / extra for extra in plan.checkpoint.extras}
    for part in plan.components:
        for extra in part.component.extras:
            names[str(Path(part.component.name, extra))] = part.component.path / extra
    for component, _ in plan.kept:
        index = [component.index] if component.index else []
        for name in (*component.extras, *index):
            names[str(Path(component.name, name))] = component.path / name
    return names


def _files(out: Path) -> dict[str, int | None]:
    """Every file below `out` with its size; of an index, which varies by the tool, None."""
    return {
        entry.relative_to(out).as_posix(): None
        if entry.name == INDEX_NAME
        else entry.stat().st_size
        for entry in out.rglob("*")
        if entry.is_file()
    }


def _planned_files(plan: Plan) -> dict[str, int | None]:
    wanted: dict[str, int | None] = {name: size_of(path) for name, path in taken_over(plan).items()}
    for part in plan.components:
        wanted[str(Path(part.component.name, INDEX_NAME))] = None
        for file in part.files:
            wanted[str(Path(part.component.name, file.name))] = file.size_bytes
    return wanted


def _is_current(plan: ComponentPlan, folder: Path) -> bool:
    index = read_index(folder / INDEX_NAME)
    config = xxhash.xxh3_128_hexdigest((plan.component.path / CONFIG).read_bytes())
    return (
        index.plan == plan.digest
        and index.manifest.digest == plan.manifest.digest
        and index.source.config == config
        and all(_has_header(folder / file.name, file.header) for file in plan.files)
        and _all(
            lambda move: _sample_agrees(plan, folder, move),
            plan.moves(),
            remote=plan.component.remote,
        )
    )


def _all(agrees: Callable[[T], bool], items: Iterable[T], *, remote: bool) -> bool:
    if not remote:
        return all(map(agrees, items))

    def check(item: T) -> None:
        if not agrees(item):
            raise _Differs

    try:
        spread(check, items, REMOTE_READERS)
    except _Differs:
        return False
    return True


class _Differs(Exception):
    pass


def _same_file(one: AnyFile, other: Path) -> bool:
    """The same bytes; of more than 16 MiB, or from elsewhere of more than 1, samples of them."""
    if isinstance(one, Path) and one.samefile(other):
        return True
    size = size_of(one)
    piece = PIECE_BYTES if isinstance(one, Path) else SAMPLE_BYTES

    def agrees(at: int) -> bool:
        count = min(piece, size - at)
        return np.array_equal(read_bytes(one, at, count), read_bytes(other, at, count))

    starts = range(0, size, max(piece, size // SAMPLES))
    return _all(agrees, starts, remote=isinstance(one, RemoteFile))


def _has_header(path: Path, header: bytes) -> bool:
    with path.open("rb") as file:
        return file.read(len(header)) == header


def _sample_agrees(plan: ComponentPlan, folder: Path, move: Move) -> bool:
    """The tensor's first elements, in the source and in the shard that has them."""
    shape = geometry(move)
    found = [_first(part) for parts in (shape.sources, shape.targets) for part in parts]
    source = next(filter(None, found[: len(shape.sources)]), None)
    target = next(filter(None, found[len(shape.sources) :]), None)
    if not shape.outer or source is None or target is None:
        return True  # an empty tensor
    (one, at, size), (two, to, room) = source, target
    count = min(size, room, SAMPLE_BYTES // max(shape.in_bytes, shape.out_bytes))
    given, made = plan.component.files[one.file], plan.files[two.file]
    wanted = read_bytes(
        given.path,
        given.data_start + one.start + at * shape.in_bytes,
        count * shape.in_bytes,
    )
    if move.dtype != move.out_dtype:
        wanted, _ = cast(wanted, move.dtype, move.out_dtype, np.empty(SAMPLE_BYTES, np.uint8))
    has = read_bytes(
        folder / made.name,
        len(made.header) + two.start + to * shape.out_bytes,
        count * shape.out_bytes,
    )
    return np.array_equal(wanted, has)


def _first(part: Part) -> tuple[Part, int, int] | None:
    """(part, local index, count) of its span that begins the row, if it has that one."""
    for start, stop, at in part.spans:
        if start == 0 and stop > 0:
            return part, at, stop
    return None
