"""Who the ranks are, and that all of them go on together or all of them stop."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import torch.distributed as dist

from shardc.errors import Problem, ShardcError, ShardSetError
from shardc.remote import Stopped, in_background

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

# A rank that dies is seen at once, its connections break; this is for one that hangs. Ranks of one
# host may read a cold volume at very different speeds, so it is generous.
CONTROL_TIMEOUT = timedelta(minutes=10)
WORD_S = 1.0  # between the ranks' words while they work

T = TypeVar("T")
Facts = Sequence[tuple[str, str]]
Tick = Callable[[int], None]


class Ranks:
    """The ranks that share one model: a mesh axis, the default group, or this process alone.

    `rank` is the coordinate on the axis, never the global rank. Control messages go over gloo,
    whatever the devices' backend is.
    """

    def __init__(self, mesh: DeviceMesh | None = None) -> None:
        self.group: ProcessGroup | None = None
        self.rank, self.size = 0, 1
        if mesh is not None:
            if mesh.ndim != 1:
                raise ShardSetError(
                    Problem("mesh", f"has {mesh.ndim} axes; give one of them, mesh['tp'] say")
                )
            self.group = mesh.get_group()
            self.rank, self.size = mesh.get_local_rank(), mesh.size()
        elif dist.is_available() and dist.is_initialized():
            self.group = dist.group.WORLD
            self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._control = self._gloo()

    def _gloo(self) -> ProcessGroup | None:
        if self.group is None or self.size == 1:
            return None
        made: ProcessGroup = dist.new_group(
            dist.get_process_group_ranks(self.group),
            timeout=CONTROL_TIMEOUT,
            backend="gloo",
            use_local_synchronization=True,
        )
        return made

    def agree(self, error: BaseException | None, facts: Facts = ()) -> None:
        """Meet the other ranks: raise this rank's error, or say which rank's it is.

        facts: what must be the same everywhere, each with its name (the plan's digest, say). Every
        rank must call this.
        """
        self._meet(error, facts, done=True)

    def attend(self, work: Callable[[Tick], T], facts: Facts) -> T:
        """Do on every rank what takes each its own time, and fail on all as soon as one does.

        work: is given what it has to call now and then, which raises where it is to stop. facts:
        as for `agree`. Every rank must call this.
        """
        if self._control is None:
            return work(lambda _: None)
        stop = threading.Event()

        def tick(_: int) -> None:
            if stop.is_set():
                raise Stopped

        outcome = in_background(lambda: work(tick))
        try:
            while True:
                wait([outcome], WORD_S)
                done = outcome.done()
                error = outcome.exception() if done else None
                if self._meet(error, facts, done=done):
                    return outcome.result()
        finally:
            stop.set()

    def _meet(self, error: BaseException | None, facts: Facts, *, done: bool) -> bool:
        """Hear of all ranks, and raise where one has failed; whether all are done."""
        if self._control is None:
            if error is not None:
                raise error
            return done
        told: list[Any] = [None] * self.size
        mine = None if error is None else str(error)
        try:
            dist.all_gather_object(told, (mine, facts, done), group=self._control)
        except RuntimeError as lost:
            raise ShardSetError(
                error.problems
                if isinstance(error, ShardcError)
                else Problem(f"rank {self.rank}", f"another rank is gone: {lost}")
            ) from lost
        if error is not None:
            raise error
        failed = [(rank, reason) for rank, (reason, *_) in enumerate(told) if reason is not None]
        if failed:
            raise ShardSetError(Problem(f"rank {rank}", reason) for rank, reason in failed)
        for rank, (_, other, _) in enumerate(told):
            if other != facts:
                raise ShardSetError(_differs(self.rank, facts, rank, other))
        return all(ready for *_, ready in told)


def _differs(own: int, mine: Facts, rank: int, theirs: Facts) -> Problem:
    """What this rank and another would load otherwise."""
    for (what, one), (_, other) in zip(mine, theirs, strict=False):
        if what == "runtime" and one != other:
            said = ", ".join(f"rank {n}'s is {r!r}" for n, r in sorted([(own, one), (rank, other)]))
            return Problem("ranks", f"they do not load with the same runtime: {said}")
    return Problem("ranks", "they do not load the same shard set", "give all the same path")
