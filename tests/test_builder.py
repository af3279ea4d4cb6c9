"""A shard set appears whole or not at all, looks as the format says, and is the same every time."""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import xxhash

import shardc
from shardc import builder, files
from shardc.errors import OutputError
from shardc.writing import Resources
from tests import checkpoints as ck

TENSORS = {
    "m.weight": ck.Data.count("F32", [8, 4]),
    "m.bias": ck.Data.count("F32", [8], 300),
    "o.weight": ck.Data.count("BF16", [4, 8], 400),
    "norm": ck.Data.count("F32", [4], 500),
}
RULES = [{"match": "m", "style": "colwise"}, {"match": "o", "style": "rowwise"}]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return ck.component(tmp_path / "source", TENSORS, config={"x": 1})


@pytest.fixture
def manifest(tmp_path: Path) -> Path:
    return ck.manifest(tmp_path / "rules.toml", RULES)


def others(folder: Path) -> list[str]:
    """What a folder holds beside the tests' own inputs."""
    return sorted(p.name for p in folder.iterdir() if p.name not in ("source", "rules.toml"))


def test_the_folder(source: Path, manifest: Path, tmp_path: Path) -> None:
    report = shardc.build(source, tmp_path / "out", 2, manifest=manifest)
    assert sorted(ck.contents(tmp_path / "out")) == [
        "config.json",
        "rank-00000-of-00002.safetensors",
        "rank-00001-of-00002.safetensors",
        "replicated.safetensors",
        ck.INDEX,
    ]
    assert others(tmp_path) == ["out"]
    assert (report.tp, report.files, report.sharded, report.kept) == (2, 5, ("",), {})
    assert report.out == str(tmp_path / "out")
    sizes = {name: len(raw) for name, raw in ck.contents(tmp_path / "out").items()}
    assert report.written_bytes == sum(sizes.values())
    assert report.source_bytes == (source / "diffusion_pytorch_model.safetensors").stat().st_size
    assert report.peak_rss_bytes > 0
    assert json.loads(json.dumps(report.to_json()))["files"] == 5


def test_shard_files_are_plain_safetensors(source: Path, manifest: Path, tmp_path: Path) -> None:
    from safetensors import safe_open

    shardc.build(source, tmp_path / "out", 2, manifest=manifest)
    for path in (tmp_path / "out").glob("*.safetensors"):
        raw = path.read_bytes()
        start = 8 + int.from_bytes(raw[:8], "little")
        assert start % 4096 == 0
        assert raw[8:start].rstrip(b" ").endswith(b"}")
        with safe_open(path, "np") as file:
            metadata = file.metadata()
        assert metadata.keys() == {"format", "shardc"}
        assert metadata["format"] == "pt"
        facts = json.loads(metadata["shardc"])
        rank = None if path.stem == "replicated" else int(path.stem[5:10])
        assert (facts["version"], facts["tp"], facts["rank"]) == ("1.0", 2, rank)


def test_the_index(source: Path, manifest: Path, tmp_path: Path) -> None:
    shardc.build(source, tmp_path / "out", 2, manifest=manifest, dtype="bf16")
    out = tmp_path / "out"
    raw = (out / ck.INDEX).read_bytes()
    index = json.loads(raw)
    body, _, _ = raw.rpartition(b',\n "digest"')
    assert index["digest"] == xxhash.xxh3_128_hexdigest(body)
    assert (index["version"], index["tp"], index["profile"]) == ("1.0", 2, "compact")
    assert (index["dtype"], index["max_part_bytes"]) == ("bf16", 4_000_000_000)
    assert index["manifest"]["text"] == manifest.read_text()
    assert index["manifest"]["name"] == "rules.toml"
    assert index["source"]["class"] == ck.CLASS
    assert index["source"]["config"] == xxhash.xxh3_128_hexdigest(
        (source / "config.json").read_bytes()
    )
    assert [file["name"] for file in index["source"]["files"]] == [
        "diffusion_pytorch_model.safetensors"
    ]
    assert list(index["tensors"]) == list(TENSORS)
    ranks = ck.read_ranks(out, 2)
    for name, entry in index["tensors"].items():
        assert entry["shape"] == list(TENSORS[name].shape)
        assert entry["dtype"] == "BF16"
        for rank, shard in enumerate(entry["shards"]):
            assert shard["digest"] == xxhash.xxh3_128_hexdigest(ranks[rank][name].raw)
    for name, entry in index["files"].items():
        assert entry["size"] == (out / name).stat().st_size
    assert "/" not in json.dumps({k: v for k, v in index.items() if k != "manifest"})


