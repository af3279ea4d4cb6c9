"""The journal of a build: what it is, and what of it is written, so that a killed one can go on.

Lines, appended only: the XXH3-64 of the rest as 16 hex digits, a space, compact JSON, a newline. A
line that does not have its digest is passed over, so a torn tail costs what it would have told.
The first line is the build's facts; each other one vouches for tensors or for a copied file, by
digests that whoever goes on checks against the bytes. So nothing need be durable before its record
is: what a crash took, or damaged, is done again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from shardc.errors import OutputError
from shardc.execute import Digests
from shardc.fileio import write_problem

FORMAT = 1
Facts = Mapping[str, str | int | None]


@dataclass(slots=True)
class Past:
    """What a journal tells: the build's facts, and by component and file what is written.

    replaces: the build was allowed to replace what stands at its place.
    """

    facts: Facts
    replaces: bool
    tensors: dict[str, dict[int, Digests]] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)

    @property
    def vouches(self) -> bool:
        """There is something to go on from."""
        return bool(self.files) or any(self.tensors.values())


def read_journal(path: Path) -> Past | None:
    """What the journal at `path` tells; None where there is none, or its first line is damaged."""
    try:
        lines = _sound(path.read_bytes())
        format_, replaces, facts = next(lines)
        if format_ != FORMAT:
            return None
        past = Past(facts, replaces)
        for kind, where, told in lines:
            if kind == "file":
                past.files[where] = told
            else:
                held = past.tensors.setdefault(where, {})
                held.update((n, Digests(whole, tuple(own))) for n, whole, own in told)
    except (OSError, StopIteration, TypeError, ValueError):
        return None
    return past


def _sound(raw: bytes) -> Iterator[Any]:
    """The documents of the lines that have their digests; nothing where the first has not."""
    for number, line in enumerate(raw.split(b"\n")[:-1]):
        check, _, document = line.partition(b" ")
        if xxhash.xxh3_64_hexdigest(document).encode() == check:
            yield json.loads(document)
        elif number == 0:
            return


class Journal:
    """A journal that a build appends to; `past` is what it told before, empty for a new one.

    Raises OutputError where it cannot be written. One call at a time.
    """

    def __init__(self, path: Path, facts: Facts, *, replaces: bool, past: Past | None) -> None:
        self._path = path
        self.past = past or Past(facts, replaces)
        self._recorded = False
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o666)
        except OSError as error:
            raise OutputError(write_problem(path, error)) from error
        if past is None:
            self._append([FORMAT, replaces, facts])
        else:
            os.ftruncate(self._fd, path.read_bytes().rfind(b"\n") + 1)  # a torn tail ends here

    @property
    def vouches(self) -> bool:
        """There is something to go on from."""
        return self._recorded or self.past.vouches

    def add_tensors(self, component: str, done: Mapping[int, Digests]) -> None:
        """These tensors of a component, by number, are written."""
        told = [[number, digests.whole, digests.targets] for number, digests in done.items()]
        self._append(["tensors", component, told])
        self._recorded = True

    def add_file(self, name: str, digest: str) -> None:
        """This file, copied from the source, is written."""
        self._append(["file", name, digest])
        self._recorded = True

    def sync(self) -> None:
        """Make it durable."""
        try:
            os.fsync(self._fd)
        except OSError as error:
            raise OutputError(write_problem(self._path, error)) from error

    def close(self) -> None:
        os.close(self._fd)

    def _append(self, document: Any) -> None:
        raw = json.dumps(document, separators=(",", ":")).encode()
        line = memoryview(b"%s %s\n" % (xxhash.xxh3_64_hexdigest(raw).encode(), raw))
        try:
            while line:
                line = line[os.write(self._fd, line) :]
        except OSError as error:
            raise OutputError(write_problem(self._path, error)) from error
