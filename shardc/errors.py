"""What can go wrong, as values: every error carries all the problems found, not the first."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, order=True)
class Problem:
    """One thing that is wrong: where it is, what it is, and what to do about it."""

    where: str
    what: str
    fix: str = ""

    def __str__(self) -> str:
        text = f"{self.where}: {self.what}" if self.where else self.what
        return f"{text} ({self.fix})" if self.fix else text


class ShardcError(Exception):
    """Base of all errors that shardc raises on purpose; `problems` holds every one found."""

    def __init__(self, problems: Problem | str | Iterable[Problem]) -> None:
        if isinstance(problems, str):
            problems = [Problem("", problems)]
        elif isinstance(problems, Problem):
            problems = [problems]
        self.problems: tuple[Problem, ...] = tuple(problems)
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
