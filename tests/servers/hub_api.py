"""The loopback Hub's API: repos, listings, refs and commits."""

from __future__ import annotations

import base64
import fnmatch
import hashlib
import json
import urllib.parse
from typing import TYPE_CHECKING, Any

from tests.servers.access import readable, seen, who, writable, writer
from tests.servers.messages import Call, Reply
from tests.servers.repos import Entry, Files, Refused, is_lfs
from tests.servers.routes import REPO, REVISION, route

if TYPE_CHECKING:
    from tests.servers.hub import Hub

DATE = "2026-01-01T00:00:00.000Z"


@route("GET", "/api/whoami-v2")
def whoami(hub: Hub, call: Call) -> Reply:
    """Whose token it is."""
    someone = who(hub, call)
    if someone == "nobody":
        raise Refused(401, "Invalid username or password.")
    token = {"type": "access_token", "accessToken": {"displayName": "t", "role": "write"}}
    return Reply.json({"name": someone, "type": "user", "orgs": [], "auth": token})


@route("POST", "/api/validate-yaml")
def validate_yaml(hub: Hub, call: Call) -> Reply:
    """A card's front matter: everything goes."""
    return Reply.json({"errors": [], "warnings": []})


@route("POST", "/api/repos/create")
def create(hub: Hub, call: Call) -> Reply:
    """A new repo, or 409."""
    writer(hub, call)
    asked = call.json()
    name = f"{asked.get('organization') or 'owner'}/{asked['name']}"
    if asked.get("type", "model") != "model":
        raise Refused(400, "only model repos live here")
    about = {"url": f"{hub.url}/{name}", "name": name, "id": name}
    with hub.lock:
        if name in hub.repos:
            return Reply.json({"error": "You already created this model repo", **about}, 409)
        hub.create(name, private=asked.get("visibility") == "private" or bool(asked.get("private")))
    return Reply.json(about)


@route("DELETE", "/api/repos/delete")
def delete(hub: Hub, call: Call) -> Reply:
    """No more of a repo."""
    asked = call.json()
    name = f"{asked.get('organization') or 'owner'}/{asked['name']}"
    writable(hub, call, name)
    del hub.repos[name]
    return Reply.json({})


@route("PUT", rf"{REPO}/settings")
def settings(hub: Hub, call: Call, name: str) -> Reply:
    """Make a repo private, public or gated."""
    repo, asked = writable(hub, call, name), call.json()
    visibility = asked.get("visibility")
    repo.private = asked.get("private", repo.private if not visibility else visibility == "private")
    repo.gated = bool(asked.get("gated", repo.gated))
    return Reply.json({})


@route("GET", rf"{REPO}/auth-check(?P<write>/write)?")
def auth_check(hub: Hub, call: Call, name: str, write: str) -> Reply:
    """Whether a request could read, or write."""
    (writable if write else readable)(hub, call, name)
    return Reply.json({})


@route("GET", rf"{REPO}(?:/revision/{REVISION})?")
def info(hub: Hub, call: Call, name: str, revision: str) -> Reply:
    """What repo_info tells; sizes and digests where `blobs` asks for them."""
    repo = seen(hub, call, name)
    commit = repo.at(revision or "main")
    siblings: list[dict[str, object]] = []
    for path, entry in sorted(commit.files.items()):
        about: dict[str, object] = {"rfilename": path}
        if call.query.get("blobs", "").lower() in ("1", "true"):
            about |= {"size": entry.size, "blobId": entry.oid}
            if entry.lfs:
                about["lfs"] = entry.lfs_info("sha256")
        siblings.append(about)
    return Reply.json(
        {
            "_id": hashlib.sha1(name.encode()).hexdigest()[:24],
            "id": name,
            "modelId": name,
            "author": name.partition("/")[0],
            "sha": commit.sha,
            "private": repo.private,
            "gated": "auto" if repo.gated else False,
            "disabled": False,
            "tags": [],
            "downloads": 0,
            "likes": 0,
            "lastModified": DATE,
            "createdAt": DATE,
            "siblings": siblings,
        }
    )


