"""Pulls from a Hub and from S3: what ranks need and no more, checked, whatever goes wrong."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click.testing
import pytest
import xxhash
from huggingface_hub import HfApi, constants, snapshot_download

import shardc
from shardc import cache, push
from shardc.cli.pulling import pull as command
from shardc.errors import OutputError, RemoteError, ShardcError, ShardSetError
from shardc.location import HubLocation, LocationError, S3Location
from shardc.pull import prepare, pull
from shardc.s3 import DIGEST, open_store
from tests import checkpoints as ck
from tests import remotes
from tests.remotes import (
    BUCKET,
    CHUNK_BYTES,
    REPO,
    S3_SET,
    SHARD,
    content,
    needed,
    offline,
    size,
    wait_until,
)
from tests.servers.faults import Fault
from tests.servers.hub import Hub
from tests.servers.s3 import S3

home, hub, s3, sets = remotes.home, remotes.hub, remotes.s3, remotes.sets  # fixtures

CLI = [
    sys.executable,
    "-c",
    "from shardc import fetch; from shardc.cli.pulling import pull; "
    f"fetch.CHUNK_BYTES = {CHUNK_BYTES}; pull()",
]


def problems(error: pytest.ExceptionInfo[Any]) -> str:
    assert isinstance(error.value, ShardcError)
    return str(error.value)


# Of the Hub.


def test_a_rank_costs_its_shard_and_what_all_need(hub: Hub, sets: dict[int, Path]) -> None:
    seen: list[int] = []
    report = pull(REPO, ranks=[1], tp=2, progress=seen.append)
    wanted = needed(sets[2], [1])
    assert ck.contents(Path(report.path)) == wanted
    assert (report.tp, report.ranks, report.files) == (2, (1,), len(wanted))
    assert report.source == f"hf://{REPO}@{hub.head(REPO)}/tp2"
    assert content(hub) == report.fetched_bytes == size(wanted) == sum(seen)
    assert report.present_bytes == 0

    # Warm: no byte of a file, and no file is read again to be checked.
    before = len(hub.log)
    again = pull(f"hf://{REPO}/tp2", ranks=[1])
    assert (again.path, again.fetched_bytes) == (report.path, 0)
    assert again.present_bytes == size(wanted)
    assert content(hub) == size(wanted)
    assert len(hub.log) - before == 2  # the commit, and its files

    # Another rank costs its own shard only.
    rest = pull(REPO, ranks=[0], tp=2)
    assert rest.fetched_bytes == size(needed(sets[2], [0, 1])) - size(wanted)
    assert content(hub) == size(ck.contents(sets[2]))
    assert shardc.verify(report.path).ok


def test_a_warm_start_hashes_nothing(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    pull(REPO, ranks=[0], tp=2)
    read: list[str] = []
    monkeypatch.setattr("shardc.needs.data_problems", lambda *told: read.append(told[-1]) or [])
    pull(REPO, ranks=[0], tp=2)
    assert read == []
    pull(REPO, ranks=[1], tp=2)
    assert len(read) == 3  # the parts of the new rank
    [link] = Path(constants.HF_HUB_CACHE).glob(f"models--*/snapshots/*/{sharded(0, 2)}*00000.*")
    os.utime(link, (1, 1))  # as a file that was written to
    read.clear()
    pull(REPO, ranks=[0], tp=2)
    assert read == [link.name]


def sharded(rank: int, tp: int) -> str:
    return f"tp{tp}/" + SHARD.format(rank=rank, tp=tp)


def test_degrees(hub: Hub, sets: dict[int, Path], tmp_path: Path) -> None:
    with pytest.raises(ShardSetError, match=r"has shards for tp 2, 4 .say which with --tp"):
        pull(REPO)
    with pytest.raises(ShardSetError, match="has shards for tp 2, 4, 8 was asked for"):
        pull(REPO, tp=8)
    with pytest.raises(ShardSetError, match="rank 4 is outside tp 4"):
        pull(REPO, tp=4, ranks=[4])
    with pytest.raises(ShardSetError, match="is cut for tp 4, 2 was asked for"):
        pull(f"{REPO}/tp4", tp=2)
    assert content(hub) < 60_000  # nothing but indexes
    with pytest.raises(ShardSetError, match=r"holds no shard set"):
        pull(f"{REPO}/tp2/vae")
    hub.move("me/half", {"transformer/shardc.index.json": b"{}"})
    with pytest.raises(ShardSetError, match=r"is transformer/shardc.index.json, but no model_ind"):
        pull("me/half")
    with pytest.raises(LocationError, match="is no address"):
        pull(str(sets[2]))


def test_a_set_at_the_root(hub: Hub, sets: dict[int, Path], tmp_path: Path) -> None:
    """Others beside it are others."""
    hub.upload("me/root", sets[4])
    assert pull("me/root", out=tmp_path / "root").tp == 4
    assert ck.contents(tmp_path / "root") == ck.contents(sets[4])
    hub.upload("me/root", sets[2].parent)
    assert pull("me/root", out=tmp_path / "root").fetched_bytes == 0
    assert pull("me/root", tp=2, ranks=[]).tp == 2
    assert pull("me/root", tp=4, ranks=[]).tp == 4


def test_what_is_incomplete_is_told_before_it_is_fetched(hub: Hub, sets: dict[int, Path]) -> None:
    """Case J03."""
    part, other = (
        f"{sharded(1, 2)}-part-00001.safetensors",
        f"{sharded(1, 2)}-part-00002.safetensors",
    )
    vae = "tp2/vae/diffusion_pytorch_model-00002-of-00002.safetensors"
    hub.move(REPO, {part: None, vae: None, other: b"short"})
    with pytest.raises(ShardSetError) as error:
        pull(REPO, tp=2)
    where = f"hf://{REPO}/"
    assert f"{where}{part}: is missing, and rank 1 needs it (push the set again)" in problems(error)
    assert f"{where}{other}: has 5 bytes, the index says" in problems(error)
    assert f"{where}{vae}: is missing, and vae/diffusion" in problems(error)
    assert len(error.value.problems) == 3
    assert not hub.requests(r"/cdn/.*rank-")
    hub.move(REPO, {vae: ck.contents(sets[2])[vae.removeprefix("tp2/")]})
    pull(REPO, tp=2, ranks=[0])  # which has what it needs


def test_at_once_each_byte_comes_once(hub: Hub, sets: dict[int, Path], tmp_path: Path) -> None:
    hub.faults.append(Fault("slow", path="/cdn/.*replicated", rate=40_000))
    runs = [run_cli(REPO, "--tp", 2, "--rank", rank, "--json") for rank in (0, 1)]
    reports = [finished(run) for run in runs]
    assert content(hub) == size(ck.contents(sets[2]))
    assert sum(report["fetched_bytes"] for report in reports) == content(hub)
    assert reports[0]["path"] == reports[1]["path"]
    assert ck.contents(Path(reports[0]["path"])) == ck.contents(sets[2])


def run_cli(*arguments: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*CLI, *map(str, arguments)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def finished(run: subprocess.Popen[str]) -> dict[str, Any]:
    out, err = run.communicate(timeout=60)
    assert (run.returncode, err) == (0, "")
    document: dict[str, Any] = json.loads(out)
    assert document.pop("ok")
    return document


@pytest.mark.parametrize("into", ["cache", "folder"])
def test_killed_in_the_middle_then_continued(
    hub: Hub, sets: dict[int, Path], home: Path, into: str
) -> None:
    out = home / "out" if into == "folder" else None
    name = f"{SHARD.format(rank=0, tp=2)}-part-00002.safetensors"
    stall = Fault("stall", method="GET", path=f"/cdn/.*{name}", skip=0 if out is None else 1)
    hub.faults.append(stall)
    run = run_cli(REPO, "--tp", 2, *([] if out is None else ["-o", out]))
    root = out or Path(constants.HF_HUB_CACHE)
    wait_until(lambda: len(large_files(root)) == 8)
    if out is not None:
        wait_until(lambda: bytes_of_part(out) > 0)
    run.kill()
    run.communicate()
    there = bytes_of_part(root)
    hub.faults.clear()
    before = len(hub.log)
    report = pull(REPO, tp=2, out=out)
    asked = {request.path.partition("?")[0] for request in hub.log[before:]}
    assert [path for path in asked if "/cdn/" in path] == [path_of(hub, f"tp2/{name}")]
    whole = (sets[2] / name).stat().st_size
    assert report.fetched_bytes == whole - there
    assert shardc.verify(report.path).ok
    assert ck.contents(Path(report.path)) == ck.contents(sets[2])


def large_files(root: Path) -> list[Path]:
    found = root.rglob("*.safetensors")
    return [p for p in found if p.is_file() and not p.name.startswith(".")]


def bytes_of_part(root: Path) -> int:
    """What a part is known to have; 0 where there is none."""
    for log in root.rglob("*.chunks"):
        whole = log.with_suffix(".part").stat().st_size
        starts = [CHUNK_BYTES * int(number) for number in log.read_text().split()]
        return sum(min(CHUNK_BYTES, whole - start) for start in starts)
    return 0


def path_of(hub: Hub, name: str) -> str:
    return f"/cdn/{hub.files(REPO)[name].sha256}/{name}"


@pytest.mark.parametrize("into", ["cache", "folder"])
def test_failing_requests_and_cut_connections(
    hub: Hub, sets: dict[int, Path], tmp_path: Path, into: str
) -> None:
    hub.faults.extend(
        [
            Fault("cut", method="GET", path="/cdn/", share=0.3, part=0.7),
            Fault("status", share=0.1, seed=1),
            Fault("reset", share=0.05, seed=2),
            Fault("truncate", method="GET", path="/cdn/", share=0.1, seed=3),
        ]
    )
    report = pull(REPO, tp=4, out=tmp_path / "out" if into == "folder" else None)
    assert hub.faults.hits() > 5
    assert report.fetched_bytes == size(ck.contents(sets[4]))
    assert ck.contents(Path(report.path)) == ck.contents(sets[4])


def test_the_server_gone_is_one_error_then_it_resumes(
    hub: Hub, sets: dict[int, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    cut = Fault("stall", method="GET", path="/cdn/.*rank-00001", times=1)
    hub.faults.append(cut)
    pulling = prepare(HubLocation(REPO), tp=2)
    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(pulling.run)
        wait_until(lambda: hub.faults.hits(cut) == 1)
        hub.stop()
        error = running.exception()
    assert isinstance(error, RemoteError)
    assert all("HF_HUB_OFFLINE=1" in str(problem) for problem in error.problems)
    with pytest.raises(RemoteError) as gone:
        pull(REPO, tp=2)
    (problem,) = gone.value.problems
    assert "asking for its commit failed 7 times" in problem.what
    assert (
        problem.fix == "try again once it can be reached; HF_HUB_OFFLINE=1 uses what the cache has"
    )
    hub.start()
    hub.faults.clear()
    report = pull(REPO, tp=2)
    assert report.fetched_bytes < size(ck.contents(sets[2]))
    assert ck.contents(Path(report.path)) == ck.contents(sets[2])
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("into", ["cache", "folder"])
@pytest.mark.parametrize(
    "name",
    ["transformer/rank-00000-of-00002-part-00001", "vae/diffusion_pytorch_model-00001-of-00002"],
)
def test_damage_is_refused_and_removed(
    hub: Hub, sets: dict[int, Path], tmp_path: Path, into: str, name: str
) -> None:
    entry = hub.files(REPO)[f"tp2/{name}.safetensors"]
    path = hub.blobs.path(entry.sha256)
    sound = path.read_bytes()
    damaged = sound[:-1] + bytes([sound[-1] ^ 1])
    path.write_bytes(damaged)
    out = tmp_path / "out" if into == "folder" else None
    with pytest.raises(RemoteError) as error:
        pull(REPO, tp=2, ranks=[0], out=out)
    (problem,) = error.value.problems
    assert problem.where == f"hf://{REPO}/tp2/{name}.safetensors"
    assert "does not have the digest that" in problem.what
    assert "it was removed: pull again" in problem.fix
    assert [p for p in tmp_path.glob("[!h]*/**/*") if read(p) == damaged] == []
    assert [p for p in tmp_path.glob("hf/**/*") if read(p) == damaged] == []
    path.write_bytes(sound)
    report = pull(REPO, tp=2, ranks=[0], out=out)
    assert ck.contents(Path(report.path)) == needed(sets[2], [0])


def read(path: Path) -> bytes:
    return path.read_bytes() if path.is_file() else b""


def test_a_file_of_the_cache_that_went_bad_is_fetched_again(
    hub: Hub, sets: dict[int, Path], caplog: pytest.LogCaptureFixture
) -> None:
    report = pull(REPO, tp=2)
    link = Path(report.path, f"{SHARD.format(rank=0, tp=2)}-part-00000.safetensors")
    blob = link.resolve()
    blob.write_bytes(b"x" * blob.stat().st_size)
    os.utime(blob, (1, 1))
    again = pull(REPO, tp=2)
    assert again.fetched_bytes == blob.stat().st_size
    assert ck.contents(Path(report.path)) == ck.contents(sets[2])
    assert "it is fetched again" in caplog.text


def test_wrong_etags_never_reach_a_folder(hub: Hub, sets: dict[int, Path], tmp_path: Path) -> None:
    """Ranges are held to one etag; the cache's files to their digests, whatever they are called."""
    hub.faults.append(Fault("etag", method="HEAD", path="rank-00000.*part-00000"))
    with pytest.raises(RemoteError, match="is another file than was listed"):
        pull(REPO, tp=2, ranks=[0], out=tmp_path / "out")
    assert not list((tmp_path / "out").rglob("rank-00000*part-00000*"))
    report = pull(REPO, tp=2, ranks=[0])
    assert ck.contents(Path(report.path)) == needed(sets[2], [0])


