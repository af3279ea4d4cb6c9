"""Servers, caches and addresses that are wrong: an error that says so, and never other bytes."""

from __future__ import annotations

import gzip
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path

import click.testing
import pytest

import shardc
from shardc.cli import main
from shardc.errors import OutputError, RemoteError, ShardcError
from shardc.hub import _seconds
from shardc.location import HubLocation, LocationError, locate
from tests.places import BUCKET, KINDS, PREFIX, REPO, WEIGHTS, Place, copy_into_cache, opened
from tests.servers.faults import Fault
from tests.servers.hub import Hub
from tests.servers.messages import Call, FilePart, Reply
from tests.servers.s3 import S3
from tests.test_remote_build import SMALL, built, place, rules, same, source

__all__ = ["place", "rules", "source"]  # fixtures


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with opened("hub", tmp_path, monkeypatch) as found:
        assert isinstance(found.server, Hub)
        yield found.server


@pytest.fixture
def s3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3]:
    with opened("s3", tmp_path, monkeypatch) as found:
        assert isinstance(found.server, S3)
        yield found.server


Wrong = Callable[[bytes, int, int], tuple[bytes, dict[str, str]]]


def elsewhere(data: bytes, start: int, size: int) -> tuple[bytes, dict[str, str]]:
    """As many other bytes, from the file's start, which the answer says."""
    other = bytes(byte ^ 1 for byte in data)
    return other, {"Content-Range": f"bytes 0-{len(data) - 1}/{size}"} if start else {}


def longer(data: bytes, start: int, size: int) -> tuple[bytes, dict[str, str]]:
    return data + b"more", {}


def encoded(data: bytes, start: int, size: int) -> tuple[bytes, dict[str, str]]:
    return gzip.compress(data), {"Content-Encoding": "gzip"}


@pytest.mark.parametrize("wrong", [elsewhere, longer, encoded])
def test_answers_with_other_bytes(
    wrong: Wrong, place: Place, source: Path, rules: Path, tmp_path: Path
) -> None:
    place.put(source)
    planned = shardc.plan(place.address, 2, manifest=rules)
    real = place.server.answer

    def answer(call: Call) -> Reply:
        reply = real(call)
        if call.method != "GET" or reply.status != 206:
            return reply
        body = reply.body
        data = b"".join(body.chunks()) if isinstance(body, FilePart) else body
        headers = {name.title(): value for name, value in reply.headers.items()}
        found = re.fullmatch(r"bytes (\d+)-\d+/(\d+)", headers["Content-Range"])
        assert found is not None
        body, changed = wrong(data, int(found[1]), int(found[2]))
        return Reply(206, {**headers, **changed}, body)

    place.server.answer = answer  # type: ignore[method-assign]
    with pytest.raises(RemoteError, match=r"the answer (is|has)|asked for|Requested"):
        shardc.builder.build(planned, tmp_path / "out", SMALL)
    assert not (tmp_path / "out").exists()


def test_objects_that_stand_for_folders(s3: S3, source: Path, rules: Path, tmp_path: Path) -> None:
    s3.upload(BUCKET, PREFIX, source)
    for folder in ("", "transformer/", "empty/"):
        s3.put(BUCKET, f"{PREFIX}/{folder}", b"")
    s3.put(BUCKET, f"{PREFIX}/transformer/nothing.txt", b"")
    (source / "transformer" / "nothing.txt").touch()
    for name in ("", "-more/config.json", ".safetensors"):  # none of these is below the prefix
        s3.put(BUCKET, f"{PREFIX}{name}", b"x")
    built(f"s3://{BUCKET}/{PREFIX}", tmp_path / "out", rules)
    built(source, tmp_path / "local", rules)
    same(tmp_path / "out", tmp_path / "local")


def test_names_that_cannot_be_files_here(s3: S3, source: Path) -> None:
    s3.upload(BUCKET, PREFIX, source)
    for name in ("vae", "n" * 300, "a\\b"):
        s3.put(BUCKET, f"{PREFIX}/{name}", b"x")
        with pytest.raises(RemoteError, match=r"cannot be a file here|no plain name") as caught:
            shardc.plan(f"s3://{BUCKET}/{PREFIX}", 2)
        assert str(caught.value).startswith(f"s3://{BUCKET}/{PREFIX}")
        s3.delete(BUCKET, f"{PREFIX}/{name}")


