"""`python -m benchmarks load`: one rank, or all ranks of a host at once, from files to the device.

The load alone is measured: imports, and what a server has before it loads, are done. The device is
a stand-in (benchmarks/staging.py): each byte is copied once, into a reused buffer. The page cache
holds the files, or, cold, nothing of them.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import page_cache
from benchmarks.harness import Contestant, Match, choose
from benchmarks.process import ROOT, RunError, Sample, combine, run_workers
from benchmarks.shapes import Workplace, rank_files, source_files

REFERENCE = "diffusers"
OPTIONAL = ("fastsafetensors", "runai", "instanttensor")
ABOUT = {
    "diffusers": "slices of the full checkpoint, by diffusers' `_load_shard_file_tp`",
    "shardc": "the rank's shard, profile compact",
    "shardc, native": "the rank's shard, profile native: the tensors that diffusers has",
    "load_file": "safetensors' load_file of the same shard, then the copy",
    "fastsafetensors": "fastsafetensors of the same shard, then the copy",
    "runai": "runai-model-streamer of the same shard, then the copy",
    "instanttensor": "instanttensor of the same shard",
    "floor": "the same bytes by large reads into reused buffers, without a copy",
    "floor, direct": "the same, past the page cache",
    "shardc, views": "views of the mapped files on the cpu, of which nothing is read yet",
    "shardc, neuron": "the rank's shard onto a simulated Neuron core, fresh device memory",
    "diffusers, neuron": "diffusers' slices onto the same",
}
NAMES = tuple(ABOUT)[1:]
WAYS = {"shardc, views": "views", "floor, direct": "floor, direct"}  # else its name's first word
ONE_RANK = ("shardc, native", "shardc, views", "shardc, neuron", "diffusers, neuron")


@dataclass(slots=True)
class Job:
    """One checkpoint and its set, loaded by some ranks at once."""

    place: Workplace
    tp: int
    ranks: Sequence[int]
    cold: bool
    everything: bool = False  # of the page cache is dropped
    checked: dict[str, tuple[int, int]] = field(default_factory=dict)  # what each has copied
    sets: dict[str, Path] = field(default_factory=dict)  # by profile

    def files(self, name: str, rank: int) -> list[Path]:
        if name.startswith("diffusers"):
            return source_files(self.place.source)
        return rank_files(self.shards(name), self.tp, rank)

    def shards(self, name: str) -> Path:
        profile = "native" if "native" in name else "compact"
        if profile not in self.sets:
            self.sets[profile] = self.place.make_set(self.tp, profile)
        return self.sets[profile]

    def run(self, name: str) -> Sample:
        files = sorted({path for rank in self.ranks for path in self.files(name, rank)})
        first = name not in self.checked
        jobs = [self.job(name, rank, check=first) for rank in self.ranks]

        def before() -> None:
            if self.cold:
                page_cache.drop(files, everything=self.everything)
            else:
                page_cache.warm(files)

        torchrun = {"OMP_NUM_THREADS": "1", "LOCAL_WORLD_SIZE": str(len(jobs))}
        told = run_workers("benchmarks.load_ways", jobs, environment=torchrun, before_go=before)
        sample = combine(told)
        if first:
            self.check(name, sample)
        return sample

    def job(self, name: str, rank: int, *, check: bool) -> dict[str, Any]:
        way, _, variant = name.partition(", ")
        neuron = variant == "neuron"
        return {
            "way": WAYS.get(name, way),
            "device": "neuron" if neuron else "meta",
            "rank": rank,
            "tp": self.tp,
            "source": str(self.place.source),
            "shards": str(self.shards(name)),
            "files": [str(path) for path in self.files(name, rank)],
            "check": check,
            "environment": neuron_environment() if neuron else {},
        }

    def check(self, name: str, sample: Sample) -> None:
        """RunError where two that load the same tensors did not copy the same."""
        self.checked[name] = (sample.delivered_bytes, sample.checksum or 0)
        if sample.checksum is None:
            return
        native = ("diffusers", "shardc, native")
        alike = native if name in native else ("shardc", "load_file", *OPTIONAL)
        found = {other: self.checked[other] for other in alike if other in self.checked}
        if len(set(found.values())) > 1:
            raise RunError(f"they did not load the same (bytes, sum): {found}")


def neuron_environment() -> Mapping[str, str]:
    """What a process with a simulated core needs; RunError where its device cannot be built."""
    from tests.neuronsim import build

    try:
        native = build.library()
    except build.CannotBuildError as missing:
        raise RunError(f"no simulated core: {missing}") from missing
    shim = ROOT / "tests" / "neuronsim" / "shim"
    return {"PYTHONPATH": f"{shim}:{ROOT}", "NEURONSIM_LIBRARY": str(native)}


def contestant(job: Job, name: str) -> Contestant:
    run = functools.partial(job.run, name)
    return Contestant(name, run, optional=name in OPTIONAL or "neuron" in name)


def matches(job: Job, only: Sequence[str] = ()) -> list[Match]:
    """Every contestant against diffusers, and shardc against what it must not be slower than."""
    group = "1 rank" if len(job.ranks) == 1 else f"{len(job.ranks)} ranks at once"
    names = [
        name
        for name in choose(NAMES, only)
        if (name not in ONE_RANK or len(job.ranks) == 1) and (name != "floor, direct" or job.cold)
    ]
    made = {name: contestant(job, name) for name in (REFERENCE, *names)}
    found = []
    for name in names:
        if name == "diffusers, neuron":
            continue
        base = REFERENCE
        if name == "shardc, neuron" and "diffusers, neuron" in names:
            base = "diffusers, neuron"
        found.append(Match(made[base], made[name], group))
    if "shardc" in names:
        bases = [name for name in ("load_file", "floor", "floor, direct") if name in names]
        found += [Match(made[base], made["shardc"], group) for base in bases]
    return found
