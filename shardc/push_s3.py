"""A shard set to a prefix of a bucket, so that a reader finds a whole set there, or none.

S3 has no commit. What makes a reader take a prefix for a set is one object: model_index.json of a
pipeline, shardc.index.json of a bare component. It goes first and comes last: one request each
way. In between there is no set, so what replaces a set that is in use belongs in a new prefix.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from typing import Any

import shardc
from shardc import s3
from shardc.checkpoint import INDEX_NAME, MODEL_INDEX
from shardc.location import S3Location
from shardc.remote import retried
from shardc.shipment import Progress, PushReport, Shipment, ShippedFile, stale_files

# Stands while a push runs, or was interrupted: then what lies there may be replaced.
MARKER = ".shardc-push.json"
DIGEST = "shardc-digest"  # user metadata: what a rerun knows an equal object by
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

    def run(self, dry_run: bool) -> PushReport:
        there = self._listed()
        interrupted = there.pop(MARKER, None) is not None
        names = [file.name for file in self._shipment.files]
        stale = stale_files(there, names, self._where, interrupted=interrupted)
        same = self._same(there)
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
        if not report.up_to_date:
            self._publish(report, there)
        if interrupted or not report.up_to_date:
            self._delete([MARKER])
        return report

    def _publish(self, report: PushReport, there: Mapping[str, int]) -> None:
        marker = {"tool": f"shardc {shardc.__version__}", "about": "a push runs, or was cut off"}
        self._ask("beginning", lambda: self._put_bytes(MARKER, json.dumps(marker).encode()))
        for heads in reversed(_head_order(there)):
            self._delete(heads)
        by_name = {file.name: file for file in report.sent}
        order = _head_order(by_name)
        self._send([file for file in report.sent if not _is_head(file.name)])
        self._delete([name for name in report.deleted if not _is_head(name)])
        self._shipment.check()
        for heads in order:
            self._send([by_name[name] for name in heads])

    def _send(self, files: Iterable[ShippedFile]) -> None:
        pool = ThreadPoolExecutor(FILES_AT_ONCE, "shardc-push")
        try:
            for _ in pool.map(self._put, files):
                pass
        except BaseException:  # Ctrl-C waits for no upload
            self._stop.set()
            raise
        finally:
            pool.shutdown(cancel_futures=True)

    def _put(self, file: ShippedFile) -> None:
        import obstore

        size = max(CHUNK_BYTES, -(-file.size_bytes // MAX_CHUNKS))
        digest = file.digest()
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
        import obstore

        start = f"{self._location.prefix}/" if self._location.prefix else ""

        def ask() -> dict[str, int]:
            pages = obstore.list(self._store, self._location.prefix or None)
            return {
                entry["path"].removeprefix(start): entry["size"]
                for page in pages
                for entry in page
                if entry["path"].startswith(start)
            }

        found: dict[str, int] = self._ask("listing its objects", ask)
        return found

    def _same(self, there: Mapping[str, int]) -> set[str]:
        """The names of the files that are there already, by size and digest."""
        alike = [file for file in self._shipment.files if there.get(file.name) == file.size_bytes]
        with ThreadPoolExecutor(CHECKS_AT_ONCE, "shardc-compare") as pool:
            found = pool.map(lambda file: self._digest(file.name) == file.digest(), alike)
            same = {file.name for file, equal in zip(alike, found, strict=True) if equal}
        self._progress(sum(file.size_bytes for file in alike if file.name in same))
        return same

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

        return retried(once, self._where, what)

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
