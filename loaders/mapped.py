"""A safetensors file, mapped, and its tensors: as views, or as bytes in the file's order."""

from __future__ import annotations

import logging
import mmap
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import torch
import xxhash

from shardc.errors import Problem, ShardSetError
from shardc.header import DTYPE_BITS, Header, TensorInfo
from shardc.loaders.pages import Span
from shardc.loaders.reads import FileReader, read_into
from shardc.remote import AnyFile, RemoteFile

log = logging.getLogger("shardc.loaders")

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
# Without a reserve: a file larger than the memory can be mapped, as only what is written is copied.
MAP_FLAGS = mmap.MAP_PRIVATE | getattr(
    mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0
)


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    try:
        file = path.open("rb")
    except OSError as error:
        raise ShardSetError(Problem(str(path), f"cannot open it: {error.strerror}")) from error
    with file:
        yield file


@dataclass(slots=True)
class MappedFile:
    """A safetensors file, mapped privately: nothing that is written to a view reaches the file.

    memory: None where no tensor has a byte, and where the file cannot be mapped (it is elsewhere,
    no mmap on its mount, too little address space): its tensors are read then. shared: other ranks
    read it too. digests: of tensors that are to be checked as they are read.
    """

    path: AnyFile
    header: Header
    memory: mmap.mmap | None = field(default=None, repr=False)
    shared: bool = True
    digests: Mapping[str, str] = field(default_factory=dict, repr=False)

    @classmethod
    def open(cls, path: AnyFile, header: Header, *, shared: bool = True) -> MappedFile:
        if header.file_bytes == header.data_start or isinstance(path, RemoteFile):
            return cls(path, header, shared=shared)
        with _opened(path) as file:
            if os.fstat(file.fileno()).st_size != header.file_bytes:
                raise ShardSetError(Problem(str(path), "changed while it was being opened"))
            try:
                memory = mmap.mmap(file.fileno(), 0, MAP_FLAGS, mmap.PROT_READ | mmap.PROT_WRITE)
            except OSError as error:
                log.warning("%s cannot be mapped (%s): it is read", path, error.strerror)
                return cls(path, header, shared=shared)
            return cls(path, header, memory, shared)

    def check_size(self) -> None:
        """ShardSetError where the file shrank or grew since: to touch a page past its end kills."""
        if self.memory is not None and (now := self.memory.size()) != self.header.file_bytes:
            what = f"has {now} bytes, {self.header.file_bytes} when it was opened"
            raise ShardSetError(Problem(str(self.path), what, "load again once it is at rest"))

    def like(self, info: TensorInfo) -> torch.Tensor:
        """A tensor without memory, of the dtype and shape that this one has."""
        dtype = DTYPES.get(info.dtype)
        if dtype is None:
            raise ShardSetError(
                Problem(str(self.path), f"tensor {info.name!r}: torch has no dtype {info.dtype}")
            )
        return torch.empty(info.shape, dtype=dtype, device="meta")

    def view(self, info: TensorInfo) -> torch.Tensor:
        """The tensor as a view of the mapping; no byte is read until it is used."""
        dtype = self.like(info).dtype
        if not info.size_bytes:
            return torch.empty(info.shape, dtype=dtype)
        start = self.header.data_start + info.start
        if self.memory is None:
            raw = self._read(info, start)
        else:
            self.check_size()
            raw = torch.frombuffer(
                self.memory, dtype=torch.uint8, count=info.size_bytes, offset=start
            )
        if raw.data_ptr() % dtype.itemsize:  # a foreign file may lie unaligned: only then a copy
            raw = raw.clone()
        return raw.view(dtype).view(info.shape)

    def _read(self, info: TensorInfo, start: int) -> torch.Tensor:
        try:
            raw = torch.empty(info.size_bytes, dtype=torch.uint8)
        except RuntimeError as error:
            what = f"tensor {info.name!r}: there is no memory for its {info.size_bytes} bytes"
            fix = "the file cannot be mapped: raise the limit on address space (ulimit -v)"
            raise ShardSetError(Problem(str(self.path), what, fix)) from error
        read_into(self.path, start, raw.numpy().data)
        if info.name in self.digests:
            self.check(info, xxhash.xxh3_128_hexdigest(raw.numpy().data))
        return raw

    def check(self, info: TensorInfo, digest: str) -> None:
        """ShardSetError where the tensor's bytes are not those that the index states."""
        stated = self.digests[info.name]
        if digest != stated:
            what = f"tensor {info.name!r}: digest {digest}, the index says {stated}"
            raise ShardSetError(Problem(str(self.path), what, "the file is damaged"))

    def span(self, info: TensorInfo) -> Span | None:
        """The mapped bytes that hold the tensor; None where it has none."""
        if not info.size_bytes or self.memory is None:
            return None
        start = self.header.data_start + info.start
        return Span(self.memory, start, start + info.size_bytes)


Held = Mapping[str, tuple[MappedFile, TensorInfo]]  # by the name that a tensor goes by
Member = tuple[str, TensorInfo]


def by_file(held: Held) -> Iterator[tuple[MappedFile, list[Member]]]:
    """Each file with what is held of it, by the name that it goes by."""
    files: dict[AnyFile, tuple[MappedFile, list[Member]]] = {}
    for name, (file, info) in held.items():
        files.setdefault(file.path, (file, []))[1].append((name, info))
    yield from files.values()


def _runs(members: Iterable[Member]) -> Iterator[list[Member]]:
    """What lies one after another in the file, to be read as one; each at a whole element."""
    run: list[Member] = []
    for name, info in sorted(members, key=lambda member: member[1].start):
        if not info.size_bytes:
            continue
        first = run[0][1].start if run else info.start
        joins = run and run[-1][1].stop == info.start
        if not joins or (info.start - first) * 8 % DTYPE_BITS[info.dtype]:
            if run:
                yield run
            run = []
        run.append((name, info))
    if run:
        yield run


def parts(
    reader: FileReader, file: MappedFile, members: Iterable[Member]
) -> Iterator[tuple[str, TensorInfo, int, torch.Tensor]]:
    """(name, tensor, offset in it, bytes), in the file's order; bytes are valid until the next."""
    for run in _runs(members):
        first, stop = run[0][1].start, run[-1][1].stop
        start = file.header.data_start
        number = 0
        for at, piece in reader.pieces(start + first, start + stop):
            low, high = first + at, first + at + piece.numel()
            while number < len(run) and run[number][1].start < high:
                name, info = run[number]
                begin, end = max(low, info.start), min(high, info.stop)
                yield name, info, begin - info.start, piece[begin - low : end - low]
                if end < info.stop:  # the rest is in the next piece
                    break
                number += 1
