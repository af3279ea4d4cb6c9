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
from typing import TYPE_CHECKING, Any

from shardc.errors import Problem, RemoteError
from shardc.location import S3Location
from shardc.remote import Remote, RemoteFile, Transient, retried

if TYPE_CHECKING:
    from typing_extensions import Buffer

READ_S = 60  # for all of a range


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
    endpoint = os.environ.get("AWS_ENDPOINT_URL") or os.environ.get("AWS_ENDPOINT") or ""
    with translated(str(location)):
        return S3Store(
            location.bucket,
            client_options={
                "timeout": timedelta(seconds=READ_S),
                "connect_timeout": timedelta(seconds=10),
                "allow_http": endpoint.startswith("http://"),
            },
            retry_config={"max_retries": 0},  # ours are told, and know how far a range came
        )


def _listed(store: Any, location: S3Location) -> dict[str, Any]:
    """What is listed for each object, by its name below the prefix."""
    import obstore

    one = location.prefix.endswith(".safetensors")
    prefix = location.prefix.rpartition("/")[0] if one else location.prefix

    def ask() -> dict[str, Any]:
        with translated(str(location)):
            if one:
                listed = obstore.list_with_delimiter(store, prefix or None)["objects"]
            else:
                pages = obstore.list(store, prefix or None)
                listed = [entry for page in pages for entry in page]
        start = f"{prefix}/" if prefix else ""
        return {e["path"].removeprefix(start): e for e in listed}

    return retried(ask, str(location), "listing its objects")


@contextmanager
def translated(where: str) -> Iterator[None]:
    """What obstore raises as Transient, or as a RemoteError that says what to do."""
    from obstore import exceptions

    try:
        yield
    except (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError) as error:
        what = f"S3 refuses: {_brief(error)}"
        fix = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_SKIP_SIGNATURE for a public"
        raise RemoteError(Problem(where, what, f"{fix} bucket")) from error
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
        if re.search(r"status code: 4(?!08|29)\d\d", str(error)):
            raise RemoteError(Problem(where, _brief(error))) from error
        raise Transient(_brief(error)) from error
    except exceptions.BaseError as error:
        raise RemoteError(Problem(where, _brief(error))) from error


def _brief(error: Exception) -> str:
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

    def fetch(self, start: int, stop: int) -> Iterator[Buffer]:
        import obstore

        with translated(self.where):
            answer = obstore.get(
                self._store, self._path, options={"range": (start, stop), "if_match": self._etag}
            )
            if (now := _identity(answer.meta)) != self.identity:
                what = f"is another object than was listed: it was {self.identity}; now {now}"
                raise RemoteError(Problem(self.where, what, "start again from objects at rest"))
            yield from answer.stream(min_chunk_size=1 << 20)
