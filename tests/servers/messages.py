"""Requests and answers, as the loopback servers see them."""

from __future__ import annotations

import json
import urllib.parse
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any, Self

CHUNK = 256 * 1024  # bytes


@dataclass(slots=True)
class Request:
    """A request in the log. `path` has its query; `status` is 0 where no answer was sent.

    bytes_sent: of the body. at: time.monotonic() of its arrival.
    """

    method: str
    path: str
    range: str | None
    status: int
    bytes_sent: int
    at: float
    host: str = ""
    authorization: str | None = None


@dataclass(frozen=True, slots=True)
class FilePart:
    """A body that lies in a file."""

    path: Path
    start: int
    length: int

    def __len__(self) -> int:
        return self.length

    def chunks(self) -> Iterator[bytes]:
        """The bytes, a chunk at a time."""
        with self.path.open("rb") as file:
            file.seek(self.start)
            left = self.length
            while left and (chunk := file.read(min(left, CHUNK))):
                left -= len(chunk)
                yield chunk


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer. `announced` is the Content-Length of an answer to HEAD whose body is not here."""

    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes | FilePart = b""
    announced: int | None = None

    @classmethod
    def json(cls, value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Self:
        """An answer in JSON."""
        kind = {"Content-Type": "application/json", **(headers or {})}
        return cls(status, kind, json.dumps(value).encode())


def _all(data: bytes, size: int = 1) -> bytes:
    if len(data) < size:
        raise ConnectionAbortedError("the client stopped sending")
    return data


class Call:
    """A request as an application sees it."""

    def __init__(self, handler: BaseHTTPRequestHandler) -> None:
        self._handler = handler
        self._read = False
        self.method = handler.command
        self.target = handler.path
        self.path, _, query = handler.path.partition("?")
        self.query = dict(urllib.parse.parse_qsl(query, keep_blank_values=True))
        self.headers = handler.headers

    def chunks(self) -> Iterator[bytes]:
        """The body of the request as it comes; ConnectionError where it stops early."""
        self._read = True
        file = self._handler.rfile
        if "chunked" in self.headers.get("Transfer-Encoding", ""):
            while size := int(_all(file.readline()).split(b";")[0], 16):
                yield _all(file.read(size), size)
                file.readline()
            file.readline()
            return
        left = int(self.headers.get("Content-Length") or 0)
        while left:
            chunk = _all(file.read(min(left, CHUNK)))
            left -= len(chunk)
            yield chunk

    def body(self) -> bytes:
        """The whole body."""
        return b"".join(self.chunks())

    def json(self) -> Any:
        """The body, parsed."""
        return json.loads(self.body() or b"{}")

    def drain(self) -> None:
        """Take what was not read, so that the connection can go on."""
        if not self._read:
            for _ in self.chunks():
                pass