def test_names_that_the_library_would_not_take(
    hub: Hub, source: Path, rules: Path, tmp_path: Path
) -> None:
    (source / "a:b #1+ü?%20.txt").write_text("x")
    hub.upload(REPO, source)
    built(REPO, tmp_path / "out", rules)
    built(source, tmp_path / "local", rules)
    same(tmp_path / "out", tmp_path / "local")


def test_weights_in_other_formats_are_not_fetched(
    hub: Hub, source: Path, rules: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from shardc import mirror

    monkeypatch.setattr(mirror, "MAX_SMALL_BYTES", 50_000)
    monkeypatch.setattr(mirror, "PIECE_BYTES", 1000)
    (source / "onnx").mkdir()
    for name in ("v1.ckpt", "vae/diffusion_pytorch_model.bin", "onnx/model.onnx_data"):
        (source / name).write_bytes(bytes(100_000))
    (source / "picture.png").write_bytes(os.urandom(3500))
    hub.upload(REPO, source)
    built(REPO, tmp_path / "out", rules)
    assert shardc.verify(tmp_path / "out", REPO).ok
    assert not hub.requests(r"ckpt|\.bin|onnx", "GET")
    built(source, tmp_path / "local", rules)
    same(tmp_path / "out", tmp_path / "local")


def test_a_cache_that_is_damaged(hub: Hub, source: Path, rules: Path, tmp_path: Path) -> None:
    hub.upload(REPO, source)
    names = [name for name in hub.files(REPO) if not name.startswith(".")]
    snapshot = copy_into_cache(hub, source, tmp_path / "cache", names)
    weights = snapshot / "vae" / "diffusion_pytorch_model.safetensors"
    os.truncate(weights.resolve(), weights.stat().st_size - 1)
    (snapshot / "README.md").resolve().write_bytes(b"x" * (snapshot / "README.md").stat().st_size)
    built(REPO, tmp_path / "out", rules)
    built(source, tmp_path / "local", rules)
    same(tmp_path / "out", tmp_path / "local")


def test_a_change_of_any_tensor_is_noticed(
    hub: Hub, source: Path, rules: Path, tmp_path: Path
) -> None:
    hub.upload(REPO, source)
    built(REPO, tmp_path / "out", rules)
    name = "transformer/diffusion_pytorch_model-00002-of-00003.safetensors"
    raw = (source / name).read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:start])
    header.pop("__metadata__", None)
    for tensor in list(header.values())[::4]:
        first, stop = (start + at for at in tensor["data_offsets"])
        hub.move(REPO, {name: raw[:first] + bytes(stop - first) + raw[stop:]})
        with pytest.raises(OutputError, match="exists already"):
            built(REPO, tmp_path / "out", rules)


@pytest.mark.parametrize(
    "address",
    [
        HubLocation("org/name", "refs/pr/1"),
        HubLocation("org/name", "v2/next", "a/tp2"),
        HubLocation("org/name", "50% @ü", "tp2"),
        HubLocation("org/name", "v1.0"),
    ],
)
def test_an_address_leads_back(address: HubLocation) -> None:
    assert locate(str(address)) == address


def test_addresses(tmp_path: Path) -> None:
    assert locate("hf://a/b@refs/pr/12/tp2") == HubLocation("a/b", "refs/pr/12", "tp2")
    with pytest.raises(LocationError, match="--revision is empty"):
        locate("a/b", revision="")
    with pytest.raises(LocationError, match="is no model repo"):
        locate("hf://datasets/a/b")
    runner = click.testing.CliRunner()
    for command in (["build", "x", "--tp", "2", "-o", "s3://b/x"], ["verify", "hf://a/b"]):
        done = runner.invoke(main, command)
        assert done.exit_code == 2
        assert "is an address" in done.output


@pytest.mark.parametrize(
    ("what", "options", "message"),
    [
        ("org/na--me", {}, "Cannot have --"),
        (REPO, {"token": ""}, "the token for the Hub: is empty"),
        (REPO, {"token": "sécret"}, "the token for the Hub: has characters that no token has"),
        (REPO, {"token": "sec\nret"}, "the token for the Hub: has characters that no token has"),
    ],
)
def test_what_cannot_be_asked_for(
    what: str, options: dict[str, str], message: str, hub: Hub
) -> None:
    with pytest.raises(RemoteError, match=message) as caught:
        shardc.plan(what, 2, **options)
    assert "cret" not in str(caught.value)


