"""Builds that are killed, and disks that are full: does the promise hold each time?

The promise: OUT is absent, or whole (the old set or the new one). After `--resume` it has the very
bytes of an undisturbed build, and no tensor that the journal vouches for was written again.

Every build is a forked child. A step is a call that changes the disk; one can be killed before it,
or, if it writes bytes, in its middle.
"""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import xxhash

import shardc
from shardc import builder, workspace
from shardc.demo import CONFIG, write_flux2
from shardc.errors import ShardcError
from shardc.journal import Journal, read_journal
from shardc.synthetic import DTYPES, write_json, write_weights
from shardc.writing import Resources

TP, OLD_TP = 4, 2
STEPS = ("fsync", "ftruncate", "link", "mkdir", "posix_fallocate", "pwrite", "rename", "rmdir",
         "unlink", "write")  # fmt: skip
TORN = ("pwrite", "write")
KILLED, FAILED = -signal.SIGKILL, 1
Action = Callable[[], Any]


def make_source(folder: Path, size_bytes: int) -> Path:
    """A FLUX.2 of about that size, with a component that is kept whole and a large extra file."""
    small = size_bytes < 10_000_000
    config = {**CONFIG, "num_attention_heads": 4 if small else 8, "num_layers": 1}
    config["attention_head_dim"] = 32 if small else 128
    config["num_single_layers"] = 1 if small else max(1, (size_bytes - 60_000_000) // 29_000_000)
    write_flux2(folder, config)
    write_weights(
        folder / "vae", "diffusion_pytorch_model", [("conv.weight", (512, 512))],
        dtype=DTYPES["bf16"],
    )  # fmt: skip
    write_json(folder / "vae" / "config.json", {"_class_name": "AutoencoderKLFlux2"})
    index = json.loads((folder / "model_index.json").read_text())
    index["vae"] = ["diffusers", "AutoencoderKLFlux2"]
    write_json(folder / "model_index.json", index)
    (folder / "tokenizer").mkdir()
    (folder / "tokenizer" / "tokenizer.json").write_bytes(b"words " * 200_000)
    return folder


def contents(folder: Path) -> dict[str, str]:
    """Every file below `folder`, by the digest of its bytes."""
    return {
        path.relative_to(folder).as_posix(): xxhash.xxh3_128_hexdigest(path.read_bytes())
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def forked(action: Action, *, kill_after: float | None = None) -> tuple[int, Any]:
    """Run `action` in a child: its exit status (-9: killed), and what it returned or said."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = FAILED
        try:
            os.close(reading)
            try:
                told, status = action(), 0
            except ShardcError as error:
                told = str(error)
            with os.fdopen(writing, "w") as pipe:
                json.dump(told, pipe)
        finally:
            os._exit(status)
    os.close(writing)
    if kill_after is not None:
        time.sleep(kill_after)
        os.kill(pid, signal.SIGKILL)
    with os.fdopen(reading) as pipe:
        raw = pipe.read()
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return code, json.loads(raw) if raw else None


def killing(action: Action, step: int, *, torn: bool) -> Action:
    """`action` that dies at its `step`-th step; one that has fewer ends well."""

    def doomed() -> Any:
        lock = threading.Lock()
        count = 0

        def watched(name: str) -> Callable[..., Any]:
            call = getattr(os, name)

            def stepping(first: Any, *rest: Any, **options: Any) -> Any:
                nonlocal count
                with lock:
                    count += 1
                    mine = count
                if mine == step:
                    if torn and name in TORN:
                        data = rest[0]
                        call(first, data[: len(data) // 2], *rest[1:])
                    os.kill(os.getpid(), signal.SIGKILL)
                return call(first, *rest, **options)

            return stepping

        for name in STEPS:
            setattr(os, name, watched(name))
        return action()

    return doomed


@dataclass
class Trial:
    """A place to build in, what ends up there undisturbed, and a tally of what was found."""

    folder: Path
    source: Path
    fsync: bool

    def __post_init__(self) -> None:
        self.out = self.folder / "out"
        self.partial = self.folder / ".out.shardc-partial"
        self.tally: Counter[str] = Counter()
        self.wanted = self._reference(TP)
        self.old = self._reference(OLD_TP)

    def _reference(self, tp: int) -> dict[str, str]:
        resources = Resources(fsync=False)
        shardc.build(self.source, self.folder / f"tp{tp}", tp, resources=resources)
        return contents(self.folder / f"tp{tp}")

    def build(self, **options: Any) -> dict[str, Any]:
        resources = Resources(fsync=self.fsync)
        return shardc.build(self.source, self.out, TP, resources=resources, **options).to_json()

    def clear(self, *, old: bool = False) -> None:
        """Nothing at OUT and beside it, or the old set."""
        for path in (self.out, *self.folder.glob(".out.*")):
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        if old:  # links: nothing writes into a file that stands
            shutil.copytree(self.folder / f"tp{OLD_TP}", self.out, copy_function=os.link)

    def look(self, *, old: bool) -> str:
        """What stands at OUT, and whether it may."""
        if not self.out.exists():
            return "absent"
        found = contents(self.out)
        if found == self.wanted:
            return "new"
        return "old" if old and found == self.old else "WRONG"

    def finish(self, *, old: bool) -> None:
        """Resume; the bytes must be the reference's, and nothing may be left or done again."""
        vouched = 0
        if (self.partial / "set").exists() and (past := read_journal(self.partial / "journal")):
            vouched = sum(map(len, past.tensors.values()))
        force = old and not vouched  # killed before it had begun: as if it had never been started
        code, told = forked(lambda: self.build(resume=True, force=force))
        if code == FAILED and old and "exists already" in str(told):
            code, told = forked(lambda: self.build(resume=True, force=True))
        if code:
            self.tally["FAILED"] += 1
            click.echo(f"resume failed: {told}", err=True)
            return
        self.tally["up to date" if told["up_to_date"] else "resumed"] += 1
        if contents(self.out) != self.wanted:
            self.tally["NOT IDENTICAL"] += 1
        if told["resumed_tensors"] != vouched:
            self.tally["DONE AGAIN"] += 1
            click.echo(f"{vouched} tensors vouched for, {told['resumed_tensors']} kept", err=True)
        self.tally["tensors taken over"] += vouched
        if left := [path.name for path in self.folder.glob(".out.*")]:
            self.tally["LEFT BEHIND"] += 1
            click.echo(f"left behind: {left}", err=True)

    def kill(self, doom: Callable[[Action], int], *, old: bool, again: bool) -> int:
        """Kill a build, and perhaps its resumption, by `doom`; look, and finish it."""
        self.clear(old=old)
        code = doom(lambda: self.build(force=old))
        self.tally["killed" if code == KILLED else "ended before"] += 1
        self.tally[self.look(old=old)] += 1
        if again and code == KILLED:
            code = doom(lambda: self.build(resume=True, force=old))
            self.tally["killed again" if code == KILLED else "ended before"] += 1
            self.tally[self.look(old=old)] += 1
        self.finish(old=old)
        return code


def at_random(trial: Trial, kills: int, chance: random.Random) -> None:
    """Kill at moments spread over a build's time, a third again while it resumes."""
    times = []
    for _ in range(3):
        trial.clear()
        started = time.monotonic()
        forked(trial.build)
        times.append(time.monotonic() - started)
    span = statistics.median(times)
    trial.tally["build, ms"] = round(span * 1000)

    def doom(action: Action) -> int:
        return forked(action, kill_after=chance.uniform(0, span))[0]

    while trial.tally["killed"] + trial.tally["killed again"] < kills:
        trial.kill(doom, old=chance.random() < 0.25, again=chance.random() < 0.33)


def at_every_step(trial: Trial, every: int) -> None:
    """Kill before each step of a build, and in the middle of each that writes."""
    workspace.JOURNALLED_BYTES = 100_000  # so that the large extra file is in it
    step = 1
    while True:
        torn = (step // every) % 2 == 1
        code = trial.kill(
            lambda action, step=step, torn=torn: forked(killing(action, step, torn=torn))[0],
            old=step % 3 == 0,
            again=False,
        )
        if code != KILLED:
            return
        step += every


@contextmanager
def small_disk(folder: Path, size_bytes: int) -> Iterator[Path]:
    """An ext4 of that size, mounted; needs root."""
    image, disk = folder / "image", folder / "disk"
    disk.mkdir(exist_ok=True)
    with image.open("wb") as file:
        file.truncate(size_bytes)
    # no reserve, so that what is free is what may be used
    subprocess.run(["mkfs.ext4", "-q", "-F", "-m", "0", str(image)], check=True)
    subprocess.run(["mount", "-o", "loop", str(image), str(disk)], check=True)
    try:
        yield disk
    finally:
        subprocess.run(["umount", str(disk)], check=True)
        image.unlink()


def unsupported(*_: Any) -> None:
    """As a filesystem that cannot reserve blocks says it."""
    raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))


def on_full_disks(trial: Trial, rounds: int, chance: random.Random) -> None:
    """Build where there is room at first, and ballast takes it; then make room, and resume."""
    size = sum(path.stat().st_size for path in (trial.folder / f"tp{TP}").rglob("*.safetensors"))
    with small_disk(trial.folder, 2 * size + 30_000_000) as disk:
        full = Trial.__new__(Trial)
        full.folder, full.source, full.fsync = disk, trial.source, trial.fsync
        full.out, full.partial = disk / "out", disk / ".out.shardc-partial"
        full.wanted, full.old, full.tally = trial.wanted, trial.old, trial.tally
        for number in range(rounds):
            full.clear()
            reserves = number % 2 == 0  # else the disk is found full only by writing
            ballast = disk / "ballast"
            left = chance.randrange(size)

            def fill(left: int = left, ballast: Path = ballast) -> None:
                room = shutil.disk_usage(disk).free - left
                fd = os.open(ballast, os.O_CREAT | os.O_WRONLY)
                os.posix_fallocate(fd, 0, max(1, room))

            def build_in_vain(reserves: bool = reserves, fill: Action = fill) -> Any:
                def no_room(*_: Any) -> None:  # it goes once it was checked
                    fill()
                    if not reserves:
                        os.posix_fallocate = unsupported

                vars(builder)["check_space"] = no_room
                return full.build()

            code, told = forked(build_in_vain)
            trial.tally["full disk"] += 1
            if code != FAILED or "No space left on device" not in str(told):
                trial.tally["NOT REFUSED"] += 1
                click.echo(f"on a full disk: {code} {told}", err=True)
            trial.tally[full.look(old=False)] += 1
            kept = any((full.partial / "set").glob("**/*")) if full.partial.exists() else False
            trial.tally["kept on a full disk" if kept else "nothing left on a full disk"] += 1
            if kept and "--resume continues" not in str(told):
                trial.tally["NOT TOLD"] += 1
            ballast.unlink()
            full.finish(old=False)


def cost(trial: Trial, rounds: int) -> dict[str, float]:
    """Builds with their journal and without, one after the other: medians, in milliseconds.

    A child's processor time is steadier than its wall time where others use the machine.
    """
    init, add = Journal.__init__, Journal.add_tensors
    inside = 0.0

    def timed(call: Callable[..., None]) -> Callable[..., None]:
        def calling(*arguments: Any, **options: Any) -> None:
            nonlocal inside
            started = time.perf_counter()
            call(*arguments, **options)
            inside += time.perf_counter() - started

        return calling

    def build() -> Any:
        seconds = trial.build()["seconds"]
        return seconds, time.process_time(), inside

    found: dict[bool, list[Any]] = {True: [], False: []}
    for number in range(2 * rounds):
        journalled = number % 2 == (number // 2) % 2  # which comes first alternates, too
        trial.clear()
        Journal.__init__ = timed(init)  # type: ignore[method-assign]
        Journal.add_tensors = timed(add) if journalled else lambda *_: None  # type: ignore[method-assign]
        found[journalled].append(forked(build)[1])
    Journal.__init__, Journal.add_tensors = init, add  # type: ignore[method-assign]
    report = {}
    for column, what in enumerate(("wall", "processor")):
        one, other = ([row[column] for row in found[which]] for which in (True, False))
        report[f"{what}, with"] = statistics.median(one) * 1000
        report[f"{what}, without"] = statistics.median(other) * 1000
        ratios = [a / b for a, b in zip(one, other, strict=True)]
        report[f"{what}, median of ratios"] = statistics.median(ratios)
    report["in the journal's code"] = statistics.median(row[2] for row in found[True]) * 1000
    return report


@click.command()
@click.option("--kills", default=0, help="Kill this many builds at random moments.")
@click.option("--steps", "every", default=0, metavar="N", help="Kill at every N-th step.")
@click.option("--disks", default=0, help="Build on this many full disks (needs root).")
@click.option("--cost", "rounds", default=0, help="Time this many builds with a journal, without.")
@click.option("--size", default=1.0, show_default=True, metavar="MB", help="Of the checkpoint.")
@click.option("--seed", default=0, show_default=True)
@click.option("--fsync/--no-fsync", default=True, show_default=True)
@click.option("--folder", type=click.Path(path_type=Path, file_okay=False), help="Where to build.")
def main(
    kills: int, every: int, disks: int, rounds: int, size: float, seed: int, fsync: bool,
    folder: Path | None,
) -> None:  # fmt: skip
    """Print a tally as JSON; exit status 1 where the promise was broken (tallied in capitals).

    Example: python -m benchmarks.crash --kills 1000 --size 200
    """
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        place = Path(temporary)
        trial = Trial(place, make_source(place / "source", round(size * 1e6)), fsync)
        chance = random.Random(seed)
        source_bytes = sum(p.stat().st_size for p in trial.source.rglob("*.safetensors"))
        report: dict[str, Any] = {"source_bytes": source_bytes}
        if kills:
            at_random(trial, kills, chance)
        if every:
            at_every_step(trial, every)
        if disks:
            on_full_disks(trial, disks, chance)
        if rounds:
            report["cost"] = cost(trial, rounds)
        report.update(trial.tally)
        click.echo(json.dumps(report, indent=1))
    if any(key.isupper() for key in trial.tally):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
