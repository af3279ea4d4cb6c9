"""The safetensors header, read straight from the file and written deterministically.

Source: the format section of the safetensors README. Weights are never touched here.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import xxhash

from shardc.errors import MAX_PROBLEMS, CheckpointError, Problem
from shardc.reading import foreign, regular_file
from shardc.reading import parse_json as parse_json
from shardc.remote import AnyFile

# Bits an element takes, for every dtype that safetensors 0.8 knows.
DTYPE_BITS: Mapping[str, int] = {
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "F8_E5M2": 8,
    "F8_E4M3": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "C64": 64,
    "F64": 64,
    "I64": 64,
    "U64": 64,
}
MAX_HEADER_BYTES = 100_000_000  # the limit of the reference implementation
MAX_DIMS = 64  # numpy's limit, and that of most of torch
MAX_NAME_CHARACTERS = 4096  # of a tensor's name
DATA_ALIGNMENT_BYTES = (
    4096  # our own files: data starts on a page, so that it maps and reads direct
)


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of a safetensors file; `start` and `stop` are bytes from the start of the data."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def size_bytes(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Header:
    """A parsed header: tensors by offset, the metadata, and where the data begins in the file."""

    tensors: tuple[TensorInfo, ...]
    metadata: Mapping[str, str]
    data_start: int
    file_bytes: int


def tensor_bytes(dtype: str, shape: Iterable[int]) -> int | None:
    """Bytes of a tensor, or None where a sub-byte dtype does not fill whole bytes."""
    bits = math.prod(shape) * DTYPE_BITS[dtype]
    return bits // 8 if bits % 8 == 0 else None


def read_header(path: AnyFile) -> Header:
    """Read and check the header of a safetensors file.

    Raises CheckpointError naming the file, the tensor and both numbers of every problem found.
    """
    with regular_file(path) as (file, size):
        length = _header_length(path, file.read(8), size)
        raw = file.read(length)
    if len(raw) != length:
        raise CheckpointError(
            Problem(str(path), f"truncated: its header has {len(raw)} of {length} bytes")
        )
    return parse_header(raw, file_bytes=size, where=str(path))


def _header_length(path: AnyFile, first: bytes, size: int) -> int:
    where = str(path)
    if size == 0:
        raise CheckpointError(Problem(where, "the file is empty"))
    length = int.from_bytes(first, "little")
    # only now: a sound file's length may begin as anything does
    if (len(first) < 8 or 8 + length > size) and (error := foreign(where, first)):
        raise error
    if len(first) < 8:
        raise CheckpointError(Problem(where, f"not a safetensors file: only {size} bytes long"))
    if length > MAX_HEADER_BYTES:
        raise CheckpointError(
            Problem(
                where,
                f"not a safetensors file: it claims a header of {length} bytes, "
                f"the limit is {MAX_HEADER_BYTES}",
            )
        )
    if 8 + length > size:
        raise CheckpointError(
            Problem(where, f"truncated: header of {length} bytes in a file of {size} bytes")
        )
    return length


def parse_header(raw: bytes, *, file_bytes: int, where: str) -> Header:
    """Check header bytes (without the length prefix) against the format and the file's size."""
    document = parse_json(raw, where)
    if not isinstance(document, dict):
        raise CheckpointError(Problem(where, "the header is not a JSON object"))
    metadata = document.pop("__metadata__", None)
    if metadata is None:  # the reference takes null for none
        metadata = {}
    problems: list[Problem] = []
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        problems.append(Problem(where, "__metadata__ must map strings to strings"))
        metadata = {}
    tensors: list[TensorInfo] = []
    for name, entry in document.items():
        parsed = _parse_tensor(name, entry)
        if isinstance(parsed, str):
            problems.append(Problem(where, f"tensor {name!r:.200}: {parsed}"))
            if len(problems) > MAX_PROBLEMS:  # nobody reads on
                break
        else:
            tensors.append(parsed)
    data_start = 8 + len(raw)
    if not problems:
        tensors.sort(key=lambda t: (t.start, t.stop))
        problems += _check_tiling(tensors, file_bytes - data_start, where)
    if problems:
        raise CheckpointError(problems)
    return Header(tuple(tensors), metadata, data_start, file_bytes)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")  # what a terminal would obey


