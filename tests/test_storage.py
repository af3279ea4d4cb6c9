"""A rank's tensors: the right bytes, as views, and every way in which a set may not be whole."""

from __future__ import annotations

import gc
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardc
from tests.checkpoints import Data, component, forge, manifest, pipeline, read_ranks
from tests.tiny import tiny

torch = pytest.importorskip("torch")

from shardc.errors import ShardSetError  # noqa: E402
from shardc.loaders import load_state_dict  # noqa: E402
from shardc.loaders.mapped import DTYPES  # noqa: E402

TENSORS = {
    "up.weight": Data.count("BF16", (8, 6)),
    "up.bias": Data.count("BF16", (8,)),
    "down.weight": Data.count("F32", (6, 8)),
    "embed.weight": Data.count("F16", (7, 2)),
    "norm.weight": Data.count("F32", (6,)),
    "scalar": Data.count("I64", ()),
    "empty": Data.count("U8", (0, 4)),
    "mask": Data.count("BOOL", (1,)),
}
RULES = [
    {"match": "up", "style": "colwise"},
    {"match": "down", "style": "rowwise"},
    {"match": "embed", "style": "vocab_parallel", "pad_to": 1},
]


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    src = component(tmp_path / "src", TENSORS)
    rules = manifest(tmp_path / "m.toml", RULES)
    shardc.build(src, tmp_path / "out", 2, manifest=rules)
    return tmp_path / "out"


def raw(tensor: torch.Tensor) -> bytes:
    return (
        tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
    )


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("verify", [False, True])
@pytest.mark.parametrize("reads", ["auto", "mapped", "direct"])
def test_every_tensor_of_a_rank(shards: Path, rank: int, verify: bool, reads: Any) -> None:
    held = load_state_dict(shards, rank, tp=2, verify=verify, reads=reads)
    expected = read_ranks(shards, 2)[rank]
    assert held.keys() == expected.keys() == TENSORS.keys()
    for name, tensor in held.items():
        assert tuple(tensor.shape) == expected[name].shape
        assert tensor.dtype == DTYPES[expected[name].dtype]
        assert raw(tensor) == expected[name].raw
    assert list(held) == list(TENSORS)


def test_views_are_zero_copy_and_private(shards: Path) -> None:
    first, second = load_state_dict(shards, 0), load_state_dict(shards, 0)
    before = first["up.weight"].clone()
    first["up.weight"].zero_()  # a private mapping: neither the file nor another view sees it
    assert torch.equal(second["up.weight"], before)
    assert torch.equal(load_state_dict(shards, 0)["up.weight"], before)
    # two tensors of one file lie in one mapping, as far apart as in the file
    entry = json.loads((shards / "shardc.index.json").read_text())["tensors"]["up.weight"]
    header = (shards / entry["shards"][0]["file"]).read_bytes()
    offsets = json.loads(header[8 : 8 + int.from_bytes(header[:8], "little")])
    apart = offsets["up.weight"]["data_offsets"][0] - offsets["down.weight"]["data_offsets"][0]
    assert second["up.weight"].data_ptr() - second["down.weight"].data_ptr() == apart


def test_every_dtype_that_torch_has(tmp_path: Path) -> None:
    tensors = {dtype: Data.count(dtype, (2, 3)) for dtype in DTYPES}
    src = component(tmp_path / "src", {**tensors, "up.weight": Data.count("F32", (2, 2))})
    shardc.build(src, tmp_path / "o", 2, manifest=manifest(tmp_path / "m.toml", RULES[:1]))
    held = load_state_dict(tmp_path / "o", 0)
    for dtype, data in tensors.items():
        assert raw(held[dtype]) == data.raw
        assert held[dtype].dtype == DTYPES[dtype]


def test_a_dtype_that_torch_lacks(tmp_path: Path) -> None:
    src = component(
        tmp_path / "src", {"a": Data.count("F6_E2M3", (4,)), "up.weight": Data.count("F32", (2, 2))}
    )
    shardc.build(src, tmp_path / "o", 2, manifest=manifest(tmp_path / "m.toml", RULES[:1]))
    with pytest.raises(ShardSetError, match=r"replicated.*'a': torch has no dtype F6_E2M3"):
        load_state_dict(tmp_path / "o", 0)


