"""Loaders given an address: each rank's own files, by a cold cache, a warm one, or none."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import xxhash

import shardc
from shardc.errors import Problem, ShardcError, ShardSetError
from tests import checkpoints as ck
from tests import remotes
from tests.remotes import BUCKET, REPO, S3_SET, SHARD, content, offline, size
from tests.servers.faults import Fault
from tests.servers.hub import Hub
from tests.servers.s3 import S3

torch = pytest.importorskip("torch")

from shardc.loaders import load_rank_weights, load_state_dict, local  # noqa: E402

SHARDED = ("text_encoder", "transformer")  # of the tiny pipeline

home, hub, s3, sets = remotes.home, remotes.hub, remotes.s3, remotes.sets  # fixtures


def left(home: Path) -> set[str]:
    """The files of caches and of the folder for temporary ones, but for those of the ranks."""
    found = [p for name in ("hf", "shardc-cache", "tmp") for p in (home / name).rglob("*")]
    names = {p.relative_to(home).as_posix() for p in found if p.is_file()}
    return {name for name in names if "shardc-ranks-" not in name}


def equal(found: dict[str, Any], wanted: dict[str, Any]) -> bool:
    return list(found) == list(wanted) and all(torch.equal(found[n], wanted[n]) for n in wanted)


def test_a_rank_of_the_hub(hub: Hub, sets: dict[int, Path]) -> None:
    for rank in (1, 0):
        found = load_state_dict(REPO, rank, tp=2)
        assert equal(found, load_state_dict(sets[2], rank))
    whole = {n: d for n, d in ck.contents(sets[2]).items() if not re.match("vae/.*tensors$", n)}
    assert content(hub) == size(whole)  # it needs but what it loads
    with pytest.raises(ShardSetError, match="has shards for tp 2, 4"):
        load_state_dict(REPO, 0)
    weights = load_rank_weights(f"hf://{REPO}", tp=2)
    local = load_rank_weights(sets[2])
    assert all(equal(one, other) for one, other in zip(weights, local, strict=True))
    assert content(hub) == size(whole)


def test_offline_it_says_which_files_of_which_rank(
    hub: Hub, sets: dict[int, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    load_state_dict(REPO, 0, tp=2)
    hub.stop()
    offline(monkeypatch)
    for cache in (True, False):
        found = load_state_dict(REPO, 0, tp=2, cache=cache)
        assert equal(found, load_state_dict(sets[2], 0))
    with pytest.raises(ShardSetError) as error:
        load_state_dict(REPO, 1, tp=2)
    name = SHARD.format(rank=1, tp=2)
    first, *_ = error.value.problems
    assert str(first) == (
        f"hf://{REPO}/tp2/{name}-part-00000.safetensors: is not in the cache, "
        "and rank 1 needs it (pull it once while online)"
    )
    assert len(error.value.problems) == 3


@pytest.fixture
def temporary(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (home / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(home / "tmp"))
    monkeypatch.setattr(tempfile, "tempdir", None)


@pytest.mark.usefixtures("temporary")
def test_streamed_nothing_stays(hub: Hub, sets: dict[int, Path], home: Path) -> None:
    hub.faults.append(Fault("cut", method="GET", path="/cdn/", share=0.3))
    found = load_state_dict(REPO, 1, tp=2, cache=False, verify=True)
    assert equal(found, load_state_dict(sets[2], 1))
    weights = load_rank_weights(REPO, tp=2, cache=False)
    assert all(equal(weights[r], load_state_dict(sets[2], r)) for r in (0, 1))
    assert weights[0]["n.weight"] is weights[1]["n.weight"]
    assert not hub.requests(r"tp2/vae/.*safetensors(\?|$)")  # it needs but what it loads
    assert left(home) == set()
    load_state_dict(REPO, 1, tp=2)
    sent = content(hub)
    load_state_dict(REPO, 1, tp=2, cache=False)  # a cache that is filled is used
    assert content(hub) == sent


@pytest.mark.usefixtures("temporary")
def test_streamed_from_s3(s3: S3, sets: dict[int, Path], home: Path) -> None:
    for reads in ("auto", "direct"):
        found = load_state_dict(S3_SET, 1, tp=2, cache=False, reads=reads)
        assert equal(found, load_state_dict(sets[2], 1))
    assert left(home) == set()


@pytest.mark.usefixtures("temporary")
def test_streamed_damage_is_seen_as_it_passes(hub: Hub, sets: dict[int, Path], home: Path) -> None:
    name = f"tp2/{SHARD.format(rank=1, tp=2)}-part-00001.safetensors"
    path = hub.blobs.path(hub.files(REPO)[name].sha256)
    sound = path.read_bytes()
    path.write_bytes(sound[:-1] + bytes([sound[-1] ^ 1]))
    load = (load_state_dict, 1), (load_rank_weights,)
    for function, *rank in load:
        with pytest.raises(ShardSetError) as error:
            function(REPO, *rank, tp=2, cache=False)
        (problem,) = error.value.problems
        assert problem.where == f"hf://{REPO}/{name}"
        assert problem.what.startswith("tensor 'm.1.weight': digest ")
    path.write_bytes(b"\0" * len(sound))
    with pytest.raises(ShardcError, match=f"hf://{REPO}/{name}: "):
        load_state_dict(REPO, 1, tp=2, cache=False)
    hub.move(REPO, {name: None})
    with pytest.raises(ShardSetError, match=rf"{name}: is missing, and rank 1 needs it"):
        load_state_dict(REPO, 1, tp=2, cache=False)
    assert left(home) == set()


# On ranks.


def failing(path: str) -> None:
    """A load that fails, and then says how long that took."""
    from shardc.loaders import load_model

    began = time.monotonic()
    try:
        load_model(path)
    except ShardcError as error:
        took = Problem("after", f"{time.monotonic() - began:.0f} s")
        raise ShardSetError([*error.problems, took]) from error


@pytest.mark.slow
def test_what_fails_on_one_rank_fails_on_all_at_once(hub: Hub, sets: dict[int, Path]) -> None:
    """Rank 1 lacks a file, and rank 0 would need minutes to fetch its own."""
    name = f"tp2/{SHARD.format(rank=1, tp=2)}-part-00001.safetensors"
    hub.faults.append(Fault("slow", path="/cdn/.*rank-00000", rate=1000))
    hub.move(REPO, {name: None})
    with pytest.raises(ShardSetError) as error:
        local.run(failing, 2, REPO)
    lacks = f"hf://{REPO}/{name}: is missing, and rank 1 needs it (push the set again)"
    texts = [str(p) for p in error.value.problems if p.where != "after"]
    assert texts == [lacks]
    seconds = [int(p.what.split()[0]) for p in error.value.problems if p.where == "after"]
    assert max(seconds) < 30
    assert hub.requests("/cdn/.*rank-00000", "GET")


def loads(cases: Sequence[tuple[str, str, dict[str, Any]]], home: str) -> dict[str, Any]:
    """What each load gave on this rank, when it began, and what was on the disk then."""
    from shardc.loaders import load_pipeline
    from tests import pipelines

    told = {}
    for name, path, options in cases:
        began = time.monotonic()
        pipeline = load_pipeline(path, **options)
        modules = [m for m in pipeline.components.values() if isinstance(m, torch.nn.Module)]
        state = xxhash.xxh3_128()
        for module in modules:
            for key, tensor in sorted(module.state_dict().items()):
                state.update(f"{key} {tensor.dtype} {list(tensor.shape)}".encode())
                state.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
        latents, image = pipelines.generate(pipeline, "flux2-klein")
        told[name] = {
            "began": began,
            "state": state.hexdigest(),
            "made": xxhash.xxh3_128_hexdigest(latents.tobytes() + image.tobytes()),
            "left": sorted(left(Path(home))),
            "pull": max(pipeline.components[n].shardc.timings.pull for n in SHARDED),
        }
    return told


@pytest.mark.slow
@pytest.mark.usefixtures("temporary")
def test_pipelines_on_two_ranks(hub: Hub, s3: S3, home: Path, tmp_path: Path) -> None:
    """From the Hub and from S3, streamed, cold and warm: the local load's tensors and images."""
    pytest.importorskip("diffusers")
    pytest.importorskip("tokenizers")
    from tests import pipelines

    pipelines.save("flux2-klein", tmp_path / "source")
    for tp in (2, 4):
        shardc.build(tmp_path / "source", tmp_path / "repo" / f"tp{tp}", tp)
    repo, s3_set, there = "me/klein", f"s3://{BUCKET}/klein", tmp_path / "repo" / "tp2"
    hub.upload(repo, tmp_path / "repo")
    s3.upload(BUCKET, "klein", tmp_path / "repo")
    before = len(hub.log), len(s3.log)
    streamed = {"cache": False}
    cases: list[tuple[str, str, dict[str, Any]]] = [
        ("local", str(there), {}),
        ("hub streamed", repo, streamed),
        ("s3 streamed", s3_set, streamed),
        ("hub cold", repo, {"revision": "main"}),
        ("hub warm", f"hf://{repo}/tp2", {}),
        ("s3 cold", s3_set, {}),
        ("s3 warm", s3_set, {}),
    ]
    ranks = local.run(loads, 2, cases, str(home))
    wanted = [rank["local"] for rank in ranks]
    assert wanted[0]["made"] == wanted[1]["made"]
    for name, *_ in cases:
        for rank, one in zip(ranks, wanted, strict=True):
            assert rank[name]["state"] == one["state"], name
            assert rank[name]["made"] == one["made"], name
            assert (rank[name]["pull"] > 0) == (name != "local")
    for name in ("local", "hub streamed", "s3 streamed"):
        # what transformers itself notes of a chat template it looked for is none of a load's files
        assert [rank[name]["left"] for rank in ranks] == [[], []], name

    spans = {
        name: [min(rank[n]["began"] for rank in ranks) for n in (name, following)]
        for (name, *_), (following, *_) in pairwise(cases)
    } | {"s3 warm": [min(rank["s3 warm"]["began"] for rank in ranks), float("inf")]}

    def sent(server: Hub | S3, name: str, number: int) -> int:
        start, stop = spans[name]
        asked = [r for r in server.log[before[number] :] if start <= r.at < stop]
        return sum(
            r.bytes_sent
            for r in asked
            if "list-type" not in r.path and "/api/models/" not in r.path
        )

    whole = size(ck.contents(there))
    assert sent(hub, "hub cold", 0) == sent(s3, "s3 cold", 1) == whole  # by the two ranks together
    assert sent(hub, "hub warm", 0) == sent(s3, "s3 warm", 1) == 0
    assert sent(hub, "local", 0) == sent(s3, "local", 1) == 0
    folders = [p.parent for p in (home / "hf").rglob("snapshots/*/tp2/model_index.json")]
    folders += [p.parent for p in (home / "shardc-cache").rglob("model_index.json")]
    assert [ck.contents(folder) == ck.contents(there) for folder in folders] == [True, True]


@pytest.mark.slow
def test_the_command(hub: Hub, home: Path, tmp_path: Path) -> None:
    pytest.importorskip("diffusers")
    from shardc.demo import CONFIG, write_flux2

    write_flux2(tmp_path / "source", {**CONFIG, "num_layers": 1, "num_single_layers": 1})
    shardc.build(tmp_path / "source", tmp_path / "tp2", 2)
    hub.upload("me/flux2", tmp_path / "tp2", "other")
    command = [sys.executable, "-m", "shardc.loaders", "me/flux2", "--nproc", "2"]
    done = subprocess.run(
        [*command, "--revision", "other", "--no-cache", "--json"],
        capture_output=True,
        text=True,
        env={**os.environ},
        timeout=120,
    )
    assert (done.returncode, done.stderr) == (0, "")
    for report in json.loads(done.stdout)["ranks"]:
        assert report["timings"]["pull"] > 0
        assert report["timings"]["placed_bytes"] > 0
    assert not [name for name in left(home) if name.endswith(".safetensors")]
