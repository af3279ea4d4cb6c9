"""Random checkpoints under random rules, all the way: built as the oracle says, and back again."""

from __future__ import annotations

import math
import random
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import shardc
from shardc import schedule
from shardc.errors import PlanError, ShardSetError
from shardc.writing import Resources
from tests import checkpoints as ck
from tests import oracle
from tests.casts import CASTABLE, cast, same

WHOLE = sorted(name for name, bits in ck.BITS.items() if bits >= 8)


@dataclass(frozen=True)
class Drawn:
    """One tensor, the rule it falls under (None: no rule), and what the oracle is to be told."""

    name: str
    data: ck.Data
    rule: dict[str, Any] | None
    told: dict[str, Any]
    pad_to: int | None = None

    def expected(self, data: ck.Data, tp: int) -> list[ck.Data]:
        if self.rule is None or self.told["style"] == "replicate":
            return [data] * tp
        told = dict(self.told)
        if self.pad_to is not None:
            multiple = math.lcm(self.pad_to, tp)
            told["padded"] = -(-data.shape[told["dim"]] // multiple) * multiple
        found = oracle.shards(data.words, tp, **told)
        return [ck.Data.of(data.dtype, words) for words in found]


@dataclass(frozen=True)
class Job:
    """A checkpoint to build, and how."""

    tensors: tuple[Drawn, ...]
    tp: int
    other_tp: int
    files: int
    workers: int
    chunk: int
    part: int
    dtype: str
    pad_heads: bool

    @property
    def data(self) -> dict[str, ck.Data]:
        return {tensor.name: tensor.data for tensor in self.tensors}

    @property
    def cast(self) -> dict[str, ck.Data]:
        return {name: cast(data, self.dtype) for name, data in self.data.items()}

    def write(self, folder: Path) -> tuple[Path, Path]:
        rules = {}
        for tensor in self.tensors:
            if tensor.rule is not None:
                rules[tensor.rule["match"]] = tensor.rule
        manifest = ck.manifest(folder / "rules.toml", rules.values())
        return ck.component(folder / "source", self.data, files=self.files), manifest


@st.composite
def replicated(draw: st.DrawFn, number: int) -> list[Drawn]:
    """Any dtype, 0-dim and 0-size too; under a rule of its own, or under none."""
    dtype = draw(st.sampled_from(sorted(ck.BITS)))
    shape = draw(st.lists(st.integers(0, 4), max_size=4))
    if ck.BITS[dtype] < 8:
        shape = [*shape, 4]  # whole bytes
    data = ck.Data.random(dtype, shape, np.random.default_rng(number))
    rule = {"match": f"w{number}", "style": "replicate"} if draw(st.booleans()) else None
    return [Drawn(f"w{number}", data, rule, {"style": "replicate"})]


@st.composite
def padded(draw: st.DrawFn, number: int, pad_to: int) -> list[Drawn]:
    dtype = draw(st.sampled_from(WHOLE))
    shape = [draw(st.integers(1, 9)), *draw(st.lists(st.integers(1, 3), min_size=1, max_size=2))]
    dim = draw(st.integers(0, len(shape) - 1))
    style = draw(st.sampled_from(["vocab_parallel", "colwise_gather"]))
    rule = {"match": f"v{number}", "style": style, "pad_to": pad_to, "dim": dim}
    data = ck.Data.random(dtype, shape, np.random.default_rng(number))
    told = {"style": style, "dim": dim}
    return [Drawn(f"v{number}.weight", data, rule, told, pad_to)]


@st.composite
def sharded(draw: st.DrawFn, number: int, tp: int) -> list[Drawn]:
    """A module's weight (and bias), or a raw parameter, under any style and fused layout."""
    packed = draw(st.booleans())
    layout = draw(st.sampled_from(["blocked", "per_head", "per_kv_head"])) if packed else "blocked"
    grouped = layout != "blocked"
    groups = draw(st.sampled_from([tp, 2 * tp])) if grouped else 1
    blocks, units, repeats = [], [], []
    for _ in range(draw(st.integers(1, 4)) if packed else 1):
        unit = draw(st.integers(1, 3))
        repeat = draw(st.booleans())
        if grouped:
            count = draw(st.integers(1, 2))
        elif repeat:
            count = draw(
                st.sampled_from([n for n in range(1, 2 * tp + 1) if not (n % tp and tp % n)])
            )
        else:
            count = tp * draw(st.integers(0 if packed else 1, 2))
        blocks.append(unit * count)
        units.append(unit)
        repeats.append(repeat)
    if sum(blocks) == 0:
        blocks[0] = units[0] * tp
    size = sum(blocks) * groups
    rowwise = draw(st.booleans())
    style = ("packed_" if packed else "") + ("rowwise" if rowwise else "colwise")
    if not packed and draw(st.booleans()):
        style = "rowwise" if rowwise else "colwise_gather"
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    dim = draw(st.integers(0, len(shape)))
    shape.insert(dim, size)
    dtype = draw(st.sampled_from(WHOLE))
    rule: dict[str, Any] = {"style": style, "unit": units, "repeat": repeats, "dim": dim}
    told = {"dim": dim, "style": style, "units": units, "repeats": repeats}
    if packed or draw(st.booleans()):
        rule["blocks"] = told["blocks"] = blocks
    if grouped:
        deinterleave = draw(st.booleans())
        rule.update(layout=layout, deinterleave=deinterleave)
        told.update(layout=layout, deinterleave=deinterleave)
    data = ck.Data.random(dtype, shape, np.random.default_rng(number))
    if draw(st.booleans()):
        return [Drawn(f"p{number}", data, {"match": f"p{number}", **rule}, told)]
    rule["match"] = f"m{number}"
    found = [Drawn(f"m{number}.weight", data, rule, told)]
    if draw(st.booleans()):
        bias = ck.Data.random(dtype, [size], np.random.default_rng(number + 100))
        told = {**told, "bias": True}
        if rowwise:
            told = {"style": "replicate"}
        found.append(
            Drawn(f"m{number}.bias", bias, rule, {**told, **({} if rowwise else {"dim": 0})})
        )
    return found


@st.composite
def zero_headed(draw: st.DrawFn, number: int) -> list[Drawn]:
    """A weight whose heads no degree need divide, in groups or alone."""
    units, groups, repeats, blocks = [], [], [], []
    for _ in range(draw(st.integers(1, 3))):
        unit, count, each = (draw(st.integers(1, n)) for n in (3, 6, 3))
        units.append(unit)
        groups.append(count)
        repeats.append(draw(st.booleans()))
        blocks.append(unit * count * each)
    style = draw(st.sampled_from(["packed_colwise", "packed_rowwise"]))
    shape = draw(st.lists(st.integers(0, 3), max_size=2))
    dim = draw(st.integers(0, len(shape)))
    shape.insert(dim, sum(blocks))
    keys = {"style": style, "blocks": blocks, "dim": dim, "groups": groups}
    rule = {"match": f"z{number}", **keys, "unit": units, "repeat": repeats}
    told = {**keys, "units": units, "repeats": repeats, "zero_heads": True}
    data = ck.Data.random(draw(st.sampled_from(WHOLE)), shape, np.random.default_rng(number))
    return [Drawn(f"z{number}", data, rule, told)]


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    tp = draw(st.sampled_from([1, 2, 3, 4]))
    pad_heads = draw(st.integers(0, 3)) == 0
    pad_to = draw(st.sampled_from([1, 2, 3, 8]))
    tensors: list[Drawn] = []
    if draw(st.booleans()):  # all that follows is unaligned in the source
        data = ck.Data.random("BOOL", [draw(st.sampled_from([1, 3, 5]))], np.random.default_rng(9))
        tensors.append(Drawn("mask", data, None, {"style": "replicate"}))
    for number in range(draw(st.integers(1, 4))):
        kind = draw(st.sampled_from(["sharded", "sharded", "replicated", "padded"]))
        if kind == "sharded" and pad_heads:
            tensors += draw(zero_headed(number))
        elif kind == "sharded":
            tensors += draw(sharded(number, tp))
        elif kind == "padded":
            tensors += draw(padded(number, pad_to))
        else:
            tensors += draw(replicated(number))
    return Job(
        tensors=tuple(tensors),
        tp=tp,
        other_tp=draw(st.sampled_from([1, 2, 3, 4, 6])),
        files=draw(st.integers(1, min(3, len(tensors)))),
        workers=draw(st.integers(1, 3)),
        chunk=draw(st.sampled_from([8, 24, 64, 200, 65536])),
        part=draw(st.sampled_from([1, 40, 300, 4_000_000_000])),
        dtype=draw(st.sampled_from(["keep", "keep", "bf16", "fp16", "fp32"])),
        pad_heads=pad_heads,
    )


def build(job: Job, source: Path, manifest: Path, out: Path, tp: int) -> None:
    resources = Resources(workers=job.workers, memory_bytes=1, fsync=False)
    with patch.object(schedule, "MIN_CHUNK_BYTES", job.chunk):  # so that chunks cut inside rows
        shardc.build(
            source,
            out,
            tp,
            manifest=manifest,
            dtype=job.dtype,
            max_part_bytes=job.part,
            pad_heads=job.pad_heads,
            resources=resources,
        )


@settings(max_examples=300)
@given(jobs())
def test_every_rank_is_what_the_oracle_says(job: Job) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        source, manifest = job.write(folder)
        build(job, source, manifest, folder / "out", job.tp)
        whole = job.cast
        ranks = ck.read_ranks(folder / "out", job.tp)
        for rank, held in enumerate(ranks):
            assert held.keys() == whole.keys()
            for tensor in job.tensors:
                expected = tensor.expected(whole[tensor.name], job.tp)[rank]
                assert held[tensor.name].shape == expected.shape, tensor
                assert same(held[tensor.name], expected), tensor
        assert shardc.verify(folder / "out").problems == ()
        assert shardc.verify(folder / "out", source).problems == ()
        for rank in range(job.tp):
            assert shardc.verify(folder / "out", source, rank=rank).problems == ()


@settings(max_examples=120)
@given(jobs())
def test_merge_gives_the_source_back(job: Job) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        source, manifest = job.write(folder)
        build(job, source, manifest, folder / "out", job.tp)
        with patch.object(schedule, "MIN_CHUNK_BYTES", job.chunk):
            resources = Resources(workers=job.workers, memory_bytes=1, fsync=False)
            shardc.merge(folder / "out", folder / "full", resources=resources)
        names = {path.name for path in source.iterdir()}
        assert {path.name for path in (folder / "full").iterdir()} == names
        for path in source.glob("*.safetensors"):
            merged = ck.read(folder / "full" / path.name)
            wanted = {name: cast(data, job.dtype) for name, data in ck.read(path).items()}
            assert merged.keys() == wanted.keys()
            assert ck.names(folder / "full" / path.name) == ck.names(path)
            for name, data in wanted.items():
                assert same(merged[name], data), name
                if job.dtype == "keep":
                    assert merged[name] == data
        assert (folder / "full" / "config.json").read_bytes() == (
            source / "config.json"
        ).read_bytes()


@settings(max_examples=120)
@given(jobs())
def test_reshard_gives_the_bytes_of_a_build(job: Job) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        source, manifest = job.write(folder)
        build(job, source, manifest, folder / "out", job.tp)
        resources = Resources(workers=job.workers, memory_bytes=1, fsync=False)
        refused: PlanError | None = None
        try:
            build(job, source, manifest, folder / "direct", job.other_tp)
        except PlanError as error:
            refused = error
        if refused is not None:
            with pytest.raises(PlanError) as again:
                shardc.reshard(folder / "out", folder / "new", job.other_tp, resources=resources)
            assert [p.what for p in again.value.problems] == [p.what for p in refused.problems]
            assert not (folder / "new").exists()
            return
        with patch.object(schedule, "MIN_CHUNK_BYTES", job.chunk):
            shardc.reshard(folder / "out", folder / "new", job.other_tp, resources=resources)
        assert ck.contents(folder / "new") == ck.contents(folder / "direct")
        shardc.reshard(folder / "new", folder / "back", job.tp, resources=resources)
        assert ck.contents(folder / "back") == ck.contents(folder / "out")


@settings(max_examples=50)
@given(jobs(), st.integers(0, 2**32))
def test_no_flipped_byte_goes_unseen(job: Job, seed: int) -> None:
    chance = random.Random(seed)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        source, manifest = job.write(folder)
        out = folder / "out"
        build(job, source, manifest, out, job.tp)
        for path in sorted(out.iterdir()):
            whole = path.read_bytes()
            for at in {0, len(whole) - 1, *(chance.randrange(len(whole)) for _ in range(4))}:
                damaged = bytearray(whole)
                damaged[at] ^= 1 << chance.randrange(8)
                path.write_bytes(damaged)
                with suppress(ShardSetError):  # it does not even open
                    assert not shardc.verify(out).ok, f"byte {at} of {path.name}"
            path.write_bytes(whole)
        assert shardc.verify(out, source).ok


def test_the_dtypes_are_all_here() -> None:
    """The strategies draw every dtype that shardc knows, and the casts those that it casts."""
    from shardc.header import DTYPE_BITS
    from shardc.planner import CASTABLE as known

    assert dict(DTYPE_BITS) == ck.BITS
    assert set(CASTABLE) == set(known)