def test_a_wrong_degree_or_rank(shards: Path) -> None:
    with pytest.raises(ShardSetError, match=r"cut for tp 2, 4 was asked for.*reshard --tp 4"):
        load_state_dict(shards, 0, tp=4)
    for rank in (2, -1):
        with pytest.raises(ShardSetError, match=f"rank {rank} is outside tp 2"):
            load_state_dict(shards, rank)


def test_a_missing_file_matters_to_its_rank_only(shards: Path) -> None:
    (shards / "rank-00001-of-00002.safetensors").unlink()
    load_state_dict(shards, 0)
    with pytest.raises(ShardSetError, match=r"rank-00001-of-00002.safetensors: is missing"):
        load_state_dict(shards, 1)
    (shards / "replicated.safetensors").unlink()
    with pytest.raises(ShardSetError, match=r"replicated.safetensors: is missing"):
        load_state_dict(shards, 0)


def test_a_truncated_file(shards: Path) -> None:
    path = shards / "rank-00000-of-00002.safetensors"
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(ShardSetError, match="truncated"):
        load_state_dict(shards, 0)


def test_a_damaged_byte_is_found_by_verify(shards: Path) -> None:
    path = shards / "rank-00000-of-00002.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    load_state_dict(shards, 0)
    with pytest.raises(ShardSetError, match=r"digest .* the index says"):
        load_state_dict(shards, 0, verify=True)


def test_a_rank_that_sits_in_anothers_place(shards: Path) -> None:
    shutil.copy(
        shards / "rank-00001-of-00002.safetensors", shards / "rank-00000-of-00002.safetensors"
    )
    with pytest.raises(ShardSetError, match="metadata says rank 1, the index says 0"):
        load_state_dict(shards, 0)


def test_files_of_two_sets(shards: Path, tmp_path: Path) -> None:
    other = {**TENSORS, "extra": Data.count("F32", (1,))}
    src = component(tmp_path / "other", other)
    shardc.build(src, tmp_path / "out2", 2, manifest=manifest(tmp_path / "m.toml", RULES))
    name = "rank-00001-of-00002.safetensors"
    shutil.copy(tmp_path / "out2" / name, shards / name)
    with pytest.raises(ShardSetError, match="metadata says plan"):
        load_state_dict(shards, 1)


def test_an_index_that_says_something_else(shards: Path) -> None:
    parts = [Data.of("BF16", np.zeros((4, 6), np.uint16))] * 2
    forge(shards, "up.weight", parts, ranges=[[[0, 3]], [[3, 8]]])
    with pytest.raises(ShardSetError, match=r"'up.weight' is BF16 \[4, 6\], the index says BF16"):
        load_state_dict(shards, 0)


def test_components(tmp_path: Path) -> None:
    src = pipeline(tmp_path / "src", {"transformer": "TinyModel", "text_encoder": "TinyModel"})
    component(src / "transformer", TENSORS)
    component(src / "text_encoder", {"up.weight": Data.count("F32", (4, 2))})
    rules = [{**rule, "optional": True} for rule in RULES]
    shardc.build(src, tmp_path / "o", 2, manifest=manifest(tmp_path / "m.toml", rules))
    assert "down.weight" in load_state_dict(tmp_path / "o", 0)  # the transformer, unless told
    held = load_state_dict(tmp_path / "o", 0, component="text_encoder")
    assert list(held) == ["up.weight"]
    with pytest.raises(ShardSetError, match=r"no sharded component 'vae'.*'text_encoder'"):
        load_state_dict(tmp_path / "o", 0, component="vae")


def test_what_is_no_shard_set(tmp_path: Path) -> None:
    src = component(tmp_path / "src", TENSORS)
    with pytest.raises(ShardSetError, match="not a shard set"):
        load_state_dict(src, 0)


def test_a_future_format_is_refused(shards: Path) -> None:
    index = shards / "shardc.index.json"
    index.write_text(index.read_text().replace('"version": "1.0"', '"version": "2.0"'))
    with pytest.raises(ShardSetError, match=r"format version 2.0, this release reads 1.0"):
        load_state_dict(shards, 0)


@pytest.mark.parametrize("on", [True, False])
def test_objects_are_collected_again_after_a_load(on: bool, tmp_path: Path) -> None:
    out = tiny(tmp_path / "out")
    (gc.enable if on else gc.disable)()
    try:
        load_state_dict(out, 0)
        assert gc.isenabled() == on
        with pytest.raises(ShardSetError):
            load_state_dict(out, 7)
        assert gc.isenabled() == on
    finally:
        gc.enable()
