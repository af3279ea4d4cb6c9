"""HiDream-I1."""

from __future__ import annotations

from typing import Any

from tests.zoo.case import Case, Draw, Published

HIDREAM = {
    "patch_size": 2,
    "in_channels": 4,
    "num_layers": 1,
    "num_single_layers": 2,
    "attention_head_dim": 8,
    "num_attention_heads": 8,
    "caption_channels": [20, 24],
    "text_emb_dim": 12,
    "axes_dims_rope": (4, 2, 2),
    "max_resolution": (8, 8),
    "llama_layers": [0, 1, 1],
}


def hidream(draw: Draw, height: int = 4, width: int = 4) -> dict[str, Any]:
    return {
        "hidden_states": draw.noise(1, 4, height, width),
        "timesteps": draw.times(1),
        "encoder_hidden_states_t5": draw.noise(1, 5, 20),
        "encoder_hidden_states_llama3": draw.noise(2, 1, 3, 24),
        "pooled_embeds": draw.noise(1, 12),
    }


def wide(draw: Draw) -> dict[str, Any]:
    """Not square: patches are padded and masked."""
    return hidream(draw, 4, 8)


CASES = [
    Case("HiDreamImageTransformer2DModel", HIDREAM, hidream),
    Case("HiDreamImageTransformer2DModel", HIDREAM, wide, option="padded"),
    Case(
        "HiDreamImageTransformer2DModel",
        {**HIDREAM, "num_routed_experts": 0},
        hidream,
        option="no experts",
    ),
]

PUBLISHED = [
    Published(
        "HiDream-ai/HiDream-I1-Full",
        "HiDreamImageTransformer2DModel",
        {
            "patch_size": 2,
            "in_channels": 16,
            "caption_channels": [4096, 4096],
            "axes_dims_rope": (64, 32, 32),
            "llama_layers": [*range(32), *[31] * 16],
        },
    ),
]
