"""Coverage-guided fuzzing of one target, by atheris, from a corpus that is made here."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

MISSING = "atheris is not installed: `pip install atheris` (Linux and macOS), then again"


def fuzz(name: str, options: list[str]) -> None:
    """Run until something is found. options: libFuzzer's, as -max_total_time=600 or -runs=1000."""
    try:
        import atheris
    except ImportError:
        sys.exit(MISSING)
    with atheris.instrument_imports(include=["shardc"]):  # for the first import only
        from tests.fuzz import targets
    if name not in targets.TARGETS:
        sys.exit(f"{name!r} is no target; there are: {', '.join(sorted(targets.TARGETS))}")
    with tempfile.TemporaryDirectory(prefix="shardc-corpus-") as folder:
        for number, seed in enumerate(targets.seeds(name)):
            (Path(folder) / f"seed-{number}").write_bytes(seed)

        def one(data: bytes) -> None:
            targets.TARGETS[name](data)

        atheris.Setup([f"fuzz-{name}", *options, folder], one)
        atheris.Fuzz()


def main() -> None:
    if len(sys.argv) < 2:
        sys.exit("usage: python -m tests.fuzz TARGET [-max_total_time=600]")
    fuzz(sys.argv[1], sys.argv[2:])
