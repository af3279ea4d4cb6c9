"""Where a build writes until it is whole: a hidden folder beside OUT, locked, with a journal.

.OUT.shardc-lock               held by the build that runs; no other may
.OUT.shardc-partial/journal    what the build is, and what of it is written
.OUT.shardc-partial/set        becomes OUT, by rename
.OUT.shardc-partial/old        what stood at OUT, until the new set does
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from shardc.checkpoint import sharded_components
from shardc.errors import OutputError, Problem, ShardcError, ShardSetError
from shardc.files import (
    copy_file,
    digest_of,
    remove,
    share_file,
    sync,
    sync_folders,
    told,
)
from shardc.journal import Facts, Journal, Past, read_journal

JOURNALLED_BYTES = 64 * 1024 * 1024  # a smaller file is copied again in no time
NOTHING_LEFT = "nothing was left behind"


def beside(out: Path, what: str) -> Path:
    """The name of what belongs to `out` while it is built, in the same folder."""
    if out.name in ("", ".."):
        out = Path(os.path.abspath(out))
    return out.with_name(f".{out.name}.shardc-{what}")


def partial_folder(out: Path) -> Path:
    """Where a build of `out` writes until it is whole."""
    return beside(out, "partial")


class Workspace:
    """An unfinished set: its `folder`, and the journal of what is in it."""

    def __init__(self, folder: Path, journal: Journal, *, fsync: bool) -> None:
        self.folder = folder
        self.journal = journal
        self._fsync = fsync

    def copy(self, source: Path, name: str) -> str:
        """Copy a file to `name`, unless an earlier build did: says how, for a report."""
        target = self._place(name)
        stated = self.journal.past.files.get(name)
        if stated is not None and digest_of(target) == stated:
            if self._fsync:
                sync(target)  # the earlier build may not have
            return "copied"
        with told(target):
            remove(target)
        digest = copy_file(source, target, fsync=self._fsync)
        if target.stat().st_size >= JOURNALLED_BYTES:
            self.journal.add_file(name, digest)
        return "copied"

    def keep(self, source: Path, name: str) -> str:
        """Have a file at `name` as cheaply as the filesystem can: says how."""
        if name in self.journal.past.files:
            return self.copy(source, name)
        target = self._place(name)
        with told(target):
            remove(target)
        return share_file(source, target, fsync=self._fsync) or self.copy(source, name)

    def carry(self, source: Path, name: str) -> None:
        """Weights as `keep` does, anything else as a copy of its own."""
        if source.suffix == ".safetensors":
            self.keep(source, name)
        else:
            self.copy(source, name)

    def allocated_bytes(self) -> int:
        """What the disk has given to it so far."""
        return allocated_bytes(self.folder)

    def _place(self, name: str) -> Path:
        target = self.folder / name
        with told(target):
            target.parent.mkdir(parents=True, exist_ok=True)
        return target


def allocated_bytes(folder: Path) -> int:
    """Bytes that the disk has given to the files below `folder`."""
    return sum(entry.lstat().st_blocks * 512 for entry in folder.rglob("*") if entry.is_file())


@contextmanager
def workspace(
    out: Path,
    facts: Facts,
    *,
    force: bool,
    resume: bool,
    fsync: bool,
    at_rest: Callable[[], bool],
) -> Iterator[Workspace]:
    """A workspace whose folder becomes `out` by rename when the block ends well.

    facts: what the build is; only what a build of the very same left is gone on from. Where the
    block ends in an error, what the journal vouches for stays, to be resumed, if that can go on
    (`at_rest`: the source is still what it was), and what stood at `out` stands there still.
    Raises OutputError where another build of `out` runs, or something is in the way.
    """
    partial = partial_folder(out)
    with _locked(out):
        _put_back(out)
        past = check_way(out, facts, force=force, resume=resume)
        replaces = force or (past is not None and past.replaces)
        journal: Journal | None = None
        try:
            with told(out):
                if past is None:
                    remove(partial)
                (partial / "set").mkdir(parents=True, exist_ok=True)
                journal = Journal(partial / "journal", facts, replaces=replaces, past=past)
                yield Workspace(partial / "set", journal, fsync=fsync)
                if fsync:
                    sync_folders(partial / "set")
                _swap(out)
                if fsync:
                    sync(out.parent)
        except BaseException as error:
            begun = journal or past
            keep = begun is not None and begun.vouches
            keep = keep and not isinstance(error, ShardSetError)  # damaged shards stay damaged
            _fail(out, error, keep=keep and at_rest())
            raise
        finally:
            if journal is not None:
                journal.close()
        with suppress(OSError):
            remove(partial)


def check_way(out: Path, facts: Facts, *, force: bool, resume: bool) -> Past | None:
    """What to go on from, None to begin afresh; OutputError where something is in the way."""
    partial = partial_folder(out)
    unfinished = _unfinished(partial)
    past = read_journal(partial / "journal") if resume and unfinished else None
    check_replaceable(out, force=force or (past is not None and past.replaces))
    if past is not None:
        if problem := _other_build(partial, past, facts):
            raise OutputError(problem)
        return past
    if force or not unfinished:
        return None
    if resume:
        what = "its journal is missing or damaged, so there is nothing to go on from"
        raise OutputError(Problem(str(partial), what, "--force starts over"))
    raise OutputError(
        Problem(
            str(partial),
            f"is left of an unfinished build of {out}",
            "--resume continues it, --force starts over",
        )
    )


def check_apart(source: Path, out: Path) -> None:
    """OutputError where one lies inside the other: the next build would take the output in."""
    inner, outer = out.resolve(), source.resolve()
    if source.is_dir() and (inner.is_relative_to(outer) or outer.is_relative_to(inner)):
        raise OutputError(
            Problem(str(out), f"overlaps its source {source}", "name a folder beside it with -o")
        )


def check_replaceable(out: Path, *, force: bool) -> None:
    """OutputError where something stands at `out` that may not be replaced."""
    if not (out.exists() or out.is_symlink()):
        return
    if not (out.is_dir() and sharded_components(out)):
        what = "exists already" if not force else "is not a shard set"
        raise OutputError(
            Problem(str(out), f"{what}, and shardc will not replace it", "name another with -o")
        )
    if not force:
        raise OutputError(
            Problem(str(out), "exists already", "--force replaces it, -o names another")
        )


def sweep(out: Path, facts: Callable[[], Facts]) -> None:
    """Remove what a build of `out`, which is up to date, left: of another build it stays."""
    partial = partial_folder(out)

    def needless() -> bool:
        if not _unfinished(partial):
            return True
        past = read_journal(partial / "journal")
        return past is not None and past.facts == facts()

    if (partial.exists() or beside(out, "lock").exists()) and needless():
        with suppress(OutputError, OSError), _locked(out):
            if needless():
                remove(partial)


def _unfinished(partial: Path) -> bool:
    """A build has begun to write there; or it is a folder of somebody else's."""
    if not partial.is_dir() or partial.is_symlink():
        return partial.exists() or partial.is_symlink()
    begun = (partial / "set").is_dir() and any((partial / "set").iterdir())
    return begun or bool({entry.name for entry in partial.iterdir()} - {"journal", "set", "old"})


