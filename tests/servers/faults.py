"""Faults on order: what a server does to the requests that match, the same each time for a seed."""

from __future__ import annotations

import hashlib
import re
import threading
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

Kind = Literal["status", "cut", "reset", "slow", "stall", "etag", "truncate"]


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that goes wrong.

    status    the request is not carried out; the answer is `status`, with Retry-After if given
    reset     the request is not carried out; the connection is reset with no answer at all
    cut       the connection closes after `part` of a body that was announced whole
    stall     nothing more comes after `part` of the body, until the client or the server goes away
    slow      the body comes at `rate` bytes/s
    etag      the answer has another ETag
    truncate  the answer is well-formed, but holds only `part` of the body

    An answer without a body (HEAD) cannot be cut or stalled half-way: then nothing is sent.
    cut, stall, slow, etag and truncate do carry the request out: a commit is made, its answer lost.

    method, path: regular expressions; the whole method, anywhere in the path with its query.
    skip: how many matching requests pass first. times: how many are hit at most; None is all.
    share: of the matching requests, drawn by seed, path and range, however threads interleave.
    """

    kind: Kind
    method: str = ".*"
    path: str = ""
    times: int | None = None
    share: float = 1.0
    seed: int = 0
    skip: int = 0
    status: int = 503
    retry_after: int | None = None
    part: float = 0.5
    rate: float = 64 * 1024


@dataclass(slots=True)
class _Order:
    """A fault that was ordered, and what became of it."""

    fault: Fault
    matched: int = 0
    hits: int = 0
    seen: Counter[str] = field(default_factory=Counter)

    def hit(self, request: str) -> bool:
        """Whether this request, which matches, is hit."""
        fault = self.fault
        self.matched += 1
        self.seen[request] += 1
        spent = fault.times is not None and self.hits >= fault.times
        if spent or self.matched <= fault.skip:
            return False
        # A repeated request is drawn anew, or a retry could never succeed.
        draw = f"{fault.seed} {request} {self.seen[request]}"
        number = int.from_bytes(hashlib.sha256(draw.encode()).digest()[:8])
        if number >= fault.share * 2**64:
            return False
        self.hits += 1
        return True


class Faults:
    """The faults ordered from one server, and how often each hit. Safe to use from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._orders: list[_Order] = []
        self._past: list[_Order] = []

    def append(self, fault: Fault) -> None:
        """Order one more; of several that would hit a request, the first ordered does."""
        with self._lock:
            self._orders.append(_Order(fault))

    def extend(self, faults: Iterable[Fault]) -> None:
        """Order several more."""
        for fault in faults:
            self.append(fault)

    def clear(self) -> None:
        """From now on nothing goes wrong. What was hit still counts."""
        with self._lock:
            self._past += self._orders
            self._orders = []

    def hits(self, fault: Fault | None = None) -> int:
        """How many requests a fault hit, or all faults together."""
        with self._lock:
            orders = [*self._past, *self._orders]
        return sum(order.hits for order in orders if fault in (None, order.fault))

    def draw(self, method: str, path: str, range_: str | None) -> Fault | None:
        """The fault that this request meets."""
        request = f"{method} {path.partition('?')[0]} {range_}"
        with self._lock:
            for order in self._orders:
                fault = order.fault
                matches = re.fullmatch(fault.method, method) and re.search(fault.path, path)
                if matches and order.hit(request):
                    return fault
        return None
