"""Direct reads give the file's bytes, wherever a tensor lies, and the choice follows the cache."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from shardc.errors import ShardSetError  # noqa: E402
from shardc.loaders import reads  # noqa: E402

SIZE = 2 * reads.STAGE_BYTES + 12_345


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("reads") / "data"
    file.write_bytes(np.random.default_rng(0).bytes(SIZE))
    return file


@pytest.mark.parametrize(
    ("start", "stop"),
    [
        (0, SIZE),
        (4096, 8192),
        (1, 2),
        (4095, 4097),
        (7, SIZE),
        (SIZE - 1, SIZE),
        (reads.STAGE_BYTES - 1, reads.STAGE_BYTES + 1),
        (5, 5),
    ],
)
def test_pieces_are_the_files_bytes(path: Path, start: int, stop: int) -> None:
    found = bytearray(stop - start)
    with reads.DirectFile(path) as file:
        for at, piece in file.pieces(start, stop):
            assert piece.numel() <= reads.STAGE_BYTES
            found[at : at + piece.numel()] = piece.numpy().tobytes()
    assert bytes(found) == path.read_bytes()[start:stop]


def test_a_file_that_ends_early(path: Path) -> None:
    with reads.DirectFile(path) as file, pytest.raises(ShardSetError, match="are needed"):
        list(file.pieces(SIZE - 10, SIZE + 10))


def test_the_choice_follows_the_page_cache(path: Path) -> None:
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as memory:
        assert path.read_bytes()  # now it is cached
        assert reads.resident_share(memory) == 1.0
        assert reads.choose("auto", memory) == "mapped"
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        share = reads.resident_share(memory)
        if share is None or share > 0:
            pytest.skip("this filesystem keeps its pages (tmpfs does)")
        assert reads.choose("auto", memory) == "direct"
        assert reads.choose("mapped", memory) == "mapped"
    assert reads.choose("direct", None) == "direct"
