"""merge and reshard, which know nothing of the source; and what they refuse."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import shardc
from shardc.errors import OutputError, PlanError, ShardSetError
from shardc.writing import Resources
from tests import checkpoints as ck
from tests.casts import cast, same

TENSORS = {
    "mask": ck.Data.count("BOOL", [3]),
    "q.weight": ck.Data.count("F32", [16, 4]),
    "k.weight": ck.Data.count("F32", [4, 4], 100),
    "o.weight": ck.Data.count("BF16", [4, 16], 400),
    "v.weight": ck.Data.count("F32", [7, 2], 600),
    "f4": ck.Data.count("F4", [6]),
    "empty": ck.Data.count("F32", [0, 4]),
    "scalar": ck.Data.count("F64", []),
}
RULES: list[dict[str, Any]] = [
    {"match": "q", "style": "packed_colwise", "blocks": [8, 8], "unit": 2},
    {"match": "k", "style": "colwise", "unit": 2, "repeat": True},
    {"match": "o", "style": "rowwise"},
    {"match": "v", "style": "vocab_parallel", "pad_to": 1},
]


def build(folder: Path, tp: int, *, files: int = 1, **options: Any) -> tuple[Path, Path]:
    source = ck.component(folder / "source", TENSORS, files=files)
    manifest = ck.manifest(folder / "rules.toml", RULES)
    shardc.build(source, folder / f"tp{tp}", tp, manifest=manifest, **options)
    return source, folder / f"tp{tp}"


@pytest.mark.parametrize("files", [1, 3])
@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("part", [1, 4_000_000_000])
def test_merge(tp: int, files: int, part: int, tmp_path: Path) -> None:
    source, out = build(tmp_path, tp, files=files, max_part_bytes=part)
    report = shardc.merge(out, tmp_path / "full")
    assert (report.tp, report.out) == (1, str(tmp_path / "full"))
    full = tmp_path / "full"
    assert {p.name for p in full.iterdir()} == {p.name for p in source.iterdir()}
    for path in source.glob("*.safetensors"):
        assert ck.read(full / path.name) == ck.read(path)
        assert ck.names(full / path.name) == ck.names(path)
        assert ck.header_of_file(full / path.name)["__metadata__"] == {"format": "pt"}
    for path in source.glob("*.index.json"):
        assert json.loads((full / path.name).read_text()) == json.loads(path.read_text())
    # and what was merged is a source that gives the same shards
    manifest = tmp_path / "rules.toml"
    shardc.build(full, tmp_path / "again", tp, manifest=manifest, max_part_bytes=part)
    assert ck.read_ranks(tmp_path / "again", tp) == ck.read_ranks(out, tp)


def test_merge_of_a_cast_set(tmp_path: Path) -> None:
    _, out = build(tmp_path, 2, dtype="bf16")
    shardc.merge(out, tmp_path / "full")
    merged = ck.read_all(tmp_path / "full")
    for name, data in TENSORS.items():
        assert same(merged[name], cast(data, "bf16"))


def test_merge_takes_one_copy_and_checks_the_others(tmp_path: Path) -> None:
    """B02."""
    _, out = build(tmp_path, 4)
    parts = [held["k.weight"] for held in ck.read_ranks(out, 4)]
    assert parts[2] == parts[3] != parts[0]
    parts[3] = ck.Data(parts[3].dtype, parts[3].shape, bytes(len(parts[3].raw)))
    ck.forge(out, "k.weight", parts)
    for action in (
        lambda: shardc.merge(out, tmp_path / "full"),
        lambda: shardc.reshard(out, tmp_path / "new", 2),
    ):
        with pytest.raises(ShardSetError, match=r"'k\.weight': ranks 2 and 3 hold different cop"):
            action()
    assert not (tmp_path / "full").exists()
    assert not (tmp_path / "new").exists()


def test_damaged_shards_are_not_merged(tmp_path: Path) -> None:
    _, out = build(tmp_path, 2)
    path = out / "rank-00001-of-00002.safetensors"
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    name = ck.names(path)[-1]
    for action in (
        lambda: shardc.merge(out, tmp_path / "full"),
        lambda: shardc.reshard(out, tmp_path / "new", 4),
    ):
        with pytest.raises(ShardSetError, match=f"tensor '{name}': its shards are not what was bu"):
            action()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["rules.toml", "source", "tp2"]


def test_incomplete_sets_are_not_merged(tmp_path: Path) -> None:
    _, out = build(tmp_path, 2)
    (out / "rank-00000-of-00002.safetensors").unlink()
    (out / "rank-00001-of-00002.safetensors").write_bytes(b"x")
    for action in (
        lambda: shardc.merge(out, tmp_path / "full"),
        lambda: shardc.reshard(out, tmp_path / "new", 4),
    ):
        with pytest.raises(ShardSetError) as caught:
            action()
        assert "rank-00000-of-00002.safetensors: is missing" in str(caught.value)
        assert "rank-00001-of-00002.safetensors: not a safetensors file" in str(caught.value)


def test_a_set_without_its_config_is_not_merged(tmp_path: Path) -> None:
    _, out = build(tmp_path, 2)
    (out / "config.json").unlink()
    with pytest.raises(ShardSetError, match=r"config\.json: cannot read it: No such file"):
        shardc.merge(out, tmp_path / "full")
    with pytest.raises(ShardSetError, match=r"config\.json: is missing"):
        shardc.reshard(out, tmp_path / "new", 4)
    (out / "config.json").write_text("{}")
    for action in (
        lambda: shardc.merge(out, tmp_path / "full"),
        lambda: shardc.reshard(out, tmp_path / "new", 4),
    ):
        with pytest.raises(ShardSetError, match=r"config\.json: is not the one that the set was"):
            action()


def test_lost_rows_are_not_merged(tmp_path: Path) -> None:
    """An index whose ranks hold the same rows twice and others never, digests to fit."""
    _, out = build(tmp_path, 2)
    document = ck.read_index(out)
    shards = document["tensors"]["o.weight"]["shards"]
    shards[1]["ranges"] = shards[0]["ranges"]
    ck.write_index(out, document)
    with pytest.raises(ShardSetError, match=r"8 of 16 rows of 'o\.weight' are on no rank"):
        shardc.merge(out, tmp_path / "full")


def test_a_header_that_is_not_the_indexs(tmp_path: Path) -> None:
    _, out = build(tmp_path, 2)
    document = ck.read_index(out)
    document["tensors"]["scalar"]["dtype"] = "I64"
    document["tensors"]["absent"] = document["tensors"]["scalar"]
    ck.write_index(out, document)
    with pytest.raises(ShardSetError) as caught:
        shardc.merge(out, tmp_path / "full")
    text = str(caught.value)
    assert "replicated.safetensors holds 'scalar' as F64 [], the index says I64 []" in text
    assert "replicated.safetensors lacks tensor 'absent'" in text


@pytest.mark.parametrize("one", [1, 2, 4])
@pytest.mark.parametrize("two", [1, 2, 4, 8])
@pytest.mark.parametrize("dtype", ["keep", "fp16"])
def test_reshard_is_a_build(one: int, two: int, dtype: Any, tmp_path: Path) -> None:
    source, out = build(tmp_path, one, files=2, dtype=dtype, max_part_bytes=100)
    manifest = tmp_path / "rules.toml"
    if two == 8:
        with pytest.raises(PlanError, match=r"q\.weight .*cannot be cut at tp 8: 4 units of 2 % 8"):
            shardc.reshard(out, tmp_path / "new", two)
        assert not (tmp_path / "new").exists()
        return
    shardc.build(
        source, tmp_path / "direct", two, manifest=manifest, dtype=dtype, max_part_bytes=100
    )
    resources = Resources(workers=2, memory_bytes=1)
    report = shardc.reshard(out, tmp_path / "new", two, resources=resources)
    assert report.tp == two
    assert ck.contents(tmp_path / "new") == ck.contents(tmp_path / "direct")


def test_pipelines(tmp_path: Path) -> None:
    pipe = ck.pipeline(tmp_path / "pipe", {"transformer": ck.CLASS, "vae": "Vae"})
    ck.component(pipe / "transformer", TENSORS, files=2)
    ck.component(pipe / "vae", {"c.weight": ck.Data.count("F16", [64])}, class_name="Vae")
    (pipe / "transformer" / "notes.txt").write_text("words")
    manifest = ck.manifest(tmp_path / "rules.toml", RULES)
    shardc.build(pipe, tmp_path / "two", 2, manifest=manifest)
    shardc.build(pipe, tmp_path / "four", 4, manifest=manifest)
    shardc.reshard(tmp_path / "two", tmp_path / "new", 4)
    assert ck.contents(tmp_path / "new") == ck.contents(tmp_path / "four")
    assert shardc.verify(tmp_path / "new", pipe).ok
    shardc.merge(tmp_path / "new", tmp_path / "full")
    full, given = ck.contents(tmp_path / "full"), ck.contents(pipe)
    assert full.keys() == given.keys()
    for name, raw in full.items():
        if not name.endswith(".safetensors") and "index.json" not in name:
            assert raw == given[name], name
    assert ck.read_all(tmp_path / "full" / "transformer") == TENSORS


def test_existing_outputs_are_refused(tmp_path: Path) -> None:
    source, out = build(tmp_path, 2)
    for action in (lambda: shardc.merge(out, source), lambda: shardc.reshard(out, source, 4)):
        with pytest.raises(OutputError, match="exists already"):
            action()
    with pytest.raises(OutputError, match="overlaps its source"):
        shardc.reshard(out, out, 4)
    with pytest.raises(OutputError, match="is not a shard set, and shardc will not replace it"):
        shardc.merge(out, source, force=True)
    assert shardc.verify(out, source).ok


@pytest.mark.parametrize("inside", ["", "new", ".."])
def test_outputs_that_overlap_their_source(inside: str, tmp_path: Path) -> None:
    source, out = build(tmp_path, 2)
    before = ck.contents(tmp_path)
    with pytest.raises(OutputError, match=r"overlaps its source|will not replace it"):
        shardc.reshard(out, out / inside, 4, force=True)
    with pytest.raises(OutputError, match=r"overlaps its source|will not replace it"):
        shardc.build(source, source / inside, 2, manifest=tmp_path / "rules.toml", force=True)
    assert ck.contents(tmp_path) == before


def test_not_a_degree(tmp_path: Path) -> None:
    _, out = build(tmp_path, 2)
    with pytest.raises(PlanError, match="tp: 0 is not a degree from 1 to 1024"):
        shardc.reshard(out, tmp_path / "new", 0)
