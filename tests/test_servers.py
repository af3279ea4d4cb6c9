"""The loopback Hub and S3 as their stock clients see them, and every fault as a plain one does."""

from __future__ import annotations

import hashlib
import http.client
import os
import random
import subprocess
import sys
import threading
import time
import urllib.parse
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

obstore = pytest.importorskip("obstore")
pytest.importorskip("moto.server")

from huggingface_hub import (  # noqa: E402
    CommitOperationAdd,
    CommitOperationDelete,
    HfApi,
    constants,
    snapshot_download,
)
from huggingface_hub.errors import (  # noqa: E402
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.hf_api import RepoFile  # noqa: E402
from obstore.store import S3Store  # noqa: E402

from tests.servers.faults import Fault, Faults  # noqa: E402
from tests.servers.hub import Hub  # noqa: E402
from tests.servers.s3 import S3, SIGNED  # noqa: E402
from tests.servers.web import Server  # noqa: E402

REPO = "org/name"
RANK = "tp2/model.safetensors"
DATA = random.Random(0).randbytes(200_000)
ASIDE = {"config.json": b'{"a": 1}', "tp2/a b.json": b"{}", "empty.safetensors": b""}


@pytest.fixture(autouse=True)
def lfs_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process the Hub's library uploads by LFS, and knows no token of the user's."""
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_IMPLICIT_TOKEN", True)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write(tmp_path / "source", {RANK: DATA, **ASIDE})


@pytest.fixture
def hub(tmp_path: Path, folder: Path) -> Iterator[Hub]:
    """A Hub with the folder in a repo."""
    with Hub(tmp_path / "hub") as hub:
        hub.upload(REPO, folder)
        yield hub


@pytest.fixture(scope="module")
def moto() -> Iterator[S3]:
    with S3() as s3:
        s3.create_bucket("shards")
        yield s3


@pytest.fixture
def s3(moto: S3) -> S3:
    """An S3 with the data in one object, and no faults."""
    moto.faults.clear()
    moto.log.clear()
    for key in moto.keys("shards"):
        moto.delete("shards", key)
    moto.put("shards", f"set/{RANK}", DATA)
    return moto


def write(folder: Path, files: dict[str, bytes]) -> Path:
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return folder


def held(folder: Path | str) -> dict[str, bytes]:
    paths = [path for path in Path(folder).rglob("*") if path.is_file()]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


def store(s3: S3, **changes: str) -> S3Store:
    config: Any = {**s3.environ, **changes}
    return S3Store("shards", prefix="set", config=config)


def ask(url: str, method: str = "GET", **headers: str) -> Answer:
    """One request by a client that does nothing of its own."""
    parts = urllib.parse.urlsplit(url)
    connection = http.client.HTTPConnection(parts.netloc, timeout=10)
    target = parts.path + (f"?{parts.query}" if parts.query else "")
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    try:
        connection.request(method, target, headers=named)
        return Answer(connection.getresponse())
    finally:
        connection.close()


class Answer:
    """A response, read; `whole` is false where less came than was announced."""

    def __init__(self, response: http.client.HTTPResponse) -> None:
        self.status, self.headers = response.status, response.headers
        try:
            self.body, self.whole = response.read(), True
        except http.client.IncompleteRead as error:
            self.body, self.whole = error.partial, False


def again(connection: http.client.HTTPConnection) -> None:
    """One request more on a connection that is kept."""
    connection.request("GET", "/")
    connection.getresponse().read()


def link(hub: Hub, name: str = RANK) -> str:
    """The signed link that a file resolves to."""
    return ask(f"{hub.url}/{REPO}/resolve/main/{name}").headers["Location"]


# The Hub and its own clients.


@pytest.mark.parametrize("multipart", [None, 64_000])
def test_hub_takes_and_gives_a_folder(tmp_path: Path, folder: Path, multipart: int | None) -> None:
    with Hub(tmp_path / "hub", multipart=multipart, page=2) as hub:
        api = HfApi(endpoint=hub.url)
        api.create_repo(REPO)
        api.create_repo(REPO, exist_ok=True)
        commit = api.upload_folder(repo_id=REPO, folder_path=folder)
        assert commit.oid == hub.head(REPO)
        assert len(hub.requests("/upload/", "PUT")) == (1 if multipart is None else 4)
        assert hub.read(REPO, RANK) == DATA
        found = snapshot_download(REPO, endpoint=hub.url, cache_dir=tmp_path / "cache")
        files = held(folder)
        got = held(found)
        got.pop(".gitattributes")
        assert got == files
        infos = api.model_info(REPO, files_metadata=True).siblings
        assert infos is not None
        sizes = {info.rfilename: info.size for info in infos if info.rfilename in files}
        assert sizes == {name: len(data) for name, data in files.items()}
        listed = [entry.path for entry in api.list_repo_tree(REPO, recursive=True)]
        assert sorted(listed) == sorted([*files, "tp2", ".gitattributes"])
        top = [entry.path for entry in api.list_repo_tree(REPO)]
        assert sorted(top) == [".gitattributes", "config.json", "empty.safetensors", "tp2"]
        (rank,) = [e for e in api.list_repo_tree(REPO, "tp2") if e.path == RANK]
        assert isinstance(rank, RepoFile)
        assert rank.lfs is not None
        assert rank.lfs.sha256 == hashlib.sha256(DATA).hexdigest()
        assert api.get_paths_info(REPO, [RANK, "tp2", "none"]) == [
            rank,
            *(entry for entry in api.list_repo_tree(REPO) if entry.path == "tp2"),
        ]
        hub.log.clear()
        api.upload_folder(repo_id=REPO, folder_path=folder)
        assert not hub.requests("/upload/"), "it is there already"
        assert not [request for request in hub.log if request.status >= 400]


def test_large_files_come_from_another_host_without_the_token(hub: Hub, tmp_path: Path) -> None:
    hub.repos[REPO].private = True
    found = snapshot_download(
        REPO, endpoint=hub.url, token=hub.token, cache_dir=tmp_path, allow_patterns="tp2/*"
    )
    assert held(found) == {RANK: DATA, "tp2/a b.json": b"{}"}
    (large,) = hub.requests("/cdn/", "GET")
    assert large.host == f"localhost:{hub.port}"
    assert large.authorization is None
    rest = [request for request in hub.log if request is not large]
    assert {request.host for request in rest} == {f"127.0.0.1:{hub.port}"}
    assert {request.authorization for request in rest} == {f"Bearer {hub.token}"}
    assert hub.bytes_sent("model.safetensors") == len(DATA)
    assert hub.bytes_sent("a%20b.json") == 2
    assert hub.bytes_sent("config.json") == 0


def test_links_are_signed_and_expire(hub: Hub) -> None:
    old = link(hub)
    assert ask(old).body == DATA
    assert ask(old[:-1] + "x").status == 403
    assert ask(old.partition("?")[0]).status == 403
    hub.expire_links()
    assert ask(old).status == 403
    assert ask(link(hub)).body == DATA


def test_hub_serves_ranges(hub: Hub) -> None:
    for url in (link(hub), f"{hub.url}{link(hub, 'config.json')}"):
        whole = ask(url)
        size = len(whole.body)
        assert (whole.status, whole.headers["Accept-Ranges"]) == (200, "bytes")
        for asked, start, end in (("2-5", 2, 6), ("2-", 2, size), ("-3", size - 3, size)):
            part = ask(url, Range=f"bytes={asked}")
            assert (part.status, part.body) == (206, whole.body[start:end])
            assert part.headers["Content-Range"] == f"bytes {start}-{end - 1}/{size}"
            assert part.headers["ETag"] == whole.headers["ETag"]
        beyond = ask(url, Range=f"bytes={size}-")
        assert (beyond.status, beyond.headers["Content-Range"]) == (416, f"bytes */{size}")
        assert ask(url, If_Match=whole.headers["ETag"]).status == 200
        assert ask(url, If_Match='"other"').status == 412
        head = ask(url, "HEAD")
        assert (head.headers["Content-Length"], head.body) == (str(size), b"")


def test_who_may_see_read_and_write(tmp_path: Path, folder: Path) -> None:
    with Hub(tmp_path / "hub", token="hf_mine") as hub:
        hub.create("org/private", private=True)
        hub.create("org/gated", gated=True)
        hub.create("org/public")
        owner, stranger, nobody, forger = (
            HfApi(endpoint=hub.url, token=token) for token in ("hf_mine", hub.stranger, False, "no")
        )

        def refused(kind: type[HfHubHTTPError], status: int, call: Any, *args: Any) -> None:
            with pytest.raises(HfHubHTTPError) as caught:
                call(*args)
            assert (type(caught.value), caught.value.response.status_code) == (kind, status)

        refused(RepositoryNotFoundError, 401, nobody.model_info, "org/private")
        refused(RepositoryNotFoundError, 404, stranger.model_info, "org/private")
        refused(RepositoryNotFoundError, 404, owner.model_info, "org/missing")
        refused(HfHubHTTPError, 401, forger.model_info, "org/public")
        for who in (nobody, stranger):
            assert who.model_info("org/gated").gated == "auto"
            assert not who.model_info("org/public").gated
        path = ".gitattributes"
        refused(GatedRepoError, 401, nobody.hf_hub_download, "org/gated", path)
        refused(GatedRepoError, 403, stranger.hf_hub_download, "org/gated", path)
        for name in ("org/gated", "org/private"):
            owner.hf_hub_download(name, path, local_dir=tmp_path / name)
            assert (tmp_path / name / path).is_file()
        add = [CommitOperationAdd("x", b"x")]
        head = hub.head("org/public")
        for who, status in ((stranger, 403), (nobody, 401)):
            with pytest.raises(HfHubHTTPError) as caught:
                who.create_commit("org/public", add, commit_message="m")
            assert caught.value.response.status_code == status
        with pytest.raises(HfHubHTTPError):
            stranger.create_repo("org/new")
        assert "org/new" not in hub.repos
        assert hub.head("org/public") == head
        assert owner.create_commit("org/public", add, commit_message="m").oid != head
        assert owner.whoami()["name"] == "owner"


def test_a_commit_is_all_or_nothing(hub: Hub) -> None:
    api = HfApi(endpoint=hub.url)
    head, files = hub.head(REPO), hub.files(REPO)
    add = CommitOperationAdd("new.json", b"new")

    def commit(*operations: Any, parent: str | None = None) -> Any:
        return api.create_commit(REPO, operations, commit_message="m", parent_commit=parent)

    with pytest.raises(EntryNotFoundError):
        commit(add, CommitOperationDelete("missing.json"))
    old = hub.move(REPO, {"config.json": b"2", "tp2/a b.json": None})
    with pytest.raises(HfHubHTTPError) as caught:
        commit(add, parent=head)
    assert caught.value.response.status_code == 412
    never_sent = CommitOperationAdd("lost.safetensors", b"12")
    never_sent._upload_mode, never_sent._should_ignore = "lfs", False
    never_sent._is_uploaded = True
    with pytest.raises(HfHubHTTPError) as caught:
        commit(add, never_sent)
    assert caught.value.response.status_code == 400
    assert hub.head(REPO) == old
    assert hub.files(REPO, head) == files
    assert hub.read(REPO, "config.json", head) == ASIDE["config.json"]
    assert hub.read(REPO, "config.json") == b"2"
    new = commit(add, CommitOperationDelete("tp2/"), parent=old).oid
    assert sorted(hub.files(REPO)) == [
        ".gitattributes",
        "config.json",
        "empty.safetensors",
        "new.json",
    ]
    assert [c.commit_id for c in api.list_repo_commits(REPO)][:3] == [new, old, head]


def test_branches_and_tags(hub: Hub, tmp_path: Path, folder: Path) -> None:
    api = HfApi(endpoint=hub.url)
    first = hub.head(REPO)
    api.create_tag(REPO, tag="v1")
    api.create_branch(REPO, branch="my/dev")
    api.upload_file(
        repo_id=REPO, path_or_fileobj=b"dev", path_in_repo="dev.json", revision="my/dev"
    )
    assert hub.upload(REPO, folder, "other") == hub.head(REPO, "other")
    assert hub.head(REPO) == hub.head(REPO, "v1") == first
    assert api.model_info(REPO, revision="my/dev").sha == hub.head(REPO, "my/dev") != first
    assert api.file_exists(REPO, "dev.json", revision="my/dev")
    assert not api.file_exists(REPO, "dev.json")
    refs = api.list_repo_refs(REPO)
    assert sorted(ref.name for ref in refs.branches) == ["main", "my/dev", "other"]
    assert [(ref.name, ref.target_commit) for ref in refs.tags] == [("v1", first)]
    with pytest.raises(RevisionNotFoundError):
        api.model_info(REPO, revision="none")
    with pytest.raises(RevisionNotFoundError):
        api.create_commit(REPO, [CommitOperationAdd("x", b"")], commit_message="m", revision="none")
    api.delete_branch(REPO, branch="my/dev")
    api.delete_tag(REPO, tag="v1")
    assert hub.repos[REPO].tags == {}
    assert sorted(hub.repos[REPO].branches) == ["main", "other"]


@pytest.mark.parametrize("xet", [False, True])
def test_the_hf_command(tmp_path: Path, folder: Path, xet: bool) -> None:
    with Hub(tmp_path / "hub", token="hf_mine", xet=xet) as hub:
        environ = {**os.environ, **hub.environ, "HF_HOME": str(tmp_path / "home")}

        def hf(*args: str) -> None:
            hf = Path(sys.executable).with_name("hf")
            subprocess.run(
                [hf, *args], env={**environ, "HF_TOKEN": "hf_mine"}, check=True, capture_output=True
            )

        hf("upload", REPO, str(folder), "--private")
        assert hub.repos[REPO].private
        assert hub.read(REPO, RANK) == DATA
        assert (hub.files(REPO)[RANK].xet is not None) == xet
        assert len(hub.requests("/upload/", "PUT")) == (0 if xet else 1)
        (tmp_path / "got").mkdir()
        hf("download", REPO, "--include", "tp2/*", "--local-dir", str(tmp_path / "got"))
        assert (tmp_path / "got" / RANK).read_bytes() == DATA
        assert hub.bytes_sent("/cdn/") == (0 if xet else len(DATA))
        assert ask(hub.sign(f"/cdn/{hub.files(REPO)[RANK].sha256}/x")).body == DATA


# S3 and obstore.


def test_s3_takes_and_gives(s3: S3, folder: Path) -> None:
    objects = store(s3)
    small = obstore.put(objects, "a b.json", b"{}", attributes={"xxh3": "ab"})
    got = obstore.get(objects, "a b.json")
    assert bytes(got.bytes()) == b"{}"
    assert got.attributes["xxh3"] == "ab"
    assert got.meta["e_tag"] == small["e_tag"] == f'"{hashlib.md5(b"{}").hexdigest()}"'
    large = DATA * 30
    obstore.put(objects, "large", large, chunk_size=5 << 20, attributes={"xxh3": "cd"})
    assert len(s3.requests("partNumber=", "PUT")) == 2
    assert s3.read("shards", "set/large") == large
    got = obstore.get(objects, "large")
    assert got.attributes["xxh3"] == "cd"
    assert bytes(obstore.get_range(objects, "large", start=7, end=99)) == large[7:99]
    last = s3.requests("/large$", "GET")[-1]
    assert (last.range, last.status, last.bytes_sent) == ("bytes=7-98", 206, 92)
    names = [entry["path"] for batch in obstore.list(objects) for entry in batch]
    assert sorted(names) == ["a b.json", "large", RANK]
    s3.upload("shards", "other/", folder)
    assert s3.keys("shards", "other/") == sorted(f"other/{name}" for name in held(folder))
    obstore.delete(objects, ["a b.json", "large"])
    assert s3.keys("shards", "set/") == [f"set/{RANK}"]
    with pytest.raises(FileNotFoundError):
        obstore.get(objects, "large")


def test_s3_conditions(s3: S3) -> None:
    objects = store(s3)
    etag = obstore.head(objects, RANK)["e_tag"]
    options = {"if_match": etag, "range": (5, 20)}
    assert bytes(obstore.get(objects, RANK, options=options).bytes()) == DATA[5:20]
    s3.put("shards", f"set/{RANK}", DATA[::-1])
    with pytest.raises(obstore.exceptions.PreconditionError):
        obstore.get(objects, RANK, options=options)
    with pytest.raises(obstore.exceptions.AlreadyExistsError):
        obstore.put(objects, RANK, b"", mode="create", use_multipart=False)


def test_s3_wants_its_key(s3: S3) -> None:
    with pytest.raises(obstore.exceptions.PermissionDeniedError):
        obstore.get(store(s3, AWS_ACCESS_KEY_ID="other"), RANK)
    assert ask(f"{s3.url}/shards/set/{RANK}").status == 403


# Faults.


def test_status(hub: Hub) -> None:
    fault = Fault("status", method="GET", path="/cdn/", status=429, retry_after=7, times=1)
    hub.faults.append(fault)
    url = link(hub)
    first = ask(url)
    assert (first.status, first.headers["Retry-After"]) == (429, "7")
    assert ask(url).body == DATA
    assert [request.status for request in hub.requests("/cdn/")] == [429, 200]
    assert (hub.faults.hits(fault), hub.faults.hits()) == (1, 1)
    hub.faults.clear()
    assert ask(url).status == 200
    hub.faults.append(fault)
    assert ask(url).status == 429, "ordered again, it hits again"
    assert hub.faults.hits() == 2


@pytest.mark.parametrize("kind", ["status", "reset", "cut"])
def test_a_commit_that_fails(hub: Hub, kind: Any) -> None:
    """Only where the answer is lost after the work was the commit made."""
    head = hub.head(REPO)
    hub.faults.append(Fault(kind, method="POST", path="/commit/", times=1))
    api = HfApi(endpoint=hub.url)
    with pytest.raises(Exception, match=r"503|disconnected|reset|closed") as caught:
        api.create_commit(REPO, [CommitOperationAdd("x", b"x")], commit_message="m")
    assert (hub.head(REPO) != head) == (kind == "cut"), caught.value
    assert hub.requests("/commit/")[0].status == {"status": 503, "reset": 0, "cut": 200}[kind]


def test_cut(hub: Hub) -> None:
    hub.faults.append(Fault("cut", path="/cdn/", part=0.25))
    answer = ask(link(hub))
    assert (answer.status, answer.headers["Content-Length"]) == (200, str(len(DATA)))
    assert (answer.body, answer.whole) == (DATA[: len(DATA) // 4], False)
    assert hub.bytes_sent("/cdn/") == len(DATA) // 4
    with pytest.raises(http.client.RemoteDisconnected):
        ask(link(hub), "HEAD")


def test_reset(hub: Hub) -> None:
    hub.faults.append(Fault("reset", path="/cdn/"))
    with pytest.raises(ConnectionResetError):
        ask(link(hub))


def test_slow(hub: Hub) -> None:
    hub.faults.append(Fault("slow", path="/cdn/", rate=800_000))
    start = time.monotonic()
    assert ask(link(hub)).body == DATA
    assert time.monotonic() - start >= len(DATA) / 800_000


def test_latency(hub: Hub) -> None:
    url = link(hub)
    hub.latency = 0.1
    start = time.monotonic()
    assert ask(url).body == DATA
    assert time.monotonic() - start >= 0.1


def test_stall(hub: Hub) -> None:
    hub.faults.append(Fault("stall", path="/cdn/"))
    connection = http.client.HTTPConnection(urllib.parse.urlsplit(hub.cdn).netloc, timeout=0.3)
    connection.request("GET", link(hub).removeprefix(hub.cdn))
    response = connection.getresponse()
    assert response.read(len(DATA) // 2) == DATA[: len(DATA) // 2]
    with pytest.raises(TimeoutError):
        response.read(1)
    connection.close()


def test_stopping_ends_what_stalls(hub: Hub) -> None:
    hub.faults.append(Fault("stall", path="/cdn/", part=0.5))
    answers: list[Answer] = []
    client = threading.Thread(target=lambda url: answers.append(ask(url)), args=(link(hub),))
    client.start()
    hub.wait_for("/cdn/")
    hub.stop()
    client.join(10)
    assert not answers or not answers[0].whole


def test_etag(hub: Hub) -> None:
    url = link(hub)
    etag = ask(url).headers["ETag"]
    hub.faults.append(Fault("etag", path="/cdn/"))
    answer = ask(url, Range="bytes=0-9")
    assert answer.body == DATA[:10]
    assert answer.headers["ETag"] not in (None, etag)


def test_truncate(hub: Hub) -> None:
    hub.faults.append(Fault("truncate", path="/cdn/"))
    answer = ask(link(hub))
    assert (answer.status, answer.body, answer.whole) == (200, DATA[: len(DATA) // 2], True)
    answer = ask(link(hub), Range="bytes=100-199")
    assert (answer.status, answer.body, answer.whole) == (206, DATA[100:150], True)
    assert answer.headers["Content-Range"] == f"bytes 100-149/{len(DATA)}"
    assert ask(link(hub), "HEAD").headers["Content-Length"] == str(len(DATA))


@pytest.mark.parametrize("kind", ["status", "reset", "cut", "truncate", "etag"])
def test_faults_of_s3(s3: S3, kind: Any) -> None:
    fault = Fault(kind, method="GET", path=RANK, times=1, part=0.5)
    s3.faults.append(fault)
    url = f"{s3.url}/shards/set/{RANK}"
    true = ask(url, "HEAD", **SIGNED).headers["ETag"]
    if kind == "reset":
        with pytest.raises(ConnectionError):
            ask(url, **SIGNED)
    else:
        answer = ask(url, **SIGNED)
        assert s3.bytes_sent(RANK) == len(answer.body)
        assert (answer.status == 503) == (kind == "status")
        assert answer.whole == (kind != "cut")
        assert (answer.body == DATA) == (kind == "etag")
        assert kind == "status" or (answer.headers["ETag"] != true) == (kind == "etag")
    assert s3.faults.hits(fault) >= 1
    assert bytes(obstore.get(store(s3), RANK).bytes()) == DATA


def test_clients_get_over_faults(hub: Hub, s3: S3, tmp_path: Path) -> None:
    """The Hub's and obstore ask again."""
    hub.faults.append(Fault("cut", method="GET", path="/cdn/", times=1))
    found = snapshot_download(REPO, endpoint=hub.url, cache_dir=tmp_path, allow_patterns="tp2/*")
    assert held(found)[RANK] == DATA
    assert len(hub.requests("/cdn/", "GET")) == 2
    s3.faults.append(Fault("status", method="GET", status=500, times=2))
    assert bytes(obstore.get(store(s3), RANK).bytes()) == DATA
    assert [request.status for request in s3.requests(RANK, "GET")] == [500, 500, 200]


def test_what_is_hit_depends_on_the_seed_alone() -> None:
    paths = [f"/file-{number}" for number in range(400)]

    def hit(order: list[str], **options: Any) -> list[str]:
        faults = Faults()
        faults.append(Fault("reset", **options))
        return sorted(path for path in order if faults.draw("GET", path, None))

    drawn = hit(paths, share=0.1, seed=1)
    assert 20 <= len(drawn) <= 60
    assert hit(paths[::-1], share=0.1, seed=1) == drawn != hit(paths, share=0.1, seed=2)
    assert hit([f"{path}?sig={path}" for path in drawn], share=0.1, seed=1) != []
    assert hit(paths, times=3) == sorted(paths[:3])
    assert hit(paths, skip=398) == sorted(paths[398:])
    assert hit(paths, path=r"-7\d$", method="GET|HEAD") == [f"/file-7{n}" for n in range(10)]
    assert hit(paths, method="PUT") == []
    again = hit(["/same"] * 400, share=0.1, seed=1)
    assert 20 <= len(again) <= 60, "a repeated request is drawn anew"


def test_of_many_threads_as_many_are_hit_as_ordered(hub: Hub) -> None:
    url = link(hub)
    fault = Fault("status", path="/cdn/", times=5)
    hub.faults.extend([fault])
    with ThreadPoolExecutor(10) as pool:
        answers = list(pool.map(ask, [url] * 20))
    assert sorted(answer.status for answer in answers) == [200] * 15 + [503] * 5
    assert hub.faults.hits(fault) == hub.faults.hits() == 5


# Going away and coming back.


@pytest.mark.parametrize("which", ["hub", "s3"])
def test_gone_and_back(request: pytest.FixtureRequest, which: str) -> None:
    server: Server = request.getfixturevalue(which)
    url = server.url
    open_one = http.client.HTTPConnection(urllib.parse.urlsplit(url).netloc, timeout=10)
    again(open_one)
    for _ in range(2):
        server.stop()
        with pytest.raises(ConnectionRefusedError):
            ask(url)
        server.start()
        assert ask(f"{url}/").status in (403, 404)
    assert server.url == url
    open_one.auto_open = 0
    with pytest.raises((ConnectionError, http.client.HTTPException)):
        again(open_one)
    if isinstance(server, Hub):
        assert server.read(REPO, RANK) == ask(link(server)).body == DATA
    else:
        assert bytes(obstore.get(store(request.getfixturevalue("s3")), RANK).bytes()) == DATA


def test_waiting_for_a_request(hub: Hub) -> None:
    url = link(hub)
    with pytest.raises(TimeoutError):
        hub.wait_for("/cdn/", seconds=0.05)
    threading.Thread(target=ask, args=(url,)).start()
    hub.wait_for("/cdn/", "GET")
    assert [request.method for request in hub.requests("/cdn/")] == ["GET"]


def test_a_bug_in_a_server_is_loud(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(Hub, "check_signature", broken)
    with pytest.raises(RuntimeError, match="a bug"), Hub(tmp_path) as hub:
        assert ask(hub.sign("/cdn/" + "0" * 64 + "/x")).status == 500
