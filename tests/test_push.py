"""Pushes to a Hub and to S3: whole or not at all, only what is missing, whatever goes wrong."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import click.testing
import pytest
from huggingface_hub import constants

import shardc
from shardc.cli.shipping import push as command
from shardc.errors import RemoteError, ShardcError, ShardSetError, VerifyError
from shardc.location import LocationError
from shardc.push import push
from shardc.push_hub import HubOptions
from shardc.push_s3 import MARKER
from shardc.shipment import PushReport, is_set, stale_files
from tests import checkpoints as ck
from tests.servers.faults import Fault
from tests.servers.hub import Hub
from tests.servers.s3 import S3

REPO = "me/model"
README = "---\nlicense: other\nlicense_name: tiny-nc\nlicense_link: LICENSE.md\n---\n# Tiny\n"
CLI = [sys.executable, "-m", "shardc", "push"]
TOKEN = HubOptions(token="hf_owner")


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """A pipeline at two degrees: a component in parts, one that is kept whole, a license."""
    folder = tmp_path_factory.mktemp("sets")
    source = ck.pipeline(folder / "source", {"transformer": ck.CLASS, "vae": "OtherModel"})
    weights = {f"m.{i}.weight": ck.Data.count("F32", [16, 64], first=i) for i in range(4)}
    ck.component(source / "transformer", {**weights, "n.weight": ck.Data.count("F32", [4])})
    ck.component(source / "vae", {"v": ck.Data.count("F32", [300])}, class_name="OtherModel")
    (source / "README.md").write_text(README)
    (source / "LICENSE.md").write_text("Do no harm.\n")
    rules = ck.manifest(folder / "rules.toml", [{"match": "m.*", "style": "colwise"}])
    for tp in (2, 4):
        shardc.build(source, folder / f"tiny-tp{tp}", tp, manifest=rules, max_part_bytes=4096)
    return {tp: folder / f"tiny-tp{tp}" for tp in (2, 4)}


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients that do not wait long before they try again."""
    real = time.sleep
    monkeypatch.setattr(time, "sleep", lambda seconds: real(min(seconds, 0.01)))


@pytest.fixture
def to_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[Hub], None]:
    """Have this process's huggingface-hub ask a loopback Hub: it read its endpoint at import."""
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)

    def point(hub: Hub) -> None:
        template = hub.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)

    return point


@pytest.fixture
def hub(to_hub: Callable[[Hub], None], tmp_path: Path) -> Iterator[Hub]:
    with Hub(tmp_path / "hub", token="hf_owner") as server:
        to_hub(server)
        yield server


def put_bytes(hub: Hub) -> int:
    """Contents that were sent, in requests."""
    return len(hub.requests("/upload/", "PUT"))


def holds(hub: Hub, folder: str, out: Path, revision: str = "main") -> bool:
    """Whether a folder of the repo has exactly the files of a set."""
    names = [n for n in hub.files(REPO, revision) if n.startswith(f"{folder}/")]
    there = {n.removeprefix(f"{folder}/"): hub.read(REPO, n, revision) for n in names}
    return there == ck.contents(out)


def commits(hub: Hub) -> int:
    return len(hub.repos[REPO].commits)


def on_push(action: Callable[[], object]) -> Callable[[str, int], Any]:
    """A progress bar that acts once, when the first bytes have been sent."""
    todo = [action]

    def tell(_: int) -> None:
        if todo:
            todo.pop()()

    def bar(what: str, _: int) -> AbstractContextManager[Callable[[int], None]]:
        return nullcontext(tell if what == "push" else lambda _: None)

    return bar


# To the Hub.


def test_fresh_repo_then_nothing_then_another_degree(hub: Hub, sets: dict[int, Path]) -> None:
    first = push(sets[2], REPO, options=TOKEN)
    assert first.created
    assert first.commit == hub.head(REPO)
    assert first.url == f"{hub.url}/{REPO}/commit/{first.commit}"
    assert first.card == "written"
    assert first.license == "tiny-nc"
    assert commits(hub) == 2  # the one of the creation, and all of the set in one
    assert holds(hub, "tp2", sets[2])

    sent = put_bytes(hub)
    again = push(sets[2], REPO, options=TOKEN)
    assert again.up_to_date
    assert not again.sent
    assert again.commit == first.commit == hub.head(REPO)
    assert put_bytes(hub) == sent

    other = push(sets[4], REPO, options=TOKEN)
    assert (other.created, other.card) == (False, "updated")
    assert holds(hub, "tp2", sets[2])
    assert holds(hub, "tp4", sets[4])
    # What is equal in both is known by its digest: the vae. Shards say what degree they are of.
    assert put_bytes(hub) - sent == len(list((sets[4] / "transformer").glob("*.safetensors")))
    card = hub.read(REPO, "README.md").decode()
    assert "| 2 | F32 | compact |" in card
    assert "| 4 | F32 | compact |" in card
    assert "- tp2\n- tp4\n" in card