def test_offline(hub: Hub, sets: dict[int, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    report = pull(REPO, tp=2, ranks=[0])
    old = hub.head(REPO)
    hub.stop()
    offline(monkeypatch)
    again = pull(REPO, tp=2, ranks=[0])
    assert (again.path, again.fetched_bytes, again.source) == (report.path, 0, report.source)
    assert pull(REPO, ranks=[0]).path == report.path  # of the degrees it has one
    lacking = f"hf://{REPO}/{sharded(1, 2)}-part-0000"
    with pytest.raises(ShardSetError) as error:
        pull(REPO, tp=2)
    assert [str(problem) for problem in error.value.problems] == [
        f"{lacking}{part}.safetensors: is not in the cache, and rank 1 needs it "
        "(pull it once while online)"
        for part in range(3)
    ]
    with pytest.raises(ShardSetError, match="what the cache has, it has shards for tp 2, 4 was"):
        pull(REPO, tp=4)
    with pytest.raises(RemoteError, match="has no revision other of it"):
        pull(REPO, revision="other")
    assert pull(REPO, revision=old, ranks=[0]).path == report.path
    for name in ("vae/diffusion_pytorch_model-00001-of-00002.safetensors", "vae/config.json"):
        Path(report.path, name).unlink()
        with pytest.raises(
            ShardSetError, match=rf"tp2/{name}: is not in the cache, and every rank"
        ):
            pull(REPO, tp=2, ranks=[0])


def test_offline_what_stock_tools_have_fetched(
    hub: Hub, sets: dict[int, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    some = ["tp2/*.json", "tp2/vae/*", "tp2/transformer/replicated*", "tp2/transformer/rank-00001*"]
    snapshot_download(REPO, endpoint=hub.url, allow_patterns=some)
    hub.stop()
    offline(monkeypatch)
    report = pull(REPO, tp=2, ranks=[1])
    assert needed(Path(report.path), [1]) == needed(sets[2], [1])
    with pytest.raises(
        ShardSetError, match=r"part-00000\.safetensors: is not in the cache, and rank 0"
    ):
        pull(REPO, ranks=[0])


def test_a_revision_that_moves(hub: Hub, sets: dict[int, Path], tmp_path: Path) -> None:
    first = pull(REPO, tp=2, ranks=[0])
    name = "tp2/scheduler/scheduler_config.json"
    hub.move(REPO, {name: b"{}"})
    second = pull(REPO, tp=2, ranks=[0])
    assert second.path != first.path
    assert ck.contents(Path(first.path)) == needed(sets[2], [0])
    assert ck.contents(Path(second.path))["scheduler/scheduler_config.json"] == b"{}"
    assert second.fetched_bytes < 500  # what is equal is there, by its name in both
    out = tmp_path / "out"
    pull(REPO, tp=2, ranks=[0], out=out, revision=first.source.partition("@")[2][:40])
    moved = pull(REPO, tp=2, ranks=[0], out=out)
    assert moved.fetched_bytes == 0
    assert ck.contents(out) == ck.contents(Path(second.path))


def test_a_folder_with_other_files_is_left_alone(
    hub: Hub, sets: dict[int, Path], tmp_path: Path
) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(OutputError, match=r"such as .*choose another -o, or empty it"):
        pull(REPO, tp=2, out=tmp_path)
    with pytest.raises(OutputError, match="is a file, not a folder"):
        pull(REPO, tp=2, out=tmp_path / "notes.txt")
    assert content(hub) == 0


def test_a_full_disk_is_told_before_anything_comes(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = prepare(HubLocation(REPO), tp=2)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=10))
    with pytest.raises(OutputError, match=f"{found.missing_bytes} bytes are to come, 10 are free"):
        found.run()


def test_without_a_cache_of_its_own(
    hub: Hub, sets: dict[int, Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("SHARDC_CACHE", str(tmp_path / "file"))  # where no folder can be made
    for out in (None, tmp_path / "out"):
        report = pull(REPO, tp=2, out=out)
        assert ck.contents(Path(report.path)) == ck.contents(sets[2])
        assert pull(REPO, tp=2, out=out).fetched_bytes == 0


def test_a_cache_that_is_read_only(
    hub: Hub, sets: dict[int, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    report = pull(REPO, tp=2)
    monkeypatch.setattr(Path, "write_bytes", refuse)  # root may write whatever the mode says
    monkeypatch.setattr(Path, "touch", refuse)
    monkeypatch.setattr(Path, "mkdir", refuse)
    note = Path(report.path).parents[2] / "refs" / "main"
    note.unlink()
    assert pull(REPO, tp=2).fetched_bytes == 0


def refuse(*_: object, **__: object) -> None:
    raise OSError(errno.EROFS, "Read-only file system")


def test_from_what_the_cache_has(hub: Hub, sets: dict[int, Path], tmp_path: Path) -> None:
    """A folder is filled from the Hub's cache, but for what went bad there."""
    report = pull(REPO, tp=2)
    blob = Path(report.path, f"{SHARD.format(rank=0, tp=2)}-part-00000.safetensors").resolve()
    blob.write_bytes(b"x" * blob.stat().st_size)
    copied = pull(REPO, tp=2, out=tmp_path / "out")
    assert copied.fetched_bytes == blob.stat().st_size
    assert ck.contents(tmp_path / "out") == ck.contents(sets[2])


def test_by_xet(
    monkeypatch: pytest.MonkeyPatch, sets: dict[int, Path], tmp_path: Path, home: Path
) -> None:
    pytest.importorskip("hf_xet")
    with Hub(tmp_path / "hub", xet=True) as server:
        remotes.point_at(server, monkeypatch)
        HfApi(endpoint=server.url, token="hf_owner").create_repo(REPO)
        HfApi(endpoint=server.url, token="hf_owner").upload_folder(
            repo_id=REPO, folder_path=sets[2]
        )
        seen: list[int] = []
        report = pull(REPO, progress=seen.append)
        assert ck.contents(Path(report.path)) == ck.contents(sets[2])
        assert report.fetched_bytes == sum(seen) == size(ck.contents(sets[2]))
        assert not server.requests("/cdn/")


def test_an_interrupt_ends_it_at_once(hub: Hub) -> None:
    hub.faults.append(Fault("stall", method="GET", path="/cdn/"))
    run = run_cli(REPO, "--tp", 2)
    hub.wait_for("/cdn/", "GET")
    began = time.monotonic()
    run.send_signal(signal.SIGINT)
    out, err = run.communicate(timeout=20)
    assert (run.returncode, out, err) == (130, "", "interrupted\n")
    assert time.monotonic() - began < 15


def test_what_a_progress_raises_ends_the_pull(hub: Hub) -> None:
    class Enough(Exception):
        pass

    def stop(_: int) -> None:
        raise Enough

    with pytest.raises(Enough):
        pull(REPO, tp=2, progress=stop)


# Of S3.


def test_s3(s3: S3, sets: dict[int, Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    report = pull(S3_SET, tp=2, ranks=[1])
    wanted = needed(sets[2], [1])
    assert ck.contents(Path(report.path)) == wanted
    assert Path(report.path).is_relative_to(cache.root() / "s3" / BUCKET)
    assert report.source == f"{S3_SET}/tp2"
    assert content(s3) == report.fetched_bytes == size(wanted)

    again = pull(f"{S3_SET}/tp2", ranks=[1])
    assert (again.path, again.fetched_bytes) == (report.path, 0)
    rest = pull(S3_SET, tp=2)
    assert rest.path == report.path
    assert rest.fetched_bytes == size(ck.contents(sets[2])) - size(wanted)
    assert shardc.verify(rest.path).ok

    s3.put(BUCKET, "sets/tiny/tp2/scheduler/scheduler_config.json", b"{}")
    moved = pull(S3_SET, tp=2, ranks=[1])
    assert moved.path != report.path
    assert ck.contents(Path(report.path)) == ck.contents(sets[2])
    s3.stop()
    with pytest.raises(RemoteError, match=r"s3://.*failed 7 times.*try again once"):
        pull(S3_SET, tp=2)


def test_s3_at_once_and_killed(s3: S3, sets: dict[int, Path], home: Path) -> None:
    name = f"{SHARD.format(rank=0, tp=2)}-part-00002.safetensors"
    s3.faults.append(Fault("stall", method="GET", path=name, skip=1))
    runs = [run_cli(S3_SET, "--tp", 2, "--rank", rank) for rank in (0, 1)]
    root = cache.root() / "s3"
    wait_until(lambda: len(large_files(root)) == 8)
    wait_until(lambda: bytes_of_part(root) > 0)
    for run in runs:
        run.kill()
        run.communicate()
    there = bytes_of_part(root)
    whole = size(ck.contents(sets[2]))
    s3.faults.clear()
    report = pull(S3_SET, tp=2)
    assert report.fetched_bytes == (sets[2] / name).stat().st_size - there
    assert ck.contents(Path(report.path)) == ck.contents(sets[2])
    stalled = 2 * CHUNK_BYTES // 2
    assert content(s3) <= whole + stalled


def test_s3_failures_and_damage(s3: S3, sets: dict[int, Path], tmp_path: Path) -> None:
    s3.faults.extend(
        [
            Fault("cut", method="GET", path="safetensors", share=0.2, part=0.7),
            Fault("status", share=0.1, seed=1),
            Fault("reset", share=0.05, seed=2),
        ]
    )
    report = pull(S3_SET, tp=4, out=tmp_path / "out")
    assert s3.faults.hits() > 5
    assert ck.contents(Path(report.path)) == ck.contents(sets[4])
    s3.faults.clear()

    key = f"sets/tiny/tp2/{SHARD.format(rank=0, tp=2)}-part-00001.safetensors"
    sound = s3.read(BUCKET, key)
    s3.put(BUCKET, key, sound[:-1] + bytes([sound[-1] ^ 1]))
    with pytest.raises(RemoteError, match="does not have the digest that the index states"):
        pull(S3_SET, tp=2, ranks=[0])
    pull(S3_SET, tp=2, ranks=[1])
    s3.put(BUCKET, key, sound)
    assert shardc.verify(pull(S3_SET, tp=2).path).ok


def test_s3_what_push_put_there_is_checked_whole(
    s3: S3, sets: dict[int, Path], tmp_path: Path
) -> None:
    """What no index knows of, the vae, by the digest that push noted with it."""
    obstore = pytest.importorskip("obstore")
    push.push(sets[2], f"s3://{BUCKET}/pushed")
    assert shardc.verify(pull(f"s3://{BUCKET}/pushed").path).ok
    key = "pushed/vae/diffusion_pytorch_model-00001-of-00002.safetensors"
    store, data = open_store(S3Location(BUCKET)), s3.read(BUCKET, key)
    digest = {DIGEST: xxhash.xxh3_128_hexdigest(data)}
    obstore.put(store, key, data[:-1] + bytes([data[-1] ^ 1]), attributes=digest)
    with pytest.raises(RemoteError, match="does not have the digest that its server states"):
        pull(f"s3://{BUCKET}/pushed")


# The command.


def test_the_command(hub: Hub, sets: dict[int, Path], tmp_path: Path) -> None:
    def run(*arguments: object) -> Any:
        return click.testing.CliRunner().invoke(command, [str(a) for a in arguments])

    done = run(REPO, "--tp", 2, "--rank", 0, "-o", tmp_path / "out")
    assert (done.exit_code, done.stderr) == (0, "")
    first, second, *_ = done.stdout.splitlines()
    assert first == f"hf://{REPO}@{hub.head(REPO)}/tp2 is at"
    assert second == str(tmp_path / "out")
    assert "0 of 2" in done.stdout
    document = json.loads(run(REPO, "--tp", 2, "--json").stdout)
    assert document["ok"]
    assert document["ranks"] == [0, 1]
    assert document["fetched_bytes"] == size(ck.contents(sets[2]))
    assert run(REPO, "--tp", 2, "-q").stdout == ""
    failed = run(REPO, "--tp", 3, "--json")
    assert failed.exit_code == 1
    assert failed.stderr.startswith(f"error: hf://{REPO}: has shards for tp 2, 4, 3 was asked for")
    assert run("org/name", "--tp", 0).exit_code == 2
    assert "is no address" in run(str(sets[2])).stderr
