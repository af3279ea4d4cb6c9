"""S3: the objects below a prefix of a bucket, each pinned by its ETag, read by ranges.

By obstore, which takes credentials and endpoint from the environment (AWS_ACCESS_KEY_ID,
AWS_REGION, AWS_ENDPOINT_URL, ...), a web identity, a container's or an instance's role.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

import xxhash

from shardc.errors import Problem, RemoteError
from shardc.location import S3Location
from shardc.remote import Remote, RemoteFile, Transient, interruptible, retried

if TYPE_CHECKING:
    import threading

    from typing_extensions import Buffer

HASHED_BYTES = 1 << 20  # of a file at once
READ_S = 60  # for all of a range
ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
DIGEST = "shardc-digest"  # of an object, as `shardc push` notes it: of a file that is no shard XXH3


def open_bucket(location: S3Location) -> Bucket:
    """The objects below a prefix as they are now; RemoteError where there are none."""
    store = open_store(location)
    found = _listed(store, location)
    if not found:
        raise RemoteError(Problem(str(location), "there is no object below this prefix"))
    return Bucket(store, location, found)


def open_store(location: S3Location) -> Any:
    """The bucket as obstore has it; RemoteError where obstore is missing or refuses."""
    try:
        from obstore.store import S3Store
    except ModuleNotFoundError as error:
        what = "S3 needs obstore"
        raise RemoteError(Problem(str(location), what, "pip install 'shardc[s3]'")) from error
    for name in ENDPOINTS:
        if not re.match(r"https?://[^/]", os.environ.get(name, "https://s3")):
            what = f"{os.environ[name]!r} is no http:// or https:// address"
            raise RemoteError(Problem(name, what, "correct or unset it"))
    plain = any(os.environ.get(name, "").startswith("http://") for name in ENDPOINTS)
    with translated(str(location)):
        return S3Store(
            location.bucket,
            client_options={
                "timeout": timedelta(seconds=READ_S),
                "connect_timeout": timedelta(seconds=10),
                "allow_http": plain,
            },
            retry_config={"max_retries": 0},  # ours are told, and know how far a range came
        )


def _listed(store: Any, location: S3Location) -> dict[str, Any]:
    one = location.prefix.endswith(".safetensors")
    prefix = location.prefix.rpartition("/")[0] if one else location.prefix
    return objects(store, prefix, str(location), below=not one)


def objects(store: Any, prefix: str, where: str, *, below: bool = True) -> dict[str, Any]:
    """What is listed for each object, by its name in the folder `prefix`, or `below` that.

    Not those that only stand for a folder: consoles make them, empty, with a slash at the end,
    which obstore leaves out, so that their keys are those of no object.
    """
    import obstore

    def ask() -> list[Any]:
        with translated(where):
            if not below:
                return list(obstore.list_with_delimiter(store, prefix or None)["objects"])
            return [entry for page in obstore.list(store, prefix or None) for entry in page]

    listed = retried(lambda: interruptible(ask), where, "listing its objects")
    start = f"{prefix}/" if prefix else ""
    found = {e["path"][len(start) :]: e for e in listed if e["path"].startswith(start)}
    folders = {str(folder) for name in found for folder in PurePosixPath(name).parents}
    return {
        name: e
        for name, e in found.items()
        if e["size"] or (name not in folders and _is_object(store, e["path"], where))
    }


def _is_object(store: Any, key: str, where: str) -> bool:
    import obstore

    def ask() -> bool:
        with translated(where):
            try:
                obstore.head(store, key)
            except FileNotFoundError:
                return False
            return True

    return retried(lambda: interruptible(ask), where, f"asking for {key}")


@contextmanager
def translated(where: str) -> Iterator[None]:
    """What obstore raises as Transient, or as a RemoteError that says what to do."""
    from obstore import exceptions

    try:
        yield
    except (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError) as error:
        raise _refused(where, error) from error
    except exceptions.PreconditionError as error:
        what = "is another object than was listed: its ETag is another now"
        raise RemoteError(Problem(where, what, "start again from objects at rest")) from error
    except FileNotFoundError as error:
        raise RemoteError(Problem(where, "there is no such bucket or object")) from error
    except exceptions.GenericError as error:
        if "credential" in str(error).lower():
            what = f"no credentials for S3: {_brief(error)}"
            fix = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
            raise RemoteError(Problem(where, what, fix)) from error
        if "<Code>NoSuchBucket" in str(error):
            raise RemoteError(Problem(where, "there is no such bucket")) from error
        if re.search(r"status code: 40[13]", str(error)):
            raise _refused(where, error) from error
        if re.search(r"status code: 4(?!08|29)\d\d", str(error)):
            raise RemoteError(Problem(where, _brief(error))) from error
        if "redirect without LOCATION" in str(error):
            what = f"the bucket is not in region {os.environ.get('AWS_REGION', 'us-east-1')}"
            raise RemoteError(Problem(where, what, "set AWS_REGION to its own")) from error
        raise Transient(_brief(error)) from error
    except exceptions.BaseError as error:
        raise RemoteError(Problem(where, _brief(error))) from error


def _refused(where: str, error: Exception) -> RemoteError:
    fix = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_SKIP_SIGNATURE for a public"
    return RemoteError(Problem(where, f"S3 refuses: {_brief(error)}", f"{fix} bucket"))


def _brief(error: Exception) -> str:
    """What S3 itself says, or else obstore."""
    said = re.search(r"<Code>(.*?)</Code>(?:.*?<Message>(.*?)</Message>)?", str(error), re.S)
    if said is not None:
        return ": ".join(filter(None, said.groups()))[:300]
    return str(error).strip().partition("\n")[0][:300]


class Bucket(Remote):
    """The objects of a bucket, by their names below the location's prefix."""

    pinned = None

    def __init__(self, store: Any, location: S3Location, listed: dict[str, Any]) -> None:
        self._store = store
        self.location = location
        self.where = str(location)
        self.files = {name: S3File(store, location.bucket, entry) for name, entry in listed.items()}

    def changes(self, names: Iterable[str]) -> list[Problem]:
        now = {name: _identity(e) for name, e in _listed(self._store, self.location).items()}
        return [
            Problem(
                file.where,
                f"changed during the build: it was {file.identity}; "
                f"now {now.get(name, 'it is gone')}",
                "build again from objects at rest",
            )
            for name, file in ((name, self.files[name]) for name in names)
            if now.get(name) != file.identity
        ]