def test_what_a_rank_downloads(hub: Hub, sets: dict[int, Path]) -> None:
    report = push(sets[2], REPO, options=TOKEN).to_json()
    sizes = {name: len(data) for name, data in ck.contents(sets[2]).items()}
    for rank, said in enumerate(report["rank_bytes"]):
        others = [n for n in sizes if "rank-" in n and f"rank-{rank:05d}" not in n]
        assert said == sum(sizes.values()) - sum(sizes[name] for name in others)
    assert [(part["name"], part["kind"]) for part in report["parts"]] == [
        ("transformer", "sharded"),
        ("vae", "kept"),
        ("", "files"),
    ]
    assert report["sent_bytes"] == sum(sizes.values())


def test_files_of_an_earlier_set_go(hub: Hub, sets: dict[int, Path], tmp_path: Path) -> None:
    push(sets[2], f"{REPO}/here", options=TOKEN)
    before = hub.head(REPO)
    report = push(sets[4], f"hf://{REPO}/here", options=TOKEN)
    assert holds(hub, "here", sets[4])
    assert report.deleted
    assert all("rank-" in name for name in report.deleted)
    assert hub.repos[REPO].commits[hub.head(REPO)].parent == before  # one commit did it all


def test_branch_private_and_message(hub: Hub, sets: dict[int, Path]) -> None:
    options = HubOptions(private=True, token=hub.token, message="Ship it")
    push(sets[2], REPO, revision="v2/next", options=options)
    assert hub.repos[REPO].private
    assert hub.repos[REPO].at("v2/next").title == "Ship it"
    assert holds(hub, "tp2", sets[2], "v2/next")
    assert not any("tp2" in name for name in hub.files(REPO))
    card = hub.read(REPO, "README.md", "v2/next").decode()
    assert 'load_pipeline("hf://me/model@v2%2Fnext")' in card


def test_somebodys_own_readme_is_left_alone(hub: Hub, sets: dict[int, Path]) -> None:
    hub.move(REPO, {"README.md": b"# Mine\n"})
    assert push(sets[2], REPO, options=TOKEN).card == "kept"
    assert hub.read(REPO, "README.md") == b"# Mine\n"


def test_a_gitignore_leaves_nothing_out(hub: Hub, sets: dict[int, Path]) -> None:
    hub.move(REPO, {".gitignore": b"*.json\nrank-*\n"})
    push(sets[2], REPO, options=TOKEN)
    assert holds(hub, "tp2", sets[2])


@pytest.mark.parametrize("kind", ["status", "reset", "cut"])
def test_a_commit_whose_answer_is_lost_is_made_once(
    kind: Any, hub: Hub, sets: dict[int, Path], quick: None
) -> None:
    fault = Fault(kind, method="POST", path="/commit/", times=2 if kind != "cut" else 1)
    hub.faults.append(fault)
    report = push(sets[2], REPO, options=TOKEN)
    assert hub.faults.hits(fault) == fault.times
    assert report.commit == hub.head(REPO)
    assert commits(hub) == 2
    assert holds(hub, "tp2", sets[2])


@pytest.mark.parametrize("seed", range(3))
def test_failing_requests_and_cuts(seed: int, hub: Hub, sets: dict[int, Path], quick: None) -> None:
    for kind in ("status", "reset", "cut"):
        hub.faults.append(Fault(kind, share=0.1, seed=seed))  # type: ignore[arg-type]
    for tp in (2, 4):
        push(sets[tp], REPO, options=TOKEN)
    assert hub.faults.hits()
    for tp in (2, 4):
        assert holds(hub, f"tp{tp}", sets[tp])


