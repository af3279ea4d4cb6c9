"""`shardc push`: verify a shard set, then publish it on the Hub or in S3, all of it or nothing."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from shardc import push_hub, push_s3
from shardc.errors import Problem
from shardc.location import HubLocation, LocationError, S3Location, locate
from shardc.push_hub import HubOptions
from shardc.shardset import open_shard_set
from shardc.shipment import Progress, PushReport, open_shipment

# What is done and how many bytes that is, to what is told of them.
Bar = Callable[[str, int], AbstractContextManager[Progress]]


def _no_bar(what: str, total_bytes: int) -> AbstractContextManager[Progress]:
    return nullcontext(lambda _: None)


def push(
    out: Path,
    to: str,
    *,
    revision: str | None = None,
    options: HubOptions | None = None,
    dry_run: bool = False,
    bar: Bar = _no_bar,
) -> PushReport:
    """Publish shard set `out` at `to`: org/name[/folder] or hf://... of the Hub, or s3://...

    A Hub repo is created where it is missing, the revision as a branch; without a folder the set
    goes into tpN. What is there already is not sent again. dry_run: verify and compare, no more.
    Raises LocationError, ShardSetError, VerifyError (then nothing was published) or RemoteError.
    """
    location = _location(to, revision, options)
    options = options or HubOptions()
    if isinstance(location, HubLocation):
        push_hub.check(location, options, dry_run=dry_run)
    indexes = open_shard_set(out).components.values()
    shards_bytes = sum(file.size for index in indexes for file in index.files.values())
    with bar("verify", shards_bytes) as progress:
        shipment = open_shipment(out, progress)
    with bar("push", shipment.size_bytes) as progress:
        if isinstance(location, HubLocation):
            return push_hub.push(shipment, location, options, progress, dry_run=dry_run)
        return push_s3.push(shipment, location, progress, dry_run=dry_run)


def _location(
    to: str, revision: str | None, options: HubOptions | None
) -> HubLocation | S3Location:
    location = locate(to, revision=revision)
    if isinstance(location, Path):
        what = "is a path on this machine" if location.exists() else "is no address"
        fix = "give org/name or s3://bucket/prefix; hf://org/name is the Hub's in any case"
        raise LocationError(Problem(to, what, fix))
    if isinstance(location, S3Location) and options not in (None, HubOptions()):
        what = "takes no token, message, base model or --private: these are for Hub repos"
        raise LocationError(Problem(to, what))
    if location.name.endswith(".safetensors"):
        raise LocationError(Problem(to, "is the address of a file", "name a folder"))
    return location
