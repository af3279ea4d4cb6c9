"""Tiny checkpoints for the tests, and readers of what was built; none of it uses shardc."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import xxhash

# Bits of an element, typed again from the format's definition.
BITS = {
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    **dict.fromkeys(
        ["BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"], 8
    ),
    **dict.fromkeys(["I16", "U16", "F16", "BF16"], 16),
    **dict.fromkeys(["I32", "U32", "F32"], 32),
    **dict.fromkeys(["C64", "F64", "I64", "U64"], 64),
}
WORDS = {8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}
CLASS = "TinyModel"
INDEX = "shardc.index.json"

Array = np.ndarray[Any, Any]
Rule = Mapping[str, Any]


@dataclass(frozen=True)
class Data:
    """A tensor as its bytes, so that every dtype, every NaN and every bit counts."""

    dtype: str
    shape: tuple[int, ...]
    raw: bytes

    @property
    def words(self) -> Array:
        """Elements as unsigned integers (not for dtypes under a byte)."""
        return np.frombuffer(self.raw, WORDS[BITS[self.dtype]]).reshape(self.shape)

    @classmethod
    def of(cls, dtype: str, words: Array) -> Data:
        return cls(dtype, words.shape, np.ascontiguousarray(words).tobytes())

    @classmethod
    def count(cls, dtype: str, shape: Sequence[int], first: int = 1) -> Data:
        """Distinct elements for as long as the dtype has as many values."""
        bits, size = BITS[dtype], math.prod(shape)
        if bits < 8:
            return cls(
                dtype, tuple(shape), bytes((first + i) % 251 for i in range(size * bits // 8))
            )
        mask = (1 << bits) - 1
        words = (np.arange(first, first + size, dtype=np.uint64) & np.uint64(mask)).astype(
            WORDS[bits]
        )
        return cls.of(dtype, words.reshape(shape))

    @classmethod
    def random(cls, dtype: str, shape: Sequence[int], rng: np.random.Generator) -> Data:
        return cls(dtype, tuple(shape), rng.bytes(math.prod(shape) * BITS[dtype] // 8))


Tensors = Mapping[str, Data]


def header_of(tensors: Tensors, metadata: Mapping[str, str] | None = None) -> dict[str, Any]:
    """The header of a file that holds `tensors` in the given order."""
    document: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
    at = 0
    for name, data in tensors.items():
        stop = at + len(data.raw)
        document[name] = {
            "dtype": data.dtype,
            "shape": list(data.shape),
            "data_offsets": [at, stop],
        }
        at = stop
    return document


def raw_file(header: Any, data: bytes) -> bytes:
    """A file of that header (an object, or bytes as they are) and data, right or wrong."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(raw).to_bytes(8, "little") + raw + data


def save(path: Path, tensors: Tensors, metadata: Mapping[str, str] | None = None) -> None:
    """Write a safetensors file, tensors one after another in the given order, unaligned."""
    path.parent.mkdir(parents=True, exist_ok=True)
    data = b"".join(tensor.raw for tensor in tensors.values())
    path.write_bytes(raw_file(header_of(tensors, metadata), data))


def component(
    folder: Path,
    tensors: Tensors,
    *,
    class_name: str = CLASS,
    config: Mapping[str, Any] | None = None,
    files: int = 1,
    stem: str = "diffusion_pytorch_model",
    variant: str | None = None,
) -> Path:
    """A component folder: config.json, and its weights in one file or in several with an index."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "config.json", {"_class_name": class_name, **(config or {})})
    suffix = f".{variant}" if variant else ""
    if files == 1:
        save(folder / f"{stem}{suffix}.safetensors", tensors, {"format": "pt"})
        return folder
    names = list(tensors)
    weight_map = {}
    for number in range(files):
        file = f"{stem}{suffix}-{number + 1:05d}-of-{files:05d}.safetensors"
        mine = names[number * len(names) // files : (number + 1) * len(names) // files]
        save(folder / file, {name: tensors[name] for name in mine}, {"format": "pt"})
        weight_map.update(dict.fromkeys(mine, file))
    total = sum(len(data.raw) for data in tensors.values())
    write_json(
        folder / f"{stem}.safetensors.index{suffix}.json",
        {"metadata": {"total_size": total}, "weight_map": weight_map},
    )
    return folder


def pipeline(folder: Path, components: Mapping[str, str], **others: Any) -> Path:
    """model_index.json for `components` (name to class), and a scheduler that has no weights."""
    index = {"_class_name": "TinyPipeline", "_diffusers_version": "0.38.0"}
    listed = {name: ["diffusers", class_name] for name, class_name in components.items()}
    folder.mkdir(parents=True, exist_ok=True)
    write_json(
        folder / "model_index.json",
        {**index, **listed, "scheduler": ["diffusers", "TinyScheduler"], **others},
    )
    (folder / "scheduler").mkdir(exist_ok=True)
    write_json(folder / "scheduler" / "scheduler_config.json", {"_class_name": "TinyScheduler"})
    return folder


def hub_snapshot(source: Path, cache: Path) -> Path:
    """`source` as the Hub's cache keeps it: a snapshot of links to blobs."""
    blobs, snapshot = cache / "blobs", cache / "snapshots" / "0123abc"
    blobs.mkdir(parents=True)
    for path in sorted(source.rglob("*")):
        if not path.is_file():
            continue
        blob = blobs / xxhash.xxh3_64_hexdigest(path.read_bytes())
        blob.write_bytes(path.read_bytes())
        link = snapshot / path.relative_to(source)
        link.parent.mkdir(parents=True, exist_ok=True)
        depth = len(link.relative_to(cache).parts) - 1
        link.symlink_to(Path(*[".."] * depth) / "blobs" / blob.name)
    return snapshot


