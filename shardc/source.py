"""A checkpoint, wherever it is: a local path, a Hub repo or a prefix of an S3 bucket."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from shardc.checkpoint import Checkpoint, open_checkpoint
from shardc.location import HubLocation, Location
from shardc.mirror import Mirror, open_mirror


def open_source(
    where: Path | Location, *, variant: str | None = None, token: str | None = None
) -> Checkpoint:
    """Read what a path or a remote address holds, as `open_checkpoint` does.

    A Hub repo is read from its cache where the Hub may not be asked, and so is any file of it
    that is there. token: for the Hub, if not the environment's. Raises CheckpointError and
    RemoteError.
    """
    if isinstance(where, HubLocation):
        from shardc import hub

        if hub.is_offline():
            where = hub.cached_snapshot(where)
    if not isinstance(where, Path):
        return read_mirror(open_mirror(where, token=token), variant=variant)
    return _of_repo(open_checkpoint(where, variant=variant), repo_of(where))


def read_mirror(mirror: Mirror, *, variant: str | None = None) -> Checkpoint:
    """The checkpoint that a mirror stands for; CheckpointError, RemoteError."""
    with mirror.told():
        found = open_checkpoint(mirror.path, variant=variant, at=mirror.at)
    carried = [found.path / name for name in found.extras]
    carried += [part.path / name for part in found.components for name in part.extras]
    mirror.narrow(carried)
    return _of_repo(replace(found, mirror=mirror), mirror.remote.pinned)


def _of_repo(found: Checkpoint, repo: str | None) -> Checkpoint:
    return replace(found, components=tuple(replace(c, repo=repo) for c in found.components))


def repo_of(path: Path) -> str | None:
    """The repo and commit that a path in the Hub's cache is of; None for any other path."""
    for folder in (path, *path.absolute().parents):
        owner = folder.parent.parent.name.split("--")
        if folder.parent.name == "snapshots" and owner[0] == "models" and len(owner) == 3:
            return str(HubLocation("/".join(owner[1:]), folder.name))
    return None
