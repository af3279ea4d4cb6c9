"""The Hub: a repo's files at one commit, read by ranges of the links that the Hub signs.

huggingface-hub is imported with the first repo that is opened. A link is resolved once a file and
used until it expires: each resolve counts against the Hub's rate limits, ranges of a link do not.
"""

from __future__ import annotations

import hashlib
import re
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from shardc.errors import Problem, RemoteError, ShardcError
from shardc.location import HubLocation
from shardc.remote import Remote, RemoteFile, Transient, retried

if TYPE_CHECKING:
    from typing_extensions import Buffer

HASHED_BYTES = 1 << 20  # of a file at once
READ_S = 30.0  # without a byte, a request has failed
TRANSIENT = frozenset({408, 425, 429, 500, 502, 503, 504})
_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+)")
EXPIRED = frozenset({400, 401, 403, 410})  # what storage answers to a link that is no longer valid


def is_offline() -> bool:
    """Whether HF_HUB_OFFLINE says that nothing may be asked of the Hub."""
    from huggingface_hub import constants

    return bool(constants.is_offline_mode())


def cached_snapshot(location: HubLocation) -> Path:
    """The folder in the Hub's cache that holds the repo, or the folder of it; RemoteError."""
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        found = snapshot_download(location.repo, revision=location.revision, local_files_only=True)
    except LocalEntryNotFoundError as error:
        if (part := getattr(error, "snapshot_path", None)) is not None:  # some of its files
            return Path(part, location.folder)
        what = f"offline, and {constants.HF_HUB_CACHE} has no revision {location.revision} of it"
        fix = "download it once while online, or unset HF_HUB_OFFLINE"
        raise RemoteError(Problem(str(location), what, fix)) from error
    return Path(found, location.folder)


def open_repo(location: HubLocation, token: str | None = None) -> Repo:
    """The files of a repo, or of a folder in it, at the commit that its revision leads to now.

    Raises RemoteError: no such repo, revision or folder, no permission, no connection.
    """
    api = client(token)
    commit = _commit(api, location)
    found = _listed(api, location, commit)
    if not found:
        what = f"has no folder or file {location.folder!r}" if location.folder else "is empty"
        raise RemoteError(Problem(str(location), f"{what} at commit {commit}"))
    return Repo(api, location, commit, found)


def client(token: str | None) -> Any:
    """The library's client for the endpoint that the environment names; RemoteError."""
    from huggingface_hub import HfApi, constants

    if token is not None and not re.fullmatch(r"[!-~]+", token):  # said without saying it
        what = "is empty" if not token.strip() else "has characters that no token has"
        raise RemoteError(Problem("the token for the Hub", what))
    return HfApi(endpoint=constants.ENDPOINT, token=token, library_name="shardc")


def _commit(api: Any, location: HubLocation) -> str:
    def ask() -> str:
        with translated(location):
            return str(api.repo_info(location.repo, revision=location.revision).sha)

    return retried(ask, str(location), "asking for its commit")


def _listed(api: Any, location: HubLocation, commit: str) -> list[Any]:
    """The repo's own entries for the folder's files, or for the one file that is named."""
    from huggingface_hub.hf_api import RepoFile

    one_file = location.folder.endswith(".safetensors")
    folder = location.folder.rpartition("/")[0] if one_file else location.folder

    def ask() -> list[Any]:
        with translated(location):
            tree = api.list_repo_tree(
                location.repo, folder or None, recursive=not one_file, revision=commit
            )
            return [entry for entry in tree if isinstance(entry, RepoFile)]

    return retried(ask, str(location), "listing its files")


