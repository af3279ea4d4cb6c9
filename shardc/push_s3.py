"""A shard set to a prefix of a bucket, so that a reader finds a whole set there, or none.

S3 has no commit. What makes a reader take a prefix for a set is one object: model_index.json of a
pipeline, shardc.index.json of a bare component. It goes first and comes last: one request each
way. In between there is no set, so what replaces a set that is in use belongs in a new prefix.
Of two pushes at once the later one wins: the other finds that the marker is not its own, and ends.
"""

from __future__ import annotations

import json
import threading
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any

import shardc
from shardc import s3
from shardc.checkpoint import INDEX_NAME, MODEL_INDEX
from shardc.errors import Problem, RemoteError, ShardcError
from shardc.location import S3Location
from shardc.remote import interruptible, retried, spread
from shardc.s3 import DIGEST
from shardc.shipment import Progress, PushReport, Shipment, ShippedFile, stale_files

# Stands while a push runs, or was interrupted: then what lies there may be replaced.
MARKER = ".shardc-push.json"
CHUNK_BYTES = 8 << 20
MAX_CHUNKS = 10_000  # S3 takes no more parts of an object
FILES_AT_ONCE = 4
CHUNKS_AT_ONCE = 2  # of a file; all of them together take some 130 MiB
CHECKS_AT_ONCE = 16
PUT_S = 600  # for a chunk


def push(
    shipment: Shipment, location: S3Location, progress: Progress, *, dry_run: bool
) -> PushReport:
    """Send what the prefix lacks, and delete what an earlier set left there.

    progress: told bytes of files as each is found there already, or is sent. Raises RemoteError,
    and VerifyError where a file changed since it was verified.
    """
    started = time.monotonic()
    report = _Push(shipment, location, progress).run(dry_run)
    return replace(report, seconds=time.monotonic() - started)


