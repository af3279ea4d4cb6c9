"""What the model card says of a verified set."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from typing import Any

from shardc.card import BuiltPart, Degree, Facts, license_of
from shardc.checkpoint import MODEL_INDEX, listed_components
from shardc.location import DEFAULT_REVISION, HubLocation, LocationError, locate
from shardc.reading import read_whole
from shardc.shipment import Shipment

README = "README.md"
MAX_README_BYTES = 10_000_000


def facts_of(shipment: Shipment, location: HubLocation, base_model: str | None) -> Facts:
    """The facts of a set that goes into the location's folder.

    base_model: a Hub repo; None takes the one that the set was built from, if it was one.
    """
    shards = shipment.shards
    first = next(iter(shards.components.values()))
    source = first.source.repo
    pipeline = (shards.path / MODEL_INDEX).is_file()
    main = location.revision == DEFAULT_REVISION
    whole = location if location.folder != f"tp{shipment.tp}" else replace(location, folder="")
    return Facts(
        repo=location.repo,
        address=_address(whole) if main else str(whole),
        pull_address=_address(location) if main else str(location),
        library="diffusers" if pipeline else tomllib.loads(first.manifest.text)["library"],
        pipeline=pipeline,
        base_model=base_model or _repo_of(source),
        license=_license(shipment),
        degree=Degree(
            tp=shipment.tp,
            dtypes=_dtypes(shipment),
            profile=", ".join(sorted({index.profile for index in shards.components.values()})),
            rank_bytes=max(shipment.rank_bytes),
            folder=location.folder,
            tool=first.tool,
            source=source,
        ),
        parts=_parts(shipment, pipeline),
        cast=None if first.dtype == "keep" else first.dtype,
    )


def _address(location: HubLocation) -> str:
    return f"{location.repo}/{location.folder}" if location.folder else location.repo


def _dtypes(shipment: Shipment) -> tuple[str, ...]:
    indexes = shipment.shards.components.values()
    return tuple(sorted({tensor.dtype for index in indexes for tensor in index.tensors.values()}))


def _parts(shipment: Shipment, pipeline: bool) -> list[BuiltPart]:
    indexes = shipment.shards.components
    listed = listed_components(shipment.path) if pipeline else {}
    kept = [part.name for part in shipment.parts if part.kind == "kept"]
    return [
        *(BuiltPart(name, i.source.class_, i.manifest.name) for name, i in indexes.items()),
        *(BuiltPart(name, str(listed[name][1]), None) for name in kept if name in listed),
    ]


def _license(shipment: Shipment) -> dict[str, Any]:
    path = shipment.path / README
    if not path.is_file() or path.stat().st_size > MAX_README_BYTES:
        return {}
    return license_of(read_whole(path, MAX_README_BYTES).decode(errors="replace"))


def _repo_of(source: str | None) -> str | None:
    try:
        found = locate(source) if source and source.startswith("hf://") else None
    except LocationError:
        return None
    return found.repo if isinstance(found, HubLocation) else None
