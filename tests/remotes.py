"""What tests of pulls share: a shard set at two degrees, on a Hub and on S3, and empty caches.

A module that imports `home` has every test of it use such caches.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from huggingface_hub import constants

import shardc
from shardc import fetch
from tests import checkpoints as ck
from tests.servers.hub import Hub
from tests.servers.s3 import S3

REPO = "me/tiny"
BUCKET = "shards"
S3_SET = f"s3://{BUCKET}/sets/tiny"
SHARD = "transformer/rank-0000{rank}-of-0000{tp}"
CHUNK_BYTES = 1 << 16  # of which the files have several


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """A pipeline at two degrees: a component in parts, and one that is kept whole, in two files."""
    folder = tmp_path_factory.mktemp("sets")
    source = ck.pipeline(folder / "source", {"transformer": ck.CLASS, "vae": "OtherModel"})
    weights = {f"m.{i}.weight": ck.Data.count("F32", [256, 256], first=i) for i in range(3)}
    ck.component(source / "transformer", {**weights, "n.weight": ck.Data.count("F32", [9000])})
    vae = {name: ck.Data.count("F32", [20_000]) for name in "ab"}
    ck.component(source / "vae", vae, class_name="OtherModel", files=2)
    rules = ck.manifest(folder / "rules.toml", [{"match": "m.*", "style": "colwise"}])
    made = {tp: folder / "repo" / f"tp{tp}" for tp in (2, 4)}
    for tp, out in made.items():
        out.parent.mkdir(exist_ok=True)
        shardc.build(source, out, tp, manifest=rules, max_part_bytes=150_000)
    return made


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Caches of this test's own, small chunks, and retries that do not wait."""
    monkeypatch.setenv("SHARDC_CACHE", str(tmp_path / "shardc-cache"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hf" / "hub"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(fetch, "CHUNK_BYTES", CHUNK_BYTES)
    real = time.sleep
    monkeypatch.setattr(time, "sleep", lambda seconds: real(min(seconds, 0.01)))
    return tmp_path


def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, sets: dict[int, Path]) -> Iterator[Hub]:
    """A Hub with both degrees in one repo."""
    with Hub(tmp_path / "hub") as server:
        point_at(server, monkeypatch)
        server.upload(REPO, sets[2].parent)
        yield server


def point_at(server: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have this process ask the server, whose library read its endpoint at import, and others."""
    template = server.url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "ENDPOINT", server.url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", server.xet is None)
    for name, value in server.environ.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch, sets: dict[int, Path]) -> Iterator[S3]:
    pytest.importorskip("moto.server")
    with S3() as server:
        for name, value in server.environ.items():
            monkeypatch.setenv(name, value)
        server.create_bucket(BUCKET)
        server.upload(BUCKET, "sets/tiny", sets[2].parent)
        yield server


def needed(path: Path, ranks: Sequence[int]) -> dict[str, bytes]:
    """The files of a set but for other ranks' shards."""
    return {
        name: data
        for name, data in ck.contents(path).items()
        if "rank-" not in name or int(name.partition("rank-")[2][:5]) in ranks
    }


def size(files: dict[str, bytes]) -> int:
    return sum(map(len, files.values()))


def content(server: Hub | S3) -> int:
    """Bytes of files that were sent."""
    return server.bytes_sent("/cdn/|resolve-cache|/shards/")


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)
