"""The tables of docs/scale.md."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.fleet.inputs import BOTH, INPUTS, MODELS, Values, Way
from benchmarks.fleet.times import host_named, ready, stores

HOSTS = (1, 10, 100, 1_000, 10_000)
RESTARTS = (  # host, ranks, where the files are, whether ranks share the page cache
    ("large", 8, "NVMe", True),
    ("large", 8, "NVMe", False),
    ("large", 32, "NVMe", True),
    ("large", 8, "gp3", True),
    ("large", 8, "gp3", False),
    ("small", 1, "gp3", True),
    ("small", 1, "gp3 from a snapshot", True),
)


@dataclass(frozen=True, slots=True)
class Table:
    columns: tuple[str, ...]
    rows: list[tuple[Any, ...]]

    def records(self) -> list[dict[str, Any]]:
        return [dict(zip(self.columns, row, strict=True)) for row in self.rows]

    def markdown(self) -> str:
        lines = [self.columns, tuple("---" for _ in self.columns), *self.rows]
        return "\n".join("| " + " | ".join(map(shown, line)) + " |" for line in lines)


def shown(cell: object) -> str:
    """Three digits that count."""
    if not isinstance(cell, float):
        return f"{cell:,}" if isinstance(cell, int) else str(cell)
    if cell == 0 or math.isinf(cell):
        return "none" if cell else "0"
    rounded = float(f"{cell:.2e}")
    return f"{rounded:,.{max(0, 2 - math.floor(math.log10(abs(rounded))))}f}"


def input_table(told: Values) -> Table:
    rows = [
        (f"`{name}`", f"{told[name] / one.base(1):,g} {one.unit}",
         f"{one.low:,g} to {one.high:,g}" if one.low < one.high else "", one.kind, one.source)
        for name, one in INPUTS.items()
    ]  # fmt: skip
    return Table(("input", "value", "range", "kind", "source"), rows)


def byte_table(told: Values) -> Table:
    rows: list[tuple[Any, ...]] = []
    for model in MODELS.values():
        full, tp = model.full_bytes / 1e9, model.tp
        own = [model.pulled_bytes("own", n) / 1e9 for n in (1, tp // 2, tp)]
        files = [model.resolves("own", n, told) for n in (1, tp)]
        asked = [f"{n:.0f}" for n in (model.resolves("full", 1, told), *files)]
        rows.append((model.name, tp, full, *own, full / own[0], " / ".join(asked)))
    columns = ("pipeline", "tp", "full GB", "1 rank", "half", "all ranks", "full / 1 rank")
    return Table((*columns, "resolves: full / 1 rank / all"), rows)


def store_table(told: Values) -> Table:
    """What the ceilings come to: where they begin, and how many starts a minute they bear."""
    model, all_stores = MODELS["klein-4B"], stores(told)
    rows: list[tuple[Any, ...]] = []
    for name in ("Hub, no quota", "S3", "EFS"):
        store = all_stores[name]
        minute = [60 * store.ceiling / model.pulled_bytes(way, 1) for way in BOTH]
        rates = store.host / 1e9, store.ceiling / 1e9, store.ceiling / store.host
        rows.append((name, *rates, *minute))
    quota, window = all_stores["Hub"].quota, all_stores["Hub"].window
    starts = [quota / model.resolves(way, 1, told) for way in BOTH]
    rows.append(("Hub, its quota alone", "", "", starts[0], *(60 * n / window for n in starts)))
    columns = ("store", "GB/s a host", "GB/s for all", "shared from hosts")
    return Table((*columns, "starts a minute: full", "own"), rows)


def both(told: Values, model: str, store: str, host: str, **of: Any) -> list[float]:
    """Seconds in all: full, own."""
    machine, place = host_named(host, told), stores(told)[store]
    return [ready(MODELS[model], way, place, machine, told, **of).total for way in BOTH]


def times(told: Values, model: str, host: str, ranks: int, ways: Sequence[Way]) -> Table:
    """Seconds by store, way and hosts."""
    machine = host_named(host, told)
    rows = []
    for name, store in stores(told).items():
        if name == "NVMe" and host == "small":
            continue
        for way in ways:
            if way != "build" or store.pulled:
                run = [ready(MODELS[model], way, store, machine, told, hosts=n, ranks=ranks)
                       for n in HOSTS]  # fmt: skip
                rows.append((name, way, *(one.total for one in run)))
    return Table(("store", "way", *(f"{n:,}" for n in HOSTS)), rows)


def model_table(told: Values) -> Table:
    """Every pipeline, 1,000 hosts from S3: one rank a small host, all ranks a large one."""
    rows = []
    for model in list(MODELS)[:4]:
        one = both(told, model, "S3", "small", hosts=1_000, ranks=1)
        every = both(told, model, "S3", "large", hosts=1_000, ranks=8)
        rows.append((model, *one, one[0] / one[1], *every, every[0] / every[1]))
    heads = [f"{ranks}: {head}" for ranks in ("1 rank", "8 ranks") for head in (*BOTH, "gain")]
    return Table(("pipeline", *heads), rows)


def spread_table(told: Values) -> Table:
    """One set of 32 ranks over more and more hosts: 1,000 sets from S3, large hosts."""
    model = MODELS["klein-9B tp 32"]
    rows = []
    for ranks in (32, 16, 8, 2, 1):
        hosts = 1_000 * model.tp // ranks
        full, own = both(told, model.name, "S3", "large", hosts=hosts, ranks=ranks)
        rows.append((ranks, hosts, model.pulled_bytes("own", ranks) / 1e9, full, own, full / own))
    return Table(("ranks a host", "hosts", "own GB a host", "full s", "own s", "gain"), rows)


def restart_table(told: Values) -> Table:
    """A host whose files are there already: cold, and with all of them in its page cache."""
    rows = []
    for host, ranks, store, shared in RESTARTS:
        cells: list[float] = []
        for warm in (False, True):
            of = {"ranks": ranks, "warm": warm, "shared": shared}
            full, own = both(told, "klein-4B", store, host, **of)
            cells += [full, own, full / own]
        told_apart = "" if ranks == 1 else "shared" if shared else "each its own"
        rows.append((ranks, store, told_apart, *cells))
    heads = (f"{state}: {head}" for state in ("cold", "warm") for head in (*BOTH, "gain"))
    return Table(("ranks", "files on", "page cache", *heads), rows)


def range_table(told: Values) -> Table:
    """The gain (full over own) of two cases, with each input at the ends of its range."""

    def gains(told: Values) -> list[float]:
        one = both(told, "klein-4B", "S3", "small", hosts=1_000)
        every = both(told, "klein-4B", "NVMe", "large", ranks=8)
        return [full / own for full, own in (one, every)]

    middle = gains(told)
    rows: list[tuple[Any, ...]] = [("as given", *middle)]
    for name, one in INPUTS.items():
        low, high = (gains({**told, name: one.base(end)}) for end in (one.low, one.high))
        if any(abs(end / mid - 1) > 0.02 for end, mid in zip(low + high, middle * 2, strict=True)):
            cells = [f"{shown(a)} to {shown(b)}" for a, b in zip(low, high, strict=True)]
            rows.append((f"`{name}` {one.low:,g} to {one.high:,g} {one.unit}", *cells))
    return Table(("input", "1 rank a host, S3, 1,000 hosts", "8 ranks, NVMe, cold"), rows)


def tables(told: Values) -> dict[str, Table]:
    """Every table of docs/scale.md, by the name of its place there."""
    return {
        "inputs": input_table(told),
        "bytes": byte_table(told),
        "stores": store_table(told),
        "one-rank": times(told, "klein-4B", "small", 1, BOTH),
        "all-ranks": times(told, "klein-4B", "large", 8, ("full", "build", "own")),
        "models": model_table(told),
        "spread": spread_table(told),
        "restart": restart_table(told),
        "ranges": range_table(told),
    }


def with_tables(text: str, made: Mapping[str, Table]) -> str:
    """The text with each `<!-- fleet: NAME -->` ... `<!-- end -->` filled; KeyError if unknown."""
    return re.sub(
        r"(<!-- fleet: ([\w-]+) -->\n).*?(<!-- end -->)",
        lambda found: f"{found[1]}{made[found[2]].markdown()}\n{found[3]}",
        text,
        flags=re.S,
    )
