"""Pages of a mapped file: asked for before they are needed, given back when they are copied."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from types import TracebackType

# The most of a mapping that is resident at once: a larger tensor is copied in such slices.
SLICE_BYTES = 32 << 20
# Of a piece of advice: of a larger, Linux reads no more than its read-ahead, or a disk request.
ADVICE_BYTES = 128 << 10
AHEAD_BYTES = 128 << 20  # of the page cache, not of the process: what is read before it is needed


@dataclass(frozen=True, slots=True)
class Span:
    """The bytes of a mapped file that hold one tensor."""

    memory: mmap.mmap = field(repr=False)
    start: int
    stop: int

    @property
    def size_bytes(self) -> int:
        return self.stop - self.start

    def read_ahead(self, first: int, last: int) -> None:
        """Have the kernel fetch these bytes of the tensor into its page cache, without waiting."""
        for at in range(first, last, ADVICE_BYTES):
            self._advise("MADV_WILLNEED", at, min(at + ADVICE_BYTES, last))

    def drop(self, first: int, last: int) -> None:
        """Give the pages of these bytes back; a neighbour's bytes on them are read again."""
        self._advise("MADV_DONTNEED", first, last)

    def _advise(self, advice: str, first: int, last: int) -> None:
        option = getattr(mmap, advice, None)
        if option is None or last <= first:  # no such advice on this system
            return
        start = (self.start + first) // mmap.PAGESIZE * mmap.PAGESIZE
        self.memory.madvise(option, start, self.start + last - start)


class ReadAhead:
    """A thread that asks for spans in order, at most AHEAD_BYTES before the one in use."""

    def __init__(self, spans: Iterable[Span | None], window_bytes: int = AHEAD_BYTES) -> None:
        self._slices = [
            (span, first, min(first + SLICE_BYTES, span.size_bytes))
            for span in spans
            if span is not None
            for first in range(0, span.size_bytes, SLICE_BYTES)
        ]
        self._room = window_bytes
        self._closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="shardc-read-ahead", daemon=True)

    def used(self, size_bytes: int) -> None:
        """So many bytes more are on the device."""
        with self._changed:
            self._room += size_bytes
            self._changed.notify()

    def _run(self) -> None:
        for span, first, last in self._slices:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._room > 0)
                if self._closed:
                    return
                self._room -= last - first
            span.read_ahead(first, last)

    def __enter__(self) -> ReadAhead:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()
