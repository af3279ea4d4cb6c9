"""The bundled manifests: found by class, by name, or taken from a file."""

from __future__ import annotations

from functools import cache
from importlib import resources
from pathlib import Path

from shardc.document import MAX_MANIFEST_BYTES
from shardc.errors import ManifestError, Problem
from shardc.manifest import Manifest, parse_manifest


@cache
def bundled() -> dict[str, Manifest]:
    """Every bundled manifest by its name (its file's stem), sorted."""
    return {
        name: parse_manifest(text, f"{name}.toml", _texts().get)
        for name, text in sorted(_texts().items())
    }


@cache
def _texts() -> dict[str, str]:
    folder = resources.files("shardc.manifests")
    return {
        entry.name.removesuffix(".toml"): entry.read_text(encoding="utf-8")
        for entry in folder.iterdir()
        if entry.name.endswith(".toml")
    }


def for_class(class_name: str | None) -> Manifest | None:
    """The bundled manifest for a config.json's class, if there is one."""
    for manifest in bundled().values():
        if class_name in manifest.classes:
            return manifest
    return None


def load(name: str) -> Manifest:
    """A bundled manifest by name, or class it serves, else the TOML file of that path."""
    found = bundled().get(name) or for_class(name)
    return found or parse_manifest(_file_text(name), Path(name).name, _texts().get)


def text_of(name: str) -> str:
    """The same as it is written: its TOML with comments, without what it extends."""
    found = bundled().get(name) or for_class(name)
    return _file_text(name) if found is None else _texts()[found.name.removesuffix(".toml")]


def _file_text(name: str) -> str:
    try:
        with Path(name).open("rb") as file:
            return file.read(MAX_MANIFEST_BYTES + 1).decode("utf-8")  # one over is refused
    except FileNotFoundError as error:
        raise ManifestError(
            Problem(
                name,
                "neither a bundled manifest nor a file",
                "`shardc manifest list` shows the bundled ones",
            )
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise ManifestError(Problem(name, f"cannot read it: {error}")) from error
