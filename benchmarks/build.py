"""`python -m benchmarks build`: shardc's build against copying the files, and against today's ways.

Whole processes are measured, from their start to their end. Cold: the source is dropped from the
page cache before each run, and each ends with what it wrote on the disk. Else the source is cached
and nobody waits for the disk.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks import build_ways, page_cache
from benchmarks.harness import Contestant, Match, choose
from benchmarks.process import Sample, run_commands

REFERENCE = "cp"
NAMES = ("shardc", "slices", "full")
ABOUT = {
    "cp": "cp -r of the same files: the floor",
    "shardc": "shardc build, digests on",
    "slices": "a process that slices the files for each rank, torch.cat, save_file",
    "full": "a process that loads the whole state dict, cuts it for each rank, save_file",
}


@dataclass(frozen=True, slots=True)
class Job:
    """One source to be built for `tp` ranks into a folder that is emptied after each run."""

    source: Path
    out: Path
    tp: int
    cold: bool
    synced: bool
    everything: bool = False  # of the page cache is dropped
    profile: str = "compact"
    address: str | None = None  # that shardc builds from instead, by this environment
    environment: Mapping[str, str] | None = None

    @property
    def target(self) -> Path:
        return self.out / "built"

    def run(self, name: str) -> Sample:
        self.prepare()
        try:
            return run_commands(self.steps(name), self.environment)
        finally:
            self.clear()

    def prepare(self) -> None:
        self.out.mkdir(parents=True, exist_ok=True)
        self.clear()
        os.sync()  # nobody pays for what another wrote
        files = page_cache.weight_files(self.source)
        if self.cold:
            page_cache.drop(files, everything=self.everything)
        else:
            page_cache.warm(files)

    def clear(self) -> None:
        for path in self.out.glob("*built*"):  # a partial build and its lock too
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    def steps(self, name: str) -> list[list[str]]:
        source, target = str(self.source), str(self.target)
        if name == "cp":
            copied = [
                str(self.target / path.relative_to(self.source))
                for path in page_cache.weight_files(self.source)
            ]
            return [["cp", "-r", source, target], *([["sync", *copied]] if self.synced else [])]
        if name == "shardc":
            step = [sys.executable, "-m", "shardc", "build", self.address or source]
            step += ["--tp", str(self.tp), "-o", target, "--profile", self.profile, "--json"]
            return [step if self.synced else [*step, "--no-fsync"]]
        layout = self.out / "layout.json"
        layout.write_text(json.dumps(build_ways.layout(self.source, self.tp, self.profile)))
        step = [sys.executable, "-m", "benchmarks.build_ways", name, str(layout), target]
        return [[*step, "--sync"] if self.synced else step]


def contestant(job: Job, name: str) -> Contestant:
    return Contestant(name, lambda: job.run(name))


def matches(job: Job, only: Sequence[str] = ()) -> list[Match]:
    """Every contestant against `cp`."""
    reference = contestant(job, REFERENCE)
    group = f"tp {job.tp}"
    return [Match(reference, contestant(job, name), group) for name in choose(NAMES, only)]
