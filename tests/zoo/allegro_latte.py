"""Allegro and Latte."""

from __future__ import annotations

from typing import Any

import torch
from diffusers.models.embeddings import get_3d_rotary_pos_embed_allegro

from tests.zoo.case import Case, Draw, Published

ALLEGRO = {
    "num_attention_heads": 8,
    "attention_head_dim": 12,
    "num_layers": 2,
    "cross_attention_dim": 96,
    "sample_height": 4,
    "sample_width": 4,
    "sample_frames": 2,
    "caption_channels": 20,
}
LATTE_1 = {
    "attention_bias": True,
    "activation_fn": "gelu-approximate",
    "norm_type": "ada_norm_single",
    "num_embeds_ada_norm": 1000,
    "norm_elementwise_affine": False,
    "norm_eps": 1e-6,
    "in_channels": 4,
    "out_channels": 8,
    "patch_size": 2,
}
LATTE = {
    **LATTE_1,
    "num_attention_heads": 8,
    "attention_head_dim": 6,
    "num_layers": 2,
    "cross_attention_dim": 48,
    "sample_size": 8,
    "caption_channels": 20,
    "video_length": 3,
}


def allegro(draw: Draw) -> dict[str, Any]:
    tables: Any = get_3d_rotary_pos_embed_allegro(
        embed_dim=12, crops_coords=((0, 0), (2, 2)), grid_size=(2, 2), temporal_size=2
    )
    *freqs, grid_t, grid_h, grid_w = tables
    positions = torch.cartesian_prod(grid_t.long(), grid_h.long(), grid_w.long())
    return {
        "hidden_states": draw.noise(1, 4, 2, 4, 4),
        "encoder_hidden_states": draw.noise(1, 5, 20),
        "timestep": draw.ids(1000, 1),
        "attention_mask": draw.ids(2, 1, 2, 4, 4),
        "encoder_attention_mask": draw.ids(2, 1, 5),
        "image_rotary_emb": (tuple(freqs), tuple(positions.T.reshape(3, 1, -1).contiguous())),
    }


def latte(draw: Draw) -> dict[str, Any]:
    return {
        "hidden_states": draw.noise(2, 4, 3, 8, 8),
        "encoder_hidden_states": draw.noise(2, 5, 20),
        "timestep": draw.ids(1000, 2),
    }


def still(draw: Draw) -> dict[str, Any]:
    """One image: the temporal blocks are passed by."""
    return {
        **latte(draw),
        "hidden_states": draw.noise(2, 4, 1, 8, 8),
        "enable_temporal_attentions": False,
    }


CASES = [
    Case("AllegroTransformer3DModel", ALLEGRO, allegro),
    Case("LatteTransformer3DModel", LATTE, latte),
    Case("LatteTransformer3DModel", LATTE, still, option="one image"),
]

PUBLISHED = [
    Published("rhymes-ai/Allegro", "AllegroTransformer3DModel", {}),
    Published(
        "maxin-cn/Latte-1",
        "LatteTransformer3DModel",
        {
            **LATTE_1,
            "attention_head_dim": 72,
            "num_layers": 28,
            "cross_attention_dim": 1152,
            "caption_channels": 4096,
        },
    ),
]
