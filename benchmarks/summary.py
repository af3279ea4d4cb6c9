"""README's table of how fast: a few of the medians of docs/benchmarks.md."""

from __future__ import annotations

from pathlib import Path

from benchmarks.targets import ALL, BUILT, ONE, SHAPE, STARTED, TP, Series, faster, over

README = Path(__file__).parents[1] / "README.md"
BEGIN, END = "<!-- speed -->\n", "<!-- /speed -->\n"
TIMES, AS_FAST = "{:.2f} of its time", "{:.1f} times as fast"
ROWS = (
    ("`shardc build`, against `cp` of the same files", TIMES,
     [over("build", cold, BUILT, "cp") for cold in (True, False)]),
    ("the same, against a script that slices the files for each rank", TIMES,
     [over("build", cold, BUILT, "slices") for cold in (True, False)]),
    ("one rank's load, against diffusers' streaming load", AS_FAST,
     [faster("load", cold, ONE) for cold in (True, False)]),
    (f"all {TP} ranks of a host at once, against the same", AS_FAST,
     [faster("load", cold, ALL) for cold in (True, False)]),
    ("a process, until its model is ready, against the same", AS_FAST,
     [faster("startup", cold, STARTED) for cold in (True, False)]),
)  # fmt: skip


def render(series: Series) -> str:
    """The table, from the first marker to the last."""
    lines = [f"| {SHAPE}, tp {TP} | nothing cached | files cached |", "|---|---|---|"]
    for text, shown, values in ROWS:
        found = [value(series) for value in values]
        cells = ["" if one is None else shown.format(one) for one in found]
        lines.append(" | ".join((f"| {text}", *cells)) + " |")
    return BEGIN + "\n".join(lines) + "\n" + END
