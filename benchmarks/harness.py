"""Contestants run in pairs with a reference, one right after the other, and what came of it."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import click

from benchmarks.figures import UnavailableError
from benchmarks.process import RunError, Sample

Run = Callable[[], Sample]
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Contestant:
    """One way of doing the job. `run` prepares outside the measurement, runs, and clears up."""

    name: str
    run: Run = field(repr=False)
    optional: bool = False  # where it cannot run it is left out, and the reason told


@dataclass(frozen=True, slots=True)
class Match:
    """A contestant that is measured against a reference, in a group of its like."""

    reference: Contestant
    contestant: Contestant
    group: str
    x: float | None = None  # where groups are points along an axis


@dataclass(frozen=True, slots=True)
class Result:
    """A match's samples: (reference's, contestant's) of each round."""

    group: str
    reference: str
    contestant: str
    pairs: tuple[tuple[Sample, Sample], ...]
    x: float | None = None

    def ratios(self, figure: Callable[[Sample], float] = lambda s: s.wall) -> list[float]:
        """The contestant's figure over the reference's, pair by pair."""
        return [figure(own) / base for ref, own in self.pairs if (base := figure(ref))]

    def samples(self) -> list[Sample]:
        return [own for _, own in self.pairs]

    def references(self) -> list[Sample]:
        return [ref for ref, _ in self.pairs]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> Result:
        known = {item.name for item in fields(Sample)}
        pairs = tuple(
            tuple(Sample(**{k: v for k, v in side.items() if k in known}) for side in pair)
            for pair in document["pairs"]
        )
        return cls(**{**document, "pairs": pairs})


def middle(values: Iterable[float]) -> float | None:
    """The median; None of nothing."""
    found = list(values)
    return statistics.median(found) if found else None


def series(
    matches: Sequence[Match], rounds: int, say: Say = lambda _: None
) -> tuple[list[Result], dict[str, str]]:
    """Each match `rounds` times, and why which contestants were left out.

    Before the first round every contestant runs once, unmeasured: caches fill, and what cannot
    run shows. With rounds 0 that run is all, and its sample stands alone. In a pair the reference
    goes first in odd rounds and last in even ones, so that drift falls on both alike. RunError
    where one that is not optional fails.
    """
    alone, skipped = _once(matches, say)
    left = [m for m in matches if not {m.reference.name, m.contestant.name} & skipped.keys()]
    taken: list[list[tuple[Sample, Sample]]] = [[] for _ in left]
    for number in range(1, rounds + 1):
        for match, pairs in zip(left, taken, strict=True):
            say(f"round {number}/{rounds}, {match.group}: {match.contestant.name}")
            if number % 2:
                base = match.reference.run()
                own = match.contestant.run()
            else:
                own = match.contestant.run()
                base = match.reference.run()
            say(f"  {own.wall:.3f} s, {match.reference.name} {base.wall:.3f} s")
            pairs.append((base, own))
    if not rounds:
        taken = [
            [(alone[m.group, m.reference.name], alone[m.group, m.contestant.name])] for m in left
        ]
    results = [
        Result(m.group, m.reference.name, m.contestant.name, tuple(pairs), m.x)
        for m, pairs in zip(left, taken, strict=True)
    ]
    return results, skipped


def _once(
    matches: Sequence[Match], say: Say
) -> tuple[dict[tuple[str, str], Sample], dict[str, str]]:
    found: dict[tuple[str, str], Sample] = {}
    skipped: dict[str, str] = {}
    for match in matches:
        for one in (match.reference, match.contestant):
            if (match.group, one.name) in found or one.name in skipped:
                continue
            say(f"once, {match.group}: {one.name}")
            try:
                found[match.group, one.name] = one.run()
            except UnavailableError as error:
                skipped[one.name] = str(error)
            except RunError as error:
                if not one.optional:
                    raise
                skipped[one.name] = str(error)
            if one.name in skipped:
                say(f"  left out: {skipped[one.name]}")
    return found, skipped


def choose(names: Sequence[str], only: Sequence[str]) -> list[str]:
    """The contestants to run, in their order; a usage error where one is unknown."""
    if unknown := sorted(set(only) - set(names)):
        have = ", ".join(map(repr, names))
        raise click.UsageError(f"no contestant {', '.join(map(repr, unknown))}; there are {have}")
    return [name for name in names if not only or name in only]
