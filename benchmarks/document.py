"""docs/benchmarks.md: its results, from the series in benchmarks/results."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import build, load, plot, startup, summary, targets
from benchmarks.report import Document, phase_rows, rows, titles

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "benchmarks.md"
IMAGES = ROOT / "docs" / "images"
RESULTS = Path(__file__).parent / "results"
BEGIN, END = "<!-- results -->\n", "<!-- /results -->\n"
ORDER = ("build", "growth", "load", "startup")
ABOUT = {
    "build": build.ABOUT,
    "growth": build.ABOUT,
    "load": load.ABOUT,
    "startup": startup.ABOUT,
}
MOST_IMPORTS = 10


def stored() -> list[Path]:
    return sorted(RESULTS.glob("*.json"))


def read(paths: Sequence[Path]) -> list[tuple[str, Document]]:
    """Series by the name of their file, in the order of the page."""
    found = [(path.stem, Document.read(path)) for path in paths]
    return sorted(found, key=lambda one: (ORDER.index(one[1].benchmark), one[0]))


def render(series: Sequence[tuple[str, Document]]) -> str:
    """The page's results, from the first marker to the last."""
    lines = ["## Targets", "", f"At {targets.SHAPE}, tp {targets.TP}; medians.", ""]
    lines += targets.table([one for _, one in series])
    machines: list[Any] = []
    for _, one in series:
        if (own := _machine(one.machine)) not in machines:
            machines.append(own)
    for own in machines:
        lines += [
            "",
            "## Machine" if len(machines) == 1 else f"## Machine {machines.index(own) + 1}",
        ]
        lines += ["", *(f"- {name}: {value}" for name, value in own.items())]
    if not series:
        lines += ["", "No series has been stored yet."]
    for name, one in series:
        lines += ["", *_section(name, one, machines)]
    return BEGIN + "\n".join(lines) + "\n" + END


def _machine(facts: Any) -> dict[str, str]:
    """What of a machine's facts is the same for series that were run on it."""
    packages = ", ".join(f"{name} {version}" for name, version in facts["packages"].items())
    return {
        "cpu": f"{facts['cpu']}, {facts['cores']} cores",
        "memory": f"{facts['memory_gib']} GiB",
        "kernel": facts["kernel"],
        "python": f"{facts['python']}: {packages}",
        "cp": facts["cp"],
    }


def _section(name: str, one: Document, machines: list[Any]) -> list[str]:
    heat = "cold" if one.cold else "warm"
    if one.benchmark in ("build", "growth"):
        heat = "cold and synced" if one.cold else "warm, not synced"
    told, facts = one.settings, one.machine
    at = "" if len(machines) == 1 else f" Machine {machines.index(_machine(facts)) + 1}."
    disks = f"Source on {facts['source_filesystem']}"
    if one.benchmark in ("build", "growth"):
        disks += f", output on {facts['out_filesystem']}"
    lines = [
        f"## {' along '.join([one.benchmark, *told.get('axis', ())])}: {told['shape']}, {heat}",
        "",
        f"`{one.command}`, {facts['day']}. {disks}; load average before: "
        f"{facts['load_average_before']}.{at}",
    ]
    for group, results in (
        one.groups().items() if one.benchmark != "growth" else [("", one.results)]
    ):
        head = titles(one)
        if one.benchmark == "growth":
            head, cells = ["", *head[1:]], _growth_rows(one)
        else:
            cells = rows(one, results)
        lines += ["", *([f"**{group}**", ""] if group else []), *_markdown(head, cells)]
        if one.benchmark == "startup":
            lines += ["", *_markdown(*phase_rows(results))]
    for way, seconds in one.imports.items():
        most = list(seconds.items())[:MOST_IMPORTS]
        said = ", ".join(f"{package} {value:.2f}" for package, value in most)
        lines += ["", f"What {way}'s imports take, by package, in s: {said}; "
                  f"all {sum(seconds.values()):.2f}."]  # fmt: skip
    for who, why in one.skipped.items():
        lines += ["", f"Left out: {who}: {why}."]
    ran = {r.contestant for r in one.results} | {r.reference for r in one.results}
    about = [f"- {who}: {ABOUT[one.benchmark][who]}" for who in ABOUT[one.benchmark] if who in ran]
    return [*lines, "", *about, "", f"![{one.benchmark}, {heat}](images/bench-{name}.svg)"]


def _growth_rows(one: Document) -> list[list[str]]:
    return [
        [f"{group}, {row[0]}", *row[1:]]
        for group, results in one.groups().items()
        for row in rows(one, results)
    ]


def _markdown(head: Sequence[str], cells: Sequence[Sequence[str]]) -> list[str]:
    lines = [head, ["---", *["--:"] * (len(head) - 1)], *cells]
    return ["| " + " | ".join(line).strip() + " |" for line in lines]


def replaced(text: str, results: str, begin: str = BEGIN, end: str = END) -> str:
    """The page with these results, markers included, in the place of those between its markers."""
    before, _, rest = text.partition(begin)
    return before + results + rest.partition(end)[2]


def write(series: Sequence[tuple[str, Document]]) -> list[Path]:
    """Write the page's results and its plots, and README's table; what was written."""
    written = [PAGE]
    for name, one in series:
        path = IMAGES / f"bench-{name}.svg"
        plot.draw(one, path)
        written.append(path)
    PAGE.write_text(replaced(PAGE.read_text(), render(series)))
    table = summary.render([one for _, one in series])
    text = summary.README.read_text()
    summary.README.write_text(replaced(text, table, summary.BEGIN, summary.END))
    return [*written, summary.README]
