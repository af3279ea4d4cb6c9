"""A loopback Hugging Face Hub for model repos, as huggingface_hub and its `hf` command see it.

with Hub(folder) as hub:
    hub.create("org/name")
    HfApi(endpoint=hub.url).upload_folder(repo_id="org/name", folder_path=...)

Large files go over a second host name, by signed links, as with the real one: in the log they are
/cdn/SHA256/PATH, uploads /upload/SHA256, and small files /api/resolve-cache/.../PATH.
Repos, commits and blobs outlive stop() and start(). HF_ENDPOINT is read at import: give it to
subprocesses.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import threading
import time
import urllib.parse
from collections.abc import Mapping
from pathlib import Path

from tests.servers import hub_api, hub_files  # noqa: F401  they fill ROUTES
from tests.servers.messages import Call, Reply
from tests.servers.repos import ATTRIBUTES, Blobs, Entry, Refused, Repo
from tests.servers.routes import ROUTES
from tests.servers.web import Server
from tests.servers.xet import Xet

OWNER = "hf_owner"
STRANGER = "hf_stranger"
LINK_SECONDS = 3600


class Hub(Server):
    """The Hub.

    token: what writes need. None: anybody may write. Private and gated repos always need `.token`.
    `.stranger` is a valid token of somebody who may read public repos only.
    xet: offer Xet storage (its bytes go by files, not by HTTP, so they are not in the log).
    multipart: the size of parts in bytes above which LFS uploads go in parts.
    page: entries a page of a listing.
    """

    def __init__(
        self,
        folder: Path,
        *,
        token: str | None = None,
        xet: bool = False,
        multipart: int | None = None,
        page: int = 1000,
    ) -> None:
        super().__init__()
        self.cdn = f"http://localhost:{self.port}"
        self.open = token is None
        self.token = token or OWNER
        self.stranger = STRANGER
        self.multipart = multipart
        self.page = page
        self.blobs = Blobs(folder / "blobs")
        self.xet = Xet(folder / "cas") if xet else None
        self.repos: dict[str, Repo] = {}
        self.lock = threading.RLock()
        self._links = 0

    @property
    def environ(self) -> dict[str, str]:
        """What sends a subprocess here. Set HF_HOME beside it, and HF_TOKEN where one is needed."""
        return {
            "HF_ENDPOINT": self.url,
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HUB_DISABLE_UPDATE_CHECK": "1",
            "HF_HUB_DISABLE_XET": "0" if self.xet else "1",
        }

    # Straight to the content, without HTTP.

    def create(self, repo: str, private: bool = False, gated: bool = False) -> Repo:
        """A new repo, with the one file that the Hub puts there."""
        with self.lock:
            assert repo not in self.repos, f"{repo} is there already"
            made = self.repos[repo] = Repo(repo, private, gated)
            entry = self.blobs.put_bytes(ATTRIBUTES.encode(), ".gitattributes")
            made.commit("main", "initial commit", {".gitattributes": entry})
        return made

    def upload(self, repo: str, folder: Path, revision: str = "main") -> str:
        """Commit the files of a folder over those that are there; the commit's id.

        Creates the repo, and the branch from main, where they are missing.
        """
        paths = sorted(path for path in folder.rglob("*") if path.is_file())
        names = {path.relative_to(folder).as_posix(): path for path in paths}
        return self._add(
            repo, {name: self.blobs.put_file(path, name) for name, path in names.items()}, revision
        )

    def move(self, repo: str, files: Mapping[str, bytes | None]) -> str:
        """A new commit on main with these files, None deleting one; its id."""
        return self._add(
            repo,
            {
                name: None if data is None else self.blobs.put_bytes(data, name)
                for name, data in files.items()
            },
        )

    def _add(self, repo: str, files: Mapping[str, Entry | None], branch: str = "main") -> str:
        with self.lock:
            found = self.repos.get(repo) or self.create(repo)
            now = found.at(branch if branch in found.branches else "main").files
            new = {name: entry for name, entry in {**now, **files}.items() if entry is not None}
            return found.commit(branch, "direct", new)

    def head(self, repo: str, revision: str = "main") -> str:
        """The id of the commit that a revision names now."""
        return self.repos[repo].at(revision).sha

    def files(self, repo: str, revision: str = "main") -> dict[str, Entry]:
        """The files of a revision."""
        return dict(self.repos[repo].at(revision).files)

    def read(self, repo: str, path: str, revision: str = "main") -> bytes:
        """The content of a file of a revision."""
        return self.content(self.repos[repo].at(revision).files[path].sha256).read_bytes()

    # For the routes.

    def content(self, sha256: str) -> Path:
        """Where a blob lies; one that is in Xet storage only is fetched from there."""
        if sha256 not in self.blobs and self.xet:
            self.xet.fetch(sha256, self.blobs.path(sha256))
        return self.blobs.path(sha256)

    def sign(self, path: str) -> str:
        """A link to the CDN that works until it expires, or all are made to."""
        expires = int(time.time()) + LINK_SECONDS
        return f"{self.cdn}{path}?exp={expires}&sig={self._signature(path, str(expires))}"

    def check_signature(self, call: Call) -> None:
        """Refused where a link is not signed, or was, but no longer counts."""
        expires = call.query.get("exp", "0")
        good = self._signature(call.path, expires)
        if int(expires) < time.time() or call.query.get("sig") != good:
            raise Refused(403, "Access denied: the link is not signed or has expired")

    def expire_links(self) -> None:
        """Make all links to the CDN that were handed out so far answer 403."""
        self._links += 1

    def _signature(self, path: str, expires: str) -> str:
        message = f"{path} {expires} {self._links}".encode()
        return hmac.new(b"loopback", message, hashlib.sha256).hexdigest()

    def answer(self, call: Call) -> Reply:
        """Find the route and take it."""
        try:
            for method, pattern, route in ROUTES:
                if call.method in method.split("|") and (match := re.fullmatch(pattern, call.path)):
                    parts = {k: urllib.parse.unquote(v or "") for k, v in match.groupdict().items()}
                    return route(self, call, **parts)
            raise Refused(404, f"Sorry, we can't find {call.method} {call.path}")
        except Refused as error:
            headers = {"X-Error-Message": error.message}
            if error.code:
                headers["X-Error-Code"] = error.code
            return Reply.json({"error": error.message}, error.status, headers)

    def failure(self, status: int, headers: Mapping[str, str]) -> Reply:
        """As the Hub words it."""
        return Reply.json({"error": f"injected {status}"}, status, headers)
