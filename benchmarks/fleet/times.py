"""Time to ready: a host, a store, and how long it takes until the last of a fleet has loaded."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from benchmarks.fleet.inputs import Model, Values, Way


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