class _Push:
    def __init__(self, shipment: Shipment, location: S3Location, progress: Progress) -> None:
        self._shipment = shipment
        self._location = location
        self._progress = progress
        self._where = str(location)
        self._store = s3.open_store(location)
        self._sends = _persistent(self._store)
        self._stop = threading.Event()
        self._digests: dict[str, str] = {}
        about = "a push runs, or was cut off"
        marker = {"tool": f"shardc {shardc.__version__}", "about": about, "push": uuid.uuid4().hex}
        self._marker = json.dumps(marker).encode()

    def run(self, dry_run: bool) -> PushReport:
        there = self._listed()
        interrupted = there.pop(MARKER, None) is not None
        names = [file.name for file in self._shipment.files]
        stale = stale_files(there, names, self._where, interrupted=interrupted)
        same = self._same(there, self._shipment.files)
        self._progress(sum(f.size_bytes for f in self._shipment.files if f.name in same))
        missing = [file for file in self._shipment.files if file.name not in same]
        if missing or stale:
            # The heads go away for the time of the push, so they have to come again.
            missing = [f for f in self._shipment.files if f.name not in same or _is_head(f.name)]
        report = PushReport(
            target=self._where,
            tp=self._shipment.tp,
            rank_bytes=self._shipment.rank_bytes,
            parts=self._shipment.parts,
            sent=missing,
            unchanged=[file for file in self._shipment.files if file not in missing],
            deleted=stale,
            created=not there,
            dry_run=dry_run,
        )
        if dry_run:
            return report
        if interrupted or not report.up_to_date:
            self._ask("beginning", lambda: self._put_bytes(MARKER, self._marker))
        if not report.up_to_date:
            with self._told():
                self._publish(report)
        if interrupted or not report.up_to_date:
            self._check_alone()
            self._delete([MARKER])
        return report

    @contextmanager
    def _told(self) -> Iterator[None]:
        """Errors and interrupts say what readers find now."""
        hint = f"until a push ends there is no set at {self._where}"
        try:
            yield
        except KeyboardInterrupt as error:
            error.args = (hint,)
            raise
        except ShardcError as error:
            *others, last = error.problems
            fix = "; ".join(filter(None, (last.fix, hint)))
            raise type(error)([*others, replace(last, fix=fix)]) from error

    def _publish(self, report: PushReport) -> None:
        there = self._listed()
        for heads in reversed(_head_order(there)):
            self._check_alone()
            self._delete(heads)
        by_name = {file.name: file for file in report.sent}
        self._send([file for file in report.sent if not _is_head(file.name)])
        self._check_alone()
        self._delete([name for name in report.deleted if not _is_head(name)])
        self._shipment.check()
        self._check_arrived()
        for heads in _head_order(by_name):
            self._send([by_name[name] for name in heads])

    def _send(self, files: Iterable[ShippedFile]) -> None:
        spread(self._put, files, FILES_AT_ONCE, self._stop)
        self._stop.clear()

    def _check_alone(self) -> None:
        """RemoteError where another push to this place has begun since this one did."""
        import obstore

        def ask() -> bytes:
            try:
                return bytes(obstore.get(self._store, self._key(MARKER)).bytes())
            except FileNotFoundError:
                return b""

        if self._ask("asking whether it is alone", ask) != self._marker:
            raise self._overtaken()

    def _check_arrived(self) -> None:
        """RemoteError where a file is another than was sent: a push before this still sent it."""
        sent = [file for file in self._shipment.files if not _is_head(file.name)]
        there = self._listed()
        if there.keys() - {MARKER} != self._same(there, sent):
            raise self._overtaken()

    def _overtaken(self) -> RemoteError:
        what = "another push to it runs, or ran meanwhile"
        return RemoteError(Problem(self._where, what, "wait for that one, then push again"))

    def _put(self, file: ShippedFile) -> None:
        import obstore

        size = max(CHUNK_BYTES, -(-file.size_bytes // MAX_CHUNKS))
        digest = self._own_digest(file)
        sent = 0

        def once() -> None:
            nonlocal sent
            self._progress(-sent)  # of an attempt that failed
            sent = 0

            def chunks() -> Iterator[bytes]:
                nonlocal sent
                with file.path.open("rb", buffering=0) as opened:
                    while chunk := opened.read(size):
                        if self._stop.is_set():
                            raise InterruptedError
                        yield chunk
                        sent += len(chunk)
                        self._progress(len(chunk))

            self._check_alone()
            with s3.translated(self._where):
                obstore.put(
                    self._sends,
                    self._key(file.name),
                    chunks() if file.size_bytes > size else file.path.read_bytes(),
                    attributes={DIGEST: digest},
                    use_multipart=file.size_bytes > size,
                    chunk_size=size,
                    max_concurrency=CHUNKS_AT_ONCE,
                )
            self._progress(file.size_bytes - sent)
            sent = file.size_bytes

        retried(once, self._where, f"sending {file.name}")

    def _put_bytes(self, name: str, data: bytes) -> None:
        import obstore

        obstore.put(self._store, self._key(name), data)

    def _delete(self, names: list[str]) -> None:
        import obstore

        if names:
            keys = [self._key(name) for name in names]
            self._ask("deleting what was there", lambda: obstore.delete(self._store, keys))

    def _listed(self) -> dict[str, int]:
        """The size of each object below the prefix, by its name there."""
        listed = s3.objects(self._store, self._location.prefix, self._where)
        return {name: entry["size"] for name, entry in listed.items()}

    def _own_digest(self, file: ShippedFile) -> str:
        if file.name not in self._digests:
            self._digests[file.name] = file.digest()
        return self._digests[file.name]

    def _same(self, there: Mapping[str, int], files: Iterable[ShippedFile]) -> set[str]:
        """The names of those files that are there already, by size and digest."""
        alike = [file for file in files if there.get(file.name) == file.size_bytes]
        found = spread(
            lambda file: self._digest(file.name) == self._own_digest(file), alike, CHECKS_AT_ONCE
        )
        return {file.name for file, equal in zip(alike, found, strict=True) if equal}

    def _digest(self, name: str) -> str | None:
        import obstore

        def ask() -> str | None:
            return obstore.get(self._store, self._key(name), options={"head": True}).attributes.get(
                DIGEST
            )

        found: str | None = self._ask(f"asking for {name}", ask)
        return found

    def _ask(self, what: str, action: Any) -> Any:
        def once() -> Any:
            with s3.translated(self._where):
                return action()

        return retried(lambda: interruptible(once), self._where, what)

    def _key(self, name: str) -> str:
        return f"{self._location.prefix}/{name}" if self._location.prefix else name


def _persistent(store: Any) -> Any:
    """The bucket, where a chunk that fails is sent again by itself and not with its whole file."""
    return type(store)(
        config=store.config,
        client_options={**store.client_options, "timeout": timedelta(seconds=PUT_S)},
        retry_config={
            "max_retries": 4,
            "backoff": {
                "init_backoff": timedelta(seconds=0.1),
                "max_backoff": timedelta(seconds=1),
                "base": 2,
            },
            "retry_timeout": timedelta(seconds=PUT_S),
        },
    )


def _is_head(name: str) -> bool:
    return name == MODEL_INDEX or name.rpartition("/")[2] == INDEX_NAME


def _head_order(names: Iterable[str]) -> list[list[str]]:
    """The objects by which readers know a set, in the order in which they come: the switch last.

    A reader of a pipeline begins with model_index.json, and takes a component without an index
    for one that is kept whole.
    """
    heads = [name for name in names if _is_head(name)]
    root = [name for name in heads if name in (INDEX_NAME, MODEL_INDEX)]
    return [[name for name in heads if name not in root], sorted(root, reverse=True)]
