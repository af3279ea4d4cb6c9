"""Benchmarks run, tiny: what they print is there, times are not judged."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("diffusers.hooks.tensor_parallel", reason="diffusers below 0.42")

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
def test_forward() -> None:
    """Every contestant runs, and gives what diffusers' own sharding gives."""
    told = ["--head", "8", "--tokens", "4", "--rounds", "1", "--json"]
    command = [sys.executable, "-m", "benchmarks.forward", *told]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    assert [row["runtime"] for row in rows] == [
        "plain, compact",
        "plain, native",
        "dtensor",
        "diffusers",
    ]
    assert all(0 < row["fastest"] <= row["median"] for row in rows)
