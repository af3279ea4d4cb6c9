"""Large reads give the file's bytes, wherever a tensor lies, and the choice follows the cache."""

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


@pytest.mark.parametrize("direct", [True, False])
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
def test_pieces_are_the_files_bytes(path: Path, start: int, stop: int, direct: bool) -> None:
    found = bytearray(stop - start)
    with reads.FileReader(path, direct=direct) as file:
        for at, piece in file.pieces(start, stop):
            assert piece.numel() <= reads.STAGE_BYTES
            found[at : at + piece.numel()] = piece.numpy().tobytes()
    assert bytes(found) == path.read_bytes()[start:stop]


def test_a_file_that_ends_early(path: Path) -> None:
    with (
        reads.FileReader(path, direct=True) as file,
        pytest.raises(ShardSetError, match="are needed"),
    ):
        list(file.pieces(SIZE - 10, SIZE + 10))


def test_the_choice_follows_the_page_cache(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as memory:
        assert path.read_bytes()  # now it is cached
        assert reads.resident_share(memory) == 1.0
        assert reads.choose("auto", memory, path, shared=False) == "cached"
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        share = reads.resident_share(memory)
        if share is None or share > 0:
            pytest.skip("this filesystem keeps its pages (tmpfs does)")
        assert reads.choose("auto", memory, path, shared=False) == "direct"
        assert reads.choose("auto", memory, path, shared=True) == "buffered"
        assert reads.choose("mapped", memory, path, shared=True) == "mapped"
        monkeypatch.setattr(reads, "was_asked_for", lambda _: True)  # it is being read ahead
        assert reads.choose("auto", memory, path, shared=False) == "buffered"


def test_what_is_asked_for(path: Path) -> None:
    """What others read too goes through the page cache, and what is not mapped is read."""
    assert reads.choose("direct", None, path, shared=False) == "direct"
    assert reads.choose("direct", None, path, shared=True) == "buffered"
    asked: list[reads.Reads] = ["auto", "mapped"]
    for way in asked:
        assert reads.choose(way, None, path, shared=False) == "buffered"


def test_a_file_that_cannot_be_opened(tmp_path: Path) -> None:
    for direct in (True, False):
        with (
            pytest.raises(ShardSetError, match=r"none: cannot open it: No such file"),
            reads.FileReader(tmp_path / "none", direct=direct),
        ):
            pass


def test_read_into(path: Path) -> None:
    found = bytearray(10_000)
    reads.read_into(path, 4_321, memoryview(found))
    assert found == path.read_bytes()[4_321:14_321]
    with pytest.raises(ShardSetError, match=f"ends at byte {SIZE}, {SIZE + 9_999} are needed"):
        reads.read_into(path, SIZE - 1, memoryview(found))


def test_the_kind_of_a_mount() -> None:
    assert not reads.is_remote(Path("/proc"))
    assert not reads.is_remote(Path("/none"))
