"""What the loopback servers share: a log of requests, faults, going away and coming back."""

from __future__ import annotations

import re
import socket
import struct
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self

from tests.servers.delivery import deliver
from tests.servers.faults import Faults
from tests.servers.messages import Call, Reply, Request


class _Listener(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128
    allow_reuse_address = True

    def __init__(self, address: tuple[str, int], server: Server) -> None:
        self.server = server
        self.open: set[socket.socket] = set()
        super().__init__(address, _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        self.open.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        # No shutdown() before close(): that would turn a reset into an orderly end.
        self.open.discard(request)
        request.close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients that go away are no errors; anything else is one of this server."""
        error = sys.exception()
        if isinstance(error, Exception) and not isinstance(error, OSError):
            self.server.errors.append(error)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: _Listener

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing on stderr."""

    def serve(self) -> None:
        """Answer one request."""
        server = self.server.server
        record = Request(
            method=self.command,
            path=self.path,
            range=self.headers.get("Range"),
            status=0,
            bytes_sent=0,
            at=time.monotonic(),
            host=self.headers.get("Host", ""),
            authorization=self.headers.get("Authorization"),
        )
        server.arrived(record)
        fault = server.faults.draw(record.method, record.path, record.range)
        if fault is not None and fault.kind == "reset":
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.close_connection = True
            return
        server.stopping.wait(server.latency)
        call = Call(self)
        if fault is not None and fault.kind == "status":
            after = fault.retry_after
            headers = {} if after is None else {"Retry-After": str(after)}
            reply = server.failure(fault.status, headers)
        else:
            try:
                reply = server.answer(call)
            except ConnectionError:  # the client left
                self.close_connection = True
                return
            except Exception as error:
                server.errors.append(error)
                reply = Reply(500, {}, traceback.format_exc().encode())
        call.drain()
        deliver(self, reply, fault, record, server.stopping)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = serve


class Server:
    """An HTTP server on 127.0.0.1. `with` starts and stops it; stop() and start() keep the port."""

    def __init__(self) -> None:
        self.log: list[Request] = []
        self.faults = Faults()
        self.latency = 0.0  # seconds before each answer
        self.errors: list[Exception] = []  # of the server itself; raised at the end of `with`
        self.stopping = threading.Event()
        self._arrival = threading.Condition()
        self._listener: _Listener | None = None
        # Bound for as long as this lives, so that nobody else gets the port while stopped.
        self._keeper = socket.socket()
        self._keeper.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._keeper.bind(("127.0.0.1", 0))
        self.port: int = self._keeper.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"

    def answer(self, call: Call) -> Reply:
        """What the application answers."""
        raise NotImplementedError

    def failure(self, status: int, headers: Mapping[str, str]) -> Reply:
        """How this kind of server words a failure of its own."""
        raise NotImplementedError

    def start(self) -> None:
        """Listen, on the port that this server always had."""
        self.stopping = threading.Event()
        self._listener = _Listener(("127.0.0.1", self.port), self)
        threading.Thread(target=self._listener.serve_forever, args=(0.02,), daemon=True).start()

    def stop(self) -> None:
        """Be gone: connections are refused, and the open ones end."""
        listener, self._listener = self._listener, None
        if listener is None:
            return
        self.stopping.set()
        listener.shutdown()
        listener.server_close()
        for connection in list(listener.open):
            try:
                connection.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue  # it ended by itself

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()
        self._keeper.close()
        if error is None and self.errors:
            raise self.errors[0]

    def arrived(self, request: Request) -> None:
        """Put a request into the log."""
        with self._arrival:
            self.log.append(request)
            self._arrival.notify_all()

    def requests(self, path: str = "", method: str = ".*") -> list[Request]:
        """The requests so far whose method is and whose path has such a thing in it."""
        return [
            request
            for request in list(self.log)
            if re.fullmatch(method, request.method) and re.search(path, request.path)
        ]

    def bytes_sent(self, pattern: str = "") -> int:
        """Bytes of bodies sent for the paths that have the pattern in them."""
        return sum(request.bytes_sent for request in self.requests(pattern))

    def wait_for(
        self, path: str = "", method: str = ".*", count: int = 1, seconds: float = 30
    ) -> None:
        """Return once so many such requests have arrived; TimeoutError after so many seconds."""
        with self._arrival:
            if not self._arrival.wait_for(
                lambda: len(self.requests(path, method)) >= count, timeout=seconds
            ):
                raise TimeoutError(f"no {count} requests {method} {path} in {seconds} s")