def name_problem(name: str) -> str | None:
    """Why this cannot be a tensor's name; None where it can."""
    if name == "__metadata__":
        return "that is the format's own key"
    if not 1 <= len(name) <= MAX_NAME_CHARACTERS:
        return f"a name of {len(name)} characters, 1 to {MAX_NAME_CHARACTERS} are taken"
    if _CONTROL.search(name):
        return "a name must be text, free of NUL and other control characters"
    return None


def _parse_tensor(name: str, entry: Any) -> TensorInfo | str:
    if reason := name_problem(name):
        return reason
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        return "must have exactly dtype, shape and data_offsets"
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        return f"unknown dtype {dtype!r:.200}"
    if not isinstance(shape, list) or not all(_is_count(n) for n in shape):
        return f"shape {shape!r:.200} is not a list of counts"
    if len(shape) > MAX_DIMS:
        return f"a shape of {len(shape)} dims, {MAX_DIMS} are taken"
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(_is_count(n) for n in offsets):
        return f"data_offsets {offsets!r:.200} are not two counts"
    start, stop = offsets
    if math.prod(max(n, 1) for n in shape) * DTYPE_BITS[dtype] >= 2**63:
        return f"shape {shape} of {dtype} overflows, its offsets span {stop - start} bytes"
    expected = tensor_bytes(dtype, shape)
    if expected is None:
        return f"shape {shape} of {dtype} does not fill whole bytes"
    if stop - start != expected:
        return f"{dtype} of shape {shape} takes {expected} bytes, its offsets span {stop - start}"
    return TensorInfo(name, dtype, tuple(shape), start, stop)


def _check_tiling(tensors: list[TensorInfo], data_bytes: int, where: str) -> list[Problem]:
    problems: list[Problem] = []
    at = 0
    for tensor in tensors:
        if tensor.start != at and len(problems) <= MAX_PROBLEMS:
            kind = "a gap" if tensor.start > at else "an overlap"
            problems.append(
                Problem(
                    where,
                    f"tensor {tensor.name!r}: {kind}, it starts at byte {tensor.start} "
                    f"where {at} was expected",
                )
            )
        at = max(at, tensor.stop)
    if not problems and at != data_bytes:
        kind = "truncated" if at > data_bytes else "trailing bytes"
        problems.append(
            Problem(where, f"{kind}: its tensors take {at} bytes, the file holds {data_bytes}")
        )
    return problems


def lay_out(tensors: Iterable[tuple[str, str, tuple[int, ...]]]) -> tuple[TensorInfo, ...]:
    """Place (name, dtype, shape) one after another, as the format demands: no gaps."""
    placed = []
    at = 0
    for name, dtype, shape in tensors:
        size = tensor_bytes(dtype, shape)
        if size is None:
            raise ValueError(f"{name}: {dtype} {shape} does not fill whole bytes")
        placed.append(TensorInfo(name, dtype, shape, at, at + size))
        at += size
    return tuple(placed)


def dump_header(
    tensors: Iterable[TensorInfo],
    metadata: Mapping[str, str],
    *,
    alignment: int = DATA_ALIGNMENT_BYTES,
) -> bytes:
    """The bytes before the data: length prefix and JSON, space-padded to `alignment`.

    Keys keep the given order, so the same input gives the same bytes (safetensors' own writer
    shuffles the metadata).
    """
    document: dict[str, Any] = {"__metadata__": dict(metadata)}
    for tensor in tensors:
        document[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [tensor.start, tensor.stop],
        }
    raw = json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode()
    raw += b" " * (-(8 + len(raw)) % alignment)
    return len(raw).to_bytes(8, "little") + raw


def header_digest(header: Header) -> str:
    """XXH3-128 over what the header says: names, dtypes, shapes and offsets, in data order."""
    state = xxhash.xxh3_128()
    for t in header.tensors:
        state.update(f"{t.name}\0{t.dtype}\0{list(t.shape)}\0{t.start}\0{t.stop}\n".encode())
    return state.hexdigest()
