"""The inside of a measured process: it says when it is ready, waits, measures itself, and tells.

Imports next to nothing, so that what a worker imports is its contestant's own.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.figures import UnavailableError, io, memory

Job = dict[str, Any]


class Channel:
    """Lines to the parent, on the stdout that nothing else can write to from here on."""

    def __init__(self) -> None:
        self._out = os.dup(1)
        os.dup2(2, 1)  # what libraries print goes to the log

    def tell(self, what: Mapping[str, Any]) -> None:
        os.write(self._out, json.dumps(what).encode() + b"\n")


def wait() -> None:
    if not sys.stdin.readline():
        os._exit(1)  # the parent is gone


def figures() -> dict[str, Any]:
    used, now, through = resource.getrusage(resource.RUSAGE_SELF), memory("self"), io("self")
    return {
        "user": used.ru_utime,
        "system": used.ru_stime,
        "rss": now["VmRSS"],
        "hwm": now["VmHWM"],
        "anon": now["RssAnon"],
        "read_bytes": through["read_bytes"],
        "asked_bytes": through["rchar"],
    }


NOTHING = dict.fromkeys(
    ("user", "system", "rss", "hwm", "anon", "read_bytes", "asked_bytes"), 0
)  # before a process began


def difference(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """What `process.combine` takes, but for the times."""
    sums = ("user", "system", "read_bytes", "asked_bytes")
    return {
        **{name: after[name] - before[name] for name in sums},
        "peak_bytes": after["hwm"],
        "peak_before": before["rss"],
        "anon_bytes": after["anon"],
        "anon_before": before["anon"],
    }


def measured(action: Callable[[], Mapping[str, Any]]) -> dict[str, Any]:
    """Do it, and what it took; `action` returns what more is to be told."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here on
    before = figures()
    begun = time.monotonic()
    told = action()
    ended = time.monotonic()
    return {"begun": begun, "ended": ended, **difference(before, figures()), **told}


def serve(work: Callable[[Job, Channel], Mapping[str, Any]]) -> None:
    """Do the job that the command line has, and leave without a goodbye to any process group."""
    channel = Channel()
    try:
        told = work(json.loads(sys.argv[1]), channel)
    except UnavailableError as error:
        told = {"unavailable": str(error)}
    except Exception:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    channel.tell(told)
    sys.stderr.flush()
    os._exit(0)
