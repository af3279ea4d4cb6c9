"""A fleet on paper: time to ready of 1 to 10,000 hosts, full checkpoint against per-rank pulls.

Plain arithmetic over the inputs below: nothing is measured, no network is touched. docs/scale.md
has the formulas, the tables and what they say. From the repository: python -m benchmarks.fleet
"""

from __future__ import annotations

import json
import math
import re
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import click

DOCUMENT = Path(__file__).parents[1] / "docs" / "scale.md"
HOSTS = (1, 10, 100, 1_000, 10_000)
SCALE = {"kB": 1e3, "MB": 1e6, "GB": 1e9, "MiB": 2**20, "GiB": 2**30}
WHOLE_FILE_BYTES = 10e9  # diffusers' default: a larger checkpoint is split
PART_BYTES = 4e9  # shardc's default: a larger rank file comes in parts

Way = Literal["full", "build", "own"]  # sliced at load; built into a set on the host; own files
BOTH: tuple[Way, Way] = ("full", "own")
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
class Input:
    """One number, its range in the same unit, what it rests on, and the source with its year."""

    value: float
    low: float
    high: float
    unit: str
    kind: Literal["documented", "reported", "measured", "assumed"]
    source: str

    def base(self, value: float) -> float:
        """In bytes, bytes a second, or as it is."""
        return value * SCALE.get(self.unit.removesuffix("/s"), 1)


PROTOTYPE = "shardc's prototypes (klein-4B tp 8, 2 cores, 2026)"
# fmt: off
INPUTS = {
    "hub_host": Input(
        0.3, 0.1, 2.3, "GB/s", "reported",
        "huggingface_hub issue 4893, 2026: 0.3 sustained on 25 Gbit/s, 2.3 for half a minute"),
    "hub_ceiling": Input(
        12.5, 1, 125, "GB/s", "assumed", "what the Hub gives one fleet; no figure is published"),
    "hub_quota": Input(
        5_000, 3_000, 100_000, "resolves", "documented",
        "Hub docs, rate limits, 2025: free account; anonymous 3,000 an address, Enterprise 50,000"),
    "hub_window": Input(
        300, 300, 300, "s", "documented", "Hub docs, rate limits, 2025: fixed windows"),
    "hub_resolves": Input(
        2, 1, 2, "a file", "assumed", "a HEAD, and a GET for what does not come by Xet"),
    "small_files": Input(
        15, 5, 40, "files", "assumed", "configs, tokenizer, scheduler of a pipeline"),
    "s3_gets": Input(
        5_500, 5_500, 55_000, "GET/s", "documented",
        "S3 user guide, optimizing performance, 2024: at least, a partitioned prefix; high: 10"),
    "s3_part": Input(
        8, 8, 64, "MiB", "assumed", "bytes a GET: the usual part size of clients"),
    "s3_connection": Input(
        85, 85, 90, "MB/s", "documented",
        "S3 user guide, performance design patterns, 2024: a request for each 85 to 90 MB/s"),
    "s3_connections": Input(
        32, 8, 128, "a host", "assumed", "requests that a host's client keeps open"),
    "efs_ceiling": Input(
        60, 10, 60, "GiB/s", "documented",
        "EFS quotas, 2025: Elastic, Regional, the largest regions; 10 in the others"),
    "efs_client": Input(
        1_500, 500, 1_500, "MiB/s", "documented",
        "EFS performance, 2024: Elastic, with a recent efs-utils or CSI driver; else 500"),
    "gp3": Input(
        1_000, 125, 2_000, "MiB/s", "documented",
        "EC2 API, CreateVolume, 2025: 125 (default) to 2,000 a volume; until then 1,000"),
    "gp3_new": Input(
        300, 100, 300, "MiB/s", "documented",
        "EC2 API, CreateVolume, 2025: provisioned rate of filling a volume from a snapshot"),
    "nvme_read": Input(
        8, 2, 16, "GB/s", "assumed", "4 drives of instance store, striped"),
    "nvme_write": Input(
        4, 1, 8, "GB/s", "assumed", "as above"),
    "large_nic": Input(
        12.5, 6.25, 100, "GB/s", "documented",
        "S3 user guide, optimizing performance, 2024: up to 100 Gbit/s an instance; "
        "Neuron docs, Trn1, 2025: trn1.32xlarge has 800 in all"),
    "small_nic": Input(
        1.25, 0.25, 3.1, "GB/s", "assumed", "10 Gbit/s; small sizes have it for a while only"),
    "small_internet": Input(
        0.625, 0.625, 0.625, "GB/s", "documented",
        "EC2 user guide, network bandwidth, 2024: 5 Gbit/s below 32 vCPUs; else half of the NIC"),
    "large_cache": Input(
        400, 100, 1_800, "GB", "assumed", "of 512 GiB (Neuron docs, Trn1, 2025: trn1.32xlarge)"),
    "small_cache": Input(
        12, 4, 100, "GB", "assumed", "of 16 GiB (Neuron docs, Inf2, 2025: inf2.xlarge)"),
    "copy": Input(
        2, 1, 5, "GB/s", "assumed",
        f"page cache to staging, a rank; 0.9 into fresh memory to 4.8 in {PROTOTYPE}"),
    "host_copy": Input(
        50, 20, 200, "GB/s", "assumed", "the same, all ranks of a host together"),
    "slicing": Input(
        4, 1, 7.3, "times", "measured",
        f"slices slower than large reads, warm: 3.9 to 7.3 in {PROTOTYPE}; low: no slower"),
    "slice_reads": Input(
        0.84, 0.38, 1, "of all", "measured",
        f"what one rank's slices read: 0.76 and 0.84 in {PROTOTYPE}; low: what its plan touches"),
    "device": Input(
        4, 1, 16, "GB/s", "assumed", "host to device, a rank"),
    "build": Input(
        1, 0.3, 2, "GB/s", "assumed", "of the full checkpoint: about the rate of a plain copy"),
}
# fmt: on
Values = Mapping[str, float]


