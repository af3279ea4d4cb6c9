"""Builds the simulated device's native part, once for its sources and the torch it is built for.

The library is kept in the user's cache, never in the tree. It is compiled in a process of its own:
loading it registers a device, which no process but a simulated rank should have.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

import torch

SOURCES = Path(__file__).parent / "csrc"
NAME = "neuronsim_native"


class CannotBuildError(Exception):
    """There is no compiler, or no ninja."""


def library() -> Path:
    """The built library; CannotBuildError says what is missing."""
    built = _cache() / _key() / f"{NAME}.so"
    if built.is_file():
        return built
    for tool in (os.environ.get("CXX", "c++"), "ninja"):
        if shutil.which(tool, path=_path()) is None:
            raise CannotBuildError(f"{tool} is not installed")
    built.parent.mkdir(parents=True, exist_ok=True)
    with (built.parent / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another test process may be building it
        if not built.is_file():
            _build(built)
    return built


def _cache() -> Path:
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "shardc" / "neuronsim"


def _path() -> str:
    """PATH, and first the folder of this Python: ninja may come from its environment."""
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])


def _key() -> str:
    """What the library depends on."""
    state = hashlib.sha256(f"{torch.__version__} {sysconfig.get_config_var('SOABI')}".encode())
    for path in sorted([*SOURCES.iterdir(), Path(__file__)]):
        state.update(path.read_bytes())
    return state.hexdigest()[:16]


def _build(built: Path) -> None:
    with tempfile.TemporaryDirectory(dir=built.parent) as folder:
        result = subprocess.run(
            [sys.executable, __file__, folder],
            env={**os.environ, "PATH": _path()},
            capture_output=True,
            text=True,
            check=False,
        )
        if result.returncode:
            raise RuntimeError(f"neuronsim does not compile:\n{result.stdout}\n{result.stderr}")
        os.replace(Path(folder) / f"{NAME}.so", built)


def _compile(folder: str) -> None:
    from torch.utils.cpp_extension import load

    load(
        NAME,
        [str(path) for path in sorted(SOURCES.glob("*.cpp"))],
        extra_cflags=["-O1", "-g0", "-Wall"],
        build_directory=folder,
        is_python_module=True,
    )


if __name__ == "__main__":
    _compile(sys.argv[1])
