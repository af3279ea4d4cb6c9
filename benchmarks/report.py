"""A series as a document: written as JSON, read back, shown as a table."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from benchmarks.harness import Result, middle
from benchmarks.process import Sample

VERSION = 1
MARK = "(reference)"
MIB, MB = 1 << 20, 1e6
# Of a process's start; "rest" is what a loader does between the others.
PHASES = (
    "start",
    "import torch",
    "import model",
    "group",
    "pull",
    "open",
    "build",
    "place",
    "wire",
    "rest",
    "touch",
)
Figure = Callable[[Sample], float]


def wall(sample: Sample) -> float:
    return sample.wall


def cpu(sample: Sample) -> float:
    return sample.user + sample.system


def read(sample: Sample) -> float:
    return sample.read_bytes


def peak_mib(sample: Sample) -> float:
    """The most that was resident, over what was when the measured part began."""
    return max(0, sample.peak_bytes - sample.peak_before) / MIB


def anon_mib(sample: Sample) -> float:
    return max(0, sample.anon_bytes - sample.anon_before) / MIB


@dataclass(frozen=True, slots=True)
class Document:
    """One series: what was run on which machine, and every sample."""

    benchmark: str
    settings: Mapping[str, Any]
    machine: Mapping[str, Any]
    results: tuple[Result, ...]
    skipped: Mapping[str, str] = field(default_factory=dict)
    imports: Mapping[str, Mapping[str, float]] = field(default_factory=dict)

    @property
    def cold(self) -> bool:
        return bool(self.settings["cold"])

    @property
    def command(self) -> str:
        """What was run, less where it was run and where the results went."""
        words = ["python -m benchmarks", self.benchmark]
        for name, value in self.settings.items():
            option = f"--{name.replace('_', '-')}"
            if isinstance(value, list):
                words += [f"{option} {one!r}" if " " in str(one) else f"{option} {one}"
                          for one in value]  # fmt: skip
            elif value is True:
                words.append(option)
            elif value is not None and value is not False:
                words.append(f"{option} {value}")
        return " ".join(words)

    def to_json(self) -> str:
        document = {
            "version": VERSION,
            "benchmark": self.benchmark,
            "command": self.command,
            "settings": self.settings,
            "machine": self.machine,
            "skipped": self.skipped,
            "imports": self.imports,
            "results": [result.to_json() for result in self.results],
        }
        return json.dumps(document, indent=1) + "\n"

    @classmethod
    def read(cls, path: Path) -> Document:
        """ValueError where it is of another version."""
        found = json.loads(path.read_text())
        if found.get("version") != VERSION:
            raise ValueError(f"{path}: version {found.get('version')}, {VERSION} is read here")
        results = tuple(Result.from_json(result) for result in found["results"])
        own = {
            key: found[key] for key in ("benchmark", "settings", "machine", "skipped", "imports")
        }
        return cls(results=results, **own)

    def groups(self) -> dict[str, list[Result]]:
        found: dict[str, list[Result]] = {}
        for result in self.results:
            found.setdefault(result.group, []).append(result)
        return found

    def ratio(
        self, group: str, reference: str, contestant: str, figure: Figure = wall
    ) -> float | None:
        """The contestant's figure over the reference's: the median of their pairs.

        Where they never met: of both against a third, one median over the other.
        """
        mine = [r for r in self.results if r.group == group]
        if (own := self._pairs(group, reference, contestant)) is not None:
            return middle(own.ratios(figure))
        common: dict[str, dict[str, float | None]] = {}
        for result in mine:
            common.setdefault(result.reference, {})[result.contestant] = middle(
                result.ratios(figure)
            )
        for ratios in common.values():
            one, other = ratios.get(contestant), ratios.get(reference)
            if one is not None and other:
                return one / other
        return None

    def times_as_fast(self, group: str, reference: str, contestant: str) -> float | None:
        """How many times as fast as the reference: the median of their pairs."""
        own = self._pairs(group, reference, contestant)
        return None if own is None else middle(1 / ratio for ratio in own.ratios())

    def _pairs(self, group: str, reference: str, contestant: str) -> Result | None:
        wanted = (group, reference, contestant)
        found = [r for r in self.results if (r.group, r.reference, r.contestant) == wanted]
        return found[0] if found else None


@dataclass(frozen=True, slots=True)
class Column:
    title: str
    cell: Callable[[Result | None, list[Sample]], str]


def _middle(figure: Figure, text: str) -> Callable[[Result | None, list[Sample]], str]:
    return lambda _, samples: text.format(middle(map(figure, samples)))


def _spread(values: list[float], text: str) -> str:
    if not values:
        return "-"
    found = text.format(middle(values))
    if len(values) == 1:
        return found
    return f"{found} ({text.format(min(values))} to {text.format(max(values))})"


def _ratio(figure: Figure, text: str, *, faster: bool = False) -> Any:
    def cell(result: Result | None, _: list[Sample]) -> str:
        if result is None:
            return text.format(1)
        ratios = result.ratios(figure)
        return _spread([1 / r for r in ratios if r] if faster else ratios, text)

    return cell


WALL = Column("wall, s", _middle(wall, "{:.3f}"))
CPU = Column("cpu, s", _middle(cpu, "{:.2f}"))
READ = Column("read, MB", _middle(lambda s: s.read_bytes / MB, "{:.0f}"))
READ_RATIO = Column("of theirs", _ratio(read, "{:.2f}"))
PEAK = Column("peak RSS, MiB", _middle(peak_mib, "{:.0f}"))
ANON = Column("anonymous, MiB", _middle(anon_mib, "{:.0f}"))
FASTER = Column("times as fast", _ratio(wall, "{:.2f}", faster=True))
COPYING = (
    WALL,
    Column("of it work, s", _middle(lambda s: s.phases.get("work", s.wall), "{:.3f}")),
    Column("of cp's", _ratio(wall, "{:.2f}")),
    CPU,
    Column("of cp's", _ratio(cpu, "{:.2f}")),
    PEAK,
    ANON,
    READ,
)
LOADING = (
    WALL,
    FASTER,
    CPU,
    READ,
    READ_RATIO,
    Column("RSS over before, MiB", PEAK.cell),
    Column("anonymous over before, MiB", ANON.cell),
)
COLUMNS = {
    "build": COPYING,
    "growth": COPYING,
    "load": LOADING,
    "startup": (WALL, FASTER, CPU, READ, PEAK, ANON),
}


def rows(document: Document, results: Iterable[Result]) -> list[list[str]]:
    """A group's cells: each reference, then what ran against it."""
    columns = COLUMNS[document.benchmark]
    by_reference: dict[str, list[Result]] = {}
    for result in results:
        by_reference.setdefault(result.reference, []).append(result)
    found = []
    for reference, own in by_reference.items():
        samples = [sample for result in own for sample in result.references()]
        found.append([f"{reference} {MARK}", *(column.cell(None, samples) for column in columns)])
        for result in own:
            cells = [column.cell(result, result.samples()) for column in columns]
            found.append([result.contestant, *cells])
    return found


