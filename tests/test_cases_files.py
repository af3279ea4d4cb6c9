"""Faults that others met with the format, with source folders and with what is written.

Groups E, F and H of the collected cases. CASES says which test each is; those that are not here are
in the file that is named, and kinds of test_hostile.py by their name there.
"""

from __future__ import annotations

import importlib
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardc
from shardc.errors import CheckpointError, ManifestError, PlanError, ShardSetError
from tests import checkpoints as ck
from tests import test_verifier
from tests.test_hostile import INDEX, KINDS, LAST, PART, RULES, TENSORS, WEIGHTS

CASES: dict[str, tuple[str, ...]] = {
    "E01": ("kind: trailing", "test_e01_the_message_counts"),
    "E02": ("test_cases_io: test_e02_a_short_file_is_refused_before_a_read", "kind: truncated"),
    "E03": ("kind: gap", "kind: leading gap", "kind: overlap", "kind: alias", "kind: reversed"),
    "E06": ("test_e06_metadata_of_any_sound_form", "kind: metadata", "kind: metadata of objects"),
    "E07": (
        "test_planner: test_a_header_never_outgrows_what_readers_accept",
        "test_hostile: test_a_million_tiny_tensors",
    ),
    "E08": ("test_e08_what_is_unaligned_is_aligned",),
    "E10": ("kind: two documents", "test_e10_no_tensors"),
    "E11": ("test_e11_columns_are_packed",),
    "F01": ("kind: index: missing file", "test_f01_a_download_that_was_cut_short"),
    "F02": ("test_f02_strays_are_not_merged",),
    "F03": ("kind: listed, but in no file", "kind: listed in another file"),
    "F05": ("kind: in both files", "test_f05_no_copy_wins"),
    "F07": ("test_checkpoint: test_total_size_is_not_believed", "test_f07_the_total_is_exact"),
    "F08": ("test_checkpoint: test_variants", "test_checkpoint: test_old_style_variant_parts"),
    "F10": ("test_f10_a_byte_of_the_source", "test_verifier: test_a_flipped_byte_of_the_source"),
    "F11": ("kind: file: empty", "test_execute: test_source_grows_during_the_build"),
    "H01": ("test_crash: test_killed_at_every_step", "test_crash: test_killed_at_random"),
    "H02": (
        "test_crash: test_full_disks",
        "test_resume: test_an_error_keeps_what_is_done_and_says_so",
    ),
    # H05 is of Windows alone, where shardc does not run
    "H06": ("test_h06_ranks_by_number", "test_h06_two_files_of_a_rank"),
    "H07": ("test_checkpoint: test_order_of_the_directory_does_not_matter",),
    "H08": ("test_h08_layouts_that_nobody_knows",),
}


def test_every_case_has_its_test() -> None:
    for tests in CASES.values():
        for test in tests:
            where, _, name = test.rpartition(": ")
            if test.startswith("kind: "):
                assert test.removeprefix("kind: ") in KINDS
            elif where:
                assert hasattr(importlib.import_module(f"tests.{where}"), name), test
            else:
                assert name in globals(), test


def built(source: Path, tp: int = 2, rules: Any = RULES) -> Path:
    made = ck.manifest(source.parent / "rules.toml", rules)
    shardc.build(source, source.parent / "out", tp, manifest=made)
    return source.parent / "out"


@pytest.mark.parametrize("extra", [1, 3])
def test_e01_the_message_counts(extra: int, tmp_path: Path) -> None:
    source = ck.component(tmp_path / "s", TENSORS)
    with (source / WEIGHTS).open("ab") as file:
        file.write(bytes(extra))
    with pytest.raises(CheckpointError, match=f"trailing bytes: .* 44 bytes, .* {44 + extra}"):
        built(source)


@pytest.mark.parametrize("metadata", ["{}", "null", '{"format":"np"}', '{"a":"b"}', None], ids=str)
def test_e06_metadata_of_any_sound_form(metadata: str | None, tmp_path: Path) -> None:
    """What is written says `pt` whatever the source says."""
    source = ck.component(tmp_path / "s", TENSORS)
    document = json.dumps(ck.header_of(TENSORS))
    if metadata is not None:
        document = f'{{"__metadata__":{metadata},' + document[1:]
    data = b"".join(tensor.raw for tensor in TENSORS.values())
    (source / WEIGHTS).write_bytes(ck.raw_file(document.encode(), data))
    out = built(source)
    for path in out.glob("*.safetensors"):
        said = ck.header_of_file(path)["__metadata__"]
        assert said["format"] == "pt"
        assert all(isinstance(value, str) for value in said.values())
    assert shardc.verify(out, source).ok


