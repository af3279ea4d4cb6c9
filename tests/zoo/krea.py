"""Krea 2."""

from __future__ import annotations

from typing import Any

import torch

from tests.zoo.case import Case, Draw, Published

KREA2 = {
    "in_channels": 8,
    "num_layers": 2,
    "attention_head_dim": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "timestep_embed_dim": 16,
    "text_hidden_dim": 32,
    "num_text_layers": 3,
    "text_num_attention_heads": 4,
    "text_num_key_value_heads": 4,
    "text_intermediate_size": 40,
    "axes_dims_rope": (4, 2, 2),
}


def krea2(draw: Draw) -> dict[str, Any]:
    return {
        "hidden_states": draw.noise(1, 6, 8),
        "encoder_hidden_states": draw.noise(1, 5, 3, 32),
        "timestep": torch.tensor([0.5], dtype=draw.dtype),
        "position_ids": draw.ids(4, 11, 3).float(),
    }


def krea2_masked(draw: Draw) -> dict[str, Any]:
    mask = torch.tensor([[True, True, True, False, False]])
    return {**krea2(draw), "encoder_attention_mask": mask}


CASES = [
    Case("Krea2Transformer2DModel", KREA2, krea2),
    Case(
        "Krea2Transformer2DModel",
        {**KREA2, "num_key_value_heads": 8, "text_num_key_value_heads": 2},
        krea2_masked,
        option="grouped text heads, masked text",
    ),
]

PUBLISHED = [
    Published("krea/Krea-2-Raw", "Krea2Transformer2DModel", {}),
    Published("krea/Krea-2-Turbo", "Krea2Transformer2DModel", {}),
]
