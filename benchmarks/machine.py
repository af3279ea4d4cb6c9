"""What a result was measured on. No host name, no user, no path: results are published."""

from __future__ import annotations

import os
import platform
import subprocess
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PACKAGES = (
    "shardc",
    "torch",
    "diffusers",
    "transformers",
    "safetensors",
    "numpy",
    "fastsafetensors",
    "instanttensor",
    "runai-model-streamer",
)
GIB = 1 << 30


def facts(folder: Path, out: Path) -> dict[str, Any]:
    """The machine, the filesystems that hold sources and outputs, and the versions."""
    return {
        "cpu": cpu(),
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB, 1),
        "kernel": f"{platform.system()} {platform.release()}",
        "source_filesystem": filesystem(folder),
        "out_filesystem": filesystem(out),
        "load_average_before": round(os.getloadavg()[0], 2),
        "day": datetime.now(UTC).date().isoformat(),
        "python": platform.python_version(),
        "cp": coreutils(),
        "packages": versions(),
    }


def cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def filesystem(path: Path) -> str:
    """The type of the filesystem that holds an existing path. Source: proc_pid_mountinfo(5)."""
    device = path.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    try:
        mounts = Path("/proc/self/mountinfo").read_text(errors="replace").splitlines()
    except OSError:
        return "unknown"
    for mount in mounts:
        own, _, kind = mount.partition(" - ")
        if own.split()[2] == number:
            return kind.split()[0]
    return "unknown"


def coreutils() -> str:
    try:
        said = subprocess.run(["cp", "--version"], capture_output=True, text=True).stdout
    except OSError:
        return "unknown"
    return said.partition("\n")[0]


def versions() -> dict[str, str]:
    """Those of PACKAGES that are installed; none is imported for it."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
