"""`python -m benchmarks startup`: whole processes, from their start until the model is ready.

On the cpu, into memory of the process; see benchmarks/startup_ways.py for what counts as ready.
Cold: the page cache has nothing of the weights (with --drop-caches nothing of Python either).
"""

from __future__ import annotations

import functools
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import page_cache
from benchmarks.harness import Contestant, Match, choose
from benchmarks.process import ROOT, RunError, Sample, combine, run_workers
from benchmarks.shapes import Workplace, rank_files, source_files

REFERENCE = "diffusers"
ABOUT = {
    "diffusers": "from_pretrained with a TensorParallelConfig, of the full checkpoint",
    "shardc": "prefetch before torch is imported, then load_model as on any cpu: views of the "
    "mapped files, every page touched",
    "shardc, no prefetch": "the same without prefetch",
    "shardc, copied": "load_model by large reads into memory of its own, as diffusers has it",
    "shardc, native": "as shardc, a set of profile native: the tensors that diffusers has",
    "imports": "torch and the model's class imported, nothing loaded: the floor of both",
}
NAMES = tuple(ABOUT)[1:]
# As in benchmarks/startup_ways.py, for what each import takes.
IMPORTS = {
    "shardc": "import shardc.loaders.model, accelerate; "
    "from diffusers import Flux2Transformer2DModel",
    "diffusers": "import accelerate; "
    "from diffusers import Flux2Transformer2DModel, TensorParallelConfig",
}
LINE = re.compile(r"^import time:\s+(\d+) \|\s+(\d+) \| ( *)(\S+)$", re.M)


@dataclass(slots=True)
class Job:
    """One checkpoint and its set, started by some ranks."""

    place: Workplace
    tp: int
    ranks: Sequence[int]
    cold: bool
    everything: bool = False  # of the page cache is dropped
    sets: dict[str, Path] = field(default_factory=dict)  # by profile

    def run(self, name: str) -> Sample:
        profile = "native" if "native" in name else "compact"
        if profile not in self.sets:
            self.sets[profile] = self.place.make_set(self.tp, profile)
        shards = self.sets[profile]
        if name == "diffusers":
            files = source_files(self.place.source)
        else:
            files = [path for rank in self.ranks for path in rank_files(shards, self.tp, rank)]
        if self.cold:
            page_cache.drop(set(files), everything=self.everything)
        else:
            page_cache.warm(set(files))
        way, _, variant = name.partition(", ")
        with tempfile.TemporaryDirectory() as folder:
            job: dict[str, Any] = {
                "way": way,
                "tp": self.tp,
                "ranks": len(self.ranks),
                "source": str(self.place.source),
                "shards": str(shards),
                "reads": "direct" if variant == "copied" else "auto",
                "prefetch": variant in ("", "native"),
                "meet": f"{folder}/meet",
                "begun": time.monotonic(),
            }
            told = run_workers(
                "benchmarks.startup_ways",
                [{**job, "rank": rank} for rank in self.ranks],
                environment={"OMP_NUM_THREADS": "1"},  # as torchrun has it
            )
        return combine(told, job["begun"])


def matches(job: Job, only: Sequence[str] = ()) -> list[Match]:
    """Every contestant against diffusers."""
    count = len(job.ranks)
    group = f"1 rank of {job.tp}" if count != job.tp else f"{count} ranks"
    made = {
        name: Contestant(name, functools.partial(job.run, name))
        for name in (REFERENCE, *choose(NAMES, only))
    }
    return [Match(made[REFERENCE], one, group) for name, one in made.items() if name != REFERENCE]


def import_seconds(way: str) -> dict[str, float]:
    """Seconds that each top-level package's own modules take to import, the largest first.

    `torch` stands for its subpackages too, but for those that cost much by themselves. Python
    measures itself, so everything takes somewhat longer than without.
    """
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", IMPORTS[way]],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise RunError(f"the imports of {way} ended with {done.returncode}")
    return summary(done.stderr)


APART = ("torch._dynamo", "torch._inductor", "torch.distributed", "torch.fx", "torch.onnx")


def summary(printed: str) -> dict[str, float]:
    """From what `-X importtime` prints, by package."""
    found: dict[str, float] = {}
    for own, _, _, module in LINE.findall(printed):
        package = module.split(".")[0]
        for prefix in APART:
            if module == prefix or module.startswith(prefix + "."):
                package = prefix
        if package in sys.stdlib_module_names:
            package = "the standard library"
        found[package] = found.get(package, 0.0) + int(own) / 1e6
    rounded = {name: round(seconds, 4) for name, seconds in found.items()}
    return dict(sorted(rounded.items(), key=lambda item: -item[1]))
