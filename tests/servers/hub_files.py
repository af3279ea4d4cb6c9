"""The loopback Hub's files: LFS uploads, Xet tokens, and downloads by way of a CDN."""

from __future__ import annotations

import re
import time
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.servers.access import readable, writable
from tests.servers.messages import Call, FilePart, Reply
from tests.servers.repos import Refused
from tests.servers.routes import REPO, REVISION, SHA, route

if TYPE_CHECKING:
    from tests.servers.hub import Hub


@route("POST", r"/(?P<name>[^/]+/[^/]+)\.git/info/lfs/objects/batch")
def lfs_batch(hub: Hub, call: Call, name: str) -> Reply:
    """Where to send the large files that are not there yet."""
    writable(hub, call, name)
    objects = [_object(hub, asked["oid"], asked["size"]) for asked in call.json()["objects"]]
    transfer = "multipart" if hub.multipart else "basic"
    return Reply.json({"transfer": transfer, "objects": objects})


def _object(hub: Hub, sha256: str, size: int) -> dict[str, Any]:
    about: dict[str, Any] = {"oid": sha256, "size": size}
    if sha256 in hub.blobs and hub.blobs.path(sha256).stat().st_size == size:
        return about
    if hub.multipart and size > hub.multipart:
        parts = {
            f"{number:05d}": hub.sign(f"/upload/{sha256}/{number}")
            for number in range(1, -(-size // hub.multipart) + 1)
        }
        upload = {
            "href": f"{hub.url}/api/complete_multipart/{sha256}",
            "header": {"chunk_size": str(hub.multipart), **parts},
        }
    else:
        upload = {"href": hub.sign(f"/upload/{sha256}")}
    verify = {"href": f"{hub.url}/api/lfs_verify"}
    return {**about, "actions": {"upload": upload, "verify": verify}}


@route("PUT", rf"/upload/{SHA}(?:/(?P<part>\d+))?")
def upload(hub: Hub, call: Call, sha256: str, part: str) -> Reply:
    """Take in a large file, or a part of one."""
    hub.check_signature(call)
    if not part:
        hub.blobs.put(call.chunks(), sha256)
        return Reply(200, {"ETag": f'"{sha256}"'})
    with _part(hub, sha256, part).open("wb") as file:
        for chunk in call.chunks():
            file.write(chunk)
    return Reply(200, {"ETag": f'"{part}"'})


@route("POST", f"/api/complete_multipart/{SHA}")
def complete(hub: Hub, call: Call, sha256: str) -> Reply:
    """Make one file of its parts."""
    paths = [_part(hub, sha256, str(part["partNumber"])) for part in call.json()["parts"]]

    def contents() -> Iterator[bytes]:
        for path in paths:
            if not path.is_file():
                raise Refused(400, f"part {path.suffix[1:]} was not uploaded")
            yield path.read_bytes()

    if sha256 not in hub.blobs:  # asked again after an answer that was lost
        hub.blobs.put(contents(), sha256)
        for path in paths:
            path.unlink()
    return Reply.json({"success": True})


def _part(hub: Hub, sha256: str, number: str) -> Path:
    return hub.blobs.folder / f"part-{sha256}.{number}"


@route("POST", "/api/lfs_verify")
def lfs_verify(hub: Hub, call: Call) -> Reply:
    """Whether an upload arrived whole."""
    asked = call.json()
    blob = hub.blobs.path(asked["oid"])
    if not blob.is_file() or blob.stat().st_size != asked["size"]:
        raise Refused(404, "the object is not here")
    return Reply.json({})


@route("GET", f"{REPO}/xet-(?P<kind>read|write)-token/{REVISION}")
def xet_token(hub: Hub, call: Call, name: str, kind: str, revision: str) -> Reply:
    """Access to Xet storage."""
    (readable if kind == "read" else writable)(hub, call, name)
    if hub.xet is None:
        raise Refused(404, "this Hub has no Xet storage")
    expires = str(int(time.time()) + 3600)
    headers = {
        "X-Xet-Cas-Url": hub.xet.url,
        "X-Xet-Access-Token": "loopback",
        "X-Xet-Token-Expiration": expires,
    }
    answer = {"casUrl": hub.xet.url, "accessToken": "loopback", "exp": int(expires)}
    return Reply.json(answer, headers=headers)


@route("GET|HEAD", f"/(?P<name>[^/]+/[^/]+)/resolve/{REVISION}/(?P<path>.+)")
def resolve(hub: Hub, call: Call, name: str, revision: str, path: str) -> Reply:
    """Send on to where a file is: the CDN for a large one, a cache on this host for the others."""
    commit = readable(hub, call, name).at(revision)
    headers = {"X-Repo-Commit": commit.sha, "Accept-Ranges": "bytes"}
    entry = commit.files.get(path)
    if entry is None:
        error = {"X-Error-Code": "EntryNotFound", "X-Error-Message": "Entry not found"}
        return Reply.json({"error": "Entry not found"}, 404, {**headers, **error})
    quoted = urllib.parse.quote(path)
    if not entry.lfs:
        headers |= {"X-Linked-Size": str(entry.size), "X-Linked-ETag": f'"{entry.oid}"'}
        headers["ETag"] = f'"{entry.oid}"'
        headers["Location"] = f"/api/resolve-cache/models/{name}/{commit.sha}/{quoted}"
        return Reply(307, headers)
    headers |= {"X-Linked-Size": str(entry.size), "X-Linked-ETag": f'"{entry.sha256}"'}
    headers["Location"] = hub.sign(f"/cdn/{entry.sha256}/{quoted}")
    if entry.xet:
        headers["X-Xet-Hash"] = entry.xet
        refresh = f"{hub.url}/api/models/{name}/xet-read-token/{commit.sha}"
        headers["X-Xet-Refresh-Route"] = refresh
    return Reply(302, headers)


@route("GET|HEAD", f"/api/resolve-cache/models/(?P<name>[^/]+/[^/]+)/{REVISION}/(?P<path>.+)")
def cached(hub: Hub, call: Call, name: str, revision: str, path: str) -> Reply:
    """A file that lies in git itself."""
    commit = readable(hub, call, name).at(revision)
    entry = commit.files.get(path)
    if entry is None:
        raise Refused(404, "Entry not found", "EntryNotFound")
    headers = {"ETag": f'"{entry.oid}"', "X-Repo-Commit": commit.sha}
    return served(call, hub.content(entry.sha256), headers)


@route("GET|HEAD", f"/cdn/{SHA}/(?P<path>.+)")
def cdn(hub: Hub, call: Call, sha256: str, path: str) -> Reply:
    """A large file, to whoever has a signed link."""
    hub.check_signature(call)
    return served(call, hub.content(sha256), {"ETag": f'"{sha256}"'})


def served(call: Call, path: Path, headers: dict[str, str]) -> Reply:
    """A file or the range of it that is asked for."""
    size = path.stat().st_size
    headers |= {"Accept-Ranges": "bytes", "Content-Type": "application/octet-stream"}
    if (wanted := call.headers.get("If-Match")) not in (None, "*", headers["ETag"]):
        raise Refused(412, f"{wanted} is not {headers['ETag']}")
    match = re.fullmatch(r"bytes=(\d*)-(\d*)", call.headers.get("Range", ""))
    if match is None or match[0] == "bytes=-":
        return Reply(200, headers, FilePart(path, 0, size))
    if match[1]:
        start, end = int(match[1]), min(size, int(match[2]) + 1 if match[2] else size)
    else:
        start, end = max(0, size - int(match[2])), size
    if start >= size or start >= end:
        return Reply(416, {"Content-Range": f"bytes */{size}"})
    headers["Content-Range"] = f"bytes {start}-{end - 1}/{size}"
    return Reply(206, headers, FilePart(path, start, end - start))
