"""Builds that are really killed, and disks that are really full. By hand: benchmarks/crash.py."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]


def crash(folder: Path, *options: object) -> dict[str, Any]:
    """The harness's tally, in a process of its own: it forks, and must have no other threads."""
    command = [sys.executable, "-m", "benchmarks.crash", *map(str, options), "--folder", folder]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    tally: dict[str, Any] = json.loads(done.stdout)
    assert not [key for key in tally if key.isupper()]
    return tally


@pytest.mark.slow
def test_killed_at_every_step(tmp_path: Path) -> None:
    """Before every call that changes the disk, or in the middle of a write; then resumed."""
    tally = crash(tmp_path, "--steps", 1, "--no-fsync")
    assert tally["killed"] > 120
    assert tally["killed"] + tally["ended before"] == tally["resumed"] + tally["up to date"]
    assert min(tally["absent"], tally["old"], tally["new"], tally["up to date"]) > 0
    assert tally["tensors taken over"] > 100


@pytest.mark.slow
def test_killed_at_steps_that_make_durable(tmp_path: Path) -> None:
    assert crash(tmp_path, "--steps", 9)["killed"] > 12


@pytest.mark.slow
def test_killed_at_random(tmp_path: Path) -> None:
    tally = crash(tmp_path, "--kills", 100, "--no-fsync", "--size", 5)
    assert tally["killed"] + tally.get("killed again", 0) >= 100


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a disk")
@pytest.mark.skipif(shutil.which("mkfs.ext4") is None, reason="there is no ext4 here")
def test_full_disks(tmp_path: Path) -> None:
    """Found when blocks are reserved, or only by writing; with room again, the build goes on."""
    try:
        tally = crash(tmp_path, "--disks", 4, "--size", 40, "--no-fsync")
    except AssertionError as error:
        if "loop device" in str(error) or "mount" in str(error):
            pytest.skip("cannot mount a disk here")
        raise
    assert tally["full disk"] == tally["absent"] == tally["resumed"] == 4
    assert tally["nothing left on a full disk"] == 2
