"""Shard sets of every format version, kept for good: they open, verify, and come again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import shardc
from tests import checkpoints as ck
from tests.golden import make

SETS = sorted(path for path in make.GOLDEN.glob("v*") if path.is_dir())
NOW = make.GOLDEN / make.VERSION


def test_the_present_version_is_kept() -> None:
    assert NOW in SETS
    index = ck.read_index(NOW / "tp2")
    assert index["version"] == "1.0"
    assert sum(len(raw) for raw in ck.contents(NOW).values()) < 40_000


@pytest.mark.parametrize("golden", SETS, ids=lambda path: path.name)
def test_it_opens_verifies_and_merges(golden: Path, tmp_path: Path) -> None:
    assert shardc.verify(golden / "tp2", golden / "source").problems == ()
    shardc.merge(golden / "tp2", tmp_path / "full")
    for path in (golden / "source").glob("*.safetensors"):
        assert ck.read(tmp_path / "full" / path.name) == ck.read(path)
    shardc.reshard(golden / "tp2", tmp_path / "one", 1)
    assert shardc.verify(tmp_path / "one", golden / "source").problems == ()


def test_the_source_is_what_the_script_writes(tmp_path: Path) -> None:
    made = make.write_source(tmp_path / "source")
    assert ck.contents(made) == ck.contents(NOW / "source")


def test_building_again_gives_the_very_same_bytes(tmp_path: Path) -> None:
    built = ck.contents(make.build(NOW / "source", tmp_path))
    kept = ck.contents(NOW / "tp2")
    assert built.keys() == kept.keys()
    # the index first: it says in words what the other files have only as bytes
    for name in sorted(kept, key=lambda name: name != ck.INDEX):
        if name == ck.INDEX:
            new, old = json.loads(built[name]), json.loads(kept[name])
            if new["tool"] != old["tool"]:  # a later release: only its name may differ
                for index in (new, old):
                    del index["tool"], index["digest"]
                assert new == old
                continue
            assert new == old
        assert built[name] == kept[name], name


def test_its_rows(tmp_path: Path) -> None:
    """What the kept bytes mean, in numbers: nobody can regenerate them wrong and pass."""
    rows = {
        "embed.weight": (0, [[0, 1, 2, 3], [4, 5, 6, None]]),
        "attn.qkv.weight": (0, [[0, 1, 2, 3, 8, 9, 10, 11, 12], [4, 5, 6, 7, 8, 9, 13, 14, 15]]),
        "attn.grouped.weight": (0, [[0, 1, 2, 3, 4, 5, 6, 7], [8, 9, 10, 11, 12, 13, 14, 15]]),
        "attn.k.weight": (0, [[0, 1], [0, 1]]),
        "attn.out.weight": (1, [[0, 1, 2, 3], [4, 5, 6, 7]]),
    }
    ranks = ck.read_ranks(NOW / "tp2", 2)
    for name, data in make.TENSORS.items():
        for rank, held in enumerate(ranks):
            if name not in rows and name != "attn.qkv.bias":
                assert held[name] == data
                continue
            dim, wanted = rows[name.replace("bias", "weight")]
            full = data.words.swapaxes(0, dim)
            zero = full[0] * 0
            found = held[name].words.swapaxes(0, dim)
            assert len(found) == len(wanted[rank])
            for line, row in zip(found, wanted[rank], strict=True):
                assert (line == (zero if row is None else full[row])).all(), name
