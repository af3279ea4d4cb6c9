"""Builds whose source is on a Hub or in a bucket: the same bytes, each fetched once."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardc
from shardc import builder, remote
from shardc.errors import CheckpointError, OutputError, RemoteError
from shardc.writing import Resources
from tests import checkpoints as ck
from tests.places import KINDS, REPO, TWENTIETH, WEIGHTS, Place, copy_into_cache, opened
from tests.servers.faults import Fault
from tests.servers.hub import Hub

LAYERS = 12
SMALL = Resources(memory_bytes=8 * 4 * 64 * 1024, fsync=False)  # ranges of 64 KiB


@pytest.fixture(params=KINDS)
def place(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Place]:
    with opened(request.param, tmp_path, monkeypatch) as found:
        yield found


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    with opened("hub", tmp_path, monkeypatch) as found:
        yield found


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A pipeline: a transformer in three files, a VAE that no manifest serves, and a scheduler."""
    rng = np.random.default_rng(7)
    pipe = ck.pipeline(tmp_path / "source", {"transformer": ck.CLASS, "vae": "TinyVae"})
    tensors = {
        f"layers.{n}.{name}.weight": ck.Data.random("BF16", shape, rng)
        for n in range(LAYERS)
        for name, shape in {"up": [256, 128], "down": [128, 256], "norm": [128]}.items()
    }
    ck.component(pipe / "transformer", tensors, files=3)
    vae = {f"v.{n}": ck.Data.random("F32", [100, 100], rng) for n in range(4)}
    ck.component(pipe / "vae", vae, class_name="TinyVae")
    (pipe / "README.md").write_text("---\nlicense: mit\n---\n")
    return pipe


@pytest.fixture
def rules(tmp_path: Path) -> Path:
    return ck.manifest(
        tmp_path / "rules.toml",
        [
            {"match": "layers.*.up", "style": "colwise"},
            {"match": "layers.*.down", "style": "rowwise"},
        ],
    )


def built(what: str | Path, out: Path, rules: Path, **options: Any) -> builder.BuildReport:
    return shardc.build(what, out, 2, manifest=rules, **{"resources": SMALL, **options})


def same(out: Path, other: Path) -> None:
    """Byte for byte, but for the repo that an index may name."""
    one, two = ck.contents(out), ck.contents(other)
    for found in (one, two):
        for name in [name for name in found if name.endswith(ck.INDEX)]:
            document = json.loads(found[name])
            document["source"].pop("repo", None)
            for key in ("version", "digest"):
                del document[key]
            found[name] = json.dumps(document).encode()
    assert one == two


def weight_bytes(source: Path) -> int:
    return sum(path.stat().st_size for path in source.rglob("*.safetensors"))


def header_bytes(source: Path) -> int:
    """What looks at the headers may fetch."""
    sizes = [path.stat().st_size for path in source.rglob("*.safetensors")]
    return sum(min(size, remote.HEAD_BYTES) for size in sizes)


def test_each_byte_is_fetched_once(place: Place, source: Path, rules: Path, tmp_path: Path) -> None:
    place.put(source)
    planned = shardc.plan(place.address, 2, manifest=rules)
    heads = place.weights_sent()
    assert heads <= header_bytes(source)
    report = built(place.address, tmp_path / "out", rules)
    built(source, tmp_path / "local", rules)
    same(tmp_path / "out", tmp_path / "local")
    own_headers = sum(file.data_start for c, _ in planned.kept for file in c.files)
    data = sum(
        file.size_bytes - file.data_start for c in planned.checkpoint.components for file in c.files
    )
    assert place.weights_sent() == 2 * heads + data + own_headers
    assert report.source_bytes == weight_bytes(source)
    assert report.kept == {"vae": "fetched"}
    assert shardc.verify(tmp_path / "out", place.address).ok


