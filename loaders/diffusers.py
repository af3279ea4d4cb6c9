"""diffusers models: found by class, built without weights. Imported only when one is asked for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import diffusers
from torch import nn

from shardc.errors import Problem, ShardSetError


def build(class_name: str, folder: Path, config: Mapping[str, Any]) -> nn.Module:
    """The class from its config, under whatever context holds parameters back."""
    cls = getattr(diffusers, class_name, None)
    if cls is None:
        raise ShardSetError(Problem(str(folder), f"this diffusers has no class {class_name}"))
    model: nn.Module = cls.from_config(dict(config))
    return model


def names(model: nn.Module, stored: Iterable[str]) -> dict[str, str] | None:
    """What the model calls each stored tensor; None where the library would convert some."""
    return {name: name for name in stored}


def pipeline(path: Path, components: Mapping[str, nn.Module]) -> Any:
    """The pipeline of `path` with these components in place; the rest loads as diffusers does."""
    load: Any = diffusers.DiffusionPipeline.from_pretrained
    return load(str(path), use_safetensors=True, **components)  # nothing is unpickled
