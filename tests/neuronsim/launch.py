"""Runs ranks that have a simulated core: fresh processes, as torchrun would, or forked ones.

What is measured, killed or needs the device's stack from its start takes a fresh process; what
only computes is forked with the libraries loaded, in a tenth of the time.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests import ranks
from tests.neuronsim import build

ROOT = Path(__file__).parents[2]
SHIM = Path(__file__).parent / "shim"


@dataclass(frozen=True, slots=True)
class Ended:
    """How a rank ended: exit status (negative: a signal), what it printed and what it wrote."""

    status: int
    result: Any
    log: str


def library() -> Path:
    """The device's native part, a minute's work the first time; without a compiler a skip."""
    try:
        return build.library()
    except build.CannotBuildError as missing:
        pytest.skip(f"NOTHING ABOUT THE NEURON DEVICE IS TESTED HERE: {missing}")


def run(device: str, function: Callable[..., Any], size: int, *args: Any) -> list[Any]:
    """What `function(rank, *args)` returns on each of `size` ranks, their group of `device`.

    cpu or neuron: the same function is for both, so nothing in it may need to know. An assertion
    where a rank fails.
    """
    if device == "cpu":
        return ranks.values(ranks.run(function, size, *args))
    with tempfile.TemporaryDirectory() as folder:
        return ranks.values(ranks.run(_on_core, size, f"{folder}/meet", library(), function, args))


def _on_core(
    rank: int, meeting: str, native: Path, function: Callable[..., Any], args: tuple[Any, ...]
) -> Any:
    import torch.distributed as dist

    size = dist.get_world_size()
    first = dist.group.WORLD  # gloo's: held on to, as another rank may still be connecting by it
    dist.destroy_process_group()
    sys.path.insert(0, str(SHIM))
    os.environ["NEURONSIM_LIBRARY"] = str(native)
    import torch_neuronx  # noqa: F401

    from tests.neuronsim import rope

    rope.in_real_numbers()
    dist.init_process_group("neuron", init_method=f"file://{meeting}", rank=rank, world_size=size)
    told = function(rank, *args)
    del first
    return told


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
        "NEURONSIM_LIBRARY": str(library()),
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
