"""load_rank_weights: several ranks in one process are what each of them is by itself."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardc
from tests import checkpoints as ck
from tests.tiny import tiny

torch = pytest.importorskip("torch")

from shardc.errors import ShardSetError  # noqa: E402
from shardc.loaders import load_rank_weights, load_state_dict, rank_weights  # noqa: E402

TENSORS = {
    "up.weight": ck.Data.count("BF16", (8, 6)),
    "up.bias": ck.Data.count("BF16", (8,)),
    "down.weight": ck.Data.count("F32", (6, 8)),
    "norm.weight": ck.Data.count("F32", (6,)),
    "scalar": ck.Data.count("I64", ()),
    "empty": ck.Data.count("U8", (0, 4)),
}
RULES = [{"match": "up", "style": "colwise"}, {"match": "down", "style": "rowwise"}]
RANKED = {"up.weight", "up.bias", "down.weight"}


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    source = ck.component(tmp_path / "s", TENSORS)
    rules = ck.manifest(tmp_path / "r.toml", RULES)
    shardc.build(source, tmp_path / "o", 4, manifest=rules, max_part_bytes=64)
    return tmp_path / "o"


@pytest.mark.parametrize("ranks", [None, range(4), [0], [2, 3], (1,)])
@pytest.mark.parametrize("verify", [False, True])
def test_each_rank_is_as_it_loads_by_itself(shards: Path, ranks: Any, verify: bool) -> None:
    found = load_rank_weights(shards, ranks=ranks, tp=4, verify=verify)
    wanted = range(4) if ranks is None else ranks
    assert len(found) == len(wanted)
    for rank, weights in zip(wanted, found, strict=True):
        own = load_state_dict(shards, rank)
        assert type(weights) is dict
        assert list(weights) == list(own) == list(TENSORS)
        for name, tensor in weights.items():
            assert (tensor.dtype, tensor.shape) == (own[name].dtype, own[name].shape)
            assert torch.equal(tensor, own[name])
            assert tensor.is_contiguous()
            assert tensor.device.type == "cpu"


def test_what_is_replicated_is_there_once(shards: Path) -> None:
    found = load_rank_weights(shards)
    for name in TENSORS:
        assert len({id(weights[name]) for weights in found}) == (4 if name in RANKED else 1)
    lines = Path("/proc/self/maps").read_text().splitlines()
    files = [line.split()[-1] for line in lines if str(shards) in line]
    assert len(files) == len(set(files)) == len(list(shards.glob("*.safetensors")))


def test_torchscript_takes_it(shards: Path) -> None:
    """NxD's initialize is scripted: List[Dict[str, Tensor]], and an int32 start rank."""

    @torch.jit.script
    def initialize(
        checkpoint: list[dict[str, torch.Tensor]], start_rank_tensor: torch.Tensor
    ) -> list[torch.Tensor]:
        start = int(start_rank_tensor)
        return [weights["up.bias"] + start for weights in checkpoint]

    found = load_rank_weights(shards, ranks=[2, 3])
    out = initialize(found, torch.tensor([2], dtype=torch.int32))
    assert [torch.equal(a, w["up.bias"] + 2) for a, w in zip(out, found, strict=True)] == [True] * 2


def test_ranks_that_cannot_be(shards: Path) -> None:
    for ranks in ([0, 2], [1, 0], [0, 0], []):
        with pytest.raises(ShardSetError, match=re.escape(f"ranks {ranks} are not one or more")):
            load_rank_weights(shards, ranks=ranks)
    with pytest.raises(ShardSetError, match="rank 4 is outside tp 4"):
        load_rank_weights(shards, ranks=range(2, 5))
    with pytest.raises(ShardSetError, match=r"cut for tp 4, 8 was asked for.*reshard --tp 8"):
        load_rank_weights(shards, tp=8)
    with pytest.raises(ShardSetError, match="no sharded component 'vae'"):
        load_rank_weights(shards, component="vae")


def test_only_the_hosts_own_files_are_needed(tmp_path: Path) -> None:
    out = tiny(tmp_path, 4)
    for rank in (0, 1):
        (out / f"rank-{rank:05d}-of-00004.safetensors").unlink()
    assert len(load_rank_weights(out, ranks=[2, 3])) == 2
    with pytest.raises(ShardSetError) as caught:
        load_rank_weights(out)
    assert [p.what for p in caught.value.problems] == [
        f"is missing, and rank {rank} needs it" for rank in (0, 1)
    ]
    (out / "replicated.safetensors").unlink()
    with pytest.raises(ShardSetError, match=r"replicated\.safetensors: is missing"):
        load_rank_weights(out, ranks=[2, 3])


@pytest.mark.parametrize("name", ["replicated", "rank-00001-of-00002"])
def test_damage_is_told_once(tmp_path: Path, name: str) -> None:
    file = tiny(tmp_path) / f"{name}.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    load_rank_weights(file.parent)
    with pytest.raises(ShardSetError, match=f"{name}.*digest") as caught:
        load_rank_weights(file.parent, verify=True)
    assert len(caught.value.problems) == 1


MEASURE = """
import sys
from pathlib import Path
from shardc.loaders import load_rank_weights

def grown():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(l.split()[1]) << 10 for l in lines if l.startswith("VmRSS:"))

import torch
load_rank_weights(sys.argv[1], ranks=[0])  # what the code itself takes
before = grown()
weights = load_rank_weights(sys.argv[1])
print(grown() - before, sum(t.nbytes for w in weights for t in w.values()))
"""


def test_nothing_is_read_into_memory(tmp_path: Path) -> None:
    chance = np.random.default_rng(0)
    tensors = {
        "m.weight": ck.Data.random("BF16", (1 << 13, 1 << 11), chance),  # 32 MiB
        "n.weight": ck.Data.random("BF16", (1 << 13, 1 << 10), chance),
    }
    rules = ck.manifest(tmp_path / "r.toml", [{"match": "m", "style": "colwise"}])
    shardc.build(ck.component(tmp_path / "s", tensors), tmp_path / "o", 4, manifest=rules)
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(tmp_path / "o")],
        capture_output=True,
        text=True,
        check=True,
    )
    grown, size = map(int, done.stdout.split())
    assert size == (32 << 20) + 4 * (16 << 20)
    assert grown < 2 << 20


def test_the_document_shows_its_arguments_and_its_upstream() -> None:
    text = (Path(__file__).parents[1] / "docs" / "loading.md").read_text()
    shown = re.search(r"^\| `load_rank_weights\((.*)\)` \|", text, re.M)
    assert shown is not None
    names = re.findall(r"(\w+)(?:=[^,]*)?(?:, |$)", shown[1].replace("*, ", ""))
    assert names == list(inspect.signature(load_rank_weights).parameters)
    document = rank_weights.load_rank_weights.__doc__ or ""
    for words in ("NxDModel.initialize(weights, start_rank_tensor)", "not\n    verified on hardw"):
        assert words in document
