"""The bundled manifests: found by class, by name, or taken from a file."""

from __future__ import annotations

from functools import cache
from importlib import resources
from pathlib import Path

from shardc.errors import ManifestError, Problem
from shardc.manifest import Manifest, parse_manifest


@cache
def bundled() -> dict[str, Manifest]:
    """Every bundled manifest by its name (its file's stem), sorted."""
    found = {}
    folder = resources.files("shardc.manifests")
    for entry in sorted(folder.iterdir(), key=lambda entry: entry.name):
        if entry.name.endswith(".toml"):
            found[entry.name.removesuffix(".toml")] = parse_manifest(
                entry.read_text(encoding="utf-8"), entry.name
            )
    return found


def for_class(class_name: str | None) -> Manifest | None:
    """The bundled manifest for a config.json's class, if there is one."""
    for manifest in bundled().values():
        if class_name in manifest.classes:
            return manifest
    return None


def load(name: str) -> Manifest:
    """A bundled manifest by name, class or class it serves, else the TOML file of that path."""
    found = bundled().get(name) or for_class(name)
    if found is not None:
        return found
    path = Path(name)
    try:
        return parse_manifest(path.read_text(encoding="utf-8"), path.name)
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