def manifest(
    path: Path,
    rules: Iterable[Rule],
    *,
    class_name: str | Sequence[str] = CLASS,
    **tables: Any,
) -> Path:
    """A manifest file; tables: dims, defaults, prefix, keep_in_fp32."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(manifest_text(rules, class_name=class_name, **tables))
    return path


def manifest_text(
    rules: Iterable[Rule], *, class_name: str | Sequence[str] = CLASS, **tables: Any
) -> str:
    lines = ["schema = 1", 'library = "diffusers"', f"class = {json.dumps(class_name)}"]
    lines += [f"{k} = {json.dumps(v)}" for k, v in tables.items() if not isinstance(v, dict)]
    for name, table in tables.items():
        if isinstance(table, dict):
            lines += ["", f"[{name}]"]
            lines += [f"{json.dumps(k)} = {json.dumps(v)}" for k, v in table.items()]
    found = list(rules)
    if not found:
        lines.insert(3, "rule = []")
    for rule in found:
        lines += ["", "[[rule]]"]
        lines += [f"{key} = {json.dumps(value)}" for key, value in rule.items()]
    return "\n".join(lines) + "\n"


def write_json(path: Path, document: Any) -> None:
    path.write_text(json.dumps(document, indent=1))


def read(path: Path) -> dict[str, Data]:
    """A file's tensors, read by safetensors itself."""
    return {
        name: Data(entry["dtype"], tuple(entry["shape"]), bytes(entry["data"]))
        for name, entry in safetensors.deserialize(path.read_bytes())
    }


def header_of_file(path: Path) -> dict[str, Any]:
    """A file's header as it stands: JSON, keys in the file's order."""
    raw = path.read_bytes()
    document: dict[str, Any] = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    return document


def names(path: Path) -> list[str]:
    """A file's tensors in the order of their data (safetensors itself gives them in none)."""
    header = header_of_file(path)
    header.pop("__metadata__", None)
    return sorted(header, key=lambda name: header[name]["data_offsets"])


def read_all(folder: Path) -> dict[str, Data]:
    """The tensors of every safetensors file of a folder; none may be in two files."""
    found: dict[str, Data] = {}
    for path in sorted(folder.glob("*.safetensors")):
        for name, data in read(path).items():
            assert name not in found
            found[name] = data
    return found


def read_ranks(folder: Path, tp: int) -> list[dict[str, Data]]:
    """Each rank's tensors: its own files', and the replicated ones."""
    shared: dict[str, Data] = {}
    for path in folder.glob("replicated*.safetensors"):
        shared.update(read(path))
    ranks = []
    for rank in range(tp):
        own = dict(shared)
        paths = sorted(folder.glob(f"rank-{rank:05d}-of-{tp:05d}*.safetensors"))
        assert paths
        for path in paths:
            for name, data in read(path).items():
                assert name not in own
                own[name] = data
        ranks.append(own)
    return ranks


def contents(folder: Path) -> dict[str, bytes]:
    """Every file of a folder by its relative name."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def read_index(folder: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((folder / INDEX).read_text())
    return document


def write_index(folder: Path, document: Mapping[str, Any]) -> None:
    """Write a component's index with the digest of whatever it says: a careful forger's tool."""
    body = {key: value for key, value in document.items() if key != "digest"}
    raw = json.dumps(body, indent=1, ensure_ascii=False).removesuffix("\n}").encode()
    tail = f',\n "digest": "{xxhash.xxh3_128_hexdigest(raw)}"\n}}\n'
    (folder / INDEX).write_bytes(raw + tail.encode())


def forge(
    folder: Path, name: str, parts: Sequence[Data], *, ranges: Sequence[Any] | None = None
) -> None:
    """Put `parts` in the ranks' places of a tensor, and make every digest fit.

    ranges: what the index is to say of each rank; None leaves it as it is.
    """
    document = read_index(folder)
    entry = document["tensors"][name]
    for rank, (shard, part) in enumerate(zip(entry["shards"], parts, strict=True)):
        path = folder / shard["file"]
        raw = bytearray(path.read_bytes())
        start = 8 + int.from_bytes(raw[:8], "little")
        header = json.loads(raw[8:start])
        first, stop = header[name]["data_offsets"]
        assert stop - first == len(part.raw)
        raw[start + first : start + stop] = part.raw
        path.write_bytes(raw)
        shard["digest"] = xxhash.xxh3_128_hexdigest(part.raw)
        if ranges is not None:
            shard["ranges"] = ranges[rank]
        state = xxhash.xxh3_128(bytes(raw[:start]))
        spans = sorted(tuple(v["data_offsets"]) for k, v in header.items() if k != "__metadata__")
        for low, high in spans:
            state.update(xxhash.xxh3_128_digest(raw[start + low : start + high]))
        document["files"][shard["file"]]["digest"] = state.hexdigest()
    write_index(folder, document)
