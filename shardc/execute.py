"""The only writer of shards: reads each source byte once, in order, and writes it in place."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import ml_dtypes
import numpy as np
import xxhash

from shardc.checkpoint import SourceFile
from shardc.fileio import Bytes, Output, Source
from shardc.planner import Move, OutFile
from shardc.remote import Stopped, finish, in_background
from shardc.schedule import Batch, Geometry, Part, chunk_bytes, geometry, schedule

GRACE_S = 1.0  # for answers that are on their way, before they are given up

log = logging.getLogger("shardc")

T = TypeVar("T")
Progress = Callable[[int], None]

NUMPY_DTYPES: dict[str, Any] = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
}


@dataclass(frozen=True, slots=True)
class Digests:
    """XXH3-128 of a tensor as a whole, in its output dtype, and of each target's part."""

    whole: str
    targets: tuple[str, ...]


Record = Callable[[Mapping[int, Digests]], None]


def execute(
    sources: Sequence[SourceFile],
    folder: Path,
    files: Sequence[OutFile],
    moves: Iterable[Move],
    *,
    workers: int,
    memory_bytes: int,
    fsync: bool,
    progress: Progress | None = None,
    held: Mapping[int, Digests] | None = None,
    record: Record | None = None,
) -> dict[int, Digests]:
    """Write `files` below `folder` by `moves`; the digests of each move, by its number.

    held: moves that an earlier build says are done; one whose bytes do not have those digests is
    done again. record: told, one call at a time, of moves whose bytes are written. Buffers take
    at most `memory_bytes`. Raises CheckpointError where a source cannot be read, OutputError
    where an output cannot be written.
    """
    limit = chunk_bytes(memory_bytes, workers, remote=any(s.remote for s in sources))
    numbered = dict(enumerate(moves))
    digests: dict[int, Digests] = {}
    with ExitStack() as stack:
        readers = [stack.enter_context(Source(source)) for source in sources]
        outputs = [Output(folder / file.name, file, durable=fsync) for file in files]
        writers = [stack.enter_context(output) for output in outputs]
        crew = stack.enter_context(_Crew(readers, writers, limit, workers))

        def settle(done: Mapping[int, Digests]) -> None:
            with crew.lock:
                digests.update(done)
                if progress is not None:
                    progress(sum(_source_bytes(numbered[number]) for number in done))

        def take_over(worker: _Worker, claim: tuple[int, Digests]) -> None:
            number, stated = claim
            if worker.holds(numbered[number], stated):
                settle({number: stated})

        def carry_out(worker: _Worker, batch: Batch) -> None:
            done = worker.run(batch)
            if record is not None:
                with crew.lock:
                    record(done)
            settle(done)

        crew.each(iter((held or {}).items()), take_over)
        rest = [item for item in numbered.items() if item[0] not in digests]
        crew.each(schedule(rest, limit), carry_out)
        if fsync:
            crew.each(iter(writers), lambda _, writer: writer.sync())
    return digests


def _source_bytes(move: Move) -> int:
    return sum(part.info.size_bytes for part in move.sources)


class _Crew:
    """Workers, each a thread with its buffers, that take jobs until none is left or one fails.

    None touches a file after the end; one that waits for a server is not waited for.
    """

    def __init__(
        self, readers: Sequence[Source], writers: Sequence[Output], limit_bytes: int, workers: int
    ) -> None:
        self.lock = threading.Lock()
        self._stop = threading.Event()
        self._running: list[Future[None]] = []
        self._workers = [_Worker(readers, writers, limit_bytes, self._stop) for _ in range(workers)]

    def __enter__(self) -> _Crew:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()  # Ctrl-C lands here: the workers stop after their chunk
        while True:
            try:
                wait(self._running, timeout=GRACE_S)
                for worker in self._workers:
                    with worker.at_work:
                        pass
                return
            except KeyboardInterrupt:
                continue  # once more: but no file may be closed under a worker

    def each(self, jobs: Iterator[T], action: Callable[[_Worker, T], None]) -> None:
        """Do `action` for each of `jobs`; raises what the first that failed did."""

        def work(worker: _Worker) -> None:
            try:
                with worker.at_work, suppress(Stopped):
                    while not self._stop.is_set():
                        with self.lock:
                            job = next(jobs, None)
                        if job is None:
                            return
                        action(worker, job)
            except BaseException:
                self._stop.set()
                raise

        self._running = [in_background(partial(work, worker)) for worker in self._workers]
        finish(self._running)


