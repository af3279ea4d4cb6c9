"""Run a function on several ranks, each a process of its own, and see what became of each."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

# Imported once in the server that ranks are forked from: a rank then starts at once.
PRELOAD = [
    "torch.distributed.tensor",
    "accelerate",
    "diffusers.pipelines.flux.pipeline_flux",
    "diffusers.pipelines.flux2.pipeline_flux2_klein",
    "diffusers.pipelines.qwenimage.pipeline_qwenimage",
    "shardc.loaders",
    "tests.zoo.preload",
]


@dataclass(frozen=True)
class Outcome:
    """What one rank returned, or the error that ended it (its text), and when, in seconds."""

    value: Any = None
    error: str | None = None
    seconds: float = 0.0


def _enter(
    function: Callable[..., Any], rank: int, size: int, meeting: str, pipe: Connection, args: Any
) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    started = time.monotonic()
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank))
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{meeting}",
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=60),
        )
        pipe.send(Outcome(function(rank, *args), None, time.monotonic() - started))
    except BaseException as error:
        text = f"{type(error).__name__}: {error}"
        pipe.send(Outcome(None, text, time.monotonic() - started))
    pipe.close()
    os._exit(0)  # without a goodbye: another rank may be dead, and destroying the group would wait


def run(function: Callable[..., Any], size: int, *args: Any, timeout: float = 120) -> list[Outcome]:
    """`function(rank, *args)` on `size` gloo ranks; a rank that dies or hangs has an error, too."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    with tempfile.TemporaryDirectory() as folder:
        processes, pipes = [], []
        for rank in range(size):
            mine, theirs = context.Pipe(duplex=False)
            process = context.Process(
                target=_enter, args=(function, rank, size, f"{folder}/meet", theirs, args)
            )
            process.start()
            theirs.close()
            processes.append(process)
            pipes.append(mine)
        deadline = time.monotonic() + timeout
        outcomes = []
        for process, pipe in zip(processes, pipes, strict=True):
            outcome = Outcome(error="hangs")
            if pipe.poll(max(0.0, deadline - time.monotonic())):
                try:
                    outcome = pipe.recv()
                except EOFError:
                    outcome = Outcome(error="died")
            outcomes.append(outcome)
            process.join(1)
            if process.is_alive():
                process.kill()
        return outcomes


def values(outcomes: list[Outcome]) -> list[Any]:
    """What every rank returned; an assertion where any did not."""
    errors = [outcome.error for outcome in outcomes]
    assert not any(errors), f"ranks failed: {errors}"
    return [outcome.value for outcome in outcomes]
