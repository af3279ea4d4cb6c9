"""What a load will need is read into the page cache before, all of it, and nothing else."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shardc.loaders.ahead import needed, prefetch
from shardc.loaders.pages import Span
from shardc.loaders.reads import resident_share
from tests import checkpoints as ck
from tests.tiny import tiny

FILE_BYTES = 48 << 20  # more than any disk's read-ahead, or than one request to it


@pytest.fixture
def cold(tmp_path: Path) -> Path:
    """A rank's file that the page cache does not hold."""
    path = tmp_path / "rank-00001-of-00002.safetensors"
    path.write_bytes(bytes(FILE_BYTES))
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return path


def mapped(path: Path) -> mmap.mmap:
    with path.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)


def wait_until_resident(memory: mmap.mmap) -> None:
    deadline = time.monotonic() + 30
    while (share := resident_share(memory)) is not None and share < 1:
        assert time.monotonic() < deadline, f"only {share:.3f} of the file was read"
        time.sleep(0.02)


def test_prefetch_reads_all(cold: Path) -> None:
    thread = prefetch(cold.parent, 1)
    assert thread is not None
    thread.join()
    wait_until_resident(mapped(cold))


def test_a_span_is_read_ahead_whole(cold: Path) -> None:
    memory = mapped(cold)
    Span(memory, 0, FILE_BYTES).read_ahead(0, FILE_BYTES)
    wait_until_resident(memory)


def test_what_a_rank_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tiny(tmp_path / "out")
    (out / "vae").mkdir()
    ck.save(out / "vae" / "model.safetensors", {"w": ck.Data.count("F32", [4])})
    found = {path.name for path in needed(out, 1)}
    assert "rank-00001-of-00002.safetensors" in found
    assert "model.safetensors" in found
    assert not any(name.startswith("rank-00000") for name in found)
    monkeypatch.setenv("RANK", "1")
    for path in (out, str(out)):
        thread = prefetch(path)
        assert thread is not None
        thread.join()
    assert prefetch("org/name") is None


def test_a_file_that_cannot_be_opened_is_left_to_the_load(tmp_path: Path) -> None:
    (tmp_path / "gone.safetensors").symlink_to(tmp_path / "nowhere")
    thread = prefetch(tmp_path, 0)
    assert thread is not None
    thread.join()


def test_prefetch_imports_no_torch() -> None:
    code = "import sys; from shardc.loaders.ahead import prefetch; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
