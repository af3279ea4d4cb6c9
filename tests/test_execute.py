"""Writing shards: casts, chunks, workers and memory; the same bytes whatever they are."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import shardc
from shardc import builder, fileio, schedule
from shardc.errors import CheckpointError, OutputError
from shardc.schedule import MAX_CHUNK_BYTES, MIN_CHUNK_BYTES, chunk_bytes
from shardc.writing import Resources
from tests import checkpoints as ck
from tests import oracle
from tests.casts import CASTABLE, WANTED, cast, of_torch, same, to_torch


def built(
    folder: Path,
    tensors: dict[str, ck.Data],
    rules: list[dict[str, Any]],
    tp: int,
    **options: Any,
) -> list[dict[str, ck.Data]]:
    keep = options.pop("keep_in_fp32", [])
    source = ck.component(folder / "source", tensors)
    manifest = ck.manifest(folder / "rules.toml", rules, keep_in_fp32=keep)
    shardc.build(source, folder / "out", tp, manifest=manifest, **options)
    assert shardc.verify(folder / "out", source).problems == ()
    return ck.read_ranks(folder / "out", tp)


# --- casts ---------------------------------------------------------------------------------------

EVERY_16_BITS = np.arange(65536, dtype=np.uint16)


def patterns(dtype: str) -> ck.Data:
    """Every pattern of a 16-bit float; of wider ones the hard cases and many random ones."""
    if ck.BITS[dtype] == 16:
        return ck.Data.of(dtype, EVERY_16_BITS)
    rng = np.random.default_rng(7)
    single = dtype == "F32"
    kind, word = (np.float32, np.uint32) if single else (np.float64, np.uint64)
    random = np.frombuffer(rng.bytes(200_000 * ck.BITS[dtype] // 8), kind)
    # every value of both 16-bit floats, the midpoint to its neighbour, and a hair to either side
    narrow = [
        to_torch(ck.Data.of(name, EVERY_16_BITS)).to(torch.float64).numpy()
        for name in ("F16", "BF16")
    ]
    exact = np.concatenate([values[np.isfinite(values)] for values in narrow])
    exact = np.unique(exact)
    ties = (exact[:-1] + exact[1:]) / 2
    large = [65504, 65519.996, 65520, 65536, 3.3895e38, 3.4e38, 1e39, 1e300, np.inf, np.nan]
    small = [0.0, 5e-324, 1e-45, 7e-46, 2.0**-24, 2.0**-25, 2.0**-149, 2.0**-150]
    special = np.array([*large, *small], np.float64)
    with np.errstate(over="ignore"):
        wide = np.concatenate([exact, ties, special, -special]).astype(kind)
    near = wide[np.isfinite(wide)]
    with np.errstate(over="ignore", under="ignore"):
        hair = [np.nextafter(near, kind(np.inf)), np.nextafter(near, kind(-np.inf))]
    return ck.Data.of(dtype, np.concatenate([random, wide, *hair]).view(word))


@pytest.mark.parametrize("option", WANTED)
@pytest.mark.parametrize("dtype", CASTABLE)
def test_casts_are_those_of_torch(dtype: str, option: str, tmp_path: Path) -> None:
    data = patterns(dtype)
    (ranks,) = built(
        tmp_path, {"w": data}, [{"match": "x", "style": "replicate", "optional": True}], 1,
        dtype=option,
    )  # fmt: skip
    expected = cast(data, option)
    found = ranks["w"]
    assert (found.dtype, found.shape) == (WANTED[option], data.shape)
    nan = to_torch(data).isnan().numpy()
    assert nan.any()
    np.testing.assert_array_equal(found.words[~nan], expected.words[~nan])
    assert to_torch(found).isnan().numpy()[nan].all()
    assert not to_torch(found).isnan().numpy()[~nan].any()


def test_a_tie_by_way_of_double() -> None:
    """F64 to a 16-bit float rounds twice in torch; the patterns above hold cases where it shows."""
    data = patterns("F64")
    finite = to_torch(data)
    with np.errstate(over="ignore"):
        once = finite.numpy().astype(np.float16)
    twice = finite.to(torch.float16).numpy()
    assert (once.view(np.uint16) != twice.view(np.uint16))[np.isfinite(once)].any()


@pytest.mark.parametrize("dtype", sorted(set(ck.BITS) - set(CASTABLE)))
def test_what_is_no_float_is_not_cast(dtype: str, tmp_path: Path) -> None:
    data = ck.Data.count(dtype, [4, 4])
    rules = [{"match": "x", "style": "replicate", "optional": True}]
    assert built(tmp_path, {"w": data}, rules, 1, dtype="bf16")[0]["w"] == data


def test_what_the_model_keeps_in_fp32_stays(tmp_path: Path) -> None:
    data = ck.Data.random("F32", [4, 4], np.random.default_rng(0))
    tensors = {"a.norm.weight": data, "a.normal.weight": data, "m.weight": data}
    rules = [{"match": "m", "style": "colwise"}]
    ranks = built(tmp_path, tensors, rules, 2, dtype="bf16", keep_in_fp32=["norm"])
    assert ranks[0]["a.norm.weight"] == data
    assert same(ranks[0]["a.normal.weight"], cast(data, "bf16"))
    assert ranks[0]["m.weight"].dtype == "BF16"


def test_c16_a_cast_that_overflows_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """T5's `wo` in fp16 makes black images: kept in fp32 it stays, else it is named, once."""
    large = ck.Data.of("F32", np.full((2, 4), 1e5, np.float32).view(np.uint32))
    infinite = ck.Data.of("F32", np.full((4, 2), np.inf, np.float32).view(np.uint32))
    tensors = {"wo.weight": large, "wi.weight": infinite}
    rules = [{"match": "wi", "style": "colwise"}]
    held = built(tmp_path / "kept", tensors, rules, 1, dtype="fp16", keep_in_fp32=["wo"])
    assert held[0]["wo.weight"] == large
    assert held[0]["wi.weight"].dtype == "F16"
    assert not caplog.records
    held = built(tmp_path / "cast", tensors, rules, 1, dtype="fp16")
    assert np.isinf(held[0]["wo.weight"].words.view(np.float16)).all()
    assert [record.getMessage().split(":")[0] for record in caplog.records] == ["wo.weight"]


