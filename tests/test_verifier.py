"""verify finds whatever is wrong with a shard set, and says where; forged digests do not help."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash

import shardc
from shardc.compare import StoredRows, first_difference, global_rows, read_bytes
from shardc.errors import ShardcError, ShardSetError, VerifyError
from shardc.header import TensorInfo
from tests import checkpoints as ck

TENSORS = {
    "m.weight": ck.Data.count("F32", [8, 4]),
    "k.weight": ck.Data.count("F32", [4, 4], 100),
    "o.weight": ck.Data.count("BF16", [4, 8], 400),
    "v.weight": ck.Data.count("F32", [7, 2], 600),
    "norm": ck.Data.count("F32", [4], 500),
}
RULES = [
    {"match": "m", "style": "colwise"},
    {"match": "k", "style": "colwise", "unit": 2, "repeat": True},
    {"match": "o", "style": "rowwise"},
    {"match": "v", "style": "vocab_parallel", "pad_to": 1},
]
TP = 4
RANK0, RANK1 = (f"rank-{rank:05d}-of-{TP:05d}.safetensors" for rank in (0, 1))
SHARED = "replicated.safetensors"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return ck.component(tmp_path / "source", TENSORS)


@pytest.fixture
def out(source: Path, tmp_path: Path) -> Path:
    manifest = ck.manifest(tmp_path / "rules.toml", RULES)
    shardc.build(source, tmp_path / "out", TP, manifest=manifest)
    return tmp_path / "out"


def test_a_sound_set(out: Path, source: Path) -> None:
    counted: list[int] = []
    report = shardc.verify(out, source, progress=counted.append)
    assert report.ok
    assert (report.tensors, report.files) == (5, TP + 1)
    held = sum(
        len(data.raw) for path in out.glob("*.safetensors") for data in ck.read(path).values()
    )
    extra = (source / "config.json").stat().st_size  # carried over, and compared as a file
    assert report.checked_bytes == sum(counted) == 2 * held + extra
    document = report.to_json()
    assert (document["ok"], document["problems"]) == (True, [])
    assert document["source"] == str(source)
    assert shardc.verify(out).checked_bytes == held


def test_one_rank(out: Path, source: Path) -> None:
    """A host that has pulled only its own ranks can check them."""
    for rank in (0, 2, 3):
        (out / f"rank-{rank:05d}-of-00004.safetensors").unlink()
    assert shardc.verify(out, rank=1).ok
    report = shardc.verify(out, source, rank=1)
    assert report.ok
    assert report.files == 2
    assert not shardc.verify(out).ok
    for outside in (4, -1):
        with pytest.raises(VerifyError, match=f"rank {outside} is outside tp 4"):
            shardc.verify(out, rank=outside)


Damage = Callable[[Path], object]


def byte(name: str, at: int) -> Damage:
    """Flip a bit of a file, counted from its end where `at` is negative."""

    def flip(out: Path) -> None:
        raw = bytearray((out / name).read_bytes())
        raw[at] ^= 1
        (out / name).write_bytes(raw)

    return flip


def header(name: str, edit: Callable[[dict[str, Any]], object]) -> Damage:
    """Edit a shard's header in place: the same length, so that only its words are wrong."""

    def change(out: Path) -> None:
        raw = (out / name).read_bytes()
        start = 8 + int.from_bytes(raw[:8], "little")
        document = json.loads(raw[8:start])
        edit(document)
        text = json.dumps(document, separators=(",", ":")).encode()
        (out / name).write_bytes(raw[:8] + text.ljust(start - 8) + raw[start:])

    return change


def swap(out: Path) -> None:
    (out / RANK0).rename(out / "x")
    (out / RANK1).rename(out / RANK0)
    (out / "x").rename(out / RANK1)


def metadata(value: str | None) -> Damage:
    def edit(document: dict[str, Any]) -> None:
        document["__metadata__"] = {"format": "pt", **({} if value is None else {"shardc": value})}

    return header(RANK0, edit)


