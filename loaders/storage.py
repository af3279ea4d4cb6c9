"""A rank's tensors: views of its mapped files, found by the index and checked against it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import torch
import xxhash

from shardc.errors import Problem, ShardSetError
from shardc.header import Header, TensorInfo
from shardc.index import Index, local_shape
from shardc.loaders import devices
from shardc.loaders.devices import DeviceError
from shardc.loaders.mapped import Held, MappedFile, Member, by_file, parts
from shardc.loaders.opening import Opening
from shardc.loaders.pages import ReadAhead, Span
from shardc.loaders.reads import FileReader, Reads, choose
from shardc.remote import AnyFile, RemoteFile, here
from shardc.shardset import ShardSet, header_problems, read_shard_headers, stated_digests

At = Callable[[Path], AnyFile]  # what to read in the place of a file of the set

DEFAULT_COMPONENT = "transformer"


def choose_component(shard_set: ShardSet, component: str | None) -> str:
    """The named component, else the only sharded one, else the transformer; ShardSetError."""
    names = list(shard_set.components)
    if component is None:
        component = names[0] if len(names) == 1 else DEFAULT_COMPONENT
    if component not in shard_set.components:
        raise ShardSetError(
            Problem(
                str(shard_set.path),
                f"has no sharded component {component!r}; it has {', '.join(map(repr, names))}",
            )
        )
    return component


def check_rank(index: Index, rank: int, tp: int | None, where: Path) -> None:
    """ShardSetError where the degree is not the set's, or the rank is outside it."""
    if tp is not None and tp != index.tp:
        raise ShardSetError(
            Problem(
                str(where),
                f"is cut for tp {index.tp}, {tp} was asked for",
                f"run {index.tp} ranks, or `shardc reshard --tp {tp}`",
            )
        )
    if not 0 <= rank < index.tp:
        raise ShardSetError(Problem(str(where), f"rank {rank} is outside tp {index.tp}"))


def open_rank(folder: Path, index: Index, rank: int, at: At = here) -> Held:
    """Every tensor that `rank` holds, with the mapped file it is in, in the index's order.

    Raises ShardSetError naming each file that is missing, damaged or another set's, and each
    tensor that is not what the index says.
    """
    return open_ranks(folder, index, [rank], at)[0]


def open_ranks(folder: Path, index: Index, ranks: Sequence[int], at: At = here) -> list[Held]:
    """As `open_rank`, for each of several ranks; what all of them hold is opened once."""
    headers: dict[str, Header] = {}
    problems: list[Problem] = []
    for number, rank in enumerate(ranks):
        wanted = (rank,) if number else (rank, None)
        own = [name for name, entry in index.files.items() if entry.rank in wanted]
        found, reasons = read_shard_headers(folder, index, own, rank=rank, at=at)
        headers |= found
        problems += reasons
    if problems:
        raise ShardSetError(problems)
    files = {
        name: MappedFile.open(at(folder / name), header, shared=index.files[name].rank is None)
        for name, header in headers.items()
    }
    _check_as_read(index, files)
    infos = {name: {t.name: t for t in file.header.tensors} for name, file in files.items()}
    opened: list[Held] = []
    for rank in ranks:
        held: dict[str, tuple[MappedFile, TensorInfo]] = {}
        for name, tensor in index.tensors.items():
            shard = tensor.shards[rank if tensor.placement.dim is not None else 0]
            shape = local_shape(tensor, shard)
            info = infos.get(shard.file, {}).get(name)
            if info is not None and (info.dtype, list(info.shape)) == (tensor.dtype, shape):
                held[name] = (files[shard.file], info)
                continue
            has = None if info is None else f"{info.dtype} {list(info.shape)}"
            what = f"tensor {name!r} is {has}, the index says {tensor.dtype} {shape}"
            problems.append(Problem(str(folder / shard.file), what))
        opened.append(held)
    if problems := problems or header_problems(folder, index, headers, at=at):
        raise ShardSetError(dict.fromkeys(problems))
    return opened


def _check_as_read(index: Index, files: dict[str, MappedFile]) -> None:
    """What comes from elsewhere passes by once, so it is checked on its way."""
    remote = {name: file for name, file in files.items() if isinstance(file.path, RemoteFile)}
    for name, digests in stated_digests(index, remote).items():
        remote[name].digests = digests


def check_digests(held: Held, index: Index, rank: int) -> None:
    """Read every tensor of the rank against its digest; ShardSetError names those that differ."""
    problems = []
    for file, members in by_file(held):
        if file.digests:
            continue  # it is checked as it is read
        states = {name: xxhash.xxh3_128() for name, _ in members}
        with FileReader(file.path) as reader:  # what is cached now is mapped next
            for name, _, _, piece in parts(reader, file, members):
                states[name].update(piece.numpy().data)
        for name, state in states.items():
            tensor = index.tensors[name]
            stated = tensor.shards[rank if tensor.placement.dim is not None else 0].digest
            if state.hexdigest() != stated:
                what = f"tensor {name!r}: digest {state.hexdigest()}, the index says {stated}"
                fix = "the file is damaged: fetch it again"
                problems.append(Problem(str(file.path), what, fix))
    if problems:
        raise ShardSetError(problems)