def titles(document: Document) -> list[str]:
    return ["", *(column.title for column in COLUMNS[document.benchmark])]


def phases(samples: Iterable[Sample]) -> list[str]:
    """The names of the phases that these have, in the order in which they come."""
    found = dict.fromkeys(name for sample in samples for name in sample.phases)
    return [*(name for name in PHASES if name in found), *(n for n in found if n not in PHASES)]


def phase_rows(results: Iterable[Result]) -> tuple[list[str], list[list[str]]]:
    """Titles and cells: the median seconds of each phase, by contestant."""
    runs: dict[str, list[Sample]] = {}
    for result in results:
        runs.setdefault(result.reference, []).extend(result.references())
        runs.setdefault(result.contestant, []).extend(result.samples())
    names = phases(sample for samples in runs.values() for sample in samples)
    cells = []
    for name, samples in runs.items():
        medians = [middle(s.phases.get(phase, 0.0) for s in samples) for phase in names]
        cells.append([name, *(f"{value:.3f}" for value in medians)])
    return ["", *(f"{name}, s" for name in names)], cells


def tables(document: Document) -> list[Table]:
    """The document as it is shown on a terminal."""
    found = []
    for group, results in document.groups().items():
        found.append(_table(group, titles(document), rows(document, results)))
        if document.benchmark == "startup":
            found.append(_table(f"{group}, phases", *phase_rows(results)))
    for way, seconds in document.imports.items():
        most = [[name, f"{value:.2f}"] for name, value in list(seconds.items())[:12]]
        total = ["all", f"{sum(seconds.values()):.2f}"]
        found.append(_table(f"imports of {way}", ["package", "its own, s"], [*most, total]))
    return found


def _table(title: str, head: list[str], cells: list[list[str]]) -> Table:
    table = Table(title=title, box=box.SIMPLE, title_justify="left", pad_edge=False)
    for number, name in enumerate(head):
        table.add_column(name, justify="right" if number else "left")
    for row in cells:
        table.add_row(*row)
    return table
