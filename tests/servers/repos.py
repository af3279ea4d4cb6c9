"""What the loopback Hub holds: repos of commits of files, and the blobs of those."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests.servers.messages import CHUNK

LFS_SIZE = 10 * 1024 * 1024  # bytes; whatever is larger is LFS
LFS_SUFFIXES = (".safetensors", ".bin", ".pt", ".ckpt", ".neff", ".zip", ".tar", ".gguf", ".onnx")
ATTRIBUTES = "".join(f"*{suffix} filter=lfs diff=lfs merge=lfs -text\n" for suffix in LFS_SUFFIXES)


class Refused(Exception):
    """A request that the Hub refuses. `code` goes into X-Error-Code, where clients look for it."""

    def __init__(self, status: int, message: str, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.code = status, message, code


@dataclass(frozen=True, slots=True)
class Entry:
    """A file in a commit. `oid` is git's for the file, or for its pointer where `lfs`."""

    sha256: str
    size: int
    lfs: bool
    oid: str
    xet: str | None = None

    @classmethod
    def regular(cls, data: bytes) -> Entry:
        """A file that lies in git itself."""
        return cls(hashlib.sha256(data).hexdigest(), len(data), False, git_oid(data))

    @classmethod
    def large(cls, sha256: str, size: int, xet: str | None = None) -> Entry:
        """A file that git only points to."""
        return cls(sha256, size, True, git_oid(pointer(sha256, size)), xet)

    def lfs_info(self, key: str) -> dict[str, object]:
        """The LFS part of a listing, the digest under `key`."""
        size = len(pointer(self.sha256, self.size))
        return {key: self.sha256, "size": self.size, "pointerSize": size}

    def listed(self, path: str) -> dict[str, object]:
        """As the Hub lists it in a tree."""
        found: dict[str, object] = {
            "type": "file",
            "oid": self.oid,
            "size": self.size,
            "path": path,
        }
        if self.lfs:
            found["lfs"] = self.lfs_info("oid")
        if self.xet:
            found["xetHash"] = self.xet
        return found


def git_oid(data: bytes) -> str:
    """The id that git gives a file's content."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def pointer(sha256: str, size: int) -> bytes:
    """What git holds in place of a large file."""
    return (
        f"version https://git-lfs.github.com/spec/v1\noid sha256:{sha256}\nsize {size}\n".encode()
    )


def is_lfs(path: str, size: int) -> bool:
    """Whether the Hub takes a file by LFS."""
    return size > 0 and (path.endswith(LFS_SUFFIXES) or size > LFS_SIZE)


Files = Mapping[str, Entry]


@dataclass(frozen=True, slots=True)
class Commit:
    """All files at one time."""

    sha: str
    parent: str | None
    title: str
    files: Files


@dataclass(slots=True)
class Repo:
    """A model repo: its commits, and the branches and tags that name some of them."""

    id: str
    private: bool = False
    gated: bool = False
    commits: dict[str, Commit] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)

    def commit(self, branch: str, title: str, files: Files) -> str:
        """Put a branch to a new commit of exactly these files; its id."""
        parent = self.branches.get(branch)
        # The same steps give the same ids, so that seeded faults hit the same requests.
        content = [self.id, len(self.commits), title, sorted((p, e.oid) for p, e in files.items())]
        sha = hashlib.sha1(json.dumps([parent, content]).encode()).hexdigest()
        self.commits[sha] = Commit(sha, parent, title, dict(files))
        self.branches[branch] = sha
        return sha

    def at(self, revision: str) -> Commit:
        """The commit that a branch, a tag or (the start of) an id names; Refused if none."""
        sha = self.branches.get(revision) or self.tags.get(revision)
        if sha is None and len(revision) >= 7:
            sha = next((sha for sha in self.commits if sha.startswith(revision)), None)
        if sha is None:
            raise Refused(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return self.commits[sha]


class Blobs:
    """Contents by their SHA-256, in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def path(self, sha256: str) -> Path:
        """Where a content lies, or would."""
        return self.folder / sha256

    def __contains__(self, sha256: str) -> bool:
        return self.path(sha256).is_file()

    def put(self, chunks: Iterable[bytes], expected: str | None = None) -> tuple[str, int]:
        """Take a content in, all or nothing; its SHA-256 and size."""
        digest, size = hashlib.sha256(), 0
        handle, name = tempfile.mkstemp(dir=self.folder, prefix="incoming-")
        try:
            with os.fdopen(handle, "wb") as file:
                for chunk in chunks:
                    digest.update(chunk)
                    size += file.write(chunk)
            sha256 = digest.hexdigest()
            if expected not in (None, sha256):
                raise Refused(400, f"the content is not {expected} but {sha256}")
            os.replace(name, self.path(sha256))
        except BaseException:
            os.unlink(name)
            raise
        return sha256, size

    def put_file(self, path: Path, name: str) -> Entry:
        """Take a file in, to be called `name`."""
        size = path.stat().st_size
        if is_lfs(name, size):
            return Entry.large(*self.put(file_chunks(path)))
        data = path.read_bytes()
        self.put([data])
        return Entry.regular(data)

    def put_bytes(self, data: bytes, name: str) -> Entry:
        """Take bytes in, to be called `name`."""
        sha256, size = self.put([data])
        return Entry.large(sha256, size) if is_lfs(name, size) else Entry.regular(data)


def file_chunks(path: Path) -> Iterator[bytes]:
    """A file's bytes, a chunk at a time."""
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            yield chunk