def test_the_index_tells_the_commit(hub: Place, source: Path, rules: Path, tmp_path: Path) -> None:
    hub.put(source)
    built(f"hf://{REPO}@main", tmp_path / "out", rules)
    assert isinstance(hub.server, Hub)
    index = ck.read_index(tmp_path / "out" / "transformer")
    assert index["source"]["repo"] == f"hf://{REPO}@{hub.server.head(REPO)}"
    assert index["version"] == "1.1"
    shardc.reshard(tmp_path / "out", tmp_path / "one", 1)
    assert ck.read_index(tmp_path / "one" / "transformer")["source"] == index["source"]


def test_a_set_that_is_up_to_date_costs_little(
    place: Place, source: Path, rules: Path, tmp_path: Path
) -> None:
    place.put(source)
    built(place.address, tmp_path / "out", rules)
    before = place.weights_sent()
    assert built(place.address, tmp_path / "out", rules).up_to_date
    assert place.weights_sent() - before < header_bytes(source) + 1_000_000
    name = "transformer/diffusion_pytorch_model-00002-of-00003.safetensors"
    raw = bytearray((source / name).read_bytes())
    raw[-4096 * 30 :] = bytes(4096 * 30)
    place.change(name, bytes(raw))
    with pytest.raises(OutputError, match="exists already"):
        built(place.address, tmp_path / "out", rules)


def test_one_request_in_twenty_fails(
    place: Place, source: Path, rules: Path, tmp_path: Path
) -> None:
    place.put(source)
    place.server.faults.extend(TWENTIETH)
    for number in range(4):
        built(place.address, tmp_path / f"out{number}", rules)
    assert place.server.faults.hits() > 10
    built(source, tmp_path / "local", rules)
    for number in range(4):
        same(tmp_path / f"out{number}", tmp_path / "local")


def test_a_cut_answer_is_continued_where_it_ended(
    place: Place, source: Path, rules: Path, tmp_path: Path
) -> None:
    place.put(source)
    shardc.plan(place.address, 2, manifest=rules)
    heads = place.weights_sent()
    place.server.faults.append(Fault("cut", method="GET", path=WEIGHTS, part=0.5, share=0.3))
    built(place.address, tmp_path / "out", rules)
    built(source, tmp_path / "local", rules)
    same(tmp_path / "out", tmp_path / "local")
    fetched = place.weights_sent() - heads
    assert place.server.faults.hits() > 5
    # what a client had buffered of a cut answer may be lost to it: little, not each time half
    assert fetched < 1.5 * (weight_bytes(source) + heads)


def test_links_expire_on_the_way(hub: Place, source: Path, rules: Path, tmp_path: Path) -> None:
    hub.put(source)
    assert isinstance(hub.server, Hub)
    server = hub.server
    told: list[int] = []

    def expire(size: int) -> None:
        told.append(size)
        if len(told) % 8 == 0:
            server.expire_links()

    built(hub.address, tmp_path / "out", rules, resources=during(expire))
    assert [r for r in server.requests(WEIGHTS) if r.status == 403]
    built(source, tmp_path / "local", rules)
    same(tmp_path / "out", tmp_path / "local")


def during(action: Callable[[int], None]) -> Resources:
    """Do this each time that a build tells its progress."""
    return Resources(memory_bytes=SMALL.memory_bytes, fsync=False, progress=action)


def test_the_server_goes_and_comes_back(
    place: Place, source: Path, rules: Path, tmp_path: Path
) -> None:
    place.put(source)
    shardc.plan(place.address, 2, manifest=rules)
    heads = place.weights_sent()
    told: list[int] = []

    def stop(size: int) -> None:
        told.append(size)
        if sum(told) * 2 > weight_bytes(source):
            place.server.stop()

    with pytest.raises(RemoteError, match=r"failed 7 times: .*--resume continues") as caught:
        built(place.address, tmp_path / "out", rules, resources=during(stop))
    assert len(caught.value.problems) == 1
    assert not (tmp_path / "out").exists()
    place.server.start()
    before = place.weights_sent()
    report = built(place.address, tmp_path / "out", rules, resume=True)
    done = sum(told)
    assert report.resumed_tensors > LAYERS
    assert place.weights_sent() - before <= weight_bytes(source) - done + 2 * heads
    built(source, tmp_path / "local", rules)
    same(tmp_path / "out", tmp_path / "local")


