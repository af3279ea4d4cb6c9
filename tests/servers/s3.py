"""A loopback S3: moto in a process of its own, behind a proxy that counts and makes faults.

with S3() as s3:
    s3.create_bucket("shards")
    obstore.store.S3Store("shards", config=s3.environ)

The access key is checked, signatures are not. moto keeps everything in memory and is slow,
at ranges of large objects above all: use small ones. Objects outlive stop() and start().
"""

from __future__ import annotations

import http.client
import subprocess
import sys
import urllib.parse
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self
from xml.etree import ElementTree

from tests.servers.messages import Call, Reply
from tests.servers.web import Server

BACKEND = Path(__file__).with_name("s3_backend.py")
KEY = "loopback"
CREDENTIAL = f"AWS4-HMAC-SHA256 Credential={KEY}/"
SIGNED = {"Authorization": f"{CREDENTIAL}20260101/us-east-1/s3/aws4_request, Signature=0"}
BETWEEN_HOPS = ("connection", "host", "transfer-encoding", "content-length", "server", "date")
CODES = {403: "AccessDenied", 404: "NoSuchKey", 500: "InternalError", 503: "SlowDown"}
XML = "{http://s3.amazonaws.com/doc/2006-03-01/}"


class S3(Server):
    """The S3 server. Addresses are path-style: URL/bucket/key."""

    def __init__(self) -> None:
        super().__init__()
        self._backend: subprocess.Popen[str] | None = None
        self._backend_port = 0

    @property
    def environ(self) -> dict[str, str]:
        """What obstore and others need, in the environment or as its config."""
        return {
            "AWS_ENDPOINT_URL": self.url,
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": "loopback",
            "AWS_REGION": "us-east-1",
            "AWS_ALLOW_HTTP": "true",
        }

    def __enter__(self) -> Self:
        self._backend = subprocess.Popen(
            [sys.executable, str(BACKEND)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert self._backend.stdout is not None
        self._backend_port = int(self._backend.stdout.readline())
        return super().__enter__()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._backend is not None
        self._backend.kill()
        self._backend.communicate()
        super().__exit__(kind, error, trace)

    # Straight to the content, neither logged nor hit by faults.

    def create_bucket(self, name: str) -> None:
        """A new, empty bucket."""
        self._direct("PUT", f"/{name}")

    def put(self, bucket: str, key: str, data: bytes) -> None:
        """Write an object."""
        self._direct("PUT", f"/{bucket}/{urllib.parse.quote(key)}", data)

    def upload(self, bucket: str, prefix: str, folder: Path) -> None:
        """Write the files of a folder as objects below a prefix."""
        for path in sorted(path for path in folder.rglob("*") if path.is_file()):
            name = path.relative_to(folder).as_posix()
            self.put(bucket, f"{prefix.rstrip('/')}/{name}".lstrip("/"), path.read_bytes())

    def read(self, bucket: str, key: str) -> bytes:
        """An object's content."""
        body = self._direct("GET", f"/{bucket}/{urllib.parse.quote(key)}").body
        assert isinstance(body, bytes)
        return body

    def keys(self, bucket: str, prefix: str = "") -> list[str]:
        """The keys of a bucket's objects that start so, in order; 1000 at most."""
        query = urllib.parse.urlencode({"list-type": 2, "prefix": prefix})
        body = self._direct("GET", f"/{bucket}?{query}").body
        assert isinstance(body, bytes)
        tree = ElementTree.fromstring(body)
        return [key.text or "" for key in tree.iterfind(f"{XML}Contents/{XML}Key")]

    def delete(self, bucket: str, key: str) -> None:
        """Remove an object."""
        self._direct("DELETE", f"/{bucket}/{urllib.parse.quote(key)}")

    def _direct(self, method: str, target: str, body: bytes = b"") -> Reply:
        reply = self._forward(method, target, SIGNED, body)
        assert reply.status < 300, (method, target, reply)
        return reply

    # The proxy.

    def answer(self, call: Call) -> Reply:
        """What moto answers, to those with the right key."""
        body = call.body()
        if not call.headers.get("Authorization", "").startswith(CREDENTIAL):
            return self.failure(403, {})
        headers = {k: v for k, v in call.headers.items() if k.lower() not in BETWEEN_HOPS}
        return self._forward(call.method, call.target, headers, body)

    def failure(self, status: int, headers: Mapping[str, str]) -> Reply:
        """As S3 words it."""
        code = CODES.get(status, "InternalError")
        error = f"<Error><Code>{code}</Code><Message>injected {status}</Message></Error>"
        body = f'<?xml version="1.0" encoding="UTF-8"?>{error}'.encode()
        return Reply(status, {"Content-Type": "application/xml", **headers}, body)

    def _forward(self, method: str, target: str, headers: Mapping[str, str], body: bytes) -> Reply:
        """moto's answer; once more where it drops one, as its threads now and then do."""
        try:
            return self._ask(method, target, headers, body)
        except (http.client.IncompleteRead, ConnectionError):
            return self._ask(method, target, headers, body)

    def _ask(self, method: str, target: str, headers: Mapping[str, str], body: bytes) -> Reply:
        connection = http.client.HTTPConnection("127.0.0.1", self._backend_port, timeout=60)
        try:
            connection.request(method, target, body, dict(headers))
            response = connection.getresponse()
            announced = response.headers["Content-Length"]
            kept = {k: v for k, v in response.headers.items() if k.lower() not in BETWEEN_HOPS}
            found = response.read()
        finally:
            connection.close()
        return Reply(
            response.status, kept, found, int(announced) if method == "HEAD" and announced else None
        )