@contextmanager
def translated(location: HubLocation | str) -> Iterator[None]:
    """What huggingface-hub raises as Transient, or as a RemoteError that says what to do."""
    from huggingface_hub import errors

    try:
        yield
    except errors.OfflineModeIsEnabled as error:
        what = "cannot be asked for: HF_HUB_OFFLINE is set"
        raise RemoteError(Problem(str(location), what, "unset it")) from error
    except errors.GatedRepoError as error:
        what = "is gated: its owner must have granted you access"
        fix = "ask for it on the repo's page, then set HF_TOKEN or run `hf auth login`"
        raise RemoteError(Problem(str(location), what, fix)) from error
    except errors.RevisionNotFoundError as error:
        what = "has no such revision"
        if isinstance(location, HubLocation):
            what = f"has no revision {location.revision!r}"
        raise RemoteError(Problem(str(location), what)) from error
    except errors.RepositoryNotFoundError as error:
        what = "no such repo on the Hub, or it is private"
        fix = "check the name, or the path; for a private one set HF_TOKEN or run `hf auth login`"
        raise RemoteError(Problem(str(location), what, fix)) from error
    except errors.EntryNotFoundError as error:
        raise RemoteError(Problem(str(location), "is not in the repo")) from error
    except errors.HfHubHTTPError as error:
        status = error.response.status_code
        if status in TRANSIENT:
            after = _seconds(error.response.headers.get("Retry-After"))
            raise Transient(f"HTTP {status}", after) from error
        fix = "set HF_TOKEN to a token that may do this" if status in (401, 403) else ""
        what = error.server_message or f"the Hub answers {status}"
        raise RemoteError(Problem(str(location), f"HTTP {status}: {what}", fix)) from error
    except http_error() as error:
        raise Transient(f"{type(error).__name__}: {error}".rstrip(": ")) from error
    except (ShardcError, Transient, OSError):
        raise
    except Exception as error:
        if isinstance(error, RuntimeError) and "closed" in str(error):
            # by another thread of the library, for all that share the client
            raise Transient(str(error)) from error
        # A name that cannot be one, a proxy's page in the place of an answer, and the like.
        what = f"cannot be asked for: {type(error).__name__}: {' '.join(str(error).split())}"
        fix = "check the name, HF_ENDPOINT and what is set for proxies"
        raise RemoteError(Problem(str(location), what, fix)) from error


def http_error() -> type[Exception]:
    """What the HTTP library of huggingface-hub raises: which library that is, varies."""
    from huggingface_hub.errors import HfHubHTTPError

    base: type[Exception] = HfHubHTTPError.__bases__[0]
    return base


def _seconds(text: str | None) -> float | None:
    """From now, of a Retry-After: seconds, or a date."""
    if text is None or text.isdecimal():
        return float(text) if text else None
    try:
        return max(0.0, (parsedate_to_datetime(text) - datetime.now(UTC)).total_seconds())
    except (ValueError, TypeError):
        return None


class Repo(Remote):
    """A repo's files at one commit, by their names below the location's folder."""

    def __init__(self, api: Any, location: HubLocation, commit: str, entries: list[Any]) -> None:
        folder = location.folder
        if folder.endswith(".safetensors"):
            folder = folder.rpartition("/")[0]
        self._api = api
        self.location = location
        self.commit = commit
        self.where = str(location)
        self.pinned = str(HubLocation(location.repo, commit))
        prefix = f"{folder}/" if folder else ""
        self.files = {
            entry.path.removeprefix(prefix): HubFile(api, location.repo, commit, entry)
            for entry in entries
        }

    def changes(self, names: Iterable[str]) -> list[Problem]:
        del names  # a commit is of all
        now = _commit(self._api, self.location)
        if now == self.commit:
            return []
        revision = self.location.revision
        what = f"revision {revision} moved during the build: it was {self.commit}; now {now}"
        return [Problem(self.where, what, f"--revision {self.commit} --resume ends it as it was")]