def test_e08_what_is_unaligned_is_aligned(tmp_path: Path) -> None:
    tensors = {
        "a": ck.Data.count("U8", [3]),
        "m.weight": ck.Data.count("F32", [2, 1], 7),
        "c": ck.Data.count("BF16", [5], 9),
        "d": ck.Data.count("F64", [1], 11),
    }
    source = ck.component(tmp_path / "s", tensors)
    raw = json.dumps(ck.header_of(tensors)).encode()
    raw += b" " * (3 - len(raw) % 8)  # the data begins at an odd byte
    (source / WEIGHTS).write_bytes(
        ck.raw_file(raw, b"".join(tensor.raw for tensor in tensors.values()))
    )
    assert (8 + len(raw)) % 2 == 1
    out = built(source)
    for path in out.glob("*.safetensors"):
        header = ck.header_of_file(path)
        start = 8 + int.from_bytes(path.read_bytes()[:8], "little")
        assert start % 4096 == 0
        at = 0
        for name in ck.names(path):
            first, stop = header[name]["data_offsets"]
            assert first == at
            assert (start + first) % (ck.BITS[header[name]["dtype"]] // 8) == 0
            at = stop
    assert shardc.verify(out, source).ok


def test_e10_no_tensors(tmp_path: Path) -> None:
    source = ck.component(tmp_path / "s", {})
    with pytest.raises(PlanError, match="holds no tensor: there is nothing to shard"):
        built(source)


def test_e11_columns_are_packed(tmp_path: Path) -> None:
    weight = ck.Data.count("F16", [4, 6])
    out = built(
        ck.component(tmp_path / "s", {"o_proj.weight": weight}),
        3,
        [{"match": "o_proj", "style": "rowwise"}],
    )
    for rank in range(3):
        path = out / f"rank-{rank:05d}-of-00003.safetensors"
        raw = path.read_bytes()
        start = 8 + int.from_bytes(raw[:8], "little")
        columns = np.ascontiguousarray(weight.words[:, 2 * rank : 2 * rank + 2])
        assert raw[start:] == columns.tobytes()
        assert len(raw) == start + 16


def test_f01_a_download_that_was_cut_short(tmp_path: Path) -> None:
    """As the Hub's cache has it: a link to a blob that is not there yet."""
    plain = ck.component(tmp_path / "s", TENSORS, files=2)
    (plain / "tokenizer.json").write_text("{}")
    snapshot = ck.hub_snapshot(plain, tmp_path / "cache")
    for name in (PART, "tokenizer.json"):
        blob = (snapshot / name).resolve()
        partial = blob.with_name(f"{blob.name}.incomplete")
        blob.rename(partial)
        with pytest.raises(CheckpointError, match=f"{name}.* is a link to a missing file"):
            shardc.plan(snapshot, 2)
        partial.rename(blob)


@pytest.mark.parametrize(
    "stray", [WEIGHTS, "consolidated.safetensors", "adapter_model.safetensors"]
)
def test_f02_strays_are_not_merged(stray: str, tmp_path: Path) -> None:
    """Not passed over in silence either: another loader might take them."""
    source = ck.component(tmp_path / "s", TENSORS, files=2)
    ck.save(source / stray, {"m.weight": ck.Data.count("F32", [4, 2], 99)})
    with pytest.raises(CheckpointError, match=f"{stray} is (a stray weight file|an adapter)"):
        built(source)


@pytest.mark.parametrize("indexed", [True, False])
def test_f05_no_copy_wins(indexed: bool, tmp_path: Path) -> None:
    source = ck.component(tmp_path / "s", TENSORS, files=2)
    ck.save(source / LAST, {**ck.read(source / LAST), "m.weight": ck.Data.count("F32", [4, 2], 9)})
    if not indexed:
        (source / INDEX).unlink()
    says = f"'m.weight' is in both {PART} and {LAST}" if indexed else f"{PART} is one part of"
    with pytest.raises(CheckpointError, match=says):
        built(source)


def test_f07_the_total_is_exact(tmp_path: Path) -> None:
    source = ck.component(tmp_path / "s", TENSORS, files=2)
    index = json.loads((source / INDEX).read_text())
    index["metadata"]["total_size"] = 1
    ck.write_json(source / INDEX, index)
    shardc.merge(built(source), tmp_path / "full")
    total = json.loads((tmp_path / "full" / INDEX).read_text())["metadata"]["total_size"]
    assert total == sum(len(tensor.raw) for tensor in TENSORS.values())


def test_f10_a_byte_of_the_source(tmp_path: Path) -> None:
    """Of the same size and time: the digests of what was built tell."""
    source = ck.component(tmp_path / "s", TENSORS)
    out = built(source)
    before = (source / WEIGHTS).stat()
    raw = bytearray((source / WEIGHTS).read_bytes())
    raw[-1] ^= 1
    (source / WEIGHTS).write_bytes(raw)
    os.utime(source / WEIGHTS, ns=(before.st_atime_ns, before.st_mtime_ns))
    report = shardc.verify(out, source)
    assert any("'n.weight' differs from the source" in str(p) for p in report.problems)
    made = tmp_path / "rules.toml"
    shardc.build(source, tmp_path / "again", 2, manifest=made)
    assert ck.read_index(out)["tensors"] != ck.read_index(tmp_path / "again")["tensors"]


def test_h06_ranks_by_number(tmp_path: Path) -> None:
    """Twelve ranks: 10 is behind 2, whatever order a folder gives its files in."""
    weight = ck.Data.of("F32", np.repeat(np.arange(12, dtype=np.uint32), 4).reshape(12, 4))
    out = built(ck.component(tmp_path / "s", {"m.weight": weight}), 12)
    for rank, held in enumerate(ck.read_ranks(out, 12)):
        assert held["m.weight"].words.tolist() == [[rank] * 4]
    shardc.merge(out, tmp_path / "full")
    assert ck.read_all(tmp_path / "full") == {"m.weight": weight}


def test_h06_two_files_of_a_rank(tmp_path: Path) -> None:
    out = built(ck.component(tmp_path / "s", {"m.weight": ck.Data.count("F32", [12, 2])}), 12)
    third, tenth = (out / f"rank-{rank:05d}-of-00012.safetensors" for rank in (3, 10))
    tenth.write_bytes(third.read_bytes())
    with pytest.raises(ShardSetError, match=f"{tenth.name}: its metadata says rank 3, .* says 10"):
        shardc.merge(out, tmp_path / "full")
    tenth.unlink()
    with pytest.raises(ShardSetError, match=f"{tenth.name}: is missing"):
        shardc.merge(out, tmp_path / "full")


def test_h08_layouts_that_nobody_knows(tmp_path: Path) -> None:
    """A runtime's own layout is nobody else's: neither declared nor by the same count of bytes."""
    tensors = {"m.weight": ck.Data.count("U8", [8, 4])}
    source = ck.component(tmp_path / "s", tensors)
    fused = {"match": "m", "style": "packed_colwise", "blocks": [4, 4], "layout": "runtime:marlin"}
    with pytest.raises(ManifestError, match="layout: input should be 'blocked'"):
        built(source, 2, [fused])
    out = built(source)
    edit = test_verifier.signed(
        lambda d: d["tensors"]["m.weight"]["placement"].update(layout="runtime:marlin")
    )
    index = (out / ck.INDEX).read_bytes()
    edit(out)
    with pytest.raises(ShardSetError, match=r"placement\.layout"):
        shardc.verify(out)
    (out / ck.INDEX).write_bytes(index)
    name = "rank-00001-of-00002.safetensors"
    test_verifier.header(name, lambda d: d["m.weight"].update(dtype="I32", shape=[4]))(out)
    assert any("('I32', (4,)), the index" in str(p) for p in shardc.verify(out).problems)
    pytest.importorskip("torch")
    from shardc.loaders import load_state_dict

    with pytest.raises(ShardSetError, match=r"tensor 'm\.weight' is I32 \[4\], the index says U8"):
        load_state_dict(out, 1)
