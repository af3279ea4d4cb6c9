"""transformers models: found by class, built without weights. Imported only when asked for."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import transformers
from torch import nn

from shardc.errors import Problem, ShardSetError

GENERATION_CONFIG = "generation_config.json"

log = logging.getLogger("shardc.loaders")


def build(class_name: str, folder: Path, config: Mapping[str, Any]) -> nn.Module:
    """The class from its config, under whatever context holds parameters back."""
    cls = getattr(transformers, class_name, None)
    if cls is None:
        raise ShardSetError(Problem(str(folder), f"this transformers has no class {class_name}"))
    loaded = cls.config_class.from_pretrained(str(folder))
    model: nn.Module = cls(loaded)
    if cls.can_generate():
        model.generation_config = _generation_config(folder)
    return model


def _generation_config(folder: Path) -> Any:
    """The folder's own, else what its config.json says of generation: as from_pretrained."""
    read = transformers.GenerationConfig.from_pretrained
    if (folder / GENERATION_CONFIG).is_file():
        return read(str(folder))
    return read(str(folder), config_file_name="config.json", _from_model_config=True)


def load(class_name: str, folder: Path) -> nn.Module:
    """The class as its library loads it, in the dtypes stored."""
    cls: Any = getattr(transformers, class_name)
    model: nn.Module = cls.from_pretrained(
        str(folder), dtype="auto", local_files_only=True, use_safetensors=True
    )
    return model


def names(model: nn.Module, stored: Iterable[str]) -> dict[str, str] | None:
    """What the model calls each stored tensor: the library renames as it loads.

    None where it would not only rename, but fuse or split tensors.
    """
    stored = sorted(stored)
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightRenaming, rename_source_key
    except ImportError:  # transformers 4
        return {name: name for name in stored}
    own = model.state_dict()
    rules = get_model_conversion_mapping(model)  # type: ignore[arg-type]
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    others: Any = [rule for rule in rules if not isinstance(rule, WeightRenaming)]
    prefix = getattr(model, "base_model_prefix", None)
    found = {}
    for name in stored:
        new, converted = rename_source_key(name, renamings, others, prefix, own)
        if new not in own and name in own:
            new, converted = name, None
        if converted is not None and new in own:
            return None
        found[name] = new
    return found


def tied(model: nn.Module) -> dict[str, str]:
    """Parameters that a checkpoint may lack because the model shares them, and with which."""
    config = getattr(model, "config", None)
    if not getattr(config, "tie_word_embeddings", False):
        return {}
    pairs = dict(getattr(model, "_tied_weights_keys", None) or {})
    placed = dict(model.named_parameters(remove_duplicate=False))
    for pair in pairs.items():
        one, other = map(placed.get, pair)
        if one is not other and not any(p is None or p.is_meta for p in (one, other)):
            log.warning("%s and %s are one by config.json, but the checkpoint has both", *pair)
    return pairs