def _identity(entry: Any) -> str:
    return f"size {entry['size']}, etag {entry['e_tag']}"


class S3File(RemoteFile):
    """One object. Each request says which ETag it must have."""

    def __init__(self, store: Any, bucket: str, entry: Any) -> None:
        super().__init__(f"s3://{bucket}/{entry['path']}", entry["size"], _identity(entry))
        self._store = store
        self._path = entry["path"]
        self._etag = entry["e_tag"]
        self._digest: str | None = None  # known once a range of it came

    def matches(self, path: Path) -> bool | None:
        if path.stat().st_size != self.size_bytes:
            return False
        if self._digest is None:
            return None
        with path.open("rb") as file:
            state = xxhash.xxh3_128()
            while chunk := file.read(HASHED_BYTES):
                state.update(chunk)
        return state.hexdigest() == self._digest

    def read(self, start: int, into: memoryview, stop: threading.Event | None = None) -> None:
        interruptible(lambda: super(S3File, self).read(start, into, stop))

    def fetch(self, start: int, stop: int) -> Iterator[Buffer]:
        import obstore

        with translated(self.where):
            answer = obstore.get(
                self._store, self._path, options={"range": (start, stop), "if_match": self._etag}
            )
            if (now := _identity(answer.meta)) != self.identity:
                what = f"is another object than was listed: it was {self.identity}; now {now}"
                raise RemoteError(Problem(self.where, what, "start again from objects at rest"))
            self._digest = answer.attributes.get(DIGEST)
            yield from answer.stream(min_chunk_size=1 << 20)