def moving(place: Place, name: str, data: bytes) -> Resources:
    """Change a file of the source once the build has begun."""
    todo = [name]

    def move(_: int) -> None:
        if todo:
            place.change(todo.pop(), data)

    return during(move)


def test_a_revision_that_moves_fails_the_build(
    hub: Place, source: Path, rules: Path, tmp_path: Path
) -> None:
    hub.put(source)
    assert isinstance(hub.server, Hub)
    was = hub.server.head(REPO)
    with pytest.raises(CheckpointError) as caught:
        built(hub.address, tmp_path / "out", rules, resources=moving(hub, "README.md", b"new"))
    now = hub.server.head(REPO)
    assert f"main moved during the build: it was {was}; now {now}" in str(caught.value)
    with pytest.raises(OutputError, match=f"source was hf://{REPO}@{was}, is now"):
        built(hub.address, tmp_path / "out", rules, resume=True)
    before = hub.weights_sent()
    built(hub.address, tmp_path / "out", rules, revision=was, resume=True)
    assert hub.weights_sent() - before < 1.2 * header_bytes(source)
    built(source, tmp_path / "local", rules)
    same(tmp_path / "out", tmp_path / "local")


def test_an_object_that_changes_fails_the_build(
    tmp_path: Path, source: Path, rules: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "transformer/diffusion_pytorch_model-00003-of-00003.safetensors"
    raw = (source / name).read_bytes()
    with opened("s3", tmp_path, monkeypatch) as place:
        place.put(source)
        changed = moving(place, name, raw[:-2] + b"ab")
        with pytest.raises(RemoteError, match=f"{name}: .*its ETag is another now"):
            built(place.address, tmp_path / "out", rules, resources=changed)
        place.put(source)
        with pytest.raises(CheckpointError, match=r"model_index.json: changed during the build"):
            built(
                place.address,
                tmp_path / "other",
                rules,
                resources=moving(place, "model_index.json", b"{}"),
            )
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "other").exists()


def test_another_etag_is_another_file(
    place: Place, source: Path, rules: Path, tmp_path: Path
) -> None:
    place.put(source)
    method = "HEAD" if place.kind == "hub" else "GET"
    place.server.faults.append(Fault("etag", method=method, path=f"00002-of-00003{WEIGHTS}"))
    with pytest.raises(RemoteError, match=r"00002-of-00003.safetensors: (is another|.*ETag)"):
        built(place.address, tmp_path / "out", rules)
    assert place.server.faults.hits() == 1


def test_links_that_change_their_etag(
    hub: Place, source: Path, rules: Path, tmp_path: Path
) -> None:
    hub.put(source)
    hub.server.faults.append(Fault("etag", method="GET", path="/cdn/.*00002-of", skip=2))
    with pytest.raises(RemoteError, match="is another file than was listed"):
        built(hub.address, tmp_path / "out", rules)