def test_a_page_in_the_place_of_an_answer(hub: Hub) -> None:
    hub.answer = lambda call: Reply(200, {}, b"<html>")  # type: ignore[method-assign]
    with pytest.raises(RemoteError, match=r"cannot be asked for: JSONDecodeError.*proxies"):
        shardc.plan(REPO, 2)


def test_what_s3_says(s3: S3, monkeypatch: pytest.MonkeyPatch) -> None:
    s3.faults.append(Fault("status", status=403, times=1))
    with pytest.raises(RemoteError, match=r"refuses: AccessDenied: .*AWS_ACCESS_KEY_ID"):
        shardc.plan(f"s3://{BUCKET}/x", 2)
    s3.faults.append(Fault("status", status=301, times=1))
    with pytest.raises(RemoteError, match=r"not in region us-east-1 \(set AWS_REGION"):
        shardc.plan(f"s3://{BUCKET}/x", 2)
    for endpoint in ("", "localhost:9000"):
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
        with pytest.raises(RemoteError, match=r"AWS_ENDPOINT_URL: .* is no http"):
            shardc.plan(f"s3://{BUCKET}/x", 2)


def test_when_to_come_again() -> None:
    assert _seconds("7") == 7
    date = format_datetime(datetime.now(UTC) + timedelta(seconds=90), usegmt=True)
    assert 80 < (_seconds(date) or 0) < 91
    assert _seconds("Wed, 21 Oct 2015 07:28:00 GMT") == 0
    assert _seconds(None) is _seconds("soon") is _seconds("²") is None


@pytest.mark.parametrize("kind", KINDS)
def test_an_interrupt_waits_for_no_server(
    kind: str, source: Path, rules: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(kind, tmp_path, monkeypatch) as place:
        place.put(source)
        server = place.server
        assert isinstance(server, Hub | S3)
        stalled = Fault("stall", method="GET", path=WEIGHTS, skip=12)
        server.faults.append(stalled)
        out = tmp_path / "out"
        command = ["build", place.address, "--tp", "2", "--manifest", str(rules), "-o", str(out)]
        process = subprocess.Popen(
            [sys.executable, "-m", "shardc", *command, "--workers", "4", "--memory", "1"],
            env={**os.environ, **server.environ, "HF_HOME": str(tmp_path), "TMPDIR": str(tmp_path)},
            stderr=subprocess.PIPE,
            text=True,
        )
        server.wait_for(WEIGHTS, "GET", count=13)
        while not server.faults.hits(stalled):
            time.sleep(0.01)
        process.send_signal(signal.SIGTERM)
        said = process.communicate(timeout=20)[1]
        assert process.returncode == 143
        assert "--resume continues" in said
        assert not list(tmp_path.glob("shardc-*"))  # the mirror
        server.faults.clear()
        built(place.address, out, rules, resume=True)
        assert shardc.verify(out, source).ok


def test_one_error_ends_what_others_wait_for(
    hub: Hub, source: Path, rules: Path, tmp_path: Path
) -> None:
    hub.upload(REPO, source)
    planned = shardc.plan(REPO, 2, manifest=rules)
    hub.faults.append(Fault("stall", method="GET", path="00001-of-00003", times=2))
    hub.faults.append(Fault("status", method="GET", path="00003-of-00003", status=404))
    began = time.monotonic()
    with pytest.raises(ShardcError, match="HTTP 404"):
        shardc.builder.build(planned, tmp_path / "out", SMALL)
    assert time.monotonic() - began < 10


@pytest.mark.parametrize("data", [b"", b"{}" + bytes(9), (2).to_bytes(8, "little") + b"{}"])
def test_files_without_tensors(data: bytes, hub: Hub, source: Path, rules: Path) -> None:
    """What the planner says of them is the same wherever they are."""
    next((source / "vae").glob("*.safetensors")).write_bytes(data)
    hub.upload(REPO, source)
    told = []
    for what in (str(source), REPO):
        try:
            told.append(str(len(shardc.plan(what, 2, manifest=rules).kept)))
        except ShardcError as error:
            told.append(str(error).replace(str(source), str(locate(REPO))))
    assert told[0] == told[1]
