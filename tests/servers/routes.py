"""Which function of the loopback Hub takes which request."""

from __future__ import annotations

from collections.abc import Callable

from tests.servers.messages import Reply

Route = Callable[..., Reply]  # (hub, call, the groups of the pattern by name)
REPO = r"/api/models/(?P<name>[^/]+/[^/]+)"
REVISION = r"(?P<revision>[^/]+)"
SHA = r"(?P<sha256>[0-9a-f]{64})"
ROUTES: list[tuple[str, str, Route]] = []


def route(method: str, pattern: str) -> Callable[[Route], Route]:
    """Take requests whose whole path matches; the groups are arguments, unquoted, "" for none."""

    def add(function: Route) -> Route:
        ROUTES.append((method, pattern, function))
        return function

    return add
