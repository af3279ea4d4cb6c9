"""Plots of a series, as small SVG files that are the same for the same numbers."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.harness import Result, middle
from benchmarks.report import MIB, Document, phases, wall

BLUE, GREY = "#1f5fa8", "#8a8a8a"
COLORS = ("#1f5fa8", "#6fa3d8", "#c9c9c9", "#f2c14e", "#e07b39", "#b23a48", "#5b8c5a", "#9b7ede",
          "#8a8a8a", "#333333")  # fmt: skip


def draw(document: Document, path: Path) -> None:
    """Write the document's plot; ModuleNotFoundError where matplotlib is not there."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.hashsalt": "shardc", "font.size": 9, "svg.fonttype": "none"})
    from matplotlib import pyplot

    kind = {"growth": _growth, "startup": _phases}.get(document.benchmark, _ratios)
    figure = kind(document, pyplot)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None, "Creator": None}, bbox_inches="tight")
    pyplot.close(figure)


def _title(document: Document, group: str) -> str:
    heat = "cold" if document.cold else "warm"
    return f"{document.settings['shape']}, {group}, {heat}"


def _ratios(document: Document, pyplot: Any) -> Any:
    """Each contestant's time over the reference's; a bar a median, a line from least to most."""
    groups = document.groups()
    longest = max(len(_first(results)) for results in groups.values())
    size = (3.8 * len(groups) + 1.2, 0.3 * longest + 1.1)
    figure, axes = pyplot.subplots(1, len(groups), figsize=size, squeeze=False)
    for axis, (group, results) in zip(axes[0], groups.items(), strict=True):
        shown = _first(results)
        for at, result in enumerate(shown):
            ratios = result.ratios(wall)
            own = result.contestant.startswith("shardc")
            axis.barh(at, middle(ratios), color=BLUE if own else GREY, height=0.6)
            axis.plot([min(ratios), max(ratios)], [at, at], color="black", linewidth=1)
            axis.annotate(
                f"{middle(ratios):.2f}", (max(ratios), at), (3, 0),
                textcoords="offset points", va="center", fontsize=8,
            )  # fmt: skip
        axis.axvline(1, color="black", linewidth=0.8, linestyle=":")
        axis.set_yticks(range(len(shown)), [result.contestant for result in shown])
        axis.invert_yaxis()
        axis.set_xlim(0, axis.get_xlim()[1] * 1.1)
        axis.set_xlabel(f"time, of {shown[0].reference}'s")
        axis.set_title(_title(document, group), fontsize=9)
    figure.tight_layout()
    return figure


def _first(results: Iterable[Result]) -> list[Result]:
    """Those against the first reference."""
    found = list(results)
    return [result for result in found if result.reference == found[0].reference]


def _phases(document: Document, pyplot: Any) -> Any:
    """Each contestant's phases, one after another."""
    groups = document.groups()
    figure, axes = pyplot.subplots(len(groups), 1, figsize=(7, 2.2 * len(groups)), squeeze=False)
    for axis, (group, results) in zip(axes[:, 0], groups.items(), strict=True):
        runs = {results[0].reference: results[0].references()}
        runs.update((result.contestant, result.samples()) for result in results)
        names = phases(sample for samples in runs.values() for sample in samples)
        left = [0.0] * len(runs)
        for number, phase in enumerate(names):
            widths = [
                middle(s.phases.get(phase, 0.0) for s in samples) or 0.0
                for samples in runs.values()
            ]
            color = COLORS[number % len(COLORS)]
            axis.barh(range(len(runs)), widths, left=left, label=phase, color=color, height=0.6)
            left = [a + b for a, b in zip(left, widths, strict=True)]
        axis.set_yticks(range(len(runs)), list(runs))
        axis.invert_yaxis()
        axis.set_xlabel("seconds from the start of the process")
        axis.set_title(_title(document, group), fontsize=9)
        axis.legend(fontsize=7, ncols=1, loc="center left", bbox_to_anchor=(1.01, 0.5))
    figure.tight_layout()
    return figure


def _growth(document: Document, pyplot: Any) -> Any:
    """Time against copying, and peak memory, along each axis."""
    axes_of: dict[str, list[Result]] = {}
    for result in document.results:
        axes_of.setdefault(result.group.partition(":")[0], []).append(result)
    size = (3.2 * len(axes_of), 4.0)
    figure, axes = pyplot.subplots(2, len(axes_of), figsize=size, squeeze=False, sharex="col")
    for column, (name, results) in enumerate(axes_of.items()):
        at = list(range(len(results)))
        upper, lower = axes[0][column], axes[1][column]
        ratios = [result.ratios(wall) for result in results]
        upper.plot(at, [middle(r) for r in ratios], "o-", color=BLUE)
        upper.vlines(at, [min(r) for r in ratios], [max(r) for r in ratios], color=BLUE)
        upper.axhline(1, color="black", linewidth=0.8, linestyle=":")
        upper.set_title(_title(document, name), fontsize=9)
        peaks = [middle(s.peak_bytes / MIB for s in result.samples()) or 0.0 for result in results]
        lower.plot(at, peaks, "o-", color=BLUE)
        labels = [result.group.partition(": ")[2] for result in results]
        lower.set_xticks(at, labels, rotation=30 if len(at) > 5 else 0)
        lower.set_xlabel(name)
        for axis, most in ((upper, max(map(max, ratios))), (lower, max(peaks))):
            axis.set_ylim(0, 1.15 * most)
    axes[0][0].set_ylabel("time, of cp's")
    axes[1][0].set_ylabel("peak RSS, MiB")
    figure.tight_layout()
    return figure
