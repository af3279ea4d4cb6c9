"""Sana, SANA-Video and Sana's ControlNet."""

from __future__ import annotations

from typing import Any

from tests.zoo.case import Case, Draw, Published

# Linear attention divides by what survives a ReLU: heads are wide enough that some of it does.
SANA = {
    "in_channels": 4,
    "out_channels": 4,
    "num_attention_heads": 8,
    "attention_head_dim": 16,
    "num_layers": 2,
    "num_cross_attention_heads": 4,
    "cross_attention_head_dim": 32,
    "cross_attention_dim": 128,
    "caption_channels": 20,
    "sample_size": 4,
}
VIDEO = {
    **SANA,
    "attention_head_dim": 12,
    "cross_attention_head_dim": 24,
    "cross_attention_dim": 96,
    "rope_max_seq_len": 16,
}


def sana(draw: Draw) -> dict[str, Any]:
    return {
        "hidden_states": draw.noise(2, 4, 4, 4),
        "encoder_hidden_states": draw.noise(2, 6, 20),
        "encoder_attention_mask": draw.ids(2, 2, 6),
        "timestep": draw.times(2),
    }


def guided(draw: Draw) -> dict[str, Any]:
    return {**sana(draw), "guidance": draw.times(2)}


def controlled(draw: Draw) -> dict[str, Any]:
    return {**sana(draw), "controlnet_block_samples": (draw.noise(2, 16, 128),)}


def control(draw: Draw) -> dict[str, Any]:
    return {**sana(draw), "controlnet_cond": draw.noise(2, 4, 4, 4), "conditioning_scale": 0.7}


def video(draw: Draw) -> dict[str, Any]:
    return {
        "hidden_states": draw.noise(2, 4, 3, 4, 4),
        "encoder_hidden_states": draw.noise(2, 6, 20),
        "encoder_attention_mask": draw.ids(2, 2, 6),
        "timestep": draw.times(2),
    }


def video_guided(draw: Draw) -> dict[str, Any]:
    return {**video(draw), "guidance": draw.times(2)}


def video_per_token(draw: Draw) -> dict[str, Any]:
    return {**video(draw), "timestep": draw.noise(2, 12).abs()}


CASES = [
    Case("SanaTransformer2DModel", SANA, sana),
    Case(
        "SanaTransformer2DModel",
        {**SANA, "qk_norm": "rms_norm_across_heads", "guidance_embeds": True},
        guided,
        option="qk norm, guidance embeds",
    ),
    Case(
        "SanaTransformer2DModel",
        {**SANA, "interpolation_scale": 1, "attention_bias": True},
        controlled,
        option="positions, bias, controlled",
    ),
    Case("SanaControlNetModel", SANA, control),
    Case("SanaVideoTransformer3DModel", VIDEO, video),
    Case(
        "SanaVideoTransformer3DModel",
        {**VIDEO, "guidance_embeds": True, "qk_norm": None},
        video_guided,
        option="guidance embeds, no qk norm",
    ),
    Case("SanaVideoTransformer3DModel", VIDEO, video_per_token, option="per-token timesteps"),
]

SMALL = {
    "num_attention_heads": 36,
    "num_layers": 28,
    "num_cross_attention_heads": 16,
    "cross_attention_head_dim": 72,
    "cross_attention_dim": 1152,
}
QK_NORM = {"qk_norm": "rms_norm_across_heads"}

PUBLISHED = [
    Published("Efficient-Large-Model/Sana_1600M_1024px_diffusers", "SanaTransformer2DModel", {}),
    Published("Efficient-Large-Model/Sana_600M_1024px_diffusers", "SanaTransformer2DModel", SMALL),
    Published(
        "Efficient-Large-Model/SANA1.5_4.8B_1024px_diffusers",
        "SanaTransformer2DModel",
        {**QK_NORM, "num_layers": 60},
    ),
    Published(
        "Efficient-Large-Model/Sana_Sprint_1.6B_1024px_diffusers",
        "SanaTransformer2DModel",
        {**QK_NORM, "guidance_embeds": True},
    ),
    Published(
        "Efficient-Large-Model/SANA-Video_2B_480p_diffusers",
        "SanaVideoTransformer3DModel",
        {"mlp_ratio": 3.0},
    ),
    Published(
        "ishan24/Sana_600M_1024px_ControlNetPlus_diffusers",
        "SanaControlNetModel",
        {**SMALL, "num_layers": 7},
    ),
]
