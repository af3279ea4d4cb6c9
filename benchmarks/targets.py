"""What is to be reached, computed from series at klein-4B and tp 8."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from benchmarks.report import MIB, Document, anon_mib, read, wall

SHAPE, TP = "klein-4b", 8
ONE, ALL, STARTED = "1 rank", f"{TP} ranks at once", f"1 rank of {TP}"
Series = Sequence[Document]


@dataclass(frozen=True, slots=True)
class Target:
    """A figure and its limit: at most, or, where `least`, at least that; and what would be fine."""

    text: str
    limit: float
    value: Callable[[Series], float | None]
    least: bool = False
    stretch: float | None = None

    def reached(self, found: float) -> bool:
        return found >= self.limit if self.least else found <= self.limit


def pick(series: Series, benchmark: str, cold: bool) -> list[Document]:
    return [
        one
        for one in series
        if one.benchmark == benchmark
        and one.cold == cold
        and (one.settings["shape"], one.settings["tp"]) == (SHAPE, TP)
    ]


def worst(values: Iterable[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)


def over(
    benchmark: str, cold: bool, group: str, reference: str, contestant: str = "shardc"
) -> Callable[[Series], float | None]:
    """The contestant's time over the reference's."""
    return lambda series: worst(
        one.ratio(group, reference, contestant) for one in pick(series, benchmark, cold)
    )


def faster(benchmark: str, cold: bool, group: str) -> Callable[[Series], float | None]:
    """How many times as fast as diffusers, at worst."""

    def value(series: Series) -> float | None:
        found = [
            one.times_as_fast(group, "diffusers", "shardc") for one in pick(series, benchmark, cold)
        ]
        return min((value for value in found if value is not None), default=None)

    return value


def over_floor(cold: bool, group: str) -> Callable[[Series], float | None]:
    """Over the better of the two ways to read the same bytes."""
    return lambda series: worst(
        one.ratio(group, name, "shardc", wall)
        for one in pick(series, "load", cold)
        for name in ("floor", "floor, direct")
    )


def over_load_file(series: Series) -> float | None:
    """In the group where it is the slowest against load_file and the same copy."""
    return worst(
        one.ratio(group, "load_file", "shardc")
        for cold in (False, True)
        for one in pick(series, "load", cold)
        for group in (ONE, ALL)
    )


def peak_of_builds(series: Series) -> float | None:
    """The most that any build took, at any size: MiB."""
    return worst(
        sample.peak_bytes / MIB
        for cold in (False, True)
        for one in pick(series, "growth", cold)
        for result in one.results
        if result.group.startswith("size:")
        for sample in result.samples()
    )


def anonymous(series: Series) -> float | None:
    """The most that any load took over what the process had before: MiB."""
    return worst(
        anon_mib(sample)
        for cold in (False, True)
        for one in pick(series, "load", cold)
        for result in one.results
        if result.contestant == "shardc" and result.reference == "diffusers"
        for sample in result.samples()
    )


def bytes_read(series: Series) -> float | None:
    return worst(
        one.ratio(ONE, "diffusers", "shardc", read) for one in pick(series, "load", cold=True)
    )


BUILT = f"tp {TP}"
TARGETS = (
    Target("build, cold and synced: time over cp + sync", 1.0, over("build", True, BUILT, "cp")),
    Target("build, warm: time over cp", 1.10, over("build", False, BUILT, "cp")),
    Target("build, cold: time over slices per rank", 1 / 3, over("build", True, BUILT, "slices")),
    Target("build, warm: time over slices per rank", 0.2, over("build", False, BUILT, "slices")),
    Target("build, 1 to 16 GB: peak RSS, MiB", 150, peak_of_builds),
    Target("load, one rank, cold: times as fast", 6, faster("load", True, ONE), True, 9),
    Target("load, one rank, warm: times as fast", 4, faster("load", False, ONE), True, 7),
    Target("load, 8 ranks, cold: times as fast", 1.8, faster("load", True, ALL), True),
    Target("load, 8 ranks, warm: times as fast", 2.5, faster("load", False, ALL), True),
    Target("load, one rank, cold: bytes read, of theirs", 0.21, bytes_read),
    Target("load, one rank, cold: time over the floor", 1.15, over_floor(True, ONE)),
    Target("load, one rank, warm: time over the floor", 1.15, over_floor(False, ONE)),
    Target("load: time over load_file and the same copy, at worst", 1.0, over_load_file),
    Target("load: anonymous memory over before, MiB", 64, anonymous),
    Target(
        "whole process, one rank, cold: times as fast", 1.7, faster("startup", True, STARTED),
        True, 2.5,
    ),
)  # fmt: skip


def table(series: Series) -> list[str]:
    """Lines of a markdown table: each target, and whether it was reached."""
    lines = ["| | target | stretch | measured | |", "|---|---|---|---|---|"]
    for target in TARGETS:
        sign = "at least" if target.least else "at most"
        found = target.value(series)
        verdict = "not measured"
        if found is not None:
            verdict = "met" if target.reached(found) else "missed"
        stretch = "" if target.stretch is None else f"{target.stretch:g}"
        shown = "" if found is None else f"{found:.3g}"
        limit = f"{sign} {target.limit:.2f}".rstrip("0").rstrip(".")
        lines.append(f"| {target.text} | {limit} | {stretch} | {shown} | {verdict} |")
    return lines
