"""Xet storage for the loopback Hub: a folder that hf_xet itself reads and writes (`local://`)."""

from __future__ import annotations

import struct
from pathlib import Path

RECORD = 48  # bytes; a shard file is made of such


class Xet:
    """The storage. `sizes`: of the files in it by SHA-256, as their commits told."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.url = f"local://{folder}"
        self.sizes: dict[str, int] = {}
        self._hashes: dict[str, str] = {}

    def hash_of(self, sha256: str) -> str | None:
        """The Xet hash of a file, which clients leave in the shards that they upload."""
        if sha256 not in self._hashes:
            for path in (self.folder / "xet" / "xorbs" / "shards").glob("*.mdb"):
                self._hashes |= _files(path.read_bytes())
        return self._hashes.get(sha256)

    def fetch(self, sha256: str, path: Path) -> None:
        """Put a file together again from its chunks, at a path."""
        import hf_xet  # type: ignore[import-untyped]

        found = self.hash_of(sha256)
        assert found is not None, f"{sha256} is not in Xet storage"
        with hf_xet.XetSession().new_file_download_group(endpoint=self.url) as group:
            group.start_download_file(hf_xet.XetFileInfo(found, self.sizes[sha256]), str(path))


def _files(shard: bytes) -> dict[str, str]:
    """The Xet hash of each file of a shard, by its SHA-256.

    After a header of 48 bytes, for each file: a header (hash, flags, entries), so many entries,
    as many for verification where bit 31 is set, and one with the SHA-256 where bit 30 is.
    """
    found = {}
    at = RECORD
    while at + RECORD <= len(shard) and shard[at : at + 32] != b"\xff" * 32:
        name = _hex(shard[at : at + 32])
        flags, entries = struct.unpack_from("<II", shard, at + 32)
        at += RECORD * (1 + entries * (2 if flags >> 31 & 1 else 1))
        if flags >> 30 & 1:
            found[_hex(shard[at : at + 32])] = name
            at += RECORD
    return found


def _hex(raw: bytes) -> str:
    """A hash as Xet writes it: four little-endian numbers."""
    return "".join(f"{int.from_bytes(raw[i : i + 8], 'little'):016x}" for i in range(0, 32, 8))
