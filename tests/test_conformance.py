"""Every case of conformance/rules.jsonl, for real: built, read by safetensors, verified, merged.

A line names its case (A: fused layouts, B: geometry), the rules, config.json and tensors to build
from, and what must come of it: each tensor's global rows on each rank (-1 is a row of zeros; null
is the whole tensor), or the error. `naive` are rows that look as good and are wrong.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardc
from shardc.errors import ShardcError, ShardSetError
from tests import checkpoints as ck

LINES = (Path(__file__).parent / "conformance" / "rules.jsonl").read_text().splitlines()
CASES = [json.loads(line) for line in LINES]
BUILT = [case for case in CASES if "rows" in case["expect"]]
REFUSED = [case for case in CASES if "error" in case["expect"]]
NAIVE = [case for case in CASES if "naive" in case]

FUSED = {f"A{number:02}" for number in (1, 2, 3, 4, 6, 7, 8, 10, 11, 12, 13, 14, 16, 18, 19, 20)}
GEOMETRY = {f"B{number:02}" for number in (1, 2, 3, 5, 6, 8, 9, 10, 12, 13, 14)}


def named(cases: list[dict[str, Any]]) -> Any:
    return pytest.mark.parametrize("case", [pytest.param(case, id=case["id"]) for case in cases])


def write(case: dict[str, Any], folder: Path) -> tuple[Path, Path, dict[str, ck.Data]]:
    """The case's checkpoint, its manifest, and its tensors: no two elements are the same."""
    tensors = {}
    first = 1
    for name, entry in case["tensors"].items():
        tensors[name] = ck.Data.count(entry["dtype"], entry["shape"], first)
        first += int(np.prod(entry["shape"]))
    source = ck.component(folder / "source", tensors, config=case["config"])
    if "files" in case:
        (source / "diffusion_pytorch_model.safetensors").unlink()
        for file, names in case["files"].items():
            ck.save(source / file, {name: tensors[name] for name in names})
    manifest = ck.manifest(folder / "rules.toml", case["rules"], dims=case.get("dims", {}))
    return source, manifest, tensors


def rows_of(data: ck.Data, dim: int, rows: list[int]) -> np.ndarray[Any, Any]:
    """Those rows of a tensor, -1 for zeros."""
    zero = np.zeros_like(np.take(data.words, [0], axis=dim))
    taken = [zero if row < 0 else np.take(data.words, [row], axis=dim) for row in rows]
    return np.concatenate(taken, axis=dim)


def test_every_case_is_here() -> None:
    assert {case["case"] for case in CASES} == {*FUSED, *GEOMETRY}
    assert len({case["id"] for case in CASES}) == len(CASES)


@named(BUILT)
def test_rows(case: dict[str, Any], tmp_path: Path) -> None:
    source, manifest, tensors = write(case, tmp_path)
    out = tmp_path / "out"
    shardc.build(source, out, case["tp"], manifest=manifest, profile=case["profile"])
    expected = case["expect"]["rows"]
    assert expected.keys() == tensors.keys()
    ranks = ck.read_ranks(out, case["tp"])
    for rank, held in enumerate(ranks):
        assert held.keys() == tensors.keys()
        for name, rows in expected.items():
            if rows is None:
                assert held[name] == tensors[name]
                continue
            wanted = rows_of(tensors[name], rows["dim"], rows["ranks"][rank])
            np.testing.assert_array_equal(held[name].words, wanted, f"{name} of rank {rank}")

    report = shardc.verify(out, source)
    assert report.problems == ()
    shardc.merge(out, tmp_path / "full")
    assert ck.read_all(tmp_path / "full") == tensors


@named(BUILT)
def test_index_states_the_rows(case: dict[str, Any], tmp_path: Path) -> None:
    source, manifest, _ = write(case, tmp_path)
    shardc.build(source, tmp_path / "out", case["tp"], manifest=manifest)
    entries = ck.read_index(tmp_path / "out")["tensors"]
    for name, rows in case["expect"]["rows"].items():
        shards = entries[name]["shards"]
        if rows is None:
            assert entries[name]["placement"]["kind"] == "replicate"
            assert [shard["file"] for shard in shards] == ["replicated.safetensors"]
            continue
        stated = [[row for item in shard["ranges"] for row in spread(item)] for shard in shards]
        assert stated == rows["ranks"]
        assert entries[name]["placement"]["dim"] == rows["dim"]


