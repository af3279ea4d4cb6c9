"""How an answer goes out, and what a fault does to it on the way."""

from __future__ import annotations

import hashlib
import re
import select
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler

from tests.servers.faults import Fault
from tests.servers.messages import FilePart, Reply, Request

BODILESS = (204, 304)
PIECE = 64 * 1024  # bytes sent at once
PACES = 20  # pieces a second when slow


def deliver(
    handler: BaseHTTPRequestHandler,
    reply: Reply,
    fault: Fault | None,
    record: Request,
    stopping: threading.Event,
) -> None:
    """Send an answer. It is recorded before it is sent, so that the log never lags behind."""
    has_body = handler.command != "HEAD" and reply.status not in BODILESS
    if fault and fault.kind == "etag":
        reply = _other_etag(reply)
    if fault and fault.kind == "truncate" and has_body:
        reply = _shortened(reply, fault.part)
    body = reply.body if has_body else b""
    ends = fault is not None and fault.kind in ("cut", "stall")
    if body or not ends:
        record.status = reply.status
        handler.send_response(reply.status)
        for name, value in reply.headers.items():
            handler.send_header(name, value)
        if reply.status not in BODILESS:
            size = len(reply.body) if reply.announced is None else reply.announced
            handler.send_header("Content-Length", str(size))
        handler.end_headers()
    limit = int(len(body) * fault.part) if fault and ends else len(body)
    rate = fault.rate if fault and fault.kind == "slow" else None
    for piece in _pieces(body, limit, rate, stopping):
        record.bytes_sent += len(piece)
        handler.wfile.write(piece)
    if ends or record.bytes_sent < limit:  # or the server stops
        handler.close_connection = True
    if fault and fault.kind == "stall":
        _hang(handler, stopping)


def _pieces(
    body: bytes | FilePart, limit: int, rate: float | None, stopping: threading.Event
) -> Iterator[bytes]:
    """The first `limit` bytes of a body, at `rate` bytes/s; it ends early when the server stops."""
    size = PIECE if rate is None else max(1, int(rate / PACES))
    start = time.monotonic()
    sent = 0
    for chunk in [body] if isinstance(body, bytes) else body.chunks():
        view = memoryview(chunk)[: limit - sent]
        for at in range(0, len(view), size):
            piece = bytes(view[at : at + size])
            sent += len(piece)
            if rate is not None:
                stopping.wait(max(0.0, start + sent / rate - time.monotonic()))
            if stopping.is_set():
                return
            yield piece
        if sent == limit:
            return


def _hang(handler: BaseHTTPRequestHandler, stopping: threading.Event) -> None:
    """Wait until the client or the server goes away."""
    while not stopping.is_set():
        # A client that waits for an answer sends nothing: what comes is the connection's end.
        readable, _, _ = select.select([handler.connection], [], [], 0.05)
        if readable:
            return


def _other_etag(reply: Reply) -> Reply:
    """The same answer with another ETag."""
    headers = dict(reply.headers)
    for name, value in reply.headers.items():
        if name.lower() in ("etag", "x-linked-etag"):
            headers[name] = f'"{hashlib.md5(value.encode()).hexdigest()}"'
    return replace(reply, headers=headers)


def _shortened(reply: Reply, part: float) -> Reply:
    """A well-formed answer with only the first part of the body."""
    body, length = reply.body, int(len(reply.body) * part)

    def short(match: re.Match[str]) -> str:
        return f"{match[1]}-{int(match[1]) + length - 1}"

    headers = {
        name: re.sub(r"(\d+)-\d+", short, value) if name.lower() == "content-range" else value
        for name, value in reply.headers.items()
    }
    if isinstance(body, FilePart):
        return replace(reply, headers=headers, body=replace(body, length=length))
    return replace(reply, headers=headers, body=body[:length])