def values(**changed: float) -> Values:
    """The inputs in bytes and seconds, with some changed (each in its own unit)."""
    return {name: one.base(changed.get(name, one.value)) for name, one in INPUTS.items()}


@dataclass(frozen=True, slots=True)
class Part:
    """A component's bytes: its full file; of one rank, replicated tensors included; those alone.

    A `rank_bytes` of 0 is a component that is kept whole. Made by plans (`tests.zoo.sizes`).
    """

    name: str
    full_bytes: int
    rank_bytes: int = 0
    replicated_bytes: int = 0
    padded: bool = False  # with zero heads: its own degrees stop below

    def held_bytes(self, ranks: int) -> int:
        """What the files of some different ranks take, the replicated one once."""
        own = self.rank_bytes - self.replicated_bytes
        return ranks * own + self.replicated_bytes if self.rank_bytes else self.full_bytes

    def files(self, way: Way, ranks: int) -> int:
        if way != "own" or not self.rank_bytes:
            return math.ceil(self.full_bytes / WHOLE_FILE_BYTES)
        return ranks * math.ceil(self.rank_bytes / PART_BYTES) + 2  # replicated, index


@dataclass(frozen=True, slots=True)
class Model:
    """A pipeline's weights at one degree, bf16, profile compact."""

    name: str
    tp: int
    parts: tuple[Part, ...]

    @property
    def full_bytes(self) -> int:
        return sum(part.full_bytes for part in self.parts)

    @property
    def placed_bytes(self) -> int:
        """What one rank puts on its device."""
        return sum(part.rank_bytes or part.full_bytes for part in self.parts)

    def pulled_bytes(self, way: Way, ranks: int) -> int:
        """What a host with so many different ranks fetches."""
        if way != "own":
            return self.full_bytes
        return sum(part.held_bytes(ranks) for part in self.parts)

    def read_bytes(self, way: Way, ranks: int, slice_reads: float) -> float:
        """What a cold load reads: the ranks of a host share its page cache."""
        if way != "full":
            return self.pulled_bytes("own", ranks)
        share = slice_reads + (1 - slice_reads) * (ranks - 1) / max(self.tp - 1, 1)
        return sum(part.full_bytes * (share if part.rank_bytes else 1) for part in self.parts)

    def resolves(self, way: Way, ranks: int, told: Values) -> float:
        files = sum(part.files(way, ranks) for part in self.parts) + told["small_files"]
        return files * told["hub_resolves"]


# fmt: off
VAE2 = Part("VAE", 168_092_230)
MODELS = {model.name: model for model in (
    Model("klein-4B", 8, (
        Part("black-forest-labs/FLUX.2-klein-4B", 7_751_113_728, 969_587_712, 801_792),
        Part("Qwen/Qwen3-4B", 8_044_985_344, 1_005_960_192, 392_192),
        VAE2)),
    Model("klein-9B", 8, (
        Part("black-forest-labs/FLUX.2-klein-9B", 18_157_191_168, 2_270_580_736, 1_069_056),
        Part("Qwen/Qwen3-8B", 16_381_519_872, 2_048_223_232, 616_448),
        VAE2)),
    Model("FLUX.1-dev", 8, (
        Part("black-forest-labs/FLUX.1-dev", 23_802_955_904, 2_976_343_168, 1_132_672),
        Part("google/t5-v1_1-xxl", 11_537_915_904, 1_442_587_136, 401_408),
        Part("CLIP-L", 246_145_536), Part("VAE", 167_639_366))),
    Model("Qwen-Image", 8, (
        Part("Qwen/Qwen-Image", 40_861_031_552, 5_109_294_720, 1_936_512),
        Part("Qwen/Qwen2.5-VL-7B-Instruct", 16_584_423_424, 2_127_842_560, 3_756_544, padded=True),
        Part("VAE", 253_785_062))),
    Model("klein-9B tp 32", 32, (
        Part("black-forest-labs/FLUX.2-klein-9B", 18_157_191_168, 568_446_976, 1_069_056),
        Part("Qwen/Qwen3-8B", 16_381_519_872, 569_141_248, 616_448),
        VAE2)),
)}
# fmt: on


