"""Stable Diffusion 3 and 3.5, AuraFlow."""

from __future__ import annotations

from typing import Any

from tests.zoo.case import Case, Draw, Published

SD3 = {
    "sample_size": 8,
    "in_channels": 4,
    "out_channels": 4,
    "num_layers": 3,
    "attention_head_dim": 8,
    "num_attention_heads": 8,
    "joint_attention_dim": 24,
    "caption_projection_dim": 64,
    "pooled_projection_dim": 20,
    "pos_embed_max_size": 8,
}
AURA = {
    "sample_size": 8,
    "in_channels": 4,
    "out_channels": 4,
    "num_mmdit_layers": 2,
    "num_single_dit_layers": 2,
    "attention_head_dim": 8,
    "num_attention_heads": 8,
    "joint_attention_dim": 24,
    "caption_projection_dim": 64,
    "pos_embed_max_size": 16,
}


def sd3(draw: Draw) -> dict[str, Any]:
    return {
        "hidden_states": draw.noise(2, 4, 8, 8),
        "encoder_hidden_states": draw.noise(2, 5, 24),
        "pooled_projections": draw.noise(2, 20),
        "timestep": draw.ids(1000, 2),
    }


def sd3_skip(draw: Draw) -> dict[str, Any]:
    """Skip-layer guidance, and what a ControlNet adds."""
    return {
        **sd3(draw),
        "skip_layers": [1],
        "block_controlnet_hidden_states": [draw.noise(2, 16, 64)],
    }


def aura(draw: Draw) -> dict[str, Any]:
    return {
        "hidden_states": draw.noise(2, 4, 8, 8),
        "encoder_hidden_states": draw.noise(2, 5, 24),
        "timestep": draw.times(2),
    }


CASES = [
    Case(
        "SD3Transformer2DModel",
        {**SD3, "num_attention_heads": 6, "caption_projection_dim": 48},
        sd3,
        option="6 heads",
        ranks=(2,),
        padded=(4,),
    ),
    Case("SD3Transformer2DModel", SD3, sd3, ranks=(2, 4, 8)),
    Case("SD3Transformer2DModel", SD3, sd3_skip, option="skipped layer, controlled"),
    Case(
        "SD3Transformer2DModel",
        {**SD3, "qk_norm": "rms_norm"},
        sd3,
        option="norm of queries and keys",
    ),
    Case(
        "SD3Transformer2DModel",
        {**SD3, "qk_norm": "rms_norm", "dual_attention_layers": (0, 1)},
        sd3,
        option="dual attention",
    ),
    Case("AuraFlowTransformer2DModel", AURA, aura),
]

LARGE = {
    "num_layers": 38,
    "num_attention_heads": 38,
    "caption_projection_dim": 2432,
    "pos_embed_max_size": 192,
    "qk_norm": "rms_norm",
}
PUBLISHED = [
    Published(
        "stabilityai/stable-diffusion-3-medium-diffusers",
        "SD3Transformer2DModel",
        {
            "num_layers": 24,
            "num_attention_heads": 24,
            "caption_projection_dim": 1536,
            "pos_embed_max_size": 192,
        },
    ),
    Published(
        "stabilityai/stable-diffusion-3.5-medium",
        "SD3Transformer2DModel",
        {
            "num_layers": 24,
            "num_attention_heads": 24,
            "caption_projection_dim": 1536,
            "pos_embed_max_size": 384,
            "dual_attention_layers": tuple(range(13)),
            "qk_norm": "rms_norm",
        },
    ),
    Published("stabilityai/stable-diffusion-3.5-large", "SD3Transformer2DModel", LARGE),
    Published("stabilityai/stable-diffusion-3.5-large-turbo", "SD3Transformer2DModel", LARGE),
    Published("fal/AuraFlow-v0.3", "AuraFlowTransformer2DModel", {}),
]
