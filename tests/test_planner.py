"""Plans: pure, complete, and full of reasons where a checkpoint does not fit."""

from __future__ import annotations

import json
import os
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import shardc
from shardc.errors import PlanError
from shardc.header import MAX_HEADER_BYTES
from shardc.planner import ComponentPlan, region_copies, split_files
from shardc.region import Region, tiling_problem
from shardc.resolve import legal_degrees
from tests import checkpoints as ck

W = {"m.weight": ck.Data.count("F32", [8, 4])}


def plan(
    folder: Path,
    tensors: dict[str, ck.Data],
    rules: list[dict[str, Any]],
    tp: int = 2,
    *,
    config: dict[str, Any] | None = None,
    tables: dict[str, Any] | None = None,
    **options: Any,
) -> ComponentPlan:
    source = ck.component(folder / "source", tensors, config=config)
    manifest = ck.manifest(folder / "tiny.toml", rules, **(tables or {}))
    (component,) = shardc.plan(source, tp, manifest=manifest, **options).components
    return component


@pytest.mark.parametrize("tp", [0, -1, 1025])
def test_not_a_degree(tp: int, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=f"tp: {tp} is not a degree from 1 to 1024"):
        plan(tmp_path, W, [{"match": "m", "style": "colwise"}], tp)


COL = {"match": "m", "style": "colwise"}
NORM = ck.Data.count("F32", [4])
REFUSED: dict[str, tuple[dict[str, ck.Data], list[dict[str, Any]], dict[str, Any], str]] = {
    "two rules": (
        W,
        [COL, {"match": "*", "style": "rowwise"}],
        {},
        "m.weight: matches more than one rule: tiny.toml:5 (rule 1) and tiny.toml:9 (rule 2)",
    ),
    "no tensor": (
        W,
        [COL, {"match": ["m2.*", "m3"], "style": "colwise"}],
        {},
        "tiny.toml:9 (rule 2): m2.* matches no tensor of ",
    ),
    "scale": (
        {**W, "m.scale": NORM},
        [COL],
        {},
        "m.scale: tiny.toml:5 (rule 1) covers the weight and the bias of its module, but says "
        "nothing of 'scale' (give it a rule of its own)",
    ),
    "bias": (
        {**W, "m.bias": NORM},
        [COL],
        {},
        "m.bias F32 [4], tiny.toml:5 (rule 1): the bias has 4 elements, its weight 8",
    ),
    "sub-byte": (
        {"m.weight": ck.Data.count("F4", [8, 4])},
        [COL],
        {},
        "m.weight F4 [8, 4], tiny.toml:5 (rule 1): F4 packs several elements into a byte, "
        "and is carried whole only",
    ),
    "degree": (
        W,
        [{**COL, "unit": 8}],
        {},
        "m.weight F32 [8, 4], tiny.toml:5 (rule 1): cannot be cut at tp 2: 1 units of 8 % 2 != 0",
    ),
    "two spellings": (
        {"a.m.weight": W["m.weight"], "b.m.weight": W["m.weight"]},
        [{"match": "$p.m", "style": "colwise"}],
        {"prefix": {"p": ["a", "b"]}},
        "tiny.toml: prefix $p is spelled more than one way: ['$p=a', '$p=b']",
    ),
    "no spelling": (
        W,
        [{"match": "$p.x", "style": "colwise"}],
        {"prefix": {"p": ["a", "b"]}},
        "tiny.toml:8 (rule 1): a.x (nor any other spelling of $p) matches no tensor of ",
    ),
    "the spelling in use": (
        {"b.m.weight": W["m.weight"]},
        [{"match": "$p.{m,n}", "style": "colwise"}],
        {"prefix": {"p": ["a", "b"]}},
        "tiny.toml:8 (rule 1): b.n matches no tensor of ",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str, tmp_path: Path) -> None:
    tensors, rules, tables, message = REFUSED[case]
    with pytest.raises(PlanError) as caught:
        plan(tmp_path, tensors, rules, tables=tables)
    assert message in str(caught.value)


CHUNKED = [
    "norm1.linear",
    "transformer_blocks.0.norm1_context.linear",
    "norm_out.linear",
    "adaLN_modulation.1",
    "double_stream_modulation_img.linear",
    "blocks.3.img_mod.1",
    "modulation",
]


@pytest.mark.parametrize("style", ["colwise", "packed_colwise"])
@pytest.mark.parametrize("name", CHUNKED)
def test_modulations_are_not_cut_by_colwise(name: str, style: str, tmp_path: Path) -> None:
    tensors = {f"{name}.weight": W["m.weight"], f"{name}.bias": ck.Data.count("F32", [8])}
    rule = {"match": name, "style": style, **({"blocks": [4, 4]} if "packed" in style else {})}
    with pytest.raises(PlanError) as caught:
        plan(tmp_path, tensors, [rule])
    assert f"{name} is a modulation whose output is chunked: {style} would" in str(caught.value)
    assert "colwise_gather or replicate it" in str(caught.value)
    for other in ("colwise_gather", "rowwise", "replicate"):
        plan(tmp_path, tensors, [{"match": name, "style": other}])


def test_every_problem_at_once(tmp_path: Path) -> None:
    tensors = {
        **W,
        "a.weight": ck.Data.count("F32", [7, 3]),
        "b.weight": ck.Data.count("F32", [5, 3]),
    }
    rules = [{"match": "*", "style": "colwise"}, {"match": "gone", "style": "rowwise"}]
    with pytest.raises(PlanError) as caught:
        plan(tmp_path, tensors, rules)
    assert sorted(problem.what for problem in caught.value.problems)[:2] == [
        "cannot be cut at tp 2: 5 units % 2 != 0",
        "cannot be cut at tp 2: 7 units % 2 != 0",
    ]
    assert len(caught.value.problems) == 3


def test_every_problem_of_every_component_at_once(tmp_path: Path) -> None:
    pipe = ck.pipeline(tmp_path / "pipe", {"one": ck.CLASS, "two": ck.CLASS})
    for name in ("one", "two"):
        ck.component(pipe / name, {"m.weight": ck.Data.count("F32", [7, 3])})
    manifest = ck.manifest(tmp_path / "tiny.toml", [COL])
    with pytest.raises(PlanError) as caught:
        shardc.plan(pipe, 2, manifest=manifest)
    wheres = [problem.where for problem in caught.value.problems]
    assert [where.split(":")[0] for where in wheres] == ["one", "two"]


def test_a_raw_parameter_goes_before_its_module(tmp_path: Path) -> None:
    """`table` names a parameter, `table.*` would not; `m` names a module, never `m`'s children."""
    tensors = {**W, "table": ck.Data.count("F32", [4]), "m.sub.weight": W["m.weight"]}
    found = plan(tmp_path, tensors, [COL, {"match": "table", "style": "sharded_norm"}])
    styles = {t.tensor.name: t.style for t in found.tensors}
    assert styles == {"m.weight": "colwise", "table": "sharded_norm", "m.sub.weight": "replicate"}


def test_profiles(tmp_path: Path) -> None:
    rules = [
        COL,
        {"match": "n", "style": "colwise_gather", "profile": "compact"},
        {"match": "n", "style": "rowwise", "profile": "native"},
        {"match": "o", "style": "colwise", "profile": "compact"},
    ]
    tensors = {f"{name}.weight": W["m.weight"] for name in "mno"}
    for profile, expected in {
        "compact": ["colwise", "colwise_gather", "colwise"],
        "native": ["colwise", "rowwise", "replicate"],
    }.items():
        found = plan(tmp_path, tensors, rules, profile=profile)
        assert [t.style for t in found.tensors] == expected


def test_optional_rules_may_match_nothing(tmp_path: Path) -> None:
    rules = [COL, {"match": ["x", "y.*"], "style": "rowwise", "optional": True}]
    found = plan(tmp_path, W, rules)
    assert found.resolution.unused == ("x", "y.*")


def test_prefix_spellings(tmp_path: Path) -> None:
    rules = [{"match": "$p.m", "style": "colwise"}]
    for spelling in ("a", "b.c", ""):
        name = f"{spelling}.m.weight".lstrip(".")
        tables = {"prefix": {"p": ["a", "b.c", ""]}}
        found = plan(tmp_path, {name: W["m.weight"]}, rules, tables=tables)
        assert found.tensors[0].style == "colwise"


def test_degrees(tmp_path: Path) -> None:
    """12 heads of 4, KV heads 3 that repeat: the legal ones, and why the others are not."""
    tensors = {"q.weight": ck.Data.count("F32", [48, 2]), "k.weight": ck.Data.count("F32", [12, 2])}
    rules = [
        {"match": "q", "style": "colwise", "unit": 4},
        {"match": "k", "style": "colwise", "unit": 4, "repeat": True},
    ]
    found = plan(tmp_path, tensors, rules, 1)
    degrees = legal_degrees(found.resolution, found.manifest, found.dims, 64)
    assert [tp for tp, reason in degrees.items() if reason is None] == [1, 3, 6, 12]
    assert "3 units of 4 % 2 != 0 and 2 % 3 != 0" in str(degrees[2])
    for tp, reason in degrees.items():
        if tp > 16:
            continue
        if reason is None:
            plan(tmp_path, tensors, rules, tp)
        else:
            with pytest.raises(PlanError) as caught:
                plan(tmp_path, tensors, rules, tp)
            assert reason in str(caught.value)


def rich(folder: Path, tp: int, **options: Any) -> ComponentPlan:
    tensors = {
        "mask": ck.Data.count("BOOL", [3]),
        "f8": ck.Data.count("F8_E4M3", [5]),
        "embed.weight": ck.Data.count("BF16", [13, 4]),
        "qkv.weight": ck.Data.count("F32", [24, 4]),
        "qkv.bias": ck.Data.count("F64", [24]),
        "kv.weight": ck.Data.count("F16", [4, 4]),
        "o.weight": ck.Data.count("F32", [4, 8]),
        "scalar": ck.Data.count("I64", []),
        "empty": ck.Data.count("F32", [0, 3]),
    }
    rules = [
        {"match": "embed", "style": "vocab_parallel", "pad_to": 1},
        {"match": "qkv", "style": "packed_colwise", "blocks": [8, 8, 8], "unit": 2},
        {"match": "kv", "style": "colwise", "unit": 2, "repeat": True},
        {"match": "o", "style": "rowwise"},
    ]
    return plan(folder, tensors, rules, tp, **options)


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_copies_tile_both_sides(tp: int, tmp_path: Path) -> None:
    """Destinations cover every shard once (bar padding), sources every tensor at least once."""
    found = rich(tmp_path, tp)
    for move, planned in zip(found.moves(), found.tensors, strict=True):
        into: dict[int, list[Region]] = {}
        read: list[Region] = []
        for _, source, target, region in region_copies(move):
            assert source.size == region.size
            into.setdefault(target, []).append(region)
            read.append(source)
        covered = set()
        for region in read:
            covered.add((region.start, region.stop))
        assert tiling_problem([Region(*pair) for pair in covered], move.shape) is None
        for number, target in enumerate(move.targets):
            held = sum(region.size for region in into.get(number, []))
            if planned.tensor.name == "embed.weight":
                assert held <= Region.whole(target.info.shape).size
            else:
                assert tiling_problem(into.get(number, []), target.info.shape) is None


@pytest.mark.parametrize("part", [1, 64, 300, 10_000])
def test_parts(part: int, tmp_path: Path) -> None:
    """No part over the limit unless one tensor is; names count up; no part where all fits."""
    found = rich(tmp_path, 2, max_part_bytes=part)
    for stem, rank in [
        ("rank-00000-of-00002", 0),
        ("rank-00001-of-00002", 1),
        ("replicated", None),
    ]:
        files = [file for file in found.files if file.rank == rank]
        sizes = [sum(t.size_bytes for t in file.tensors) for file in files]
        for file, size in zip(files, sizes, strict=True):
            assert size <= part or len(file.tensors) == 1
        for one, two in pairwise(files):  # none is needless
            first = two.tensors[0].size_bytes
            assert sum(t.size_bytes for t in one.tensors) + first > part
        names = [file.name for file in files]
        if len(files) == 1:
            assert names == [f"{stem}.safetensors"]
        else:
            assert names == [f"{stem}-part-{n:05d}.safetensors" for n in range(len(files))]


def test_tensors_are_aligned_to_their_elements(tmp_path: Path) -> None:
    for file in rich(tmp_path, 2).files:
        assert len(file.header) % 4096 == 0
        for tensor in file.tensors:
            assert tensor.start % max(1, ck.BITS[tensor.dtype] // 8) == 0


def test_rank_bytes(tmp_path: Path) -> None:
    found = rich(tmp_path, 2)
    sizes = {t.tensor.name: sum(x.info.size_bytes for x in t.targets) for t in found.tensors}
    shared = sum(sizes[name] for name in ("mask", "f8", "scalar", "empty"))
    assert found.replicated_bytes() == shared == 3 + 5 + 8
    own = sum(size for name, size in sizes.items()) - shared
    assert found.rank_bytes() == [shared + own // 2] * 2


def test_a_plan_reads_no_weights(tmp_path: Path) -> None:
    """A header that promises 40 GB, and no byte of them on the disk."""
    folder = tmp_path / "source"
    folder.mkdir()
    ck.write_json(folder / "config.json", {"_class_name": ck.CLASS})
    rows = 10_000_000
    header = {"m.weight": {"dtype": "F32", "shape": [rows, 1000], "data_offsets": [0, rows * 4000]}}
    raw = json.dumps(header).encode()
    path = folder / "model.safetensors"
    path.write_bytes(len(raw).to_bytes(8, "little") + raw)
    os.truncate(path, 8 + len(raw) + rows * 4000)
    manifest = ck.manifest(tmp_path / "tiny.toml", [COL])
    (found,) = shardc.plan(folder, 8, manifest=manifest).components
    assert found.rank_bytes() == [rows * 500] * 8
    assert path.stat().st_blocks < 100


def test_the_digest_follows_all_that_decides_bytes(tmp_path: Path) -> None:
    base = [COL]
    tensors = {**W, "n.weight": W["m.weight"]}
    digests = [
        plan(tmp_path, tensors, base).digest,
        plan(tmp_path, tensors, base, 4).digest,
        plan(tmp_path, tensors, base, profile="native").digest,
        plan(tmp_path, tensors, base, dtype="bf16").digest,
        plan(tmp_path, tensors, base, max_part_bytes=7).digest,
        plan(tmp_path, tensors, [{**COL, "unit": 2}]).digest,
        plan(tmp_path, W, base).digest,
        plan(tmp_path, {**W, "n.weight": ck.Data.count("F16", [8, 4])}, base).digest,
    ]
    assert len(set(digests)) == len(digests)
    assert plan(tmp_path / "elsewhere", tensors, base).digest == digests[0]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"dtype": "fp8"}, "dtype: 'fp8' is none of keep, bf16, fp16, fp32"),
        ({"profile": "big"}, "profile: 'big' is none of compact, native"),
        ({"max_part_bytes": -5}, "max_part_bytes: -5 is less than a byte"),
        ({"tp": 0}, "tp: 0 is not a degree from 1 to 1024"),
    ],
)
def test_options_check_themselves(options: dict[str, Any], says: str, tmp_path: Path) -> None:
    source = ck.component(tmp_path / "s", {"a": ck.Data.count("F32", [2])})
    with pytest.raises(PlanError, match=re.escape(says)):
        shardc.build(source, tmp_path / "out", **{"tp": 2, **options})
    assert not (tmp_path / "out").exists()


def test_nothing_to_shard(tmp_path: Path) -> None:
    source = ck.component(tmp_path / "s", {})
    manifest = ck.manifest(tmp_path / "m.toml", [])
    with pytest.raises(PlanError, match="holds no tensor: there is nothing to shard"):
        shardc.plan(source, 2, manifest=manifest)


def test_a_header_never_outgrows_what_readers_accept() -> None:
    names = [(f"{i:06d}" + "n" * 30_000, "U8", ()) for i in range(2000)]  # 60 MB of names
    files = split_files("replicated", None, names, {}, 10**9)
    assert len(files) > 1
    assert [t.name for f in files for t in f.tensors] == [name for name, _, _ in names]
    assert all(len(f.header) < MAX_HEADER_BYTES for f in files)