@dataclass(frozen=True, slots=True)
class Host:
    """Bytes a second of its interface, to the internet, and of its disk; bytes of page cache."""

    nic: float
    internet: float
    write: float
    read: float
    cache_bytes: float


@dataclass(frozen=True, slots=True)
class Store:
    """Where hosts get the files: a ceiling that all share, one a host, a quota of requests.

    `pulled`: files are copied to the host's disk first; else they are read in place.
    """

    ceiling: float
    host: float
    pulled: bool = False
    internet: bool = False
    quota: float = math.inf
    window: float = 0.0


def host_named(name: str, told: Values) -> Host:
    if name == "large":
        nic = told["large_nic"]
        return Host(nic, nic / 2, told["nvme_write"], told["nvme_read"], told["large_cache"])
    nic = told["small_nic"]
    internet = min(nic, told["small_internet"])
    return Host(nic, internet, told["gp3"], told["gp3"], told["small_cache"])


def stores(told: Values) -> dict[str, Store]:
    s3 = told["s3_gets"] * told["s3_part"]
    connections = told["s3_connections"] * told["s3_connection"]
    quota, window = told["hub_quota"], told["hub_window"]
    return {
        "Hub": Store(told["hub_ceiling"], told["hub_host"], True, True, quota, window),
        "Hub, no quota": Store(told["hub_ceiling"], told["hub_host"], True, True),
        "S3": Store(s3, connections, True),
        "EFS": Store(told["efs_ceiling"], told["efs_client"]),
        "gp3": Store(math.inf, told["gp3"]),
        "gp3 from a snapshot": Store(math.inf, told["gp3_new"]),
        "NVMe": Store(math.inf, told["nvme_read"]),
    }


def last_done(waves: Iterable[tuple[float, int]], size: float, cap: float, ceiling: float) -> float:
    """When the last of many equal transfers ends: max-min share of one ceiling, a cap for each.

    `waves` are (start in seconds, transfers), by start. Those under way all get the same rate, so
    they end in the order in which they began, and one number says how far a wave has come.
    """
    todo = deque(waves)
    active: deque[tuple[float, int]] = deque()  # (level at which it ends, transfers)
    now, level, count = 0.0, 0.0, 0  # level: bytes that one under way since the start would have
    while todo or active:
        rate = min(cap, ceiling / count) if count else 0.0
        ends = now + (active[0][0] - level) / rate if count else math.inf
        if todo and todo[0][0] <= ends:
            start, n = todo.popleft()
            level += rate * (start - now)
            now = start
            active.append((level + size, n))
            count += n
        else:
            level, n = active.popleft()
            now = ends
            count -= n
    return now


@dataclass(frozen=True, slots=True)
class Ready:
    """Seconds until the last host has pulled, and then built, and then loaded."""

    pull: float
    build: float
    load: float

    @property
    def total(self) -> float:
        return self.pull + self.build + self.load


