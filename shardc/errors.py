"""What can go wrong, as values: every error carries all the problems found, not the first."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

MAX_PROBLEMS = 1000  # that one error carries; of more it says how many


@dataclass(frozen=True, slots=True, order=True)
class Problem:
    """One thing that is wrong: where it is, what it is, and what to do about it."""

    where: str
    what: str
    fix: str = ""

    def __str__(self) -> str:
        text = f"{self.where}: {self.what}" if self.where else self.what
        return printable(f"{text} ({self.fix})" if self.fix else text)


# Control characters, line ends, what turns the direction of text, halves of characters.
_UNPRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    """The text on one line that no terminal obeys: what might be obeyed is escaped."""
    return _UNPRINTABLE.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


class ShardcError(Exception):
    """Base of all errors that shardc raises on purpose; `problems` holds every one found."""

    def __init__(self, problems: Problem | str | Iterable[Problem]) -> None:
        if isinstance(problems, str):
            problems = [Problem("", problems)]
        elif isinstance(problems, Problem):
            problems = [problems]
        found = tuple(problems)
        if len(found) > MAX_PROBLEMS:
            more = Problem("", f"and {len(found) - MAX_PROBLEMS} problems more")
            found = (*found[:MAX_PROBLEMS], more)
        self.problems: tuple[Problem, ...] = found
        super().__init__(str(self))

    def __str__(self) -> str:
        if len(self.problems) == 1:
            return str(self.problems[0])
        lines = [f"{len(self.problems)} problems:"]
        lines += [f"  - {problem}" for problem in self.problems]
        return "\n".join(lines)


class CheckpointError(ShardcError):
    """The source checkpoint is malformed, incomplete or not something shardc may read."""


class ManifestError(ShardcError):
    """A manifest is malformed, or none is known for the checkpoint's class."""


class PlanError(ShardcError):
    """The checkpoint cannot be cut this way: tensor, rule and degree do not fit."""


class OutputError(ShardcError):
    """The output exists already, has no room, or could not be written."""


class ShardSetError(ShardcError):
    """A shard set is incomplete, damaged, or of a version that this release cannot read."""


class VerifyError(ShardcError):
    """The bytes of a shard set are not what its index or its source say."""


class RemoteError(ShardcError):
    """A server cannot be reached, refuses, or has other files than it had before."""
