"""The only writer of shards: reads each source byte once, in order, and writes it in place."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import xxhash

from shardc.checkpoint import SourceFile
from shardc.fileio import Bytes, Output, Source
from shardc.planner import Move, OutFile
from shardc.schedule import Batch, Geometry, Part, chunk_bytes, geometry, schedule

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


def default_workers() -> int:
    """Two threads keep a disk busy while a third computes; more only contend."""
    return min(3, max(2, (os.cpu_count() or 1)))


def execute(
    sources: Sequence[SourceFile],
    folder: Path,
    files: Sequence[OutFile],
    moves: Iterator[Move],
    *,
    workers: int,
    memory_bytes: int,
    fsync: bool,
    progress: Progress | None = None,
) -> dict[int, Digests]:
    """Write `files` below `folder` by `moves`; the digests of each move, by its number.

    Buffers take at most `memory_bytes`. Raises CheckpointError where a source cannot be read or
    has changed since its header was, OutputError where an output cannot be written.
    """
    limit = chunk_bytes(memory_bytes, workers)
    digests: dict[int, Digests] = {}
    with ExitStack() as stack:
        readers = [stack.enter_context(Source(source)) for source in sources]
        writers = [stack.enter_context(Output(folder / file.name, file)) for file in files]
        batches = schedule(moves, limit)
        lock = threading.Lock()
        failed = threading.Event()

        def work() -> None:
            worker = _Worker(readers, writers, limit)
            while not failed.is_set():
                with lock:
                    batch = next(batches, None)
                if batch is None:
                    return
                try:
                    done = worker.run(batch)
                except BaseException:
                    failed.set()
                    raise
                with lock:
                    digests.update(done)
                    if progress is not None:
                        progress(_batch_bytes(batch))

        with ThreadPoolExecutor(workers) as pool:
            try:
                for future in [pool.submit(work) for _ in range(workers)]:
                    future.result()
            except BaseException:
                failed.set()  # Ctrl-C lands here: the other workers stop after their batch
                raise
            if fsync:
                list(pool.map(Output.sync, writers))
        for reader in readers:
            reader.check_unchanged()
    return digests


def _batch_bytes(batch: Batch) -> int:
    return sum(part.info.size_bytes for _, move in batch.moves for part in move.sources)


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
        self, readers: Sequence[Source], writers: Sequence[Output], limit_bytes: int
    ) -> None:
        self._readers = readers
        self._writers = writers
        self._limit = limit_bytes
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
            self._readers[file].read(first, held, batch.moves[0][1].name)
        done = {}
        for number, move in batch.moves:
            mine = None
            if held is not None:
                info = move.sources[0].info
                mine = held[info.start - first : info.stop - first]
            done[number] = self._move(move, mine)
        return done

    def _move(self, move: Move, held: Bytes | None) -> Digests:
        shape = geometry(move)
        whole = xxhash.xxh3_128()
        parts = [_Digest() for _ in shape.targets]
        for chunk in shape.chunks(self._limit):
            data = self._fill(move, shape, chunk, held)
            if move.dtype != move.out_dtype:
                data = self._cast_to(data, move.dtype, move.out_dtype)
            whole.update(data.data)
            for target, digest in zip(shape.targets, parts, strict=True):
                self._drain(shape, target, chunk, data, digest)
        digests = []
        for target, stored, digest in zip(shape.targets, move.targets, parts, strict=True):
            size = stored.info.size_bytes
            digests.append(digest.finish(size) or self._read_digest(target, size))
        return Digests(whole.hexdigest(), tuple(digests))

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
            self._readers[source.file].read(source.start + start, data, move.name)
            return data
        for source in shape.sources:
            if not source.spans:
                continue
            reader = self._readers[source.file]
            if end - first == 1:
                base = source.start + first * source.row * width
                for a, b, at in _overlaps(source.spans, low, high):
                    into = data[(a - low) * width : (b - low) * width]
                    reader.read(base + at * width, into, move.name)
                continue
            block = self._stage[: (end - first) * source.row * width]
            reader.read(source.start + first * source.row * width, block, move.name)
            rows_in = block.reshape(end - first, -1)
            rows_out = data.reshape(end - first, -1)
            for a, b, at in source.spans:
                rows_out[:, a * width : b * width] = rows_in[:, at * width : (at + b - a) * width]
        return data

    def _cast_to(self, data: Bytes, dtype: str, out_dtype: str) -> Bytes:
        """Round to nearest even; infinities and NaN stay. F64 goes by way of F32, as in torch."""
        values = data.view(NUMPY_DTYPES[dtype])
        wanted = np.dtype(NUMPY_DTYPES[out_dtype])
        into = self._cast[: values.size * wanted.itemsize].view(wanted)
        with np.errstate(over="ignore", invalid="ignore"):
            if dtype == "F64" and out_dtype != "F32":
                values = values.astype(np.float32)
            into[...] = values.astype(np.float32) if _needs_f32(dtype, out_dtype) else values
        flat: Bytes = into.view(np.uint8)
        return flat

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
            if sum(b - a for a, b, _ in target.spans) != target.row:
                block[:] = 0  # the rest is padding
            for a, b, at in target.spans:
                rows_out[:, at * width : (at + b - a) * width] = rows_in[:, a * width : b * width]
        if block.size:
            writer.write(target.start + first * target.row * width, block)
            digest.update(first * target.row * width, block)

    def _read_digest(self, target: Part, size: int) -> str:
        state = xxhash.xxh3_128()
        for at in range(0, size, self._limit):
            # not the read buffer: it may hold the batch's next tensors
            piece = self._stage[: min(self._limit, size - at)]
            self._writers[target.file].read_back(target.start + at, piece)
            state.update(piece.data)
        return state.hexdigest()


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