def place_on(
    held: Held, device: torch.device, reads: Reads = "auto"
) -> Iterator[tuple[str, torch.Tensor]]:
    """Each tensor on `device`: a view on cpu; elsewhere copied, and its host pages dropped.

    A file that is elsewhere is streamed, on cpu into memory of the tensors' own. They come file by
    file, in no order to rely on. reads: by the mapping, the next tensors being
    read ahead, or by large reads, past the page cache but for what other ranks read too; auto
    takes for each file what its share of cached pages makes the faster, and views on cpu. Raises
    DeviceError naming the tensor that the device cannot hold, before the first copy where it is
    known that all of them do not fit, and ShardSetError where a file can no longer be read.
    """
    if device.type == "cpu" and reads != "direct":
        views = {n: h for n, h in held.items() if not isinstance(h[0].path, RemoteFile)}
        for name, (file, info) in views.items():
            yield name, file.view(info)
        held = {n: h for n, h in held.items() if n not in views}
    if not held:
        return
    way = devices.lane(device)
    devices.check_room(way, device, sum(info.size_bytes for _, info in held.values()))
    mapped: list[tuple[str, MappedFile, TensorInfo]] = []
    cached: list[tuple[str, MappedFile, TensorInfo]] = []
    for file, members in by_file(held):
        chosen = choose(reads, file.memory, file.path, shared=file.shared)
        if chosen == "cached":
            cached += [(name, file, info) for name, info in members]
        elif chosen == "mapped" or device.type == "xla":  # which takes whole tensors only
            mapped += [(name, file, info) for name, info in members]
        else:
            yield from _place_read(device, file, members, direct=chosen == "direct")
    yield from _place_mapped(way, cached, [])
    yield from _place_mapped(way, mapped, [file.span(info) for _, file, info in mapped])
    way.sync()


@contextmanager
def _named(name: str) -> Iterator[None]:
    """Say which tensor it was that a device, or its stack by a RuntimeError, would not take."""
    try:
        yield
    except (DeviceError, RuntimeError) as error:
        raise DeviceError(Problem(f"tensor {name!r}", str(error))) from error


def _place_mapped(
    way: devices.Lane,
    held: Sequence[tuple[str, MappedFile, TensorInfo]],
    spans: Sequence[Span | None],
) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors onto the device from their mapping; `spans` are what to read ahead of that."""
    if not held:
        return
    with ReadAhead(spans) as ahead, ThreadPoolExecutor(way.threads, "shardc-put") as pool:

        def place(name: str, file: MappedFile, info: TensorInfo) -> tuple[str, torch.Tensor]:
            with _named(name):
                done = _given_back(file, file.span(info), ahead)
                return name, way.put(file.view(info), done)

        yield from (map if way.threads == 1 else pool.map)(place, *zip(*held, strict=True))


def _given_back(
    file: MappedFile, span: Span | None, ahead: ReadAhead
) -> Callable[[int, int], None]:
    """What to do once the device has a slice: drop its pages, and see that the file stands."""

    def done(first: int, last: int) -> None:
        file.check_size()
        if span is not None:
            span.drop(first, last)
            ahead.used(last - first)

    return done


def _place_read(
    device: torch.device, file: MappedFile, members: Sequence[Member], *, direct: bool
) -> Iterator[tuple[str, torch.Tensor]]:
    """A file's tensors onto the device by way of the reader's buffers, neighbours in one read."""
    state = xxhash.xxh3_128()
    for name, info in members:
        if not info.size_bytes:
            yield name, devices.empty(file.like(info), device)
    with FileReader(file.path, direct=direct) as reader:
        for name, info, at, piece in parts(reader, file, members):
            with _named(name):
                if at == 0:
                    placed = devices.empty(file.like(info), device)
                    state.reset()
                item, size = placed.element_size(), piece.numel()
                if piece.data_ptr() % item:
                    piece = piece.clone()
                _copy(piece, placed.view(-1)[at // item : (at + size) // item])
            if file.digests:
                state.update(piece.numpy().data)
            if at + size == info.size_bytes:
                if file.digests:
                    file.check(info, state.hexdigest())
                yield name, placed


def _copy(piece: torch.Tensor, into: torch.Tensor) -> None:
    """Bytes into a flat tensor. On the host by this thread alone: torch's would starve readers."""
    if into.device.type == "cpu":
        np.copyto(into.view(torch.uint8).numpy(), piece.numpy())
    else:
        into.copy_(piece.view(into.dtype))


def load_state_dict(
    path: str | Path,
    rank: int,
    *,
    tp: int | None = None,
    component: str | None = None,
    device: str | torch.device = "cpu",
    verify: bool = False,
    reads: Reads = "auto",
    revision: str | None = None,
    token: str | None = None,
    cache: bool = True,
) -> dict[str, torch.Tensor]:
    """What `rank` holds of a shard set: its own tensors and the replicated ones, by name.

    path: a folder, or an address of the Hub or of S3 (`org/name`, `hf://org/name@revision`,
    `s3://bucket/prefix`) that holds the set, or sets in folders tpN. Then the rank's files are
    pulled first, into the Hub's cache or shardc's own; cache=False streams them instead, and
    leaves nothing on the disk. revision, token: of the Hub.

    On cpu these are views of the mapped files: nothing is read or copied until used, and writing
    to one changes neither the file nor another process's view. component: which, where several
    are sharded (default: the transformer). tp: the degree you run at, to be checked. verify: read
    everything against the digests first. reads: "mapped", "direct" (large reads, into memory of
    their own on cpu, past the page cache but for what other ranks read too), or what suits the
    cache. A file that cannot be mapped is read, with a warning. Raises ShardSetError, or
    DeviceError before any read where the device is not ready.
    """
    where = devices.resolve(device)
    part = partial(choose_component, component=component)
    remote = Opening(path, revision=revision, token=token, cache=cache, part=part)
    with remote as opening, opening.told():
        opening.fetch([rank], tp)
        shard_set = opening.open()
        name = choose_component(shard_set, component)
        index = shard_set.components[name]
        folder = shard_set.folder(name)
        check_rank(index, rank, tp, folder)
        held = open_rank(folder, index, rank, opening.at)
        if verify:
            check_digests(held, index, rank)
        placed = dict(place_on(held, where, reads))
        return {name: placed[name] for name in held}