DAMAGED: dict[str, tuple[Damage, str]] = {
    "missing": (lambda out: (out / RANK1).unlink(), f"{RANK1}: is missing"),
    "missing shared": (lambda out: (out / SHARED).unlink(), f"{SHARED}: is missing"),
    "config missing": (lambda out: (out / "config.json").unlink(), "config.json: is missing"),
    "config": (byte("config.json", 3), "config.json: is not the one that the set was built with"),
    "data": (byte(RANK0, -1), f"{RANK0}: tensor 'o.weight': digest "),
    "shared data": (byte(SHARED, -1), f"{SHARED}: tensor 'norm': digest "),
    "header padding": (
        lambda out: header(RANK0, lambda d: d["__metadata__"].update(format="np"))(out),
        f"{RANK0}: does not have the digest that the index states",
    ),
    "truncated": (
        lambda out: (out / RANK0).open("r+b").truncate((out / RANK0).stat().st_size - 1),
        f"{RANK0}: truncated: its tensors take ",
    ),
    "empty": (lambda out: (out / RANK0).write_bytes(b""), f"{RANK0}: the file is empty"),
    "swapped": (swap, f"{RANK0}: its metadata says rank 1, the index says 0"),
    "no key": (metadata(None), f"{RANK0}: its metadata lacks the shardc key"),
    "no JSON": (metadata("{"), f"{RANK0}: its metadata lacks the shardc key"),
    "a list": (metadata("[]"), f"{RANK0}: its metadata lacks the shardc key"),
    "another plan": (
        metadata(json.dumps({"tp": TP, "rank": 0, "plan": "0" * 32})),
        f"{RANK0}: its metadata says plan {'0' * 32}, the index says ",
    ),
    "another tp": (
        metadata(json.dumps({"tp": 8, "rank": 0})),
        f"{RANK0}: its metadata says tp 8, the index says 4",
    ),
    "stray": (
        lambda out: ck.save(out / "extra.safetensors", {"x": TENSORS["norm"]}),
        "extra.safetensors: does not belong to the shard set",
    ),
    "stray index": (
        lambda out: ck.write_json(out / "model.safetensors.index.json", {}),
        "model.safetensors.index.json: does not belong to the shard set",
    ),
    "another name": (
        header(SHARED, lambda d: d.update({"gone": d.pop("norm")})),
        f"{SHARED}: tensor 'gone': the header has ('F32', (4,)), the index None",
    ),
    "another dtype": (
        header(SHARED, lambda d: d["norm"].update(dtype="I32")),
        f"{SHARED}: tensor 'norm': the header has ('I32', (4,)), the index ('F32', (4,))",
    ),
    "another shape": (
        header(RANK0, lambda d: d["o.weight"].update(shape=[2, 4])),
        f"{RANK0}: tensor 'o.weight': the header has ('BF16', (2, 4)), the index ('BF16', (4, 2))",
    ),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_damage(case: str, out: Path) -> None:
    damage, message = DAMAGED[case]
    damage(out)
    report = shardc.verify(out)
    assert not report.ok
    assert any(message in str(problem) for problem in report.problems), report.problems
    assert str(out) in str(report.problems[0])


def test_all_damage_at_once(out: Path) -> None:
    for case in ("missing", "data", "shared data", "config", "stray"):
        DAMAGED[case][0](out)
    text = "\n".join(str(problem) for problem in shardc.verify(out).problems)
    for case in ("missing", "data", "shared data", "config", "stray"):
        assert DAMAGED[case][1] in text


# --- indexes -------------------------------------------------------------------------------------


def unsigned(edit: Callable[[dict[str, Any]], object]) -> Damage:
    """Edit the index and leave its digest as it was."""

    def change(out: Path) -> None:
        raw = (out / ck.INDEX).read_bytes()
        document = json.loads(raw)
        edit(document)
        (out / ck.INDEX).write_text(json.dumps(document, indent=1) + "\n")

    return change


def signed(edit: Callable[[dict[str, Any]], object]) -> Damage:
    """Edit the index, and its digest to fit."""

    def change(out: Path) -> None:
        document = ck.read_index(out)
        edit(document)
        ck.write_index(out, document)

    return change


def tensor(name: str, **entries: Any) -> Damage:
    return signed(lambda d: d["tensors"][name].update(entries))


def shard(name: str, rank: int, **entries: Any) -> Damage:
    return signed(lambda d: d["tensors"][name]["shards"][rank].update(entries))


CLOSED: dict[str, tuple[Damage, str]] = {
    "no index": (
        lambda out: (out / ck.INDEX).unlink(),
        "not a shard set: there is no shardc.index",
    ),
    "no JSON": (lambda out: (out / ck.INDEX).write_text("{"), f"{ck.INDEX}: not valid JSON"),
    "a list": (
        lambda out: (out / ck.INDEX).write_text("[]"),
        "has no format version: not a shardc",
    ),
    "no version": (unsigned(lambda d: d.pop("version")), "has no format version: not a shardc"),
    "number": (unsigned(lambda d: d.update(version=1)), "has no format version: not a shardc"),
    "another major": (
        unsigned(lambda d: d.update(version="2.0")),
        "format version 2.0, this release reads 1.0 (rebuild it, or install the release that wrote",
    ),
    "edited": (unsigned(lambda d: d.update(tp=8)), "is damaged: it does not have the digest it"),
    "tp": (signed(lambda d: d.update(tp=0)), "tp: Input should be greater than or equal to 1"),
    "no tensors": (signed(lambda d: d.pop("tensors")), "tensors: Field required"),
    "digest": (shard("norm", 0, digest="xyz"), "tensors.norm.shards.0.digest: String should match"),
    "file name": (shard("norm", 0, file="../x.safetensors"), "tensors.norm.shards.0.file: String"),
    "file's rank": (
        signed(lambda d: d["files"][RANK0].update(rank=1)),
        f"file {RANK0} is said to hold rank 1 of 4",
    ),
    "shard count": (
        signed(lambda d: d["tensors"]["m.weight"]["shards"].pop()),
        "tensor 'm.weight' has 3 shards, 4 expected",
    ),
    "origin": (tensor("norm", origin=7), "tensor 'norm' comes from file 7, which is not listed"),
    "dim": (
        signed(lambda d: d["tensors"]["m.weight"]["placement"].update(dim=2)),
        "tensor 'm.weight' of shape [8, 4] is cut along 2",
    ),
    "no dim": (
        signed(lambda d: d["tensors"]["m.weight"]["placement"].pop("dim")),
        "tensor 'm.weight' of shape [8, 4] is cut along None",
    ),
    "wrong file": (shard("m.weight", 0, file=RANK1), f"'m.weight': shard 0 cannot be in {RANK1}"),
    "no such file": (
        shard("norm", 0, file="rank-00007-of-00008.safetensors"),
        "tensor 'norm': shard 0 cannot be in rank-00007-of-00008.safetensors",
    ),
    "no ranges": (
        signed(lambda d: d["tensors"]["m.weight"]["shards"][1].pop("ranges")),
        "tensor 'm.weight': shard 1 lacks ranges, or has them in vain",
    ),
    "vain ranges": (shard("norm", 0, ranges=[[0, 4]]), "'norm': shard 0 lacks ranges, or has them"),
    "ranges outside": (
        shard("m.weight", 3, ranges=[[7, 9]]),
        "'m.weight': ranges of shard 3 leave 8",
    ),
    "padding claimed": (
        shard("v.weight", 3, ranges=[{"zeros": 2}]),
        "tensor 'v.weight': the ranks hold 6 rows of 7",
    ),
    "ranges reversed": (shard("m.weight", 3, ranges=[[7, 6]]), "ranges of shard 3 leave 8"),
}


@pytest.mark.parametrize("case", CLOSED)
def test_indexes_that_do_not_open(case: str, out: Path, tmp_path: Path) -> None:
    damage, message = CLOSED[case]
    damage(out)
    for action in (
        lambda: shardc.verify(out),
        lambda: shardc.merge(out, tmp_path / "full"),
        lambda: shardc.reshard(out, tmp_path / "new", 2),
    ):
        with pytest.raises(ShardSetError) as caught:
            action()
        assert message in str(caught.value)
        assert str(out) in str(caught.value)
    assert not (tmp_path / "full").exists()
    assert not (tmp_path / "new").exists()


def test_not_there(tmp_path: Path, source: Path) -> None:
    with pytest.raises(ShardSetError, match="gone: no such folder"):
        shardc.verify(tmp_path / "gone")
    pipe = ck.pipeline(tmp_path / "pipe", {"transformer": ck.CLASS})
    with pytest.raises(ShardSetError, match=r"or it is unfinished .`shardc build` makes one of it"):
        shardc.verify(pipe)


def test_a_later_minor_version_may_say_more(out: Path, source: Path) -> None:
    signed(lambda d: d.update(version="1.7", mood="sunny"))(out)
    signed(lambda d: d["tensors"]["norm"].update(colour="red"))(out)
    report = shardc.verify(out, source)
    assert report.ok


LYING: dict[str, tuple[Damage, str]] = {
    "manifest": (
        signed(lambda d: d["manifest"].update(text="schema = 1")),
        "the index's manifest does not have the digest it states",
    ),
    "size": (
        signed(lambda d: d["files"][RANK0].update(size=7_000)),
        f"{RANK0}: has ",
    ),
    "another share": (
        shard("m.weight", 0, ranges=[[2, 4]]),
        "tensor 'm.weight': rank 0 holds rows [2, 3] (2), its placement means rows [0, 1] (2)",
    ),
    "lost rows": (
        shard("m.weight", 0, ranges=[[2, 4]]),
        "tensor 'm.weight': rows [0, 1] (2) are on no rank",
    ),
    "tiled copies": (
        signed(
            lambda d: [
                entry.update(ranges=[[2 * (rank % 2), 2 * (rank % 2) + 2]])
                for rank, entry in enumerate(d["tensors"]["k.weight"]["shards"])
            ]
        ),
        "tensor 'k.weight': rank 1 holds rows [2, 3] (2), its placement means rows [0, 1] (2)",
    ),
    "void": (
        signed(lambda d: d["tensors"]["m.weight"]["placement"]["blocks"][0].update(unit=4)),
        "tensor 'm.weight': its placement is void: 2 units among 4 ranks",
    ),
    "void blocks": (
        signed(lambda d: d["tensors"]["m.weight"]["placement"]["blocks"][0].update(size=3)),
        "tensor 'm.weight': its placement is void: ",
    ),
    "padding claimed": (
        shard("v.weight", 3, ranges=[{"zeros": 1}, [6, 7]]),
        "tensor 'v.weight': rank 3 holds rows [-1, 6] (2), its placement means rows [6, -1] (2)",
    ),
}


@pytest.mark.parametrize("case", LYING)
def test_indexes_that_lie(case: str, out: Path) -> None:
    damage, message = LYING[case]
    damage(out)
    problems = [str(problem) for problem in shardc.verify(out).problems]
    assert any(message in problem for problem in problems), problems


# --- against the source --------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(TENSORS))
def test_forged_bytes_differ_from_the_source(name: str, out: Path, source: Path) -> None:
    """All digests are right; only the source knows."""
    entry = ck.read_index(out)["tensors"][name]
    ranks = ck.read_ranks(out, TP)
    for rank in range(len(entry["shards"])):
        parts = [held[name] for held in ranks][: len(entry["shards"])]
        raw = bytearray(parts[rank].raw)
        raw[-1] ^= 1
        parts[rank] = ck.Data(parts[rank].dtype, parts[rank].shape, bytes(raw))
        ck.forge(out, name, parts)
        problems = [str(problem) for problem in shardc.verify(out, source).problems]
        file = entry["shards"][rank]["file"]
        assert [p for p in problems if f"{file}: tensor '{name}' differs from the source" in p]
        if name != "k.weight":  # whose copies give it away by themselves
            assert shardc.verify(out).ok
            assert (
                shardc.verify(out, source, rank=(rank + 1) % TP).ok
                or entry["placement"]["kind"] == "replicate"
            )


def test_copies_that_differ(out: Path) -> None:
    """B02: repeated KV heads must be the same bytes on every rank that holds them."""
    parts = [held["k.weight"] for held in ck.read_ranks(out, TP)]
    parts[1] = ck.Data(parts[1].dtype, parts[1].shape, parts[1].raw[:-1] + b"\x99")
    ck.forge(out, "k.weight", parts)
    problems = [str(problem) for problem in shardc.verify(out).problems]
    assert len(problems) == 1
    assert "tensor 'k.weight': ranks 0 and 1 hold different copies of rows from " in problems[0]


def test_another_source(out: Path, source: Path, tmp_path: Path) -> None:
    other = ck.component(tmp_path / "other", {**TENSORS, "norm": ck.Data.count("F32", [5])})
    (problem,) = shardc.verify(out, other).problems
    assert "is not the source that the set was built from: diffusion_pytorch_model.safe" in str(
        problem
    )
    split = ck.component(tmp_path / "split", TENSORS, files=2)
    assert not shardc.verify(out, split).ok


def test_a_flipped_byte_of_the_source(out: Path, source: Path) -> None:
    """F10: the same names, sizes and times; other bytes."""
    path = source / "diffusion_pytorch_model.safetensors"
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    assert not shardc.verify(out, source).ok
    assert shardc.verify(out).ok


def test_a_source_without_the_component(tmp_path: Path) -> None:
    pipe = ck.pipeline(tmp_path / "pipe", {"a": ck.CLASS, "b": ck.CLASS})
    for name in "ab":
        ck.component(pipe / name, TENSORS)
    manifest = ck.manifest(tmp_path / "rules.toml", RULES)
    shardc.build(pipe, tmp_path / "out", TP, manifest=manifest)
    assert shardc.verify(tmp_path / "out", pipe).ok
    shutil.rmtree(pipe / "b")
    document = json.loads((pipe / "model_index.json").read_text())
    del document["b"]
    ck.write_json(pipe / "model_index.json", document)
    problems = list(map(str, shardc.verify(tmp_path / "out", pipe).problems))
    assert any("has no component 'b'" in problem for problem in problems)


def test_a_tensor_that_the_index_left_out(out: Path, source: Path) -> None:
    """Taken out of a shard and of the index, digests to fit: the source misses it."""
    document = ck.read_index(out)
    del document["tensors"]["norm"]
    del document["files"][SHARED]
    ck.write_index(out, document)
    (out / SHARED).unlink()
    (problem,) = shardc.verify(out, source).problems
    assert "lacks tensor 'norm' of the source" in str(problem)


def test_another_shape_than_the_sources(out: Path, source: Path) -> None:
    """A replicated tensor with another shape of the same size, consistently."""
    header(SHARED, lambda d: d["norm"].update(shape=[2, 2]))(out)
    document = ck.read_index(out)
    document["tensors"]["norm"]["shape"] = [2, 2]
    ck.write_index(out, document)
    ck.forge(out, "norm", [TENSORS["norm"]])
    assert shardc.verify(out).ok
    (problem,) = shardc.verify(out, source).problems
    assert "tensor 'norm' is (2, 2), in the source (4,)" in str(problem)


# --- the comparison itself -----------------------------------------------------------------------


def test_read_bytes_early_end(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"12345")
    assert read_bytes(tmp_path / "x", 1, 3).tobytes() == b"234"
    with pytest.raises(VerifyError, match="x: ends 2 bytes early"):
        read_bytes(tmp_path / "x", 3, 4)


@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize("chunk", [8, 64, 4 * 1024 * 1024])
def test_first_difference_finds_every_byte(
    dim: int, chunk: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the dim and however small the pieces, no byte is passed over."""
    monkeypatch.setattr("shardc.compare.CHUNK_BYTES", chunk)
    full = ck.Data.count("U16", [4, 4, 4])
    rows = np.array([3, 0, 1, -1, -1, 2], np.int64)
    padded = np.concatenate([full.words, np.zeros_like(np.take(full.words, [0], dim))], axis=dim)
    part = np.take(padded, rows, axis=dim)
    (tmp_path / "full").write_bytes(full.raw)
    whole = StoredRows(
        tmp_path / "full", 0, TensorInfo("w", "U16", full.shape, 0, len(full.raw)), dim
    )
    size = part.nbytes
    for at in [None, *range(size)]:
        raw = bytearray(np.ascontiguousarray(part).tobytes())
        if at is not None:
            raw[at] ^= 4
        (tmp_path / "part").write_bytes(raw)
        stored = StoredRows(tmp_path / "part", 0, TensorInfo("w", "U16", part.shape, 0, size), dim)
        found = first_difference(whole, stored, rows, "U16", lambda _: None)
        assert (found is None) == (at is None), at


def test_global_rows() -> None:
    assert global_rows([(2, 4), (0, 1)]).tolist() == [2, 3, 0]
    assert global_rows([]).tolist() == []


def test_digests_are_of_the_bytes(out: Path) -> None:
    entry = ck.read_index(out)["tensors"]["norm"]
    assert entry["digest"] == xxhash.xxh3_128_hexdigest(TENSORS["norm"].raw)
    assert issubclass(ShardSetError, ShardcError)
