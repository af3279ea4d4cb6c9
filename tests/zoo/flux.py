"""FLUX.1, FLUX.2 and FLUX.3."""

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
FLUX2 = {
    "in_channels": 16,
    "num_layers": 2,
    "num_single_layers": 2,
    "attention_head_dim": 16,
    "num_attention_heads": 8,
    "joint_attention_dim": 32,
    "timestep_guidance_channels": 16,
    "axes_dims_rope": (4, 4, 4, 4),
}
FLUX3 = {
    "in_channels": 16,
    "cond_in_channels": 12,
    "num_layers": 1,
    "num_single_layers": 2,
    "attention_head_dim": 16,
    "num_attention_heads": 8,
    "joint_attention_dim": 32,
    "timestep_channels": 16,
    "axes_dims_rope": (4, 4, 4, 4),
}


def flux1(draw: Draw) -> dict[str, Any]:
    return {
        "hidden_states": draw.noise(1, 6, 16),
        "encoder_hidden_states": draw.noise(1, 4, 32),
        "pooled_projections": draw.noise(1, 32),
        "timestep": draw.times(1),
        "img_ids": draw.ids(4, 6, 3).float(),
        "txt_ids": draw.ids(1, 4, 3).float(),
    }


def flux1_guidance(draw: Draw) -> dict[str, Any]:
    return {**flux1(draw), "guidance": draw.times(1)}


def flux1_controlled(draw: Draw) -> dict[str, Any]:
    """With what a ControlNet adds to each block's output."""
    return {
        **flux1(draw),
        "controlnet_block_samples": [draw.noise(1, 6, 128)],
        "controlnet_single_block_samples": [draw.noise(1, 6, 128)],
    }


def flux2(draw: Draw) -> dict[str, Any]:
    return {
        "hidden_states": draw.noise(1, 6, 16),
        "encoder_hidden_states": draw.noise(1, 4, 32),
        "timestep": draw.times(1),
        "img_ids": draw.ids(4, 1, 6, 4).float(),
        "txt_ids": draw.ids(4, 1, 4, 4).float(),
    }


def flux2_guidance(draw: Draw) -> dict[str, Any]:
    return {**flux2(draw), "guidance": draw.times(1)}


def flux3(draw: Draw) -> dict[str, Any]:
    return {
        "hidden_states": draw.noise(2, 6, 16),
        "encoder_hidden_states": draw.noise(2, 4, 32),
        "timestep": draw.times(2),
        "img_ids": draw.ids(4, 6, 4).float(),
        "txt_ids": draw.ids(4, 4, 4).float(),
    }


def flux3_reference(draw: Draw) -> dict[str, Any]:
    return {
        **flux3(draw),
        "image_cond_hidden_states": draw.noise(2, 5, 12),
        "image_cond_ids": draw.ids(4, 5, 4).float(),
    }


def flux3_flow_map(draw: Draw) -> dict[str, Any]:
    return {**flux3(draw), "target_timestep": draw.times(2)}


CASES = [
    Case("FluxTransformer2DModel", FLUX1, flux1, ranks=(2, 4, 8)),
    Case(
        "FluxTransformer2DModel",
        {**FLUX1, "guidance_embeds": True},
        flux1_guidance,
        option="guidance embeds",
    ),
    Case("FluxTransformer2DModel", FLUX1, flux1_controlled, option="controlled"),
    Case("Flux2Transformer2DModel", FLUX2, flux2_guidance, ranks=(2, 4, 8)),
    Case(
        "Flux2Transformer2DModel",
        {**FLUX2, "guidance_embeds": False},
        flux2,
        option="no guidance",
    ),
    Case(
        "Flux2Transformer2DModel",
        {**FLUX2, "mlp_ratio": 2.5, "out_channels": 8},
        flux2_guidance,
        option="fractional MLP ratio",
    ),
    Case("Flux3Transformer2DModel", FLUX3, flux3, ranks=(2, 4, 8)),
    Case("Flux3Transformer2DModel", FLUX3, flux3_reference, option="reference image"),
    Case(
        "Flux3Transformer2DModel",
        {**FLUX3, "flow_map": True},
        flux3_flow_map,
        option="flow map",
    ),
]

PUBLISHED = [
    Published(
        "black-forest-labs/FLUX.1-dev",
        "FluxTransformer2DModel",
        {"guidance_embeds": True},
    ),
    Published("black-forest-labs/FLUX.1-schnell", "FluxTransformer2DModel", {}),
    Published("black-forest-labs/FLUX.2-dev", "Flux2Transformer2DModel", {}),
    Published(
        "black-forest-labs/FLUX.2-klein-4B",
        "Flux2Transformer2DModel",
        {
            "num_layers": 5,
            "num_single_layers": 20,
            "num_attention_heads": 24,
            "joint_attention_dim": 7680,
            "guidance_embeds": False,
        },
    ),
    Published(
        "black-forest-labs/FLUX.2-klein-9B",
        "Flux2Transformer2DModel",
        {
            "num_layers": 8,
            "num_single_layers": 24,
            "num_attention_heads": 32,
            "joint_attention_dim": 12288,
            "guidance_embeds": False,
        },
    ),
]