def _other_build(partial: Path, past: Past, facts: Facts) -> Problem | None:
    """The first fact in which the unfinished build is not this one."""
    for key in (*facts, *past.facts):
        was, now = past.facts.get(key), facts.get(key)
        if was != now:
            what = f"is left of another build: {key} was {was}, is now {now}"
            return Problem(str(partial), what, "--force starts over")
    return None


@contextmanager
def _locked(out: Path) -> Iterator[None]:
    """Be the only build of `out`: the kernel lets go of the lock when this process ends."""
    path = beside(out, "lock")
    with told(path):
        if not path.parent.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
        elif not path.parent.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path.parent))
        lock = FileLock(path, timeout=0)
        try:
            lock.acquire()
        except Timeout:
            raise OutputError(
                Problem(
                    str(out),
                    "is being built by another process",
                    "wait for it, or choose another -o",
                )
            ) from None
    try:
        yield
    finally:
        with suppress(OSError):
            path.unlink()  # while it is held: whoever has it open finds it unlinked, and refuses
        lock.release()


def _put_back(out: Path) -> None:
    """Undo half a swap: a build was killed between moving the old set away and the new one in."""
    old = partial_folder(out) / "old"
    if (old.exists() or old.is_symlink()) and not (out.exists() or out.is_symlink()):
        with told(out):
            old.rename(out)


def _swap(out: Path) -> None:
    partial = partial_folder(out)
    if out.exists() or out.is_symlink():
        remove(partial / "old")
        out.rename(partial / "old")
    try:
        (partial / "set").rename(out)
    except BaseException:
        _put_back(out)
        raise


def _fail(out: Path, error: BaseException, *, keep: bool) -> None:
    """Remove what is not to be kept, and have `error` say what is."""
    partial = partial_folder(out)
    hint = NOTHING_LEFT
    if (partial / "journal").exists() and not (partial / "set").exists():
        hint = f"{out} is complete"
    elif keep:
        hint = f"--resume continues what {partial} keeps, --force starts over"
    with suppress(OSError, OutputError):
        _put_back(out)
        if not keep:
            remove(partial)
    if isinstance(error, KeyboardInterrupt):
        error.args = (hint,)
    elif isinstance(error, ShardcError) and keep:
        *others, last = error.problems
        fix = "; ".join(filter(None, (last.fix, hint)))
        raise type(error)([*others, Problem(last.where, last.what, fix)]) from error
