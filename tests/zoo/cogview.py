"""CogView3-Plus, CogView4 and GLM-Image."""

from __future__ import annotations

from typing import Any

import torch

from tests.zoo.case import Case, Draw, Published

COGVIEW = {
    "in_channels": 4,
    "out_channels": 4,
    "num_layers": 2,
    "attention_head_dim": 8,
    "num_attention_heads": 8,
    "text_embed_dim": 20,
    "time_embed_dim": 16,
    "condition_dim": 8,
    "pos_embed_max_size": 8,
    "sample_size": 8,
}
GLM = {
    "in_channels": 4,
    "out_channels": 4,
    "num_layers": 2,
    "attention_head_dim": 8,
    "num_attention_heads": 8,
    "text_embed_dim": 20,
    "time_embed_dim": 16,
    "condition_dim": 8,
    "prior_vq_quantizer_codebook_size": 30,
}


def cogview(draw: Draw) -> dict[str, Any]:
    return {
        "hidden_states": draw.noise(2, 4, 4, 4),
        "encoder_hidden_states": draw.noise(2, 5, 20),
        "timestep": draw.ids(1000, 2),
        "original_size": draw.noise(2, 2),
        "target_size": draw.noise(2, 2),
        "crop_coords": draw.noise(2, 2),
    }


def masked(draw: Draw) -> dict[str, Any]:
    return {**cogview(draw), "attention_mask": draw.ids(2, 2, 5)}


def glm(draw: Draw) -> dict[str, Any]:
    return {
        "hidden_states": draw.noise(2, 4, 4, 4),
        "encoder_hidden_states": draw.noise(2, 5, 20),
        "prior_token_id": draw.ids(30, 2, 4),
        "prior_token_drop": torch.tensor([False, True]),
        "timestep": draw.ids(1000, 2),
        "target_size": draw.noise(2, 2),
        "crop_coords": draw.noise(2, 2),
    }


CASES = [
    Case("CogView4Transformer2DModel", COGVIEW, cogview),
    Case("CogView4Transformer2DModel", COGVIEW, masked, option="masked"),
    Case("CogView3PlusTransformer2DModel", COGVIEW, cogview),
    Case("GlmImageTransformer2DModel", GLM, glm),
]

PUBLISHED = [
    Published(
        "zai-org/CogView4-6B",
        "CogView4Transformer2DModel",
        {"num_layers": 28, "attention_head_dim": 128, "num_attention_heads": 32},
    ),
    Published("zai-org/CogView3-Plus-3B", "CogView3PlusTransformer2DModel", {}),
    Published(
        "zai-org/GLM-Image",
        "GlmImageTransformer2DModel",
        {"attention_head_dim": 128, "num_attention_heads": 32},
    ),
]
