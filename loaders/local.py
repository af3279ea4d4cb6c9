"""Ranks on this machine: each a fresh process in one process group, and none is left behind.

Nothing here imports torch before a rank has started, and what a rank prints goes into a file.
"""

from __future__ import annotations

import importlib
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

from shardc.errors import Problem, ShardcError, ShardSetError

T = TypeVar("T")

BACKENDS = {"cpu": "gloo", "cuda": "nccl", "neuron": "neuron"}
GRACE_S = 15.0  # for the other ranks to end by themselves, and to say why, once one has failed
POLL_S = 0.02
# The parent's own path: where a rank starts in must not decide what it imports.
START = "import sys; sys.path[:] = {path!r}; from shardc.loaders.local import enter; enter({rank})"


@dataclass(frozen=True, slots=True)
class _Job:
    """What all ranks are told."""

    work: Callable[..., Any]
    arguments: tuple[Any, ...]
    size: int
    device: str
    port: int


@dataclass(frozen=True, slots=True)
class _Outcome:
    value: Any = None
    problems: tuple[Problem, ...] = ()


@dataclass(frozen=True, slots=True)
class _Rank:
    number: int
    process: subprocess.Popen[bytes]
    folder: Path

    def outcome(self) -> _Outcome | None:
        """What the rank told, or how it died and the last that it printed; None while it runs."""
        ended = self.process.poll()  # before the look at the file: it is written before the end
        told = self.folder / f"{self.number}.out"
        if told.exists():
            found: _Outcome = pickle.loads(told.read_bytes())
            return found
        if ended is None:
            return None
        how = f"died of {signal.Signals(-ended).name}" if ended < 0 else f"ended with {ended}"
        lines = (self.folder / f"{self.number}.log").read_text(errors="replace").splitlines()
        said = next((line.strip() for line in reversed(lines) if line.strip()), "")
        what = f"{how}: {said}" if said else how
        return _Outcome(problems=(Problem(f"rank {self.number}", what),))


def run(
    work: Callable[..., T], size: int, *arguments: Any, device: str = "cpu", timeout_s: float = 600
) -> list[T]:
    """`work(*arguments)` on `size` ranks of one process group; what each returned, by rank.

    work: a function of an importable module. device: decides the group's backend. Where a rank
    fails, dies, or has not ended after `timeout_s`, all are ended, and ShardSetError says why.
    """
    with tempfile.TemporaryDirectory(prefix="shardc-ranks-") as name:
        folder = Path(name)
        job = _Job(work, arguments, size, device, _free_port())
        (folder / "job").write_bytes(pickle.dumps(job))
        ranks: list[_Rank] = []
        try:
            ranks.extend(_start(number, folder) for number in range(size))
            outcomes = _collect(ranks, timeout_s)
        finally:
            _end(ranks)
    if problems := _distinct(outcomes):
        raise ShardSetError(problems)
    return [outcome.value for outcome in outcomes]


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


def _start(number: int, folder: Path) -> _Rank:
    with (folder / f"{number}.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-c", START.format(path=sys.path, rank=number), str(folder)],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
        )
    return _Rank(number, process, folder)


def _collect(ranks: Sequence[_Rank], timeout_s: float) -> list[_Outcome]:
    outcomes: dict[int, _Outcome] = {}
    deadline = time.monotonic() + timeout_s
    while len(outcomes) < len(ranks) and time.monotonic() < deadline:
        for rank in ranks:
            if rank.number not in outcomes and (outcome := rank.outcome()) is not None:
                outcomes[rank.number] = outcome
                if outcome.problems:
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        time.sleep(POLL_S)
    failed = any(outcome.problems for outcome in outcomes.values())
    for rank in ranks:
        late = Problem(f"rank {rank.number}", f"has not ended after {timeout_s:g} s")
        outcomes.setdefault(rank.number, _Outcome(problems=() if failed else (late,)))
    return [outcomes[rank.number] for rank in ranks]


def _distinct(outcomes: Sequence[_Outcome]) -> list[Problem]:
    """Every problem once: not again where several ranks met it, or were told of it by another."""
    found = dict.fromkeys(problem for outcome in outcomes for problem in outcome.problems)
    texts = {str(problem) for problem in found}
    return [p for p in found if not (p.where.startswith("rank ") and p.what in texts)]


def _end(ranks: Sequence[_Rank]) -> None:
    for rank in ranks:
        assert rank.process.stdin is not None
        rank.process.stdin.close()  # what a rank that is done waits for
    for rank in ranks:
        if not (rank.folder / f"{rank.number}.out").exists():
            rank.process.kill()
        try:
            rank.process.wait(2)
        except subprocess.TimeoutExpired:
            rank.process.kill()
            rank.process.wait()


# --- in a rank ------------------------------------------------------------------------------------


def enter(rank: int) -> None:
    """Do the job in the folder that the command line names, and leave there what came of it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt is for the parent, which ends all
    folder = Path(sys.argv[1])
    try:
        job: _Job = pickle.loads((folder / "job").read_bytes())
        _meet(rank, job, folder)
        outcome = _Outcome(job.work(*job.arguments))
    except ShardcError as error:
        outcome = _Outcome(problems=error.problems)
    except Exception as error:
        traceback.print_exc()
        text = str(error).strip().partition("\n")[0]
        problem = Problem(f"rank {rank}", f"{type(error).__name__}: {text}")
        outcome = _Outcome(problems=(problem,))
    part = folder / f"{rank}.part"
    part.write_bytes(pickle.dumps(outcome))
    part.rename(folder / f"{rank}.out")
    sys.stdin.read()  # until all are done: a rank that left could cut off another's last message
    os._exit(0)  # without a goodbye: another rank may be dead, and destroying the group would wait


def _meet(rank: int, job: _Job, folder: Path) -> None:
    """Join the process group, as torchrun would have it."""
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(job.size),
        LOCAL_WORLD_SIZE=str(job.size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(job.port),
    )
    if sys.platform == "linux":  # else gloo looks the host name up, which not every machine can
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    import torch
    import torch.distributed as dist

    from shardc.loaders import devices

    torch.set_num_threads(max(1, (os.cpu_count() or 1) // job.size))
    if job.device == "cuda":
        if (count := torch.cuda.device_count()) < job.size:
            what = f"torch sees {count} devices here, {job.size} ranks need one each"
            raise devices.DeviceError(Problem("cuda", what))
        torch.cuda.set_device(rank)
    elif job.device == "neuron":
        try:
            importlib.import_module("torch_neuronx")
        except ImportError:
            devices.resolve("neuron")  # says what to install
    gloo = job.device == "cpu"
    dist.init_process_group(
        BACKENDS[job.device],
        init_method=f"file://{folder}/meet" if gloo else None,
        rank=rank,
        world_size=job.size,
        timeout=timedelta(seconds=60 if gloo else 600),
    )
