"""Who may do what on the loopback Hub, refused in the Hub's words and codes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from tests.servers.messages import Call
from tests.servers.repos import Refused, Repo

if TYPE_CHECKING:
    from tests.servers.hub import Hub

Who = Literal["owner", "stranger", "nobody"]


def who(hub: Hub, call: Call) -> Who:
    """Whose token a request carries; Refused where it is nobody's and the Hub wants tokens."""
    given = call.headers.get("Authorization")
    if given is None:
        return "nobody"
    if given == f"Bearer {hub.token}":
        return "owner"
    if given == f"Bearer {hub.stranger}":
        return "stranger"
    if hub.open:
        return "nobody"
    raise Refused(401, "Invalid credentials in Authorization header")


def writer(hub: Hub, call: Call) -> None:
    """Refused where a request may not write."""
    someone = who(hub, call)
    if someone == "stranger":
        raise Refused(403, "You don't have the required permissions to write here")
    if someone == "nobody" and not hub.open:
        raise Refused(401, "Invalid username or password.")


def seen(hub: Hub, call: Call, name: str) -> Repo:
    """The repo, if the request may see it; else it is as if it did not exist."""
    someone = who(hub, call)
    repo = hub.repos.get(name)
    if repo is not None and (not repo.private or someone == "owner"):
        return repo
    if someone == "nobody":
        raise Refused(401, "Invalid username or password.", "RepoNotFound")
    raise Refused(404, "Repository not found", "RepoNotFound")


def readable(hub: Hub, call: Call, name: str) -> Repo:
    """The repo, if the request may download from it: gated ones want more than to be seen."""
    repo = seen(hub, call, name)
    if repo.gated and (someone := who(hub, call)) != "owner":
        if someone == "nobody":
            raise Refused(
                401,
                f"Access to model {name} is restricted. You must have access to it and be"
                " authenticated to access it. Please log in.",
                "GatedRepo",
            )
        raise Refused(
            403,
            f"Access to model {name} is restricted and you are not in the authorized list."
            f" Visit {hub.url}/{name} to ask for access.",
            "GatedRepo",
        )
    return repo


def writable(hub: Hub, call: Call, name: str) -> Repo:
    """The repo, if the request may write to it."""
    repo = seen(hub, call, name)
    writer(hub, call)
    return repo