@pytest.mark.parametrize("style", ["colwise", "rowwise"])
def test_cast_and_cut_at_once(style: str, tmp_path: Path) -> None:
    data = ck.Data.random("F32", [300, 400], np.random.default_rng(0))
    ranks = built(
        tmp_path, {"mask": ck.Data.count("BOOL", [3]), "m.weight": data},
        [{"match": "m", "style": style}], 4,
        dtype="bf16", resources=Resources(memory_bytes=1, workers=2),
    )  # fmt: skip
    expected = oracle.shards(cast(data, "bf16").words, 4, style)
    for held, words in zip(ranks, expected, strict=True):
        assert same(held["m.weight"], ck.Data.of("BF16", words))


# --- chunks --------------------------------------------------------------------------------------


@pytest.mark.parametrize("style", ["colwise", "rowwise", "packed_colwise", "packed_rowwise"])
@pytest.mark.parametrize("shape", [(8, 40_000), (40_000, 8), (64, 3000), (4, 8, 5000)])
def test_tensors_larger_than_a_chunk(style: str, shape: tuple[int, ...], tmp_path: Path) -> None:
    """At the real smallest chunk: cuts between rows, and inside rows that are wider than it."""
    blocks = {"blocks": [4, 4]} if 8 in shape[:2] else {"blocks": [shape[0] // 2] * 2}
    dim = shape.index(8) if 8 in shape else 0
    data = ck.Data.count("F32", shape)
    rule = {"match": "m", "style": style, "dim": dim, **(blocks if "packed" in style else {})}
    resources = Resources(memory_bytes=1, workers=2)
    tensors = {"odd": ck.Data.count("U8", [5]), "m.weight": data}
    ranks = built(tmp_path, tensors, [rule], 2, resources=resources)
    assert len(data.raw) > MIN_CHUNK_BYTES
    told = blocks if "packed" in style else {}
    for held, words in zip(
        ranks, oracle.shards(data.words, 2, style, dim=dim, **told), strict=True
    ):
        assert held["m.weight"] == ck.Data.of("F32", words)
    shardc.merge(tmp_path / "out", tmp_path / "full", resources=resources)
    assert ck.read_all(tmp_path / "full") == tensors


def test_padding_then_more_of_the_same_read(tmp_path: Path) -> None:
    """A padded tensor's digest is read back while its neighbours wait in the read buffer."""
    tensors = {f"t{n}": ck.Data.count("F32", [6], 10 * n) for n in range(9)}
    tensors["t4v.weight"] = ck.Data.count("F32", [5, 2], 500)
    rules = [{"match": "t4v", "style": "vocab_parallel", "pad_to": 64}]
    tensors = dict(sorted(tensors.items()))
    ranks = built(tmp_path, tensors, rules, 2)
    for held in ranks:
        for name in tensors.keys() - {"t4v.weight"}:
            assert held[name] == tensors[name]


def test_one_part_that_is_not_the_tensor(tmp_path: Path) -> None:
    """At tp 1 a set's part may be de-interleaved or padded along an inner dim: not the source."""
    tensors = {"q.weight": ck.Data.count("F32", [12, 4]), "v.weight": ck.Data.count("F32", [4, 5])}
    rules = [
        {
            "match": "q",
            "style": "packed_colwise",
            "blocks": [2, 1],
            "layout": "per_head",
            "deinterleave": True,
        },
        {"match": "v", "style": "colwise_gather", "dim": 1, "pad_to": 4},
    ]
    built(tmp_path, tensors, rules, 1)
    shardc.merge(tmp_path / "out", tmp_path / "full")
    assert ck.read_all(tmp_path / "full") == tensors
    shardc.reshard(tmp_path / "out", tmp_path / "two", 2)
    shardc.build(tmp_path / "source", tmp_path / "direct", 2, manifest=tmp_path / "rules.toml")
    assert ck.contents(tmp_path / "two") == ck.contents(tmp_path / "direct")


@pytest.mark.parametrize("memory", [0, 1, 2**16, 2**20, 2**26, 2**40])
@pytest.mark.parametrize("workers", [1, 2, 3, 16])
def test_chunks_stay_under_the_memory_bound(memory: int, workers: int) -> None:
    size = chunk_bytes(memory, workers)
    assert MIN_CHUNK_BYTES <= size <= MAX_CHUNK_BYTES
    assert size % 4096 == 0
    least = MIN_CHUNK_BYTES * workers * schedule.BUFFERS_A_WORKER
    assert size * workers * schedule.BUFFERS_A_WORKER <= max(memory, least)


# --- one pass, the same bytes --------------------------------------------------------------------


def mixed(folder: Path) -> tuple[Path, Path]:
    tensors = {
        "mask": ck.Data.count("BOOL", [7]),
        "embed.weight": ck.Data.count("BF16", [1001, 64]),
        **{f"blocks.{n}.q.weight": ck.Data.count("F32", [96, 128], n) for n in range(6)},
        **{f"blocks.{n}.o.weight": ck.Data.count("F16", [128, 96], n) for n in range(6)},
        **{f"blocks.{n}.norm": ck.Data.count("F32", [64], n) for n in range(6)},
        "wide.weight": ck.Data.count("F32", [2, 100_000]),
    }
    rules: list[dict[str, Any]] = [
        {"match": "embed", "style": "vocab_parallel", "pad_to": 16},
        {"match": "blocks.*.q", "style": "packed_colwise", "blocks": [32, 32, 32], "unit": 8},
        {"match": "{blocks.*.o,wide}", "style": "rowwise"},
    ]
    source = ck.component(folder / "source", tensors, files=3)
    return source, ck.manifest(folder / "rules.toml", rules)


@pytest.mark.parametrize("dtype", ["keep", "bf16", "fp32"])
def test_neither_workers_nor_memory_change_a_byte(dtype: Any, tmp_path: Path) -> None:
    source, manifest = mixed(tmp_path)
    seen: dict[str, bytes] | None = None
    for workers in (1, 2, 3, 7):
        for memory in (1, 2**20, 2**26):
            out = tmp_path / f"out-{workers}-{memory}"
            resources = Resources(workers=workers, memory_bytes=memory, fsync=False)
            shardc.build(
                source, out, 4, manifest=manifest, dtype=dtype, max_part_bytes=150_000,
                resources=resources,
            )  # fmt: skip
            found = ck.contents(out)
            assert seen is None or found == seen
            seen = found
    assert shardc.verify(out, source).ok


@pytest.mark.parametrize("fsync", [True, False])
def test_what_will_be_synced_is_begun_early(
    fsync: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Now and then, for each file that has as much to write; and it changes no byte."""
    source, manifest = mixed(tmp_path)
    shardc.build(source, tmp_path / "whole", 4, manifest=manifest)
    begun: list[str] = []
    write_back = fileio.write_back

    def recorded(fd: int) -> None:
        begun.append(os.readlink(f"/proc/self/fd/{fd}"))
        write_back(fd)

    monkeypatch.setattr(fileio, "write_back", recorded)
    monkeypatch.setattr(fileio, "WRITE_BACK_BYTES", 50_000)
    resources = Resources(fsync=fsync)
    shardc.build(source, tmp_path / "out", 4, manifest=manifest, resources=resources)
    assert ck.contents(tmp_path / "out") == ck.contents(tmp_path / "whole")
    size = sum(path.stat().st_size for path in (tmp_path / "out").glob("*.safetensors"))
    if fsync:
        assert len(set(begun)) == 4
        assert 0 < len(begun) <= size // 50_000
    else:
        assert not begun


def test_each_source_byte_is_read_once_and_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, manifest = mixed(tmp_path)
    reads: list[tuple[str, int, int]] = []
    read = fileio.Source.read

    def counting(self: fileio.Source, offset: int, into: Any, tensor: str) -> None:
        reads.append((self._file.name, offset, into.nbytes))
        read(self, offset, into, tensor)

    monkeypatch.setattr(fileio.Source, "read", counting)
    resources = Resources(workers=1, memory_bytes=2**22)
    shardc.build(source, tmp_path / "out", 4, manifest=manifest, resources=resources)
    for path in source.glob("*.safetensors"):
        mine = [(at, at + size) for name, at, size in reads if name == path.name]
        raw = path.read_bytes()
        assert mine[0][0] == 0
        assert mine[-1][1] == len(raw) - 8 - int.from_bytes(raw[:8], "little")
        assert all(one[1] == two[0] for one, two in pairwise(mine))
    total = sum(path.stat().st_size for path in source.glob("*.safetensors"))
    assert len(reads) <= math.ceil(total / chunk_bytes(2**22, 1)) + 6 + 3  # not one a tensor


def test_progress_counts_the_source(tmp_path: Path) -> None:
    source, manifest = mixed(tmp_path)
    counted: list[int] = []
    resources = Resources(progress=counted.append, workers=3)
    shardc.build(source, tmp_path / "out", 2, manifest=manifest, resources=resources)
    held = sum(
        len(data.raw) for path in source.glob("*.safetensors") for data in ck.read(path).values()
    )
    assert sum(counted) == held


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_does_not_grow_with_the_checkpoint(tmp_path: Path) -> None:
    """96 MB of weights with buffers of 8 MiB: the process's peak stays far under what it moves."""
    folder = tmp_path / "source"
    data = ck.Data("BF16", (4096, 4096), bytes(2 * 4096 * 4096))
    ck.component(folder, {f"m{n}.weight": data for n in range(3)})
    rules = [{"match": "m0", "style": "colwise"}, {"match": "{m1,m2}", "style": "rowwise"}]
    manifest = ck.manifest(tmp_path / "rules.toml", rules)
    code = (
        "import shardc\n"
        "from pathlib import Path\n"
        "from shardc.writing import Resources\n"
        "resources = Resources(memory_bytes=8 * 2**20, workers=2)\n"
        f"report = shardc.build({str(folder)!r}, {str(tmp_path / 'out')!r}, 8,"
        f" manifest={str(manifest)!r}, resources=resources)\n"
        "lines = Path('/proc/self/status').read_text().splitlines()\n"
        "(peak,) = (int(s.split()[1]) for s in lines if s.startswith('VmHWM'))\n"
        "print(peak * 1024, report.peak_rss_bytes)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    peak, reported = map(int, result.stdout.split())
    assert 2**20 < peak < 150 * 2**20
    assert reported <= peak  # its own, not that of the large process that started it
    assert shardc.verify(tmp_path / "out", folder).ok


# --- a source that moves -------------------------------------------------------------------------


def disturbed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, disturb: Any, **options: Any
) -> CheckpointError:
    """The error of a build whose source is disturbed at its third read; nothing may be left."""
    source, manifest = mixed(tmp_path)
    first = source / "diffusion_pytorch_model-00001-of-00003.safetensors"
    before = sorted(path.name for path in tmp_path.iterdir())
    read = fileio.Source.read
    count = 0

    def third(self: fileio.Source, *arguments: Any) -> None:
        nonlocal count
        count += 1
        if count == 3:
            disturb(first)
        read(self, *arguments)

    monkeypatch.setattr(fileio.Source, "read", third)
    resources = Resources(workers=1, memory_bytes=1)
    with pytest.raises(CheckpointError) as caught:
        shardc.build(source, tmp_path / "out", 2, manifest=manifest, resources=resources)
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    assert str(first) in str(caught.value)
    return caught.value


def test_source_truncated_during_the_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    error = disturbed(tmp_path, monkeypatch, lambda path: path.open("r+b").truncate(20_000))
    assert re.search(
        r"tensor 'embed\.weight': the file ends at byte \d+, \d+ bytes are missing: it shrank "
        "since its header was read",
        str(error),
    )


def test_source_grows_during_the_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def grow(path: Path) -> None:
        with path.open("ab") as file:
            file.write(b"x")

    error = disturbed(tmp_path, monkeypatch, grow)
    assert re.search(
        r"changed during the build: it was size_bytes \d+, mtime_ns \d+, inode \d+, header \w+; "
        r"now size_bytes \d+, .* \(build again from a source at rest\)",
        str(error),
    )


def test_source_touched_during_the_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another byte in place, the size as it was."""

    def touch(path: Path) -> None:
        with path.open("r+b") as file:
            file.seek(-1, 2)
            file.write(b"\xaa")

    assert "changed during the build" in str(disturbed(tmp_path, monkeypatch, touch))


@pytest.mark.parametrize("what", ["inode", "header", "config", "gone"])
def test_source_replaced_during_the_build(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each alone is enough: another file by that name, another header at the same time and size."""

    def replace(path: Path) -> None:
        status = path.stat()
        if what == "inode":
            path.with_name("fresh").write_bytes(path.read_bytes())
            path.with_name("fresh").rename(path)
        elif what == "header":
            raw = path.read_bytes()
            with path.open("r+b") as file:
                file.write(raw.replace(b'"mask"', b'"musk"', 1))
        elif what == "gone":
            path.unlink()
            return
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))

    if what == "config":
        source, manifest = mixed(tmp_path)
        writing = fileio.Output.write

        def touch(self: fileio.Output, *arguments: Any) -> None:
            (source / "config.json").write_text((source / "config.json").read_text() + " ")
            writing(self, *arguments)

        monkeypatch.setattr(fileio.Output, "write", touch)
        with pytest.raises(CheckpointError, match=r"config\.json: changed during the build"):
            shardc.build(source, tmp_path / "out", 2, manifest=manifest)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["rules.toml", "source"]
        return
    error = disturbed(tmp_path, monkeypatch, replace)
    assert "changed during the build" in str(error)
    if what == "gone":
        assert "now cannot open it: No such file or directory" in str(error)


def test_a_header_that_is_not_the_plans(tmp_path: Path) -> None:
    source, manifest = mixed(tmp_path)
    planned = shardc.plan(source, 2, manifest=manifest)
    (first, *_) = sorted(source.glob("*.safetensors"))
    first.write_bytes(first.read_bytes().replace(b'"mask"', b'"musk"', 1))
    with pytest.raises(CheckpointError, match="has another header than when it was planned for"):
        builder.build(planned, tmp_path / "out", Resources())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rules.toml", "source"]


def test_source_gone_since_it_was_planned(tmp_path: Path) -> None:
    source, manifest = mixed(tmp_path)
    planned = shardc.plan(source, 2, manifest=manifest)
    gone = source / "diffusion_pytorch_model-00002-of-00003.safetensors"
    gone.unlink()
    with pytest.raises(CheckpointError) as caught:
        builder.build(planned, tmp_path / "out", Resources())
    assert f"{gone}: cannot open it: No such file or directory" in str(caught.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rules.toml", "source"]


@pytest.mark.parametrize("side", ["source", "shard"])
def test_a_disk_that_fails(side: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """EIO on reading a weight file, or on reading back what was written."""
    source, manifest = mixed(tmp_path)
    preadv = os.preadv

    def fail(fd: int, *arguments: Any) -> int:
        name = os.readlink(f"/proc/self/fd/{fd}")
        if ("/source/" in name) == (side == "source"):
            raise OSError(5, "Input/output error")
        return preadv(fd, *arguments)

    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises((CheckpointError, OutputError)) as caught:
        shardc.build(source, tmp_path / "out", 4, manifest=manifest)
    expected = {
        "source": r"tensor '.*': reading \d+ bytes at \d+ failed: Input/output error",
        "shard": r"rank-.*\.safetensors: cannot write its \d+ bytes: Input/output error",
    }
    assert re.search(expected[side], str(caught.value))
    monkeypatch.undo()
    left = [".out.shardc-partial"] if "--resume continues" in str(caught.value) else []
    assert sorted(path.name for path in tmp_path.iterdir()) == [*left, "rules.toml", "source"]
    if side == "source":  # the first read failed: nothing is worth keeping
        assert not left
    shardc.build(source, tmp_path / "out", 4, manifest=manifest, resume=True)
    assert shardc.verify(tmp_path / "out", source).ok


def test_writes_that_fall_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reads and writes that take a part of what they were given, as the kernel may."""
    source, manifest = mixed(tmp_path)
    shardc.build(source, tmp_path / "whole", 4, manifest=manifest)
    pwrite, preadv = os.pwrite, os.preadv
    monkeypatch.setattr(
        os, "pwrite", lambda fd, data, at: pwrite(fd, data[: 1 + len(data) // 3], at)
    )
    monkeypatch.setattr(
        os, "preadv", lambda fd, views, at: preadv(fd, [views[0][: 1 + len(views[0]) // 3]], at)
    )
    shardc.build(source, tmp_path / "short", 4, manifest=manifest)
    monkeypatch.undo()
    assert ck.contents(tmp_path / "short") == ck.contents(tmp_path / "whole")
    monkeypatch.setattr(os, "pwrite", lambda *_: 0)
    with pytest.raises(OutputError, match="nothing could be written"):
        shardc.build(source, tmp_path / "none", 4, manifest=manifest)


def test_reference_cast_is_its_own_inverse() -> None:
    """The helper that judges casts keeps bits where nothing is to be done."""
    for dtype in CASTABLE:
        data = patterns(dtype)
        assert of_torch(to_torch(data)) == data