@route("GET", rf"{REPO}/tree/{REVISION}(?:/(?P<path>.*))?")
def tree(hub: Hub, call: Call, name: str, revision: str, path: str) -> Reply:
    """A folder's entries, a page at a time."""
    files = seen(hub, call, name).at(revision).files
    start = path.strip("/") + "/" if path.strip("/") else ""
    recursive = call.query.get("recursive", "").lower() in ("1", "true")
    entries: dict[str, dict[str, object]] = {}
    for file, entry in sorted(files.items()):
        if not file.startswith(start):
            continue
        *folders, _ = file[len(start) :].split("/")
        for depth in range(1, len(folders) + 1 if recursive else min(len(folders), 1) + 1):
            folder = start + "/".join(folders[:depth])
            entries[folder] = _folder(folder)
        if recursive or not folders:
            entries[file] = entry.listed(file)
    if start and not entries:
        raise Refused(404, f"{path} does not exist on {revision}", "EntryNotFound")
    at = int(call.query.get("cursor", 0))
    page = min(hub.page, int(call.query.get("limit", hub.page)))
    headers = {}
    if at + page < len(entries):
        query = urllib.parse.urlencode({**call.query, "cursor": at + page})
        headers["Link"] = f'<{hub.url}{call.path}?{query}>; rel="next"'
    return Reply.json(list(entries.values())[at : at + page], headers=headers)


@route("POST", rf"{REPO}/paths-info/{REVISION}")
def paths_info(hub: Hub, call: Call, name: str, revision: str) -> Reply:
    """Some files and folders by their paths; those that are not there are left out."""
    files = seen(hub, call, name).at(revision).files
    body = call.body()
    if body.startswith(b"{"):
        paths = json.loads(body)["paths"]
    else:
        paths = urllib.parse.parse_qs(body.decode()).get("paths", [])
    found = []
    for path in paths:
        if path in files:
            found.append(files[path].listed(path))
        elif any(file.startswith(path.rstrip("/") + "/") for file in files):
            found.append(_folder(path))
    return Reply.json(found)


def _folder(path: str) -> dict[str, object]:
    oid = hashlib.sha1(path.encode()).hexdigest()
    return {"type": "directory", "oid": oid, "size": 0, "path": path}


@route("GET", rf"{REPO}/refs")
def refs(hub: Hub, call: Call, name: str) -> Reply:
    """The branches and tags."""
    repo = seen(hub, call, name)

    def listed(kind: str, names: dict[str, str]) -> list[dict[str, str]]:
        return [
            {"name": key, "ref": f"refs/{kind}/{key}", "targetCommit": sha}
            for key, sha in names.items()
        ]

    branches, tags = listed("heads", repo.branches), listed("tags", repo.tags)
    return Reply.json({"branches": branches, "tags": tags, "converts": [], "pullRequests": []})


@route("GET", rf"{REPO}/commits/{REVISION}")
def commits(hub: Hub, call: Call, name: str, revision: str) -> Reply:
    """The commits up to a revision, the last first."""
    repo = seen(hub, call, name)
    sha: str | None = repo.at(revision).sha
    found = []
    while sha:
        commit = repo.commits[sha]
        about = {"id": sha, "title": commit.title, "message": "", "date": DATE}
        found.append({**about, "authors": [{"user": "owner"}]})
        sha = commit.parent
    return Reply.json(found)


@route("POST", rf"{REPO}/branch/(?P<branch>[^/]+)")
def add_branch(hub: Hub, call: Call, name: str, branch: str) -> Reply:
    """A new branch, or 409."""
    repo = writable(hub, call, name)
    start = call.json().get("startingPoint") or "main"
    with hub.lock:
        if branch in repo.branches:
            raise Refused(409, f"Reference already exists: refs/heads/{branch}")
        repo.branches[branch] = repo.at(start).sha
    return Reply.json({})


