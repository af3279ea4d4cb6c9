"""A rank's tensors: views of its mapped files, found by the index and checked against it."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import torch
import xxhash

from shardc.errors import Problem, ShardSetError
from shardc.header import Header, TensorInfo
from shardc.index import Index, local_shape
from shardc.loaders import devices
from shardc.loaders.devices import DeviceError
from shardc.loaders.pages import ReadAhead, Span
from shardc.loaders.reads import DirectFile, Reads, choose
from shardc.shardset import ShardSet, open_shard_set, read_shard_headers

DTYPES: Mapping[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "I16": torch.int16,
    "U16": torch.uint16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "F32": torch.float32,
    "C64": torch.complex64,
    "F64": torch.float64,
    "I64": torch.int64,
    "U64": torch.uint64,
}
DEFAULT_COMPONENT = "transformer"


@dataclass(slots=True)
class MappedFile:
    """A safetensors file, mapped privately: nothing that is written to a view reaches the file."""

    path: Path
    header: Header
    memory: mmap.mmap | None = field(default=None, repr=False)

    @classmethod
    def open(cls, path: Path, header: Header) -> MappedFile:
        if header.file_bytes == header.data_start:
            return cls(path, header)
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_size != header.file_bytes:
                raise ShardSetError(Problem(str(path), "changed while it was being opened"))
            try:
                memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
            except OSError as error:  # no mmap on this mount, or a limited address space
                what = f"cannot be mapped: {error.strerror}"
                fix = "copy it to a local disk, or raise the limit"
                raise ShardSetError(Problem(str(path), what, fix)) from error
            return cls(path, header, memory)

    def view(self, info: TensorInfo) -> torch.Tensor:
        """The tensor as a view of the mapping; no byte is read until it is used."""
        dtype = DTYPES.get(info.dtype)
        if dtype is None:
            raise ShardSetError(
                Problem(str(self.path), f"tensor {info.name!r}: torch has no dtype {info.dtype}")
            )
        if not info.size_bytes or self.memory is None:
            return torch.empty(info.shape, dtype=dtype)
        raw = torch.frombuffer(
            self.memory,
            dtype=torch.uint8,
            count=info.size_bytes,
            offset=self.header.data_start + info.start,
        )
        if raw.data_ptr() % dtype.itemsize:  # a foreign file may lie unaligned: only then a copy
            raw = raw.clone()
        return raw.view(dtype).view(info.shape)

    def span(self, info: TensorInfo) -> Span | None:
        """The mapped bytes that hold the tensor; None where it has none."""
        if not info.size_bytes or self.memory is None:
            return None
        start = self.header.data_start + info.start
        return Span(self.memory, start, start + info.size_bytes)


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


def open_rank(folder: Path, index: Index, rank: int) -> dict[str, tuple[MappedFile, TensorInfo]]:
    """Every tensor that `rank` holds, with the mapped file it is in, in the index's order.

    Raises ShardSetError naming each file that is missing, damaged or another set's, and each
    tensor that is not what the index says.
    """
    own = [name for name, entry in index.files.items() if entry.rank in (None, rank)]
    headers, problems = read_shard_headers(folder, index, own, rank=rank)
    if problems:
        raise ShardSetError(problems)
    files = {name: MappedFile.open(folder / name, header) for name, header in headers.items()}
    infos = {name: {t.name: t for t in file.header.tensors} for name, file in files.items()}
    held: dict[str, tuple[MappedFile, TensorInfo]] = {}
    for name, tensor in index.tensors.items():
        shard = tensor.shards[rank if tensor.placement.dim is not None else 0]
        shape = local_shape(tensor, shard)
        info = infos.get(shard.file, {}).get(name)
        if info is None or (info.dtype, list(info.shape)) != (tensor.dtype, shape):
            has = None if info is None else f"{info.dtype} {list(info.shape)}"
            problems.append(
                Problem(
                    str(folder / shard.file),
                    f"tensor {name!r} is {has}, the index says {tensor.dtype} {shape}",
                )
            )
            continue
        held[name] = (files[shard.file], info)
    if problems:
        raise ShardSetError(problems)
    return held


def check_digests(
    held: Mapping[str, tuple[MappedFile, TensorInfo]], index: Index, rank: int
) -> None:
    """Read every tensor of the rank against its digest; ShardSetError names those that differ."""
    problems = []
    for name, (file, info) in held.items():
        tensor = index.tensors[name]
        shard = tensor.shards[rank if tensor.placement.dim is not None else 0]
        state = xxhash.xxh3_128()
        if file.memory is not None:
            start = file.header.data_start + info.start
            with memoryview(file.memory) as whole, whole[start : start + info.size_bytes] as part:
                state.update(part)
            if (span := file.span(info)) is not None:
                span.drop(0, info.size_bytes)
        if state.hexdigest() != shard.digest:
            problems.append(
                Problem(
                    str(file.path),
                    f"tensor {name!r}: digest {state.hexdigest()}, the index says {shard.digest}",
                    "the file is damaged: fetch it again",
                )
            )
    if problems:
        raise ShardSetError(problems)


def place_on(
    held: Mapping[str, tuple[MappedFile, TensorInfo]],
    device: torch.device,
    reads: Reads = "auto",
) -> Iterator[tuple[str, torch.Tensor]]:
    """Each tensor on `device`: a view on cpu; elsewhere copied, and its host pages dropped.

    reads: by the mapping, the next tensors being read ahead, or by large reads past the page
    cache; auto takes for each file what its share of cached pages makes the faster, and views on
    cpu. Raises DeviceError naming the tensor that the device cannot hold, before the first copy
    where it is known that all of them do not fit.
    """
    if device.type == "cpu" and reads != "direct":
        for name, (file, info) in held.items():
            yield name, file.view(info)
        return
    way = devices.lane(device)
    devices.check_room(way, device, sum(info.size_bytes for _, info in held.values()))
    ways: dict[Path, str] = {}
    for file, _ in held.values():
        if file.path not in ways:  # xla takes whole tensors only
            ways[file.path] = "mapped" if device.type == "xla" else choose(reads, file.memory)
    mapped = {n: (f, i) for n, (f, i) in held.items() if ways[f.path] == "mapped"}
    spans = {name: file.span(info) for name, (file, info) in mapped.items()}
    with ExitStack() as stack:
        ahead = stack.enter_context(ReadAhead(spans.values()))
        opened: dict[Path, DirectFile] = {}
        for name, (file, info) in held.items():
            own = spans.get(name)

            def done(first: int, last: int, span: Span | None = own) -> None:
                if span is not None:
                    span.drop(first, last)
                    ahead.used(last - first)

            try:
                if name in mapped:
                    placed = way.put(file.view(info), done)
                else:
                    if file.path not in opened:
                        opened[file.path] = stack.enter_context(DirectFile(file.path))
                    placed = _read_onto(device, file, info, opened[file.path])
            except (DeviceError, RuntimeError) as error:  # the latter is the device stack's own
                raise DeviceError(Problem(f"tensor {name!r}", str(error))) from error
            yield name, placed
        way.sync()


def _read_onto(
    device: torch.device, file: MappedFile, info: TensorInfo, direct: DirectFile
) -> torch.Tensor:
    """The tensor on the device, piece by piece by way of the direct reader's buffers."""
    view = file.view(info)
    placed = devices.empty(view, device)
    flat, item = placed.view(-1), view.element_size()
    start = file.header.data_start + info.start
    for at, piece in direct.pieces(start, start + info.size_bytes):
        if piece.data_ptr() % item:
            piece = piece.clone()
        flat[at // item : (at + piece.numel()) // item].copy_(piece.view(view.dtype))
    return placed


def load_state_dict(
    path: str | Path,
    rank: int,
    *,
    tp: int | None = None,
    component: str | None = None,
    device: str | torch.device = "cpu",
    verify: bool = False,
    reads: Reads = "auto",
) -> dict[str, torch.Tensor]:
    """What `rank` holds of a shard set: its own tensors and the replicated ones, by name.

    On cpu these are views of the mapped files: nothing is read or copied until used, and writing
    to one changes neither the file nor another process's view. component: which, where several
    are sharded (default: the transformer). tp: the degree you run at, to be checked. verify: read
    everything against the digests first. reads: "mapped", "direct" (large reads past the page
    cache, into memory of their own on cpu), or what suits the cache. Raises ShardSetError, or
    DeviceError before any read where the device is not ready.
    """
    where = devices.resolve(device)
    shard_set = open_shard_set(Path(path))
    name = choose_component(shard_set, component)
    index = shard_set.components[name]
    folder = shard_set.folder(name)
    check_rank(index, rank, tp, folder)
    held = open_rank(folder, index, rank)
    if verify:
        check_digests(held, index, rank)
    return dict(place_on(held, where, reads))
