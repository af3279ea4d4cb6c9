"""A Hub repo and an S3 prefix on loopback, as one kind of thing: what tests build from."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from shardc import remote
from tests.servers.faults import Fault
from tests.servers.hub import Hub
from tests.servers.s3 import S3
from tests.servers.web import Server

KINDS = ("hub", "s3")
REPO = "org/model"
BUCKET = "bucket"
PREFIX = "models/one"
WEIGHTS = r"\.safetensors(\?|$)"
# One request in twenty fails, in all the ways there are.
TWENTIETH = (
    Fault("status", method="GET|HEAD", share=0.0125, status=503, seed=1),
    Fault("status", method="GET|HEAD", share=0.0125, status=429, retry_after=0, seed=2),
    Fault("cut", method="GET", share=0.0125, part=0.37, seed=3),
    Fault("reset", method="GET|HEAD", share=0.0125, seed=4),
)


@dataclass(frozen=True, slots=True)
class Place:
    """Where something can be put: `address` is what shardc is given for it."""

    kind: str
    server: Server
    address: str

    def put(self, folder: Path) -> None:
        """The folder's files, there."""
        if isinstance(self.server, Hub):
            self.server.upload(REPO, folder)
        elif isinstance(self.server, S3):
            self.server.upload(BUCKET, PREFIX, folder)

    def change(self, name: str, data: bytes) -> None:
        """Another content for one file; on the Hub that is a commit."""
        if isinstance(self.server, Hub):
            self.server.move(REPO, {name: data})
        elif isinstance(self.server, S3):
            self.server.put(BUCKET, f"{PREFIX}/{name}", data)

    def weights_sent(self) -> int:
        """Bytes of weight files that the server has sent so far."""
        return self.server.bytes_sent(WEIGHTS)


@contextmanager
def opened(kind: str, folder: Path, patch: pytest.MonkeyPatch) -> Iterator[Place]:
    """A place with nothing in it, and this process's clients sent there.

    Their caches are below `folder`, and the pauses between attempts a thousandth of what they are.
    """
    from huggingface_hub import constants

    patch.setattr(remote, "PAUSE_S", 0.001)
    patch.setattr(remote, "MAX_PAUSE_S", 0.008)
    if kind == "s3":
        with S3() as s3:
            for name, value in s3.environ.items():
                patch.setenv(name, value)
            s3.create_bucket(BUCKET)
            yield Place(kind, s3, f"s3://{BUCKET}/{PREFIX}")
        return
    with Hub(folder / "hub") as hub:
        template = constants.HUGGINGFACE_CO_URL_TEMPLATE.removeprefix(constants.ENDPOINT)
        patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.url + template)
        patch.setattr(constants, "ENDPOINT", hub.url)
        patch.setattr(constants, "HF_HUB_CACHE", str(folder / "cache"))
        patch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        patch.delenv("HF_TOKEN", raising=False)
        yield Place(kind, hub, REPO)


def copy_into_cache(hub: Hub, source: Path, cache: Path, names: list[str]) -> Path:
    """Some files of the repo's main revision as the Hub's cache keeps them; the snapshot."""
    commit = hub.head(REPO)
    home = cache / f"models--{REPO.replace('/', '--')}"
    (home / "refs").mkdir(parents=True, exist_ok=True)
    (home / "blobs").mkdir(exist_ok=True)
    (home / "refs" / "main").write_text(commit)
    snapshot = home / "snapshots" / commit
    for name in names:
        entry = hub.files(REPO)[name]
        shutil.copy(source / name, home / "blobs" / entry.sha256)
        (snapshot / name).parent.mkdir(parents=True, exist_ok=True)
        depth = len(Path(name).parts) + 1
        (snapshot / name).symlink_to(Path(*[".."] * depth) / "blobs" / entry.sha256)
    return snapshot
