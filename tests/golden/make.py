"""Write the golden checkpoint and its shard set: `python -m tests.golden.make` from the root.

A golden set is made once a format version and read by every release after it. Run this again only
for a new version, into a new folder; test_golden.py says what differs where the bytes have moved.
"""

from __future__ import annotations

import sys
from pathlib import Path

import shardc
from tests import checkpoints as ck

GOLDEN = Path(__file__).parent
VERSION = "v1"
TP = 2

TENSORS = {
    "mask": ck.Data.count("BOOL", [5]),
    "embed.weight": ck.Data.count("BF16", [7, 4], 1),
    "attn.qkv.weight": ck.Data.count("F32", [16, 4], 100),
    "attn.qkv.bias": ck.Data.count("F32", [16], 200),
    "attn.grouped.weight": ck.Data.count("F16", [16, 2], 300),
    "attn.k.weight": ck.Data.count("BF16", [2, 4], 400),
    "attn.out.weight": ck.Data.count("BF16", [4, 8], 500),
    "attn.out.bias": ck.Data.count("BF16", [4], 600),
    "norm.weight": ck.Data.count("F32", [4], 700),
    "scale": ck.Data.count("F8_E4M3", [], 9),
    "packed": ck.Data.count("F4", [6], 3),
    "empty": ck.Data.count("F32", [0, 3]),
}
RULES = [
    {"match": "embed", "style": "vocab_parallel", "blocks": ["vocab"], "pad_to": 1},
    {
        "match": "attn.qkv",
        "style": "packed_colwise",
        "blocks": ["inner", "head", "inner - head"],
        "unit": ["head", "head", 1],
        "repeat": [False, True, False],
    },
    {
        "match": "attn.grouped",
        "style": "packed_colwise",
        "blocks": [4, 2, 2],
        "unit": 2,
        "layout": "per_kv_head",
        "deinterleave": True,
    },
    {"match": "attn.k", "style": "colwise", "unit": "head", "repeat": True},
    {"match": "attn.out", "style": "rowwise", "blocks": ["inner"], "unit": "head"},
]
CONFIG = {"heads": 4, "head": 2, "vocab": 7}
DIMS = {"inner": "heads * head"}


def write_source(folder: Path) -> Path:
    """The checkpoint, in two files with an index."""
    return ck.component(folder, TENSORS, config=CONFIG, files=2)


def build(source: Path, folder: Path) -> Path:
    """The shard set in folder / tp2, by way of a manifest file beside it."""
    manifest = ck.manifest(folder / "tiny.toml", RULES, dims=DIMS)
    shardc.build(source, folder / f"tp{TP}", TP, manifest=manifest, dtype="keep")
    return folder / f"tp{TP}"


def main() -> None:
    target = GOLDEN / VERSION
    if target.exists():
        sys.exit(f"{target} is there already: a golden set is never made twice")
    write_source(target / "source")
    build(target / "source", target)


if __name__ == "__main__":
    main()
