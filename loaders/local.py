"""Ranks on this machine: each a fresh process in one process group, and none is left behind.

Nothing here imports torch before a rank has started, and what a rank prints goes into a file.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TypeVar

from shardc.errors import Problem, ShardcError, ShardSetError

T = TypeVar("T")

BACKENDS = {"cpu": "gloo", "cuda": "nccl", "neuron": "neuron"}
GRACE_S = 15.0  # for the other ranks to end by themselves, and to say why, once one has failed


@dataclass(frozen=True, slots=True)
class _Outcome:
    value: Any = None
    problems: tuple[Problem, ...] = ()


@dataclass(frozen=True, slots=True)
class _Rank:
    number: int
    process: BaseProcess
    pipe: Connection
    log: Path

    def outcome(self) -> _Outcome:
        """What the rank sent; where it died first, how, and the last thing that it printed."""
        with suppress(EOFError, ConnectionResetError):
            told: _Outcome = self.pipe.recv()
            return told
        self.process.join(GRACE_S)
        code = self.process.exitcode or 0
        how = f"died of {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
        lines = self.log.read_text(errors="replace").split("\n") if self.log.exists() else []
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
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="shardc-ranks-") as folder, socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
        held.close()
        ranks: list[_Rank] = []
        try:
            for number in range(size):
                mine, theirs = context.Pipe()
                log = Path(folder) / f"rank-{number}.log"
                place = (number, size, device, f"{folder}/meet", port)
                process = context.Process(
                    target=_enter, args=(work, arguments, place, str(log), theirs), daemon=True
                )
                process.start()
                theirs.close()
                ranks.append(_Rank(number, process, mine, log))
            outcomes = _collect(ranks, timeout_s)
        finally:
            for rank in ranks:
                rank.pipe.close()  # what a rank that is done waits for
            for rank in ranks:
                rank.process.join(2)
                if rank.process.is_alive():
                    rank.process.kill()
                    rank.process.join()
    if problems := _distinct(outcomes):
        raise ShardSetError(problems)
    return [outcome.value for outcome in outcomes]


def _collect(ranks: Sequence[_Rank], timeout_s: float) -> list[_Outcome]:
    outcomes: dict[int, _Outcome] = {}
    waiting = {rank.pipe: rank for rank in ranks}
    deadline = time.monotonic() + timeout_s
    while waiting and (ready := wait(list(waiting), max(0.0, deadline - time.monotonic()))):
        for pipe in ready:
            assert isinstance(pipe, Connection)
            rank = waiting.pop(pipe)
            outcomes[rank.number] = outcome = rank.outcome()
            if outcome.problems:
                deadline = min(deadline, time.monotonic() + GRACE_S)
    failed = any(outcome.problems for outcome in outcomes.values())
    for rank in waiting.values():
        late = Problem(f"rank {rank.number}", f"has not ended after {timeout_s:g} s")
        outcomes[rank.number] = _Outcome(problems=() if failed else (late,))
    return [outcomes[rank.number] for rank in ranks]


def _distinct(outcomes: Sequence[_Outcome]) -> list[Problem]:
    """Every problem once: not again where several ranks met it, or were told of it by another."""
    found = dict.fromkeys(problem for outcome in outcomes for problem in outcome.problems)
    texts = {str(problem) for problem in found}
    return [p for p in found if not (p.where.startswith("rank ") and p.what in texts)]


# --- in a rank ------------------------------------------------------------------------------------


def _enter(
    work: Callable[..., Any],
    arguments: tuple[Any, ...],
    place: tuple[int, int, str, str, int],
    log: str,
    pipe: Connection,
) -> None:
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for stream in (1, 2):
        os.dup2(output, stream)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt is for the parent, which ends all
    try:
        _meet(*place)
        outcome = _Outcome(work(*arguments))
    except ShardcError as error:
        outcome = _Outcome(problems=error.problems)
    except Exception as error:
        traceback.print_exc()
        text = str(error).strip().partition("\n")[0]
        problem = Problem(f"rank {place[0]}", f"{type(error).__name__}: {text}")
        outcome = _Outcome(problems=(problem,))
    with suppress(OSError, EOFError):
        pipe.send(outcome)
        pipe.recv()  # until all are done: a rank that left could cut off another's last message
    sys.stdout.flush()
    os._exit(0)  # without a goodbye: another rank may be dead, and destroying the group would wait


def _meet(rank: int, size: int, device: str, meeting: str, port: int) -> None:
    """Join the process group, as torchrun would have it."""
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(size),
        LOCAL_WORLD_SIZE=str(size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    if sys.platform == "linux":  # else gloo looks the host name up, which not every machine can
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    import torch
    import torch.distributed as dist

    from shardc.loaders import devices

    torch.set_num_threads(max(1, (os.cpu_count() or 1) // size))
    if device == "cuda":
        if torch.cuda.device_count() < size:
            count = torch.cuda.device_count()
            what = f"this torch sees {count} of them, {size} ranks need one each"
            raise devices.DeviceError(Problem("cuda", what))
        torch.cuda.set_device(rank)
    elif device == "neuron":
        try:
            importlib.import_module("torch_neuronx")
        except ImportError:
            devices.resolve("neuron")  # says what to install
    dist.init_process_group(
        BACKENDS[device],
        init_method=f"file://{meeting}" if device == "cpu" else None,
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=60 if device == "cpu" else 600),
    )