def test_a_stalled_answer_is_asked_again(
    hub: Place, source: Path, rules: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from shardc import hub as client

    monkeypatch.setattr(client, "READ_S", 0.3)
    hub.put(source)
    hub.server.faults.append(Fault("stall", method="GET", path=WEIGHTS, times=3))
    hub.server.faults.append(Fault("slow", method="GET", path=WEIGHTS, times=3, rate=200_000))
    built(hub.address, tmp_path / "out", rules)
    assert hub.server.faults.hits() == 6
    assert shardc.verify(tmp_path / "out", source).ok


REFUSALS = {
    "no repo": ("org/other", {}, "no such repo on the Hub, or it is private"),
    "no revision": (REPO, {"revision": "v9"}, "has no revision 'v9'"),
    "no folder": (f"{REPO}/gone", {}, "is not in the repo|has no folder or file 'gone'"),
    "no file": (f"{REPO}/vae/x.safetensors", {}, "there is no such file"),
    "gated": ("org/gated", {}, "is gated: .*then set HF_TOKEN or run `hf auth login`"),
    "private": ("org/private", {}, "for a private one set HF_TOKEN"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_what_the_hub_refuses(name: str, hub: Place, source: Path) -> None:
    hub.put(source)
    assert isinstance(hub.server, Hub)
    hub.server.create("org/private", private=True)
    hub.server.create("org/gated", gated=True)
    hub.server.upload("org/gated", source)
    what, options, message = REFUSALS[name]
    with pytest.raises(RemoteError, match=message) as caught:
        shardc.plan(what, 2, **options)
    assert len(caught.value.problems) == 1


@pytest.mark.parametrize("repo", ["org/private", "org/gated"])
def test_a_token_opens(repo: str, hub: Place, source: Path, rules: Path) -> None:
    assert isinstance(hub.server, Hub)
    hub.server.create(repo, private=repo == "org/private", gated=repo == "org/gated")
    hub.server.upload(repo, source)
    assert shardc.plan(repo, 2, manifest=rules, token=hub.server.token).kept
    fetched = hub.server.requests("/cdn/")
    assert fetched
    assert not any(r.authorization for r in fetched)  # the token is not for the Hub's storage


def test_what_s3_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened("s3", tmp_path, monkeypatch) as place:
        with pytest.raises(RemoteError, match="there is no object below this prefix"):
            shardc.plan(place.address, 2)
        with pytest.raises(RemoteError, match=r"s3://no-such-bucket: there is no such bucket"):
            shardc.plan("s3://no-such-bucket", 2)


def test_a_single_file(place: Place, source: Path, rules: Path, tmp_path: Path) -> None:
    ck.component(tmp_path / "bare", ck.read_all(source / "transformer"))
    place.put(tmp_path)
    address = f"{place.address}/bare/diffusion_pytorch_model.safetensors"
    built(address, tmp_path / "out", rules)
    built(tmp_path / "bare" / "diffusion_pytorch_model.safetensors", tmp_path / "local", rules)
    same(tmp_path / "out", tmp_path / "local")


def test_what_the_cache_has_is_not_fetched(
    hub: Place, source: Path, rules: Path, tmp_path: Path
) -> None:
    hub.put(source)
    assert isinstance(hub.server, Hub)
    names = [n for n in hub.server.files(REPO) if "00001" in n or n.startswith("vae/")]
    copy_into_cache(hub.server, source, tmp_path / "cache", names)
    built(hub.address, tmp_path / "out", rules)
    assert not hub.server.requests(r"00001-of-00003|/vae/")
    built(source, tmp_path / "local", rules)
    same(tmp_path / "out", tmp_path / "local")


def test_offline(
    hub: Place, source: Path, rules: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(RemoteError, match=r"offline, and .* has no revision main of it"):
        shardc.plan(hub.address, 2)
    hub.put(source)
    assert isinstance(hub.server, Hub)
    names = [n for n in hub.server.files(REPO) if not n.startswith(".")]
    snapshot = copy_into_cache(hub.server, source, tmp_path / "cache", names)
    built(hub.address, tmp_path / "out", rules)
    assert not hub.server.requests()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    built(hub.address, tmp_path / "online", rules)
    assert ck.contents(tmp_path / "out") == ck.contents(tmp_path / "online")
    (snapshot / "transformer" / "diffusion_pytorch_model-00002-of-00003.safetensors").unlink()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(CheckpointError, match=r"00002-of-00003.safetensors is missing"):
        built(hub.address, tmp_path / "less", rules)


def test_errors_name_the_address(hub: Place, source: Path, tmp_path: Path) -> None:
    path = source / "transformer" / "diffusion_pytorch_model-00001-of-00003.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
    hub.put(source)
    with pytest.raises(CheckpointError) as caught:
        shardc.plan(hub.address, 2)
    assert f"hf://{REPO}/transformer/{path.name}" in str(caught.value)
