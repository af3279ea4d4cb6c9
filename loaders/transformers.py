"""transformers models: found by class, built without weights. Imported only when asked for."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import transformers
from torch import nn

from shardc.errors import Problem, ShardSetError


def build(class_name: str, folder: Path, config: Mapping[str, Any]) -> nn.Module:
    """The class from its config, under whatever context holds parameters back."""
    cls = getattr(transformers, class_name, None)
    if cls is None:
        raise ShardSetError(Problem(str(folder), f"this transformers has no class {class_name}"))
    loaded = cls.config_class.from_pretrained(str(folder))
    model: nn.Module = cls(loaded)
    return model


def tied(model: nn.Module) -> dict[str, str]:
    """Parameters that a checkpoint may lack because the model shares them, and with which."""
    config = getattr(model, "config", None)
    if not getattr(config, "tie_word_embeddings", False):
        return {}
    return dict(getattr(model, "_tied_weights_keys", None) or {})
