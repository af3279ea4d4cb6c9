"""The bundled manifests: found by class, by name, or taken from a file."""

from __future__ import annotations

from functools import cache
from importlib import resources
from pathlib import Path

from shardc.document import MAX_MANIFEST_BYTES
from shardc.errors import ManifestError, Problem
from shardc.manifest import Manifest, parse_manifest


def bundled() -> dict[str, Manifest]:
    """Every bundled manifest by its name (its file's stem), sorted."""
    return {name: _bundled(name) for name in sorted(_texts())}


@cache
def _bundled(name: str) -> Manifest:
    return parse_manifest(_texts()[name], f"{name}.toml", _texts().get)


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
    if class_name is None:
        return None
    for name, text in sorted(_texts().items()):
        # to parse them all takes longer than a small build does
        if class_name in text and class_name in _bundled(name).classes:
            return _bundled(name)
    return None


def load(name: str) -> Manifest:
    """A bundled manifest by name, or class it serves, else the TOML file of that path."""
    found = _found(name)
    return found or parse_manifest(_file_text(name), Path(name).name, _texts().get)


def text_of(name: str) -> str:
    """The same as it is written: its TOML with comments, without what it extends."""
    found = _found(name)
    return _file_text(name) if found is None else _texts()[found.name.removesuffix(".toml")]


def _found(name: str) -> Manifest | None:
    return _bundled(name) if name in _texts() else for_class(name)


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