@route("POST", rf"{REPO}/tag/{REVISION}")
def add_tag(hub: Hub, call: Call, name: str, revision: str) -> Reply:
    """A new tag, or 409."""
    repo, tag = writable(hub, call, name), call.json()["tag"]
    with hub.lock:
        if tag in repo.tags:
            raise Refused(409, f"Tag reference exists already: refs/tags/{tag}")
        repo.tags[tag] = repo.at(revision).sha
    return Reply.json({})


@route("DELETE", rf"{REPO}/(?P<kind>branch|tag)/(?P<ref>[^/]+)")
def remove_ref(hub: Hub, call: Call, name: str, kind: str, ref: str) -> Reply:
    """No more of a branch or a tag."""
    repo = writable(hub, call, name)
    if (repo.branches if kind == "branch" else repo.tags).pop(ref, None) is None:
        raise Refused(404, f"Invalid rev id: {ref}", "RevisionNotFound")
    return Reply.json({})


@route("POST", rf"{REPO}/preupload/{REVISION}")
def preupload(hub: Hub, call: Call, name: str, revision: str) -> Reply:
    """How each file is to be sent, and what is there under its name."""
    files = writable(hub, call, name).at(revision).files
    asked = call.json()
    lines = [line.strip() for line in asked.get("gitIgnore", "").splitlines()]
    ignored = [line for line in lines if line and not line.startswith("#")]
    found = []
    for file in asked["files"]:
        path = file["path"]
        about: dict[str, object] = {
            "path": path,
            "uploadMode": "lfs" if is_lfs(path, file["size"]) else "regular",
            "shouldIgnore": any(fnmatch.fnmatch(path, pattern) for pattern in ignored),
        }
        if entry := files.get(path):
            about["oid"] = entry.sha256 if entry.lfs else entry.oid
        found.append(about)
    return Reply.json({"files": found})


@route("POST", rf"{REPO}/commit/{REVISION}")
def commit(hub: Hub, call: Call, name: str, revision: str) -> Reply:
    """A commit, all or nothing; 412 where the branch is no longer at the parent asked for."""
    repo = writable(hub, call, name)
    lines = [json.loads(line) for line in call.body().splitlines()]
    header = next(line["value"] for line in lines if line["key"] == "header")
    with hub.lock:
        now = repo.at(revision)
        if revision not in repo.branches:
            raise Refused(400, f"{revision} is no branch")
        if (parent := header.get("parentCommit")) and not now.sha.startswith(parent):
            raise Refused(412, "A commit has happened since. Please refresh and try again.")
        sha = repo.commit(revision, header["summary"], _applied(hub, now.files, lines))
    url = f"{hub.url}/{name}/commit/{sha}"
    return Reply.json({"success": True, "commitOid": sha, "commitUrl": url, "hookOutput": ""})


def _applied(hub: Hub, files: Files, lines: list[dict[str, Any]]) -> Files:
    """The files after a commit's operations."""
    after = dict(files)
    for line in lines:
        key, value = line["key"], line["value"]
        path = value.get("path", "")
        if key == "file":
            data = base64.b64decode(value["content"])
            hub.blobs.put([data])
            after[path] = Entry.regular(data)
        elif key == "lfsFile":
            after[path] = _large(hub, value)
        elif key == "deletedFile":
            if after.pop(path, None) is None:
                raise Refused(404, f'A file with the name "{path}" does not exist', "EntryNotFound")
        elif key == "deletedFolder":
            folder = path.rstrip("/") + "/"
            after = {name: entry for name, entry in after.items() if not name.startswith(folder)}
    return after


def _large(hub: Hub, value: dict[str, Any]) -> Entry:
    sha256 = value["oid"]
    xet = hub.xet.hash_of(sha256) if hub.xet else None
    if xet is None and sha256 not in hub.blobs:
        raise Refused(400, f"LFS pointer pointed to a file that does not exist: {sha256}")
    size = value["size"] if "size" in value else hub.content(sha256).stat().st_size
    if hub.xet and xet:
        hub.xet.sizes[sha256] = size
    return Entry.large(sha256, size, xet)