def spread(item: Any) -> list[int]:
    return [-1] * item["zeros"] if isinstance(item, dict) else list(range(*item))


@named(REFUSED)
def test_refused(case: dict[str, Any], tmp_path: Path) -> None:
    source, manifest, _ = write(case, tmp_path)
    before = ck.contents(tmp_path)
    with pytest.raises(ShardcError, match=case["expect"]["error"]):
        shardc.build(source, tmp_path / "out", case["tp"], manifest=manifest)
    assert ck.contents(tmp_path) == before
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["rules.toml", "source"]


@named(NAIVE)
@pytest.mark.parametrize("ranges", ["kept", "naive"])
def test_naive_rows_fail_verify(case: dict[str, Any], ranges: str, tmp_path: Path) -> None:
    """The wrong rows with every digest right. `ranges`: what the index says of them."""
    source, manifest, tensors = write(case, tmp_path)
    out = tmp_path / "out"
    shardc.build(source, out, case["tp"], manifest=manifest)
    assert shardc.verify(out, source).ok
    few = False  # so few rows in all that the index itself cannot be
    for name, wrong in case["naive"].items():
        dim = case["expect"]["rows"][name]["dim"]
        assert wrong != case["expect"]["rows"][name]["ranks"]
        parts = [ck.Data.of(tensors[name].dtype, rows_of(tensors[name], dim, r)) for r in wrong]
        told = [[{"zeros": 1} if row < 0 else [row, row + 1] for row in rows] for rows in wrong]
        ck.forge(out, name, parts, ranges=told if ranges == "naive" else None)
        few |= sum(row >= 0 for rows in wrong for row in rows) < tensors[name].shape[dim]

    if few and ranges == "naive":
        with pytest.raises(ShardSetError, match=r"the ranks hold \d+ rows of \d+"):
            shardc.verify(out, source)
        return
    against_source = shardc.verify(out, source)
    assert any("differs from the source" in str(problem) for problem in against_source.problems)
    if ranges == "naive":  # the placement in the index gives it away even without the source
        alone = shardc.verify(out)
        assert any("its placement means rows" in str(problem) for problem in alone.problems)
        # and the digests do not: the forgery is a careful one
        assert not any("digest" in str(problem) for problem in alone.problems)


def test_blocked_and_grouped_rules_differ(tmp_path: Path) -> None:
    """A03: the two layouts of one fused tensor are not told apart by its shape."""
    built = {}
    for case in CASES:
        if case["id"] in ("A03", "A03-blocked"):
            folder = tmp_path / case["id"]
            source, manifest, _ = write(case, folder)
            shardc.build(source, folder / "out", 2, manifest=manifest)
            built[case["id"]] = ck.read_ranks(folder / "out", 2)
    assert built["A03"][0].keys() == built["A03-blocked"][0].keys()
    assert built["A03"][0] != built["A03-blocked"][0]


def test_packed_rowwise_adds_up(tmp_path: Path) -> None:
    """A12: over the ranks, x_r @ W_r^T sums to x @ W^T."""
    (case,) = (case for case in CASES if case["id"] == "A12")
    weight = np.random.default_rng(0).standard_normal((4, 12)).astype(np.float32)
    bias = np.zeros(4, np.float32)
    source = ck.component(
        tmp_path / "source",
        {
            "single.proj_out.weight": ck.Data("F32", (4, 12), weight.tobytes()),
            "single.proj_out.bias": ck.Data("F32", (4,), bias.tobytes()),
        },
    )
    manifest = ck.manifest(tmp_path / "rules.toml", case["rules"])
    shardc.build(source, tmp_path / "out", 2, manifest=manifest)
    x = np.random.default_rng(1).standard_normal((3, 12)).astype(np.float32)
    total = np.zeros((3, 4), np.float32)
    for rank, held in enumerate(ck.read_ranks(tmp_path / "out", 2)):
        columns = [*range(rank * 2, rank * 2 + 2), *range(4 + rank * 4, 8 + rank * 4)]
        local = held["single.proj_out.weight"].words.view(np.float32)
        total += x[:, columns] @ local.T
    np.testing.assert_allclose(total, x @ weight.T, rtol=1e-5)
