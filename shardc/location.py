"""Where a checkpoint or a shard set is: a path, a Hub repo, or a prefix of an S3 bucket. Pure.

org/name[/folder]                     a Hub repo, where no such path is on this machine
hf://org/name[@revision][/folder]     the same, in any case; a revision's slashes are %2F
s3://bucket[/prefix]                  an S3 bucket
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from urllib.parse import quote, unquote

from shardc.errors import Problem, ShardcError, printable

_PART = r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}"
_REPO = re.compile(
    rf"(?P<repo>{_PART}/{_PART})(@(?P<revision>refs/pr/\d+|[^/\s]+))?(/(?P<folder>.+))?"
)
_BUCKET = re.compile(r"(?P<bucket>[a-z0-9][a-z0-9._-]{1,61}[a-z0-9])(/(?P<prefix>.*))?")
DEFAULT_REVISION = "main"


class LocationError(ShardcError):
    """A remote address that cannot be one, or an option that does not go with it."""


@dataclass(frozen=True, slots=True)
class HubLocation:
    """A model repo of the Hub, or a folder in it. `revision` is a branch, a tag or a commit."""

    repo: str
    revision: str = DEFAULT_REVISION
    folder: str = ""

    def __str__(self) -> str:
        at = "" if self.revision == DEFAULT_REVISION else f"@{quote(self.revision, safe='')}"
        return f"hf://{self.repo}{at}" + (f"/{self.folder}" if self.folder else "")

    @property
    def name(self) -> str:
        """What to call what is there."""
        return (self.folder or self.repo).rpartition("/")[2]


@dataclass(frozen=True, slots=True)
class S3Location:
    """The objects of a bucket below a prefix."""

    bucket: str
    prefix: str = ""

    def __str__(self) -> str:
        return f"s3://{self.bucket}" + (f"/{self.prefix}" if self.prefix else "")

    @property
    def name(self) -> str:
        """What to call what is there."""
        return (self.prefix or self.bucket).rpartition("/")[2]


Location = HubLocation | S3Location


def locate(text: str | Path, *, revision: str | None = None) -> Path | Location:
    """What an argument names; a path that exists here is that path, whatever else it could be.

    revision: of a Hub repo. LocationError where an address is malformed.
    """
    if revision == "":  # as of a variable that is not set: main would be a guess
        raise LocationError(Problem(str(text), "--revision is empty"))
    found = _locate(text, revision)
    if revision is not None and not isinstance(found, HubLocation):
        raise LocationError(Problem(str(text), "has no revisions", "--revision is for Hub repos"))
    return found


def _locate(text: str | Path, revision: str | None) -> Path | Location:
    if isinstance(text, Path):
        return text
    scheme, slashes, rest = text.partition("://")
    if not slashes:
        if Path(text).exists() or Path(text).is_symlink() or text.startswith((".", "/", "~")):
            return Path(text)
        match = _REPO.fullmatch(text.rstrip("/"))
        return _hub(text, match, revision) if match else Path(text)
    if scheme == "hf" and rest.startswith(("datasets/", "spaces/")):
        raise LocationError(Problem(text, "is no model repo"))
    if scheme == "hf":
        return _hub(text, _REPO.fullmatch(rest.removeprefix("models/").rstrip("/")), revision)
    if scheme == "s3":
        match = _BUCKET.fullmatch(rest.rstrip("/"))
        if match is None:
            raise LocationError(Problem(text, "is no s3://bucket/prefix"))
        return S3Location(match["bucket"], _plain(text, match["prefix"] or ""))
    raise LocationError(
        Problem(text, f"{printable(scheme)}:// is not known", "hf:// and s3:// are, and paths")
    )


def _hub(text: str, match: re.Match[str] | None, revision: str | None) -> HubLocation:
    if match is None:
        raise LocationError(Problem(text, "is no hf://org/name[@revision][/folder]"))
    own = match["revision"]
    if own is not None:
        own = unquote(own)
    if revision is not None and own is not None and revision != own:
        raise LocationError(Problem(text, f"says revision {own}, --revision says {revision}"))
    return HubLocation(
        match["repo"], own or revision or DEFAULT_REVISION, _plain(text, match["folder"] or "")
    )


def _plain(text: str, folder: str) -> str:
    parts = folder.split("/") if folder else []
    if any(part in ("", ".", "..") or part != printable(part) for part in parts):
        raise LocationError(Problem(text, f"{folder!r} is no plain folder"))
    return PurePosixPath(*parts).as_posix() if parts else ""
