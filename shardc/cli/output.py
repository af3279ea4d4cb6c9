"""How commands speak: data on stdout, progress and errors on stderr, exit status 0, 1 or 2."""

from __future__ import annotations

import errno
import functools
import json
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, ParamSpec, TextIO

import click

from shardc.errors import Problem, ShardcError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

P = ParamSpec("P")
INTERRUPTED = 130  # as a shell reports SIGINT
TERMINATED = 143  # and SIGTERM


class _Terminated(KeyboardInterrupt):
    """SIGTERM, which is to end a command as Ctrl-C does."""


@contextmanager
def _terminable() -> Iterator[None]:
    """Have SIGTERM raise as SIGINT does, so that what is left behind can be told."""

    def terminate(*_: object) -> None:
        raise _Terminated

    try:
        before = signal.signal(signal.SIGTERM, terminate)
    except ValueError:  # not in the main thread
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before or signal.SIG_DFL)


def reporting(command: Callable[P, None]) -> Callable[P, None]:
    """Turn an error into its problems and exit status 1; a traceback comes only with `debug`.

    Reads the command's `as_json` and `debug`, where it has them.
    """

    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            with _terminable():
                command(*args, **kwargs)
        except (ShardcError, OSError) as error:
            if isinstance(error, OSError) and error.errno == errno.EPIPE:
                raise  # nobody reads on: click ends the process quietly
            if kwargs.get("debug"):
                traceback.print_exc()
            problems = _problems(error)
            for problem in problems:
                click.echo(f"error: {problem}", err=True)
            if kwargs.get("as_json"):
                with suppress(OSError):  # stdout itself may be what failed
                    say_json({"ok": False, "problems": problems})
            sys.exit(1)
        except KeyboardInterrupt as error:
            told = str(error)
            click.echo(f"interrupted: {told}" if told else "interrupted", err=True)
            sys.exit(TERMINATED if isinstance(error, _Terminated) else INTERRUPTED)

    return run


def _problems(error: ShardcError | OSError) -> list[str]:
    if isinstance(error, ShardcError):
        return [str(problem) for problem in error.problems]
    where = "" if error.filename is None else str(error.filename)
    return [str(Problem(where, error.strerror or str(error)))]


def say_json(document: Any) -> None:
    """The one document on stdout."""
    click.echo(json.dumps(document, indent=1))


def console() -> Console:
    """Stdout for tables: as wide as the terminal, 100 columns in a pipe. Text is taken as it is."""
    from rich.console import Console

    width = None if _is_terminal(sys.stdout) else 100
    return Console(width=width, highlight=False, markup=False, emoji=False)


def _is_terminal(stream: TextIO | None) -> bool:
    return stream is not None and stream.isatty()  # None where the shell closed it


def table(*columns: str, title: str | None = None) -> Table:
    """An empty table; columns that begin with `>` are numbers."""
    from rich import box
    from rich.table import Table

    made = Table(title=title, box=box.SIMPLE, title_justify="left", pad_edge=False)
    for column in columns:
        made.add_column(
            column.removeprefix(">"),
            justify="right" if column.startswith(">") else "left",
            overflow="fold",
        )
    return made


@contextmanager
def progress(what: str, total_bytes: int | None, *, quiet: bool) -> Iterator[Callable[[int], None]]:
    """A bar on stderr: bytes, rate, time left. Nothing in pipes, and gone when done."""
    if quiet or not _is_terminal(sys.stderr):
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    )
    with bar:
        task = bar.add_task(what, total=total_bytes)
        yield lambda count: bar.advance(task, count)


def size(count: float) -> str:
    """Bytes for people: 7.75 GB."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.2f} {unit}"
        count /= 1000
    return f"{count:.2f} TB"


def parameters(count: int) -> str:
    """Parameters for people: 3.88 B, 2.05 M."""
    return f"{count / 1e9:.2f} B" if count >= 1e8 else f"{count / 1e6:.2f} M"


def mebibytes(count: float) -> str:
    """Memory for people: 56 MiB."""
    return f"{count / 2**20:.0f} MiB"


def degrees(numbers: list[int]) -> str:
    """Degrees with runs joined: 1-4, 8."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(
        str(a) if a == b else f"{a}-{b}" if b > a + 1 else f"{a}, {b}" for a, b in runs
    )