class _Digest:
    """A streaming digest of a target's bytes, for as long as they come in order."""

    def __init__(self) -> None:
        self._state = xxhash.xxh3_128()
        self._at = 0
        self._ordered = True

    def update(self, offset: int, data: Bytes) -> None:
        if self._ordered and offset == self._at:
            self._state.update(data.data)
            self._at += data.nbytes
        else:
            self._ordered = False

    def finish(self, size: int) -> str | None:
        """None where bytes came out of order or are padding: then the file itself is read."""
        return self._state.hexdigest() if self._ordered and self._at == size else None


class _Worker:
    """One thread's buffers, and the moving of one batch after another through them."""

    def __init__(
        self,
        readers: Sequence[Source],
        writers: Sequence[Output],
        limit_bytes: int,
        stop: threading.Event,
    ) -> None:
        self._readers = readers
        self._writers = writers
        self._limit = limit_bytes
        self._stop = stop
        self.at_work = threading.Lock()  # held, but while it waits for a server
        self._read = np.empty(limit_bytes, np.uint8)
        self._stage = np.empty(limit_bytes, np.uint8)
        self._cast = np.empty(limit_bytes, np.uint8)
        self._gather = np.empty(limit_bytes, np.uint8)

    def run(self, batch: Batch) -> dict[int, Digests]:
        held: Bytes | None = None
        first = 0
        if batch.run is not None:
            file, first, stop = batch.run
            held = self._read[: stop - first]
            self._bring(self._readers[file], first, held, batch.moves[0][1].name)
        done = {}
        for number, move in batch.moves:
            mine = None
            if held is not None:
                info = move.sources[0].info
                mine = held[info.start - first : info.stop - first]
            done[number] = self._move(move, mine)
        return done

    def holds(self, move: Move, stated: Digests) -> bool:
        """Whether the outputs have the digests that an earlier build states for this move."""
        return len(stated.targets) == len(move.targets) and all(
            self._read_digest(part.file, part.info.start, part.info.size_bytes) == digest
            for part, digest in zip(move.targets, stated.targets, strict=True)
        )

    def _move(self, move: Move, held: Bytes | None) -> Digests:
        shape = geometry(move)
        for target, stored in zip(shape.targets, move.targets, strict=True):
            if target.padded and not self._writers[target.file].fresh:
                self._clear(target, stored.info.size_bytes)
        whole = xxhash.xxh3_128()
        parts = [_Digest() for _ in shape.targets]
        overflowed = False
        for chunk in shape.chunks(self._limit):
            self._go_on()
            data = self._fill(move, shape, chunk, held)
            if move.dtype != move.out_dtype:
                data, over = cast(data, move.dtype, move.out_dtype, self._cast)
                overflowed |= over
            whole.update(data.data)
            for target, digest in zip(shape.targets, parts, strict=True):
                self._drain(shape, target, chunk, data, digest)
        if overflowed:
            log.warning(
                "%s: values too large for %s have become infinities; cast to bf16, or let its "
                "manifest keep it in fp32 (keep_in_fp32)",
                move.name,
                move.out_dtype,
            )
        digests = []
        for target, stored, digest in zip(shape.targets, move.targets, parts, strict=True):
            size = stored.info.size_bytes
            own = digest.finish(size) or self._read_digest(target.file, target.start, size)
            digests.append(own)
        return Digests(whole.hexdigest(), tuple(digests))

    def _go_on(self) -> None:
        if self._stop.is_set():
            raise Stopped

    def _bring(self, reader: Source, offset: int, into: Bytes, tensor: str) -> None:
        if not reader.is_remote:
            reader.read(offset, into, tensor)
            return
        self.at_work.release()
        try:
            reader.read(offset, into, tensor, self._stop)
        finally:
            self.at_work.acquire()
        self._go_on()  # if it was given up meanwhile, the files are closed

    def _clear(self, target: Part, size: int) -> None:
        """Zeros, which padding relies on, where an earlier build may have left anything."""
        for at in range(0, size, self._limit):
            piece = self._stage[: min(self._limit, size - at)]
            piece[:] = 0
            self._writers[target.file].write(target.start + at, piece)

    def _fill(
        self, move: Move, shape: Geometry, chunk: tuple[int, int, int, int], held: Bytes | None
    ) -> Bytes:
        """The chunk's bytes of the whole tensor, in its own order, as one flat array."""
        first, end, low, high = chunk
        width = shape.in_bytes
        start = (first * shape.row + low) * width
        size = (end - first) * (high - low) * width
        if held is not None:
            return held[start : start + size]
        data = self._read[:size]
        if len(shape.sources) == 1 and shape.sources[0].whole_row:
            source = shape.sources[0]
            self._bring(self._readers[source.file], source.start + start, data, move.name)
            return data
        for source in shape.sources:
            if not source.spans:
                continue
            reader = self._readers[source.file]
            if end - first == 1:
                base = source.start + first * source.row * width
                for a, b, at in _overlaps(source.spans, low, high):
                    into = data[(a - low) * width : (b - low) * width]
                    self._bring(reader, base + at * width, into, move.name)
                continue
            block = self._stage[: (end - first) * source.row * width]
            self._bring(reader, source.start + first * source.row * width, block, move.name)
            rows_in = block.reshape(end - first, -1)
            rows_out = data.reshape(end - first, -1)
            for a, b, at in source.spans:
                rows_out[:, a * width : b * width] = rows_in[:, at * width : (at + b - a) * width]
        return data

    def _drain(
        self,
        shape: Geometry,
        target: Part,
        chunk: tuple[int, int, int, int],
        data: Bytes,
        digest: _Digest,
    ) -> None:
        """Write the target's share of a chunk, in as few runs as its layout allows."""
        first, end, low, high = chunk
        width = shape.out_bytes
        writer = self._writers[target.file]
        if end - first == 1:
            base = first * target.row * width
            for a, b, at in _overlaps(target.spans, low, high):
                run = data[(a - low) * width : (b - low) * width]
                writer.write(target.start + base + at * width, run)
                digest.update(base + at * width, run)
            return
        if target.whole_row and target.row == shape.row:
            block = data
        else:
            block = self._gather[: (end - first) * target.row * width]
            rows_in = data.reshape(end - first, -1)
            rows_out = block.reshape(end - first, -1)
            if target.padded:
                block[:] = 0
            for a, b, at in target.spans:
                rows_out[:, at * width : (at + b - a) * width] = rows_in[:, a * width : b * width]
        if block.size:
            writer.write(target.start + first * target.row * width, block)
            digest.update(first * target.row * width, block)

    def _read_digest(self, file: int, start: int, size: int) -> str:
        state = xxhash.xxh3_128()
        for at in range(0, size, self._limit):
            self._go_on()
            # not the read buffer: it may hold the batch's next tensors
            piece = self._stage[: min(self._limit, size - at)]
            self._writers[file].read_back(start + at, piece)
            state.update(piece.data)
        return state.hexdigest()