class HubFile(RemoteFile):
    """One file of a commit. Its link is shared by the threads that read it."""

    def __init__(self, api: Any, repo: str, commit: str, entry: Any) -> None:
        from huggingface_hub import hf_hub_url

        etag = entry.lfs.sha256 if entry.lfs else entry.blob_id
        where = str(HubLocation(repo, folder=entry.path))
        super().__init__(where, entry.size, f"size {entry.size}, etag {etag}")
        self.path = entry.path
        self.etag: str = etag
        self._api, self._repo, self._commit = api, repo, commit
        self._url = hf_hub_url(repo, entry.path, revision=commit, endpoint=api.endpoint)
        self._lock = threading.Lock()
        self._link: str | None = None
        self._linked_etag: str | None = None

    def cached(self) -> Path | None:
        from huggingface_hub import try_to_load_from_cache

        try:
            found = try_to_load_from_cache(self._repo, self.path, revision=self._commit)
        except ValueError:  # a name that the library would not write to a disk
            return None
        path = Path(found) if isinstance(found, str) else None
        whole = path is not None and path.is_file() and path.stat().st_size == self.size_bytes
        return path if whole else None

    def matches(self, path: Path) -> bool | None:
        if path.stat().st_size != self.size_bytes:
            return False
        kind = "sha256" if len(self.etag) == 64 else "sha1"  # of the file, or of git's blob
        with path.open("rb") as file:
            state = hashlib.new(kind, usedforsecurity=False)
            if kind == "sha1":
                state.update(b"blob %d\0" % self.size_bytes)
            while chunk := file.read(HASHED_BYTES):
                state.update(chunk)
        return state.hexdigest() == self.etag

    def fetch(self, start: int, stop: int) -> Iterator[Buffer]:
        from huggingface_hub import get_session
        from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

        link = self._resolve()
        headers = {"Range": f"bytes={start}-{stop - 1}", "Accept-Encoding": "identity"}
        if urlsplit(link)[:2] == urlsplit(self._url)[:2]:  # a token is for the Hub alone
            headers = {**build_hf_headers(token=self._api.token, library_name="shardc"), **headers}
        with (
            translated(self.where),
            get_session().stream(
                "GET", link, headers=headers, timeout=READ_S, follow_redirects=True
            ) as answer,
        ):
            self._check(answer, start, stop, link)
            yield from answer.iter_raw()

    def _resolve(self) -> str:
        """Where the bytes are."""
        from huggingface_hub import get_hf_file_metadata

        with self._lock:
            if self._link is not None:
                return self._link
            with translated(self.where):
                found = get_hf_file_metadata(
                    self._url, token=self._api.token, endpoint=self._api.endpoint
                )
            has = f"size {found.size}, etag {found.etag}"
            if has != self.identity:
                raise self._moved(has)
            self._link, self._linked_etag = found.location, None
            return self._link

    def _check(self, answer: Any, start: int, stop: int, link: str) -> None:
        status = answer.status_code
        if status in TRANSIENT:
            raise Transient(f"HTTP {status}", _seconds(answer.headers.get("Retry-After")))
        if status in EXPIRED:
            with self._lock:
                if self._link == link:
                    self._link = None
            raise Transient(f"HTTP {status}: the link to its storage has expired, or is refused")
        ranges = answer.headers.get("Content-Range", "")
        given = _RANGE.fullmatch(ranges)
        if status == 416 or (status == 206 and (given is None or int(given[3]) != self.size_bytes)):
            raise self._moved(f"a range of {ranges or 'nothing'}")
        if given and (int(given[1]) != start or int(given[2]) >= stop):
            raise Transient(f"bytes {start} to {stop} were asked for, the answer is {ranges}")
        if (coding := answer.headers.get("Content-Encoding", "identity")) != "identity":
            raise Transient(f"the answer is encoded, as {coding}")
        if status != 206 and not (status == 200 and (start, stop) == (0, self.size_bytes)):
            raise RemoteError(Problem(self.where, f"HTTP {status} to a request for a range"))
        etag = answer.headers.get("ETag")
        with self._lock:
            if self._link == link and etag is not None:
                before = self._linked_etag = self._linked_etag or etag
                if etag != before:
                    raise self._moved(f"etag {etag} where it was {before}")

    def _moved(self, now: str) -> RemoteError:
        what = f"is another file than was listed: it was {self.identity}; now {now}"
        return RemoteError(Problem(self.where, what, "start again from a repo at rest"))
