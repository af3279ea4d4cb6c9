"""Calls that would take one rank's part for the whole model: refused, with the way out named."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from shardc.errors import Problem, ShardSetError

# What a sharded model must not do: each would act on one rank's part as if it were the whole.
FORBIDDEN = {
    "save_pretrained": "`shardc merge` gives the full checkpoint back",
    "push_to_hub": "push the shard set's folder",
    "load_lora_adapter": "fuse the adapter into the checkpoint, then build",
    "load_adapter": "fuse the adapter into the checkpoint, then build",
    "add_adapter": "fuse the adapter into the checkpoint, then build",
    "load_lora_weights": "fuse the adapter into the checkpoint, then build",
    "enable_group_offload": "a shard is already a part; use a higher tp",
    "enable_model_cpu_offload": "a shard is already a part; use a higher tp",
    "enable_sequential_cpu_offload": "a shard is already a part; use a higher tp",
    "enable_layerwise_casting": "build with --dtype instead",
    "quantize": "quantise the checkpoint before it is built",
}
# What diffusers refuses by itself where a model has its own tensor parallelism.
GUARDED = frozenset(
    {
        "save_pretrained",
        "load_lora_adapter",
        "load_lora_weights",
        "enable_group_offload",
        "enable_model_cpu_offload",
        "enable_sequential_cpu_offload",
    }
)


def forbid(model: object, guarded: Collection[str]) -> None:
    """Refuse what acts on the whole model; `guarded`: what the library refuses by itself."""
    for name, instead in FORBIDDEN.items():
        if name not in guarded and hasattr(type(model), name):
            object.__setattr__(model, name, _Refusal(name, instead))


@dataclass(frozen=True, slots=True)
class _Refusal:
    name: str
    instead: str

    def __call__(self, *_: Any, **__: Any) -> Any:
        raise ShardSetError(
            Problem(self.name, "this model holds one rank's shard, not the whole", self.instead)
        )
