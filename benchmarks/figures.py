"""What the kernel says of a process. Light: measured processes import it too."""

from __future__ import annotations

import re
from pathlib import Path

FIGURES = re.compile(r"^(VmHWM|VmRSS|RssAnon):\s+(\d+) kB", re.M)
Figures = dict[str, int]


class UnavailableError(Exception):
    """A contestant that cannot run here, and why."""


def memory(pid: int | str) -> Figures:
    """Bytes now resident (VmRSS, of them RssAnon) and the most that ever were (VmHWM)."""
    text = Path(f"/proc/{pid}/status").read_text()
    return {name: int(number) << 10 for name, number in FIGURES.findall(text)}


def io(pid: int | str) -> Figures:
    """Source: proc_pid_io(5)."""
    lines = Path(f"/proc/{pid}/io").read_text().splitlines()
    return {name: int(number) for name, number in (line.split(": ") for line in lines)}