def cast(data: Bytes, dtype: str, out_dtype: str, into: Bytes) -> tuple[Bytes, bool]:
    """`data` in another float dtype, at the start of `into`: to nearest even, by F32 from F64.

    And whether a finite value has become an infinity.
    """
    overflows: list[object] = []
    values = data.view(NUMPY_DTYPES[dtype])
    wanted = np.dtype(NUMPY_DTYPES[out_dtype])
    made = into[: values.size * wanted.itemsize].view(wanted)
    with np.errstate(over="call", invalid="ignore", call=lambda *_: overflows.append(None)):
        if dtype == "F64" and out_dtype != "F32":
            values = values.astype(np.float32)
        made[...] = values.astype(np.float32) if _needs_f32(dtype, out_dtype) else values
    flat: Bytes = made.view(np.uint8)
    return flat, bool(overflows)


def _needs_f32(dtype: str, out_dtype: str) -> bool:
    # ml_dtypes casts between bfloat16 and float16 only by way of float32
    return {dtype, out_dtype} == {"BF16", "F16"}


def _overlaps(
    spans: Sequence[tuple[int, int, int]], low: int, high: int
) -> Iterator[tuple[int, int, int]]:
    for start, stop, at in spans:
        a, b = max(start, low), min(stop, high)
        if a < b:
            yield a, b, at + a - start