def test_somebody_else_commits_meanwhile(hub: Hub, sets: dict[int, Path]) -> None:
    hub.create(REPO)
    with pytest.raises(RemoteError, match=r"somebody else committed to main.*push again"):
        push(sets[2], REPO, options=TOKEN, bar=on_push(lambda: hub.move(REPO, {"a": b"b"})))
    assert sorted(hub.files(REPO)) == [".gitattributes", "a"]
    push(sets[2], REPO, options=TOKEN)
    assert holds(hub, "tp2", sets[2])


def test_a_file_that_changes_after_it_was_verified(
    hub: Hub, sets: dict[int, Path], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    subprocess.run(["cp", "-r", str(sets[2]), str(out)], check=True)
    model_index = out / "model_index.json"
    changed = model_index.read_text() + "\n"
    with pytest.raises(VerifyError, match=r"model_index.json: changed since it was verified"):
        push(out, REPO, options=TOKEN, bar=on_push(lambda: model_index.write_text(changed)))
    assert list(hub.files(REPO)) == [".gitattributes"]


def test_the_hub_is_gone_at_first(hub: Hub, sets: dict[int, Path], quick: None) -> None:
    hub.stop()
    with pytest.raises(RemoteError, match="asking for its commit failed") as caught:
        push(sets[2], REPO, options=TOKEN)
    assert len(caught.value.problems) == 1


def test_the_hub_goes_away_and_comes_back(hub: Hub, sets: dict[int, Path], quick: None) -> None:
    hub.faults.append(Fault("reset", path="/upload/", skip=3))
    with pytest.raises(RemoteError, match=r"failed: .*what came through is not sent twice"):
        push(sets[2], REPO, options=TOKEN)
    assert list(hub.files(REPO)) == [".gitattributes"]
    before = {r.path.partition("?")[0] for r in hub.requests("/upload/", "PUT") if r.status == 200}
    assert len(before) == 3
    hub.faults.clear()
    hub.log.clear()
    push(sets[2], REPO, options=TOKEN)
    assert holds(hub, "tp2", sets[2])
    assert not before & {request.path.partition("?")[0] for request in hub.log}


def run(hub: Hub, *args: str, **environ: str) -> subprocess.Popen[str]:
    home = str(hub.blobs.path("x").parents[2] / "home")
    settings = {"HF_HOME": home, "HF_TOKEN": hub.token, **hub.environ, **environ}
    return subprocess.Popen(
        [*CLI, *args],
        env={**os.environ, **settings},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_killed_halfway(hub: Hub, sets: dict[int, Path]) -> None:
    hub.faults.append(Fault("stall", path="/upload/", skip=3, times=1))
    process = run(hub, str(sets[2]), REPO)
    hub.wait_for("/upload/", "PUT", count=4)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert list(hub.files(REPO)) == [".gitattributes"]
    process = run(hub, str(sets[2]), REPO, "--json")
    out, err = process.communicate()
    assert process.returncode == 0, err
    assert json.loads(out)["commit"] == hub.head(REPO)
    assert holds(hub, "tp2", sets[2])


def test_an_interrupt_waits_for_no_upload(hub: Hub, sets: dict[int, Path]) -> None:
    hub.faults.append(Fault("stall", path="/upload/", skip=3))
    process = run(hub, str(sets[2]), REPO)
    hub.wait_for("/upload/", "PUT", count=4)
    process.send_signal(signal.SIGINT)
    assert "interrupted" in process.communicate(timeout=10)[1]
    assert process.returncode == 130


def test_xet(sets: dict[int, Path], tmp_path: Path) -> None:
    pytest.importorskip("hf_xet")
    with Hub(tmp_path / "hub", xet=True) as hub:
        for up_to_date in (False, True):
            process = run(hub, str(sets[2]), REPO, "--json")
            out, err = process.communicate()
            assert process.returncode == 0, err
            assert json.loads(out)["up_to_date"] is up_to_date
        assert holds(hub, "tp2", sets[2])
        assert not put_bytes(hub)


# What is refused, and what is said.


def test_a_set_that_does_not_verify_is_refused(
    hub: Hub, sets: dict[int, Path], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    subprocess.run(["cp", "-r", str(sets[2]), str(out)], check=True)
    shard = next(out.rglob("rank-00001*.safetensors"))
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    hub.log.clear()
    with pytest.raises(VerifyError, match="is not pushed: it is not sound"):
        push(out, REPO, options=TOKEN)
    shard.unlink()
    with pytest.raises(VerifyError, match="is missing"):
        push(out, REPO, options=TOKEN)
    (out / "transformer" / ck.INDEX).unlink()
    with pytest.raises(ShardSetError, match="not a shard set"):
        push(out, REPO, options=TOKEN)
    assert not hub.log


def test_dry_run_sends_nothing(hub: Hub, sets: dict[int, Path]) -> None:
    report = push(sets[2], REPO, dry_run=True)
    assert report.created
    assert len(report.sent) == len(ck.contents(sets[2]))
    hub.create(REPO)
    assert not push(sets[2], REPO, revision="next", dry_run=True).up_to_date
    assert {request.method for request in hub.log} <= {"GET", "HEAD"}
    assert list(hub.repos[REPO].branches) == ["main"]


def test_tokens(hub: Hub, sets: dict[int, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    hub.create(REPO)
    with pytest.raises(RemoteError, match="takes a token, and there is none"):
        push(sets[2], REPO)
    with pytest.raises(RemoteError, match="HTTP 401: Invalid credentials"):
        push(sets[2], REPO, options=HubOptions(token="hf_wrong"))
    for repo in (REPO, "me/new"):
        with pytest.raises(RemoteError, match=r"HTTP 403: .*permission"):
            push(sets[2], repo, options=HubOptions(token=hub.stranger))
    assert list(hub.files(REPO)) == [".gitattributes"]
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(RemoteError, match="HF_HUB_OFFLINE is set"):
        push(sets[2], REPO, options=TOKEN)


def test_targets_that_cannot_be(hub: Hub, sets: dict[int, Path], tmp_path: Path) -> None:
    hub.move(REPO, {"unet/config.json": b"{}", "a/shardc.index.json": b"", "a/b/c.txt": b""})
    with pytest.raises(RemoteError, match=r"is public already, and --private"):
        push(sets[2], REPO, options=HubOptions(private=True, token=hub.token))
    with pytest.raises(RemoteError, match=r"no shard set, such as 'config.json'"):
        push(sets[2], f"{REPO}/unet", options=TOKEN)
    with pytest.raises(LocationError, match="place of another degree"):
        push(sets[2], f"{REPO}/some/tp4", options=TOKEN)
    with pytest.raises(LocationError, match="stays what it is"):
        push(sets[2], REPO, revision=hub.head(REPO), options=TOKEN)
    with pytest.raises(LocationError, match="no address"):
        push(sets[2], "model", options=TOKEN)
    with pytest.raises(LocationError, match="path on this machine"):
        push(sets[2], str(sets[4]), options=TOKEN)
    for folder in ("a/b/c.txt/tp2", "README.md", ".git/tp2"):
        with pytest.raises(LocationError, match=r"is a file of the repo|is hidden"):
            push(sets[2], f"{REPO}/{folder}", options=TOKEN)
    for address in (f"{REPO}/x.safetensors", "s3://bucket/x.safetensors"):
        with pytest.raises(LocationError, match="is the address of a file"):
            push(sets[2], address)
    with pytest.raises(LocationError, match="me/mo--del"):
        push(sets[2], "hf://me/mo--del", options=TOKEN)
    with pytest.raises(LocationError, match="not a repo"):
        push(sets[2], REPO, options=HubOptions(base_model="not a repo"))
    with pytest.raises(LocationError, match="for Hub repos"):
        push(sets[2], "s3://bucket/x", options=TOKEN)


def test_what_may_be_replaced() -> None:
    pipeline = ["model_index.json", "a/shardc.index.json", "a/rank", "vae/v"]
    assert is_set(pipeline)
    assert is_set(["shardc.index.json"])
    assert not is_set(["a/shardc.index.json"])
    assert stale_files([], ["x"], "w") == []
    assert stale_files(pipeline, ["model_index.json", "a/shardc.index.json"], "w") == [
        "a/rank",
        "vae/v",
    ]
    assert stale_files(["old"], ["new"], "w", interrupted=True) == ["old"]
    for there in (
        ["a"],
        ["shardc.index.json", "tp4/shardc.index.json"],
        [*pipeline, "b/c/shardc.index.json"],
    ):
        with pytest.raises(RemoteError):
            stale_files(there, ["shardc.index.json"], "w")


def test_the_command_tells_what_it_did(hub: Hub, sets: dict[int, Path]) -> None:
    runner = click.testing.CliRunner()
    done = runner.invoke(command, [str(sets[2]), REPO, "--token", hub.token])
    assert done.exit_code == 0, done.output
    words = " ".join(done.output.split())
    for said in (
        "What each of 2 ranks downloads",
        "vae, kept whole",
        f"published hf://{REPO}/tp2",
        "tiny-nc: the weights' license goes with them",
        f"commit {hub.url}/{REPO}/commit/",
    ):
        assert said in words
    assert "up to date" in runner.invoke(command, [str(sets[2]), REPO, "--token", hub.token]).output
    silent = runner.invoke(command, [str(sets[4]), REPO, "--token", hub.token, "-q"])
    assert (silent.exit_code, silent.output) == (0, "")
    wrong = runner.invoke(command, [str(sets[2]), REPO, "--token", "hf_wrong", "--json"])
    assert wrong.exit_code == 1
    assert json.loads(wrong.stdout)["ok"] is False
    assert "hf_wrong" not in wrong.output


# To S3.


@pytest.fixture(scope="module")
def s3_server() -> Iterator[S3]:
    with S3() as server:
        server.create_bucket("bucket")
        yield server


@pytest.fixture
def s3(s3_server: S3, monkeypatch: pytest.MonkeyPatch) -> S3:
    for name, value in s3_server.environ.items():
        monkeypatch.setenv(name, value)
    s3_server.faults.clear()
    s3_server.log.clear()
    return s3_server


def in_bucket(s3: S3, prefix: str) -> dict[str, bytes]:
    start = f"{prefix}/"
    return {k.removeprefix(start): s3.read("bucket", k) for k in s3.keys("bucket", start)}


def test_s3_fresh_then_nothing_then_another_set(s3: S3, sets: dict[int, Path]) -> None:
    first = push(sets[2], "s3://bucket/a/set")
    assert first.created
    assert in_bucket(s3, "a/set") == ck.contents(sets[2])
    puts = [request.path for request in s3.requests(method="PUT")]
    assert MARKER in puts[0]
    assert puts[-1].endswith("/model_index.json")  # what makes it a set, at last
    assert puts[-2].endswith("/transformer/shardc.index.json")

    s3.log.clear()
    assert push(sets[2], "s3://bucket/a/set").up_to_date
    assert {request.method for request in s3.log} == {"GET", "HEAD"}

    s3.log.clear()
    other = push(sets[4], "s3://bucket/a/set")
    assert in_bucket(s3, "a/set") == ck.contents(sets[4])
    assert all("rank-" in name for name in other.deleted)
    assert not any("vae/" in request.path for request in s3.requests(method="PUT"))
    gone = next(i for i, request in enumerate(s3.log) if "delete" in request.path)
    sent = [i for i, request in enumerate(s3.log) if request.method == "PUT"]
    assert sent[0] < gone < sent[1]  # no set is there while it is half one and half the other


def test_s3_interrupted(s3: S3, sets: dict[int, Path]) -> None:
    push(sets[2], "s3://bucket/b")
    s3.faults.append(Fault("status", method="PUT", path="rank-", status=403, skip=2))
    with pytest.raises(RemoteError, match="S3 refuses"):
        push(sets[4], "s3://bucket/b")
    there = in_bucket(s3, "b")
    assert MARKER in there
    assert not is_set(there)
    s3.faults.clear()
    push(sets[4], "s3://bucket/b")
    assert in_bucket(s3, "b") == ck.contents(sets[4])


def test_s3_another_push_meanwhile(
    s3: S3, sets: dict[int, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    from shardc import push_s3

    monkeypatch.setattr(push_s3, "FILES_AT_ONCE", 1)  # else the first may still be sending some
    address = "s3://bucket/both"
    push(sets[2], address)
    told: list[int] = []

    def tell(count: int) -> None:
        told.append(count)
        if len(told) == 5:
            push(sets[2], address)

    def bar(what: str, _: int) -> AbstractContextManager[Callable[[int], None]]:
        return nullcontext(tell if what == "push" else lambda _: None)

    with pytest.raises(RemoteError, match="another push to it runs"):
        push(sets[4], address, bar=bar)
    assert in_bucket(s3, "both") == ck.contents(sets[2])


def test_s3_a_push_that_still_sends(
    s3: S3, sets: dict[int, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    from shardc.shipment import Shipment

    def late(_: Shipment) -> None:
        s3.put("bucket", "late/vae/more.txt", b"from another")

    monkeypatch.setattr(Shipment, "check", late)
    with pytest.raises(RemoteError, match=r"ran meanwhile .*there is no set at s3://bucket/late"):
        push(sets[2], "s3://bucket/late")
    assert not is_set(in_bucket(s3, "late"))


def test_s3_where_a_console_made_folders(s3: S3, sets: dict[int, Path]) -> None:
    for folder in ("", "transformer/", "vae/"):
        s3.put("bucket", f"folders/{folder}", b"")
    push(sets[2], "s3://bucket/folders")
    assert push(sets[2], "s3://bucket/folders").up_to_date
    assert ck.contents(sets[2]).items() <= in_bucket(s3, "folders").items()


def test_s3_at_no_time_is_there_half_a_set(s3: S3, sets: dict[int, Path]) -> None:
    for steps in (0, 1, 2, 3, 8, 10, 11, 12, 20):
        s3.faults.clear()
        push(sets[2], "s3://bucket/steps")
        s3.faults.append(Fault("status", method="PUT|POST|DELETE", status=403, skip=steps))
        try:
            push(sets[4], "s3://bucket/steps")
            break
        except RemoteError:
            there = in_bucket(s3, "steps")
            there.pop(MARKER, None)
            assert not is_set(there) or there in map(ck.contents, sets.values())
    assert steps > 8
    assert in_bucket(s3, "steps") == ck.contents(sets[4])


@pytest.mark.parametrize("kind", ["status", "reset", "cut"])
def test_s3_failing_requests_and_cuts(
    kind: Any, s3: S3, sets: dict[int, Path], quick: None
) -> None:
    s3.faults.append(Fault(kind, share=0.1, seed=1))
    hits = s3.faults.hits()
    for tp in (2, 4):
        push(sets[tp], f"s3://bucket/{kind}")
    assert s3.faults.hits() > hits
    s3.faults.clear()
    assert in_bucket(s3, kind) == ck.contents(sets[4])


def test_s3_gone_refused_and_dry(s3: S3, sets: dict[int, Path], quick: None) -> None:
    assert not push(sets[2], "s3://bucket/dry", dry_run=True).up_to_date
    assert not s3.requests(method="PUT|POST|DELETE")
    s3.put("bucket", "mine/notes.txt", b"mine")
    with pytest.raises(RemoteError, match=r"no shard set, such as 'notes.txt'"):
        push(sets[2], "s3://bucket/mine")
    with pytest.raises(RemoteError, match="no such bucket"):
        push(sets[2], "s3://other-bucket/x")
    s3.stop()
    try:
        with pytest.raises(ShardcError, match="listing its objects failed") as caught:
            push(sets[2], "s3://bucket/gone")
        assert len(caught.value.problems) == 1
    finally:
        s3.start()


def test_s3_large_files_go_in_parts(
    s3: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from shardc import push_s3

    monkeypatch.setattr(push_s3, "CHUNK_BYTES", 5 << 20)  # S3 takes no smaller ones
    source = ck.component(tmp_path / "source", {"m.weight": ck.Data.count("F32", [3000, 1000])})
    rules = ck.manifest(tmp_path / "rules.toml", [{"match": "m", "style": "colwise"}])
    shardc.build(source, tmp_path / "out", 2, manifest=rules)
    s3.faults.append(Fault("reset", method="PUT", path="partNumber", times=2))
    told: list[int] = []
    report: PushReport = push(
        tmp_path / "out",
        "s3://bucket/large",
        bar=lambda what, _: nullcontext(told.append if what == "push" else lambda _: None),
    )
    assert in_bucket(s3, "large") == ck.contents(tmp_path / "out")
    assert len(s3.requests("partNumber", "PUT")) == 2 * 2 + 2
    assert sum(told) == sum(len(data) for data in ck.contents(tmp_path / "out").values())
    assert report.rank_bytes[0] > 6_000_000
