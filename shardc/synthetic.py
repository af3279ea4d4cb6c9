"""Random checkpoints of an architecture's true names, shapes and files, for demo and benchmarks.

Weights are streamed, so that memory stays flat whatever the size, and depend only on the seed and
the tensor's name.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from shardc.header import dump_header, lay_out

Config = dict[str, Any]
Tensor = tuple[str, tuple[int, ...]]
Row = tuple[str, *tuple[int, ...]]  # a module's name, then the shape of its weight

CHUNK_BYTES = 4 << 20


def each(names: str, *shape: int) -> list[Row]:
    return [(name, *shape) for name in names.split()]


def embedder(name: str, out: int, into: int) -> list[Row]:
    return [(f"{name}.linear_1", out, into), (f"{name}.linear_2", out, out)]


def state_dict(
    stem: list[Row], blocks: dict[str, tuple[int, list[Row]]], end: list[Row], *, bias: bool
) -> Iterator[Tensor]:
    """Every tensor of a model: its stem, each list of blocks with their count, and its end."""
    repeated: Iterator[Row] = (
        (f"{blocks_name}.{i}.{name}", *shape)
        for blocks_name, (count, rows) in blocks.items()
        for i in range(count)
        for name, *shape in rows
    )
    for name, *shape in chain(stem, repeated, end):
        yield f"{name}.weight", tuple(shape)
        if bias and len(shape) == 2:  # a 1-d weight is an RMSNorm's, which has no bias
            yield f"{name}.bias", (shape[0],)


def flux2_tensors(c: Config) -> Iterator[Tensor]:
    unit = c["attention_head_dim"]
    d = c["num_attention_heads"] * unit
    mlp = int(d * c["mlp_ratio"])
    kinds = ["timestep", "guidance"] if c["guidance_embeds"] else ["timestep"]
    channels = c["timestep_guidance_channels"]
    stem = [
        *chain.from_iterable(
            embedder(f"time_guidance_embed.{kind}_embedder", d, channels) for kind in kinds
        ),
        *each("double_stream_modulation_img.linear double_stream_modulation_txt.linear", 6 * d, d),
        *each("single_stream_modulation.linear", 3 * d, d),
        *each("x_embedder", d, c["in_channels"]),
        *each("context_embedder", d, c["joint_attention_dim"]),
    ]
    double = [
        *each("attn.to_q attn.to_k attn.to_v", d, d),
        *each("attn.norm_q attn.norm_k", unit),
        *each("attn.to_out.0", d, d),
        *each("attn.norm_added_q attn.norm_added_k", unit),
        *each("attn.add_q_proj attn.add_k_proj attn.add_v_proj attn.to_add_out", d, d),
        *each("ff.linear_in", 2 * mlp, d),
        *each("ff.linear_out", d, mlp),
        *each("ff_context.linear_in", 2 * mlp, d),
        *each("ff_context.linear_out", d, mlp),
    ]
    single = [
        *each("attn.to_qkv_mlp_proj", 3 * d + 2 * mlp, d),
        *each("attn.norm_q attn.norm_k", unit),
        *each("attn.to_out", d, d + mlp),
    ]
    end = [
        *each("norm_out.linear", 2 * d, d),
        *each("proj_out", c["patch_size"] ** 2 * (c["out_channels"] or c["in_channels"]), d),
    ]
    blocks = {
        "transformer_blocks": (c["num_layers"], double),
        "single_transformer_blocks": (c["num_single_layers"], single),
    }
    return state_dict(stem, blocks, end, bias=False)


@dataclass(frozen=True, slots=True)
class DType:
    """A float dtype and the masks that turn random bits into finite values of it.

    The sign, the mantissa and the two lowest exponent bits stay random, the rest of the exponent
    is set: magnitudes lie in [1/128, 1/8).
    """

    name: str  # in safetensors
    torch_name: str  # in config.json of transformers
    item_bytes: int
    keep: int
    put: int

    def bits(self, mask: int) -> np.uint64:
        """`mask` repeated over 64 bits."""
        return np.uint64(int.from_bytes(mask.to_bytes(self.item_bytes) * (8 // self.item_bytes)))


DTYPES = {
    "bf16": DType("BF16", "bfloat16", 2, 0x81FF, 0x3C00),
    "fp16": DType("F16", "float16", 2, 0x8FFF, 0x2000),
    "fp32": DType("F32", "float32", 4, 0x81FFFFFF, 0x3C000000),
}


def random_bytes(name: str, size_bytes: int, dtype: DType, seed: int) -> Iterator[memoryview]:
    """A tensor's little-endian bytes in chunks, the same for a seed, name, size and dtype."""
    # Raw bits, because numpy promises their stream, not that of Generator's methods.
    source = np.random.SFC64([seed, *name.encode()])
    keep, put = dtype.bits(dtype.keep), dtype.bits(dtype.put)
    for start in range(0, size_bytes, CHUNK_BYTES):
        chunk_bytes = min(CHUNK_BYTES, size_bytes - start)
        words = source.random_raw(-(-chunk_bytes // 8))
        words &= keep
        words |= put
        yield words.astype("<u8", copy=False).data.cast("B")[:chunk_bytes]


def split(
    sizes: Mapping[str, int], *, files: int | None = None, max_file_bytes: int = 0
) -> list[list[str]]:
    """Cut tensors, in order, into `files` of about equal size, or as huggingface_hub does.

    Its rule: a file is closed before the tensor that would make it exceed `max_file_bytes`.
    ValueError where there are fewer tensors than files.
    """
    if files is not None and files > len(sizes):
        raise ValueError(f"{len(sizes)} tensors do not fill {files} files")
    groups: list[list[str]] = [[]]
    total = sum(sizes.values())
    at = start = 0
    for i, (name, size) in enumerate(sizes.items()):
        if files is None:
            full = at + size - start > max_file_bytes
        else:
            due = (at + size / 2) * files >= total * len(groups)
            full = due or len(sizes) - i <= files - len(groups)
        if full and groups[-1]:
            groups.append([])
            start = at
        groups[-1].append(name)
        at += size
    return groups


def write_json(path: Path, document: Mapping[str, Any]) -> None:
    """Write JSON as diffusers does."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def write_weights(
    folder: Path,
    stem: str,
    contents: Iterable[Tensor],
    *,
    dtype: DType,
    seed: int = 0,
    files: int | None = None,
    max_file_bytes: int = 5 * 10**9,
    advance: Callable[[int], object] = lambda _bytes: None,
) -> None:
    """Write STEM.safetensors, or STEM-0000i-of-0000n.safetensors and their index.

    As safetensors does, tensors are ordered by name within a file.
    """
    shapes = dict(contents)
    sizes = {name: math.prod(shape) * dtype.item_bytes for name, shape in shapes.items()}
    groups = split(sizes, files=files, max_file_bytes=max_file_bytes)
    weight_map: dict[str, str] = {}
    folder.mkdir(parents=True, exist_ok=True)
    for i, group in enumerate(groups, 1):
        part = f"-{i:05d}-of-{len(groups):05d}" if len(groups) > 1 else ""
        file_name = f"{stem}{part}.safetensors"
        weight_map.update(dict.fromkeys(group, file_name))
        infos = lay_out((name, dtype.name, shapes[name]) for name in sorted(group))
        with (folder / file_name).open("wb") as file:
            file.write(dump_header(infos, {"format": "pt"}, alignment=8))
            for info in infos:
                for chunk in random_bytes(info.name, info.size_bytes, dtype, seed):
                    advance(file.write(chunk))
    if len(groups) > 1:
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map}
        write_json(folder / f"{stem}.safetensors.index.json", index)