def test_the_same_inputs_give_the_same_bytes(source: Path, manifest: Path, tmp_path: Path) -> None:
    """Another path, another time, another hash seed, another directory to stand in."""
    shardc.build(source, tmp_path / "out", 2, manifest=manifest)
    code = f"import shardc; shardc.build('source', 'again', 2, manifest={str(manifest)!r})"
    for seed in ("0", "1"):
        there = tmp_path / f"there{seed}"
        ck.component(there / "source", TENSORS, config={"x": 1})
        subprocess.run(
            [sys.executable, "-c", code],
            cwd=there,
            env={**os.environ, "PYTHONHASHSEED": seed, "TZ": "Asia/Tokyo"},
            check=True,
        )
        assert ck.contents(there / "again") == ck.contents(tmp_path / "out")


def test_fsync_changes_nothing(source: Path, manifest: Path, tmp_path: Path) -> None:
    for fsync in (True, False):
        resources = Resources(fsync=fsync)
        shardc.build(source, tmp_path / f"{fsync}", 2, manifest=manifest, resources=resources)
    assert ck.contents(tmp_path / "True") == ck.contents(tmp_path / "False")


@pytest.mark.parametrize("mask", [0o022, 0o077, 0o002])
def test_modes_are_the_umasks(mask: int, source: Path, manifest: Path, tmp_path: Path) -> None:
    (source / "config.json").chmod(0o600)
    before = os.umask(mask)
    try:
        shardc.build(source, tmp_path / "out", 2, manifest=manifest)
    finally:
        os.umask(before)
    for path in (tmp_path / "out").rglob("*"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~mask, path.name


# --- what is in the way --------------------------------------------------------------------------


def test_an_existing_output_is_refused(source: Path, manifest: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    shardc.build(source, out, 2, manifest=manifest)
    before = ck.contents(out)
    with pytest.raises(OutputError, match=r"out: exists already \(--force replaces it, -o names"):
        shardc.build(source, out, 4, manifest=manifest)
    assert ck.contents(out) == before
    shardc.build(source, out, 4, manifest=manifest, force=True)
    assert "rank-00003-of-00004.safetensors" in ck.contents(out)
    assert others(tmp_path) == ["out"]


@pytest.mark.parametrize("kind", ["folder", "file", "link", "source"])
def test_force_replaces_shard_sets_only(
    kind: str, source: Path, manifest: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    if kind == "folder":
        out.mkdir()
        (out / "thesis.txt").write_text("years of work")
    elif kind == "file":
        out.write_text("years of work")
    elif kind == "link":
        out.symlink_to("nowhere")
    else:
        out = source
    in_the_way = "overlaps its source" if kind == "source" else "exists already"
    with pytest.raises(OutputError, match=in_the_way):
        shardc.build(source, out, 2, manifest=manifest)
    in_the_way = "overlaps its source" if kind == "source" else "is not a shard set, and shardc wi"
    with pytest.raises(OutputError, match=in_the_way):
        shardc.build(source, out, 2, manifest=manifest, force=True)
    assert out.is_symlink() or out.exists()


def test_an_unfinished_build_is_in_the_way(source: Path, manifest: Path, tmp_path: Path) -> None:
    partial = tmp_path / ".out.shardc-partial"
    partial.mkdir()
    (partial / "rank-00000-of-00002.safetensors").write_bytes(b"half")
    with pytest.raises(OutputError, match=r"\.out\.shardc-partial: is left of an unfinished build"):
        shardc.build(source, tmp_path / "out", 2, manifest=manifest)
    with pytest.raises(
        OutputError, match=r"partial: its journal is missing .* \(--force starts ov"
    ):
        shardc.build(source, tmp_path / "out", 2, manifest=manifest, resume=True)
    assert others(tmp_path) == [".out.shardc-partial"]
    shardc.build(source, tmp_path / "out", 2, manifest=manifest, force=True)
    assert shardc.verify(tmp_path / "out", source).ok
    assert others(tmp_path) == ["out"]


def test_a_failed_rebuild_keeps_the_old_set(
    source: Path, manifest: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    shardc.build(source, out, 2, manifest=manifest)
    before = ck.contents(out)

    def fail(_: int) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OutputError, match=r"cannot write it.*: Input/output error"):
        shardc.build(source, out, 4, manifest=manifest, force=True)
    monkeypatch.undo()
    assert ck.contents(out) == before
    assert others(tmp_path) == ["out"]


def test_no_room(
    source: Path, manifest: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Usage:
        free = 1000

    monkeypatch.setattr("shutil.disk_usage", lambda _: Usage)
    with pytest.raises(OutputError, match=r"out: needs \d+ bytes, 1000 are free \(choose another"):
        shardc.build(source, tmp_path / "out", 2, manifest=manifest)
    assert others(tmp_path) == []


def test_a_parent_that_is_a_file(source: Path, manifest: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(OutputError, match="cannot write it: Not a directory"):
        shardc.build(source, tmp_path / "file" / "out", 2, manifest=manifest)


def test_missing_parents_are_made(source: Path, manifest: Path, tmp_path: Path) -> None:
    shardc.build(source, tmp_path / "a" / "b" / "out", 2, manifest=manifest)
    assert shardc.verify(tmp_path / "a" / "b" / "out", source).ok


# --- a disk that is full, a process that is killed -----------------------------------------------


@contextlib.contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Path]:
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)],
        capture_output=True,
        check=False,
    )
    if mounted.returncode:
        pytest.skip("cannot mount a tmpfs here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_leaves_nothing(
    source: Path, manifest: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ENOSPC where the check of free space was too early to know."""
    monkeypatch.setattr(builder, "check_space", lambda *_: None)
    with small_disk(tmp_path / "disk", "24k") as disk:
        with pytest.raises(OutputError) as caught:
            shardc.build(source, disk / "out", 4, manifest=manifest)
        assert re.search(
            r"safetensors: cannot write its \d+ bytes: No space left on device, \d+ are free "
            r"\(free some space, or choose another -o\)$",
            str(caught.value),
        )
        assert list(disk.iterdir()) == []


def test_a_full_disk_while_extras_are_copied(
    source: Path, manifest: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(builder, "check_space", lambda *_: None)
    (source / "notes.txt").write_bytes(bytes(100_000))
    with small_disk(tmp_path / "disk", "24k") as disk:
        with pytest.raises(
            OutputError, match=r"notes\.txt: cannot write its 100000 bytes: No space"
        ):
            shardc.build(source, disk / "out", 4, manifest=manifest)
        assert list(disk.iterdir()) == []


def test_a_file_size_limit_leaves_nothing(source: Path, manifest: Path, tmp_path: Path) -> None:
    """EFBIG, in a process whose files may not grow over 4 KiB."""
    code = (
        "import resource, signal, sys, shardc\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))\n"
        "try:\n"
        f"    shardc.build({str(source)!r}, {str(tmp_path / 'out')!r}, 2,"
        f" manifest={str(manifest)!r})\n"
        "except shardc.errors.OutputError as error:\n"
        "    print(error)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert "rank-00000-of-00002.safetensors: cannot write its " in result.stdout
    assert "File too large" in result.stdout
    assert others(tmp_path) == []
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] != 4096


# --- files that are carried over -----------------------------------------------------------------


def test_components_kept_whole_share_their_bytes(tmp_path: Path) -> None:
    pipe = ck.pipeline(tmp_path / "pipe", {"transformer": ck.CLASS, "vae": "Vae"})
    ck.component(pipe / "transformer", TENSORS)
    ck.component(pipe / "vae", {"c.weight": ck.Data.count("F16", [64])}, class_name="Vae")
    manifest = ck.manifest(tmp_path / "rules.toml", RULES)
    report = shardc.build(pipe, tmp_path / "out", 2, manifest=manifest)
    assert report.kept.keys() == {"vae"}
    assert report.kept["vae"] in ("cloned", "hard-linked", "copied")
    kept = tmp_path / "out" / "vae" / "diffusion_pytorch_model.safetensors"
    given = pipe / "vae" / "diffusion_pytorch_model.safetensors"
    assert kept.read_bytes() == given.read_bytes()
    assert (report.kept["vae"] == "hard-linked") == kept.samefile(given)
    # what is no weight is never shared: editing one must not edit the other
    assert not (tmp_path / "out" / "vae" / "config.json").samefile(pipe / "vae" / "config.json")


def test_weights_behind_a_link_are_shared_or_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "blob").write_bytes(b"bytes")
    (tmp_path / "link").symlink_to("blob")
    way = files.share_file(tmp_path / "link", tmp_path / "shared", fsync=True)
    assert way in ("cloned", "hard-linked")
    assert (tmp_path / "shared").read_bytes() == b"bytes"
    assert not (tmp_path / "shared").is_symlink()

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", refuse)
    if way == "hard-linked":
        assert files.share_file(tmp_path / "link", tmp_path / "kept", fsync=True) is None
    digest = files.copy_file(tmp_path / "link", tmp_path / "kept", fsync=True)
    assert digest == xxhash.xxh3_128_hexdigest(b"bytes") == files.digest_of(tmp_path / "kept")
    assert files.digest_of(tmp_path / "link") is None


def test_write_file_is_whole_or_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files.write_file(tmp_path / "x", b"data", fsync=True)
    assert (tmp_path / "x").read_bytes() == b"data"

    def fail(*_: Any) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OutputError, match="y: cannot write its 4 bytes: Input/output"):
        files.write_file(tmp_path / "y", b"data", fsync=True)
    assert not (tmp_path / "y").exists()
