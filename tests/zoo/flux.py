"""FLUX.1 and what is built like it."""

from __future__ import annotations

from typing import Any

from tests.zoo.case import Case, Draw, Published

FLUX1 = {
    "in_channels": 16,
    "num_layers": 1,
    "num_single_layers": 2,
    "attention_head_dim": 16,
    "num_attention_heads": 8,
    "joint_attention_dim": 32,
    "pooled_projection_dim": 32,
    "axes_dims_rope": (4, 4, 8),
}


def flux1(draw: Draw) -> dict[str, Any]:
    return {
        "hidden_states": draw.noise(1, 6, 16),
        "encoder_hidden_states": draw.noise(1, 4, 32),
        "pooled_projections": draw.noise(1, 32),
        "timestep": draw.noise(1).abs(),
        "img_ids": draw.ids(4, 6, 3).float(),
        "txt_ids": draw.ids(1, 4, 3).float(),
    }


def flux1_guidance(draw: Draw) -> dict[str, Any]:
    return {**flux1(draw), "guidance": draw.noise(1).abs()}


CASES = [
    Case("FluxTransformer2DModel", FLUX1, flux1, ranks=(2, 4, 8)),
    Case(
        "FluxTransformer2DModel",
        {**FLUX1, "guidance_embeds": True},
        flux1_guidance,
        option="guidance embeds",
    ),
]

PUBLISHED = [
    Published(
        "black-forest-labs/FLUX.1-dev",
        "FluxTransformer2DModel",
        {"guidance_embeds": True},
    ),
    Published("black-forest-labs/FLUX.1-schnell", "FluxTransformer2DModel", {}),
]
