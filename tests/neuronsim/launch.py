"""Runs ranks that have a simulated core, as torchrun would: a process each, told by environment."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.neuronsim import build

ROOT = Path(__file__).parents[2]
SHIM = Path(__file__).parent / "shim"


@dataclass(frozen=True, slots=True)
class Ended:
    """How a rank ended: exit status (negative: a signal), what it printed and what it wrote."""

    status: int
    result: Any
    log: str


def launch(
    module: str,
    case: str,
    *,
    world: int = 1,
    arguments: Mapping[str, Any] | None = None,
    environment: Mapping[str, str] | None = None,
    distributed: bool = True,
    seconds: float = 180,
) -> list[Ended]:
    """`python -m MODULE CASE ARGUMENTS` once a rank; the result is the JSON of its last line.

    distributed: whether the ranks are told of one another. A rank that has not ended after
    `seconds` is killed, and all with it; TimeoutError has their logs.
    """
    common = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(SHIM), str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "NEURONSIM_LIBRARY": str(build.library()),
        "OMP_NUM_THREADS": "1",
        **(environment or {}),
    }
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", module, case, json.dumps(arguments or {})]
    running = []
    with tempfile.TemporaryDirectory() as folder:
        for rank in range(world):
            mine = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world}
            mine |= {"LOCAL_WORLD_SIZE": world, "MASTER_PORT": port}
            told = {name: str(value) for name, value in mine.items()} if distributed else {}
            told["MASTER_ADDR"] = "127.0.0.1"
            out = (Path(folder) / f"{rank}.out").open("w+")
            log = (Path(folder) / f"{rank}.log").open("w+")
            process = subprocess.Popen(command, env=common | told, stdout=out, stderr=log, cwd=ROOT)
            running.append((process, out, log))
        late = _wait([process for process, _, _ in running], seconds)
        ended = []
        for process, out, log in running:
            with out, log:
                out.seek(0)
                log.seek(0)
                ended.append(_ended(process.returncode, out.read(), log.read()))
    if late:
        raise TimeoutError("\n".join(f"rank {rank}: {end.log}" for rank, end in enumerate(ended)))
    return ended


def _wait(processes: list[subprocess.Popen[bytes]], seconds: float) -> bool:
    """Wait for all; after `seconds` end them all and return True."""
    deadline = time.monotonic() + seconds
    for process in processes:
        try:
            process.wait(max(0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            for each in processes:
                each.kill()
                each.wait()
            return True
    return False


def _ended(status: int, printed: str, log: str) -> Ended:
    lines = printed.splitlines()
    try:
        result = json.loads(lines[-1]) if lines else None
    except ValueError:
        result = None
    return Ended(status, result, printed + log)


def results(ended: list[Ended]) -> list[Any]:
    """Each rank's result; AssertionError with the log of one that failed."""
    for rank, end in enumerate(ended):
        assert end.status == 0, f"rank {rank} ended with {end.status}:\n{end.log}"
    return [end.result for end in ended]