def ready(
    model: Model, way: Way, store: Store, host: Host, told: Values,
    *, hosts: int = 1, ranks: int = 1, warm: bool = False, shared: bool = True,
) -> Ready:  # fmt: skip
    """Time to ready, all hosts starting at once, each with `ranks` ranks (whole sets if over tp).

    `warm`: the files are in the page cache already, so nothing is pulled or read. `shared` false:
    each rank reads what it needs from the disk, whatever the others read (containers with volumes
    of their own, direct reads).
    """
    distinct = min(ranks, model.tp)
    rate = told["copy"] / (told["slicing"] if way == "full" else 1)
    rate = min(rate, told["host_copy"] / ranks, told["device"])
    placing = model.placed_bytes / rate
    if warm:
        return Ready(0, 0, placing)
    build = model.full_bytes / min(told["build"], host.write) if way == "build" else 0.0
    reads = model.read_bytes(way, distinct if shared else 1, told["slice_reads"])
    reads *= 1 if shared else ranks
    if not store.pulled:
        cap = min(store.host, host.nic) if store.ceiling < math.inf else store.host
        reading = last_done([(0, hosts)], reads, cap, store.ceiling)
        return Ready(0, build, max(reading, placing))
    batch = hosts
    if store.quota < math.inf:
        batch = max(1, int(store.quota // model.resolves(way, distinct, told)))
    waves = [(i * store.window, min(batch, hosts - i * batch)) for i in range(-(-hosts // batch))]
    pulled = model.pulled_bytes(way, distinct)
    cap = min(store.host, host.internet if store.internet else host.nic, host.write)
    kept = pulled + (model.full_bytes if way == "build" else 0) <= host.cache_bytes
    reading = 0.0 if kept else reads / host.read
    return Ready(last_done(waves, pulled, cap, store.ceiling), build, max(reading, placing))


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


def draw(told: Values, folder: Path) -> None:
    """scale-hosts.svg and scale-ranks.svg: the same bytes each time."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    style: Any = {"svg.hashsalt": "shardc", "svg.fonttype": "none", "path.simplify": True}
    counts = [round(10 ** (i / 4)) for i in range(17)]
    with plt.rc_context(style):
        figure, axes = plt.subplots(1, 2, figsize=(9, 3.8), sharey=True, layout="constrained")
        for ax, host, ranks in zip(axes, ("small", "large"), (1, 8), strict=True):
            for color, name in enumerate(("Hub", "S3", "EFS")):
                done = [both(told, "klein-4B", name, host, hosts=n, ranks=ranks) for n in counts]
                for way, line, seconds in zip(BOTH, "-:", zip(*done, strict=True), strict=True):
                    ax.loglog(counts, seconds, line, color=f"C{color}", label=f"{name}, {way}")
            ax.minorticks_off()
            ax.set(xlabel="hosts", title=f"klein-4B tp 8, {ranks} of 8 ranks a host")
            ax.grid(alpha=0.3)
        axes[0].set(ylabel="seconds until all are ready")
        axes[0].legend(fontsize="small")
        save(figure, folder / "scale-hosts.svg")
        figure, ax = plt.subplots(figsize=(6, 3.6), layout="constrained")
        for model in MODELS.values():
            shares = [2**i for i in range(model.tp.bit_length())]
            saved = [model.full_bytes / model.pulled_bytes("own", n) for n in shares]
            ax.loglog([n / model.tp for n in shares], saved, "o-", label=f"{model.name}")
        ax.set(xlabel="share of the set's ranks on one host", ylabel="full bytes / own bytes")
        ax.set_xticks([1 / 2**i for i in range(6)], ["1", *(f"1/{2**i}" for i in range(1, 6))])
        ax.set_yticks([1, 2, 4, 8, 16, 32], ["1", "2", "4", "8", "16", "32"])
        ax.minorticks_off()
        ax.grid(alpha=0.3)
        ax.legend(fontsize="small")
        save(figure, folder / "scale-ranks.svg")
    plt.close("all")


def save(figure: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})
    lines = path.read_text().splitlines()  # it leaves spaces at the ends of lines
    path.write_text("".join(f"{line.rstrip()}\n" for line in lines))


def parse(changes: Sequence[str]) -> dict[str, float]:
    """NAME=VALUE pairs; click.BadParameter where one is not an input or not positive."""
    changed = {}
    for change in changes:
        name, _, number = change.partition("=")
        if name not in INPUTS:
            raise click.BadParameter(f"{name!r} is none of {', '.join(INPUTS)}")
        try:
            changed[name] = float(number)
        except ValueError:
            raise click.BadParameter(f"{change!r}: write NAME=NUMBER") from None
        if not 0 < changed[name] < math.inf:
            raise click.BadParameter(f"{change!r}: must be above 0 and finite")
    return changed


@click.command()
@click.option("--set", "changes", multiple=True, metavar="NAME=VALUE", help="In its own unit.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@click.option("--plot", type=click.Path(path_type=Path, file_okay=False), help="Draw into DIR.")
@click.option("--write", is_flag=True, help="Fill in the tables of docs/scale.md.")
def main(changes: tuple[str, ...], as_json: bool, plot: Path | None, write: bool) -> None:
    """Time to ready of a fleet, full checkpoint against per-rank pulls, by arithmetic.

    Example: python -m benchmarks.fleet --set gp3=125 --set s3_connections=8
    """
    if write and changes:
        raise click.UsageError("--write is for the inputs as they are: leave out --set")
    told = values(**parse(changes))
    made = tables(told)
    if plot:
        draw(told, plot)
    if write:
        DOCUMENT.write_text(with_tables(DOCUMENT.read_text(), made))
    if as_json:
        click.echo(json.dumps({name: table.records() for name, table in made.items()}, indent=1))
    else:
        for name, table in made.items():
            click.echo(f"{name}\n\n{table.markdown()}\n")


if __name__ == "__main__":
    main()
