"""Where a shard set lies in a Hub repo or below an S3 prefix: there itself, or in a folder tpN."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import replace
from typing import TypeVar

from shardc.checkpoint import INDEX_NAME, MODEL_INDEX
from shardc.errors import Problem, RemoteError, ShardSetError
from shardc.location import HubLocation, Location
from shardc.mirror import open_remote, visible
from shardc.remote import Below, Remote, Transient

LocationT = TypeVar("LocationT", bound=Location)
_DEGREE = re.compile(r"tp([1-9]\d*)")


def find_set(
    location: Location, *, tp: int | None = None, token: str | None = None
) -> tuple[Remote, Location]:
    """The set's own folder of a remote one, and its address; RemoteError, ShardSetError."""
    try:
        remote = open_remote(location, token=token)
    except RemoteError as error:
        if not isinstance(error.__cause__, Transient):
            raise
        fix = "try again once it can be reached"
        if isinstance(location, HubLocation):
            fix += "; HF_HUB_OFFLINE=1 uses what the cache has"
        raise RemoteError(replace(p, fix=fix) for p in error.problems) from error
    folder = choose_folder([name for name, _ in visible(remote)], tp, str(location))
    return Below(remote, folder) if folder else remote, inside(location, folder)


def inside(location: LocationT, folder: str) -> LocationT:
    """The address of a folder below a location."""
    if isinstance(location, HubLocation):
        return replace(location, folder=f"{location.folder}/{folder}".strip("/"))
    return replace(location, prefix=f"{location.prefix}/{folder}".strip("/"))


def choose_folder(names: Collection[str], tp: int | None, where: str) -> str:
    """Where the set lies among files of these names: "" or `tpN`; ShardSetError."""
    degrees = degrees_in(names)
    if tp in degrees:
        return f"tp{tp}"
    if _is_set(name for name in names if not _DEGREE.fullmatch(name.partition("/")[0])):
        return ""
    if tp is None and len(degrees) == 1:
        return f"tp{degrees[0]}"
    if degrees:
        what = f"has shards for tp {', '.join(map(str, degrees))}"
        if tp is None:
            raise ShardSetError(Problem(where, what, "say which with --tp, or tp= in Python"))
        fix = f"run as many ranks, or make that degree: `shardc reshard --tp {tp}`"
        raise ShardSetError(Problem(where, f"{what}, {tp} was asked for", fix))
    raise ShardSetError(_no_set(names, where))


def degrees_in(names: Collection[str]) -> list[int]:
    """The degrees of the sets in folders tpN, of files of these names."""
    folders = {name.partition("/")[0] for name in names if "/" in name}
    return sorted(
        int(match[1])
        for folder in folders
        if (match := _DEGREE.fullmatch(folder))
        and _is_set(n.partition("/")[2] for n in names if n.startswith(f"{folder}/"))
    )


def _is_set(names: Iterable[str]) -> bool:
    """Whether a folder with files of these names is a shard set, as `open_shard_set` decides."""
    names = set(names)
    if INDEX_NAME in names:
        return True
    return MODEL_INDEX in names and any(
        n.endswith(f"/{INDEX_NAME}") and n.count("/") == 1 for n in names
    )


def _no_set(names: Collection[str], where: str) -> Problem:
    parts = sorted(name for name in names if name.endswith(f"/{INDEX_NAME}"))
    if parts:
        what = f"is no whole shard set: there is {parts[0]}, but no {MODEL_INDEX}"
        return Problem(where, what, "name the set's own folder, or push the set again")
    what = f"holds no shard set: there is no {INDEX_NAME}"
    return Problem(where, what, "`shardc build` makes one, `shardc push` puts it there")
