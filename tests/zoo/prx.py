"""PRX."""

from __future__ import annotations

from typing import Any

import torch

from tests.zoo.case import Case, Draw, Published

PRX = {
    "in_channels": 4,
    "patch_size": 2,
    "context_in_dim": 24,
    "hidden_size": 64,
    "mlp_ratio": 2.5,
    "num_heads": 8,
    "depth": 2,
    "axes_dim": [4, 4],
}


def prx(draw: Draw) -> dict[str, Any]:
    return {
        "hidden_states": draw.noise(1, 4, 4, 6),
        "timestep": torch.tensor([0.5], dtype=draw.dtype),
        "encoder_hidden_states": draw.noise(1, 5, 24),
    }


def prx_masked(draw: Draw) -> dict[str, Any]:
    return {**prx(draw), "attention_mask": torch.tensor([[True, True, True, False, False]])}


CASES = [
    Case("PRXTransformer2DModel", PRX, prx),
    Case(
        "PRXTransformer2DModel",
        {**PRX, "bottleneck_size": 10, "resolution_embeds": True},
        prx_masked,
        option="bottleneck, resolution embeds, masked text",
    ),
]

PUBLISHED = [Published("Photoroom/prx-512-t2i-sft", "PRXTransformer2DModel", {})]
