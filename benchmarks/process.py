"""Processes run and measured from outside: a command from start to end, workers while they work.

Time is the monotonic clock's, which all processes of a machine share.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from benchmarks.figures import Figures, UnavailableError, io, memory

ROOT = Path(__file__).parents[1]
SAMPLE_S = 0.01
TIMEOUT_S = 1800.0


class RunError(Exception):
    """A measured process failed; says which, and the last that it printed."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One run. Of several ranks: the time from the first's start to the last's end, the largest
    memory of any, and the sums of the rest. `*_before`: memory when the measured part began."""

    wall: float
    user: float
    system: float
    peak_bytes: int
    peak_before: int
    anon_bytes: int
    anon_before: int
    read_bytes: int  # from the disk
    asked_bytes: int  # by read calls, from the page cache too; not by mappings
    phases: dict[str, float] = field(default_factory=dict)
    delivered_bytes: int = 0
    checksum: int | None = None


class Sampler:
    """A thread that looks at the memory of processes every SAMPLE_S, and how high it got."""

    def __init__(self, pids: Sequence[int]) -> None:
        self._pids = pids
        self._over = threading.Event()
        self.peaks: dict[int, Figures] = {pid: {} for pid in pids}
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Sampler:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        while True:
            for pid in self._pids:
                self._look(pid)
            if self._over.wait(SAMPLE_S):
                return

    def _look(self, pid: int) -> None:
        peaks = self.peaks[pid]
        try:
            now = memory(pid)
        except OSError:  # it has ended
            return
        for name, size_bytes in now.items():
            peaks[name] = max(peaks.get(name, 0), size_bytes)


def _environ(more: Mapping[str, str]) -> dict[str, str]:
    """This process's environment and `more`; modules are compiled once, as an installer does."""
    own = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return {**own, **more}


# --- commands -------------------------------------------------------------------------------------


def run_commands(
    steps: Sequence[Sequence[str]], environment: Mapping[str, str] | None = None
) -> Sample:
    """Run commands one after another and measure them as one, their start and end included.

    environment: what to set besides this process's own.

    What the last prints on stdout may be a JSON object that has `seconds`: its own time, kept as
    phase "work".
    """
    user = system = 0.0
    peak, anon, read, asked = 0, 0, 0, 0
    printed = b""
    begun = time.monotonic()
    for step in steps:
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as log:
            process = subprocess.Popen(
                step, stdout=out, stderr=log, cwd=ROOT, env=_environ(environment or {})
            )
            with Sampler([process.pid]) as sampler:
                # it stays a zombie until its figures are read
                os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
                ended = time.monotonic()
                figures = io(process.pid)
            _, status, used = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
            if process.returncode:
                raise RunError(f"{_name(step)} ended with {process.returncode}: {_tail(log)}")
            out.seek(0)
            printed = out.read()
        user, system = user + used.ru_utime, system + used.ru_stime
        peaks = sampler.peaks[process.pid]
        peak, anon = max(peak, peaks.get("VmHWM", 0)), max(anon, peaks.get("RssAnon", 0))
        read, asked = read + figures["read_bytes"], asked + figures["rchar"]
    phases = {"work": own} if (own := _seconds(printed)) is not None else {}
    return Sample(ended - begun, user, system, peak, 0, anon, 0, read, asked, phases)


def _name(step: Sequence[str]) -> str:
    return " ".join(Path(word).name for word in step[:4])


def _seconds(printed: bytes) -> float | None:
    try:
        told = json.loads(printed)
    except ValueError:
        return None
    return float(told["seconds"]) if isinstance(told, dict) and "seconds" in told else None


def _tail(log: IO[bytes]) -> str:
    log.seek(0)
    lines = log.read().decode(errors="replace").strip().splitlines()
    return " / ".join(lines[-3:]) or "it printed nothing"


# --- workers --------------------------------------------------------------------------------------


class _Worker:
    """`python -m MODULE JOB`: lines of JSON come from it; where it waits, a line sets it going."""

    def __init__(self, module: str, job: Mapping[str, Any], environment: Mapping[str, str]) -> None:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the worker
        own = {name: str(value) for name, value in job.get("environment", {}).items()}
        self.process = subprocess.Popen(
            [sys.executable, "-m", module, json.dumps(job)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            cwd=ROOT,
            env=_environ({**environment, **own}),
        )

    def go(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(b"go\n")
        self.process.stdin.flush()

    def told(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            status = self.process.wait()
            raise RunError(f"a worker ended with {status}: {_tail(self._log)}")
        told: dict[str, Any] = json.loads(line)
        if "unavailable" in told:
            raise UnavailableError(told["unavailable"])
        return told

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout, self._log):
            if pipe is not None:
                pipe.close()


def run_workers(
    module: str,
    jobs: Sequence[Mapping[str, Any]],
    *,
    environment: Mapping[str, str] | None = None,
    before_go: Callable[[], None] | None = None,
) -> list[dict[str, Any]]:
    """What each job's worker told at its end, `peaks` of its memory added.

    before_go: called once all are ready, then all are let go at once; None where they do not
    wait. The first failure ends all.
    """
    with ExitStack() as stack:
        workers = []
        for job in jobs:
            workers.append(_Worker(module, job, environment or {}))
            stack.callback(workers[-1].end)
        late = threading.Timer(TIMEOUT_S, _kill, [workers])
        late.start()
        stack.callback(late.cancel)
        if before_go is not None:
            _each(workers)
            before_go()
        with Sampler([worker.process.pid for worker in workers]) as sampler:
            if before_go is not None:
                for worker in workers:
                    worker.go()
            told = _each(workers)
        peaks = [sampler.peaks[worker.process.pid] for worker in workers]
        return [{**one, "peaks": peak} for one, peak in zip(told, peaks, strict=True)]


def _kill(workers: Sequence[_Worker]) -> None:
    for worker in workers:
        worker.process.kill()


def _each(workers: Sequence[_Worker]) -> list[dict[str, Any]]:
    """A line from every worker; where one fails the others are ended, as they may wait for it."""

    def hear(worker: _Worker) -> dict[str, Any]:
        try:
            return worker.told()
        except BaseException:
            for other in workers:
                if other is not worker:
                    other.process.kill()
            raise

    with ThreadPoolExecutor(len(workers)) as pool:
        heard = [pool.submit(hear, worker) for worker in workers]
    failures = [error for future in heard if (error := future.exception())]
    if failures:
        # the first to fail says why, those that were ended for it do not
        raise min(failures, key=lambda error: "ended with -9" in str(error))
    return [future.result() for future in heard]


def combine(told: Sequence[Mapping[str, Any]], begun: float | None = None) -> Sample:
    """The sample of workers that ran at once; from their own begin, or from `begun` on."""
    first = min(one["begun"] for one in told) if begun is None else begun
    last = max(told, key=lambda one: one["ended"])
    checks = [one["checksum"] for one in told if one.get("checksum") is not None]
    return Sample(
        wall=last["ended"] - first,
        user=sum(one["user"] for one in told),
        system=sum(one["system"] for one in told),
        peak_bytes=max(one["peak_bytes"] for one in told),
        peak_before=max(one["peak_before"] for one in told),
        anon_bytes=max(max(one["anon_bytes"], one["peaks"].get("RssAnon", 0)) for one in told),
        anon_before=max(one["anon_before"] for one in told),
        read_bytes=sum(one["read_bytes"] for one in told),
        asked_bytes=sum(one["asked_bytes"] for one in told),
        phases=last.get("phases", {}),
        delivered_bytes=sum(one["delivered_bytes"] for one in told),
        checksum=sum(checks) if len(checks) == len(told) else None,
    )
