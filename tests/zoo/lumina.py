"""Lumina-Next and Lumina-Image-2.0."""

from __future__ import annotations

from typing import Any

import torch
from diffusers.models import embeddings

from tests.zoo.case import Case, Draw, Published

LUMINA2 = {
    "in_channels": 4,
    "hidden_size": 96,
    "num_layers": 2,
    "num_refiner_layers": 1,
    "num_attention_heads": 8,
    "num_kv_heads": 2,
    "multiple_of": 16,
    "axes_dim_rope": (4, 4, 4),
    "axes_lens": (16, 8, 8),
    "cap_feat_dim": 20,
}
NEXT = {
    "sample_size": 8,
    "hidden_size": 64,
    "num_layers": 2,
    "num_attention_heads": 8,
    "num_kv_heads": 2,
    "multiple_of": 16,
    "cross_attention_dim": 20,
}


def lumina2(draw: Draw) -> dict[str, Any]:
    return {
        "hidden_states": draw.noise(2, 4, 4, 4),
        "timestep": draw.times(2),
        "encoder_hidden_states": draw.noise(2, 6, 20),
        "encoder_attention_mask": torch.arange(6) < torch.tensor([[6], [4]]),
    }


def next_dit(draw: Draw) -> dict[str, Any]:
    rotary: Any = embeddings.get_2d_rotary_pos_embed_lumina
    return {
        "hidden_states": draw.noise(2, 4, 8, 8),
        "timestep": draw.times(2),
        "encoder_hidden_states": draw.noise(2, 6, 20),
        "encoder_mask": torch.arange(6) < torch.tensor([[6], [4]]),
        "image_rotary_emb": rotary(8, 8, 8),
        "cross_attention_kwargs": {},
    }


CASES = [
    Case("Lumina2Transformer2DModel", LUMINA2, lumina2, ranks=(2, 4, 8)),
    Case("Lumina2Transformer2DModel", {**LUMINA2, "num_kv_heads": 1}, lumina2, option="1 KV head"),
    Case(
        "Lumina2Transformer2DModel",
        {**LUMINA2, "num_kv_heads": 8, "ffn_dim_multiplier": 1.3},
        lumina2,
        option="wider MLP",
    ),
    Case("LuminaNextDiT2DModel", NEXT, next_dit, ranks=(2, 4, 8)),
    Case("LuminaNextDiT2DModel", {**NEXT, "num_kv_heads": 8}, next_dit, option="8 KV heads"),
    Case(
        "LuminaNextDiT2DModel",
        {**NEXT, "qk_norm": False, "num_kv_heads": None, "ffn_dim_multiplier": 1.3},
        next_dit,
        option="no qk norm, wider MLP",
    ),
]

PUBLISHED = [
    Published(
        "Alpha-VLLM/Lumina-Image-2.0",
        "Lumina2Transformer2DModel",
        {"cap_feat_dim": 2304},
    ),
    Published(
        "Alpha-VLLM/Lumina-Next-SFT-diffusers",
        "LuminaNextDiT2DModel",
        {"num_layers": 24, "num_kv_heads": 8},
    ),
]
