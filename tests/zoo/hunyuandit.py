"""HunyuanDiT and its ControlNet."""

from __future__ import annotations

from typing import Any

from tests.zoo.case import Case, Draw, Published

HUNYUAN = {
    "num_attention_heads": 8,
    "attention_head_dim": 8,
    "in_channels": 4,
    "patch_size": 2,
    "sample_size": 8,
    "hidden_size": 64,
    "mlp_ratio": 4.39,
    "cross_attention_dim": 24,
    "cross_attention_dim_t5": 32,
    "pooled_projection_dim": 16,
    "text_len": 4,
    "text_len_t5": 6,
}
V1_2 = {"use_style_cond_and_image_meta_size": False}


def hunyuan(draw: Draw) -> dict[str, Any]:
    return {
        "hidden_states": draw.noise(2, 4, 4, 4),
        "timestep": draw.times(2),
        "encoder_hidden_states": draw.noise(2, 4, 24),
        "text_embedding_mask": draw.ids(2, 2, 4),
        "encoder_hidden_states_t5": draw.noise(2, 6, 32),
        "text_embedding_mask_t5": draw.ids(2, 2, 6),
        "image_meta_size": draw.noise(2, 6),
        "style": draw.ids(1, 2),
        "image_rotary_emb": (draw.noise(4, 8), draw.noise(4, 8)),
    }


def controlled(draw: Draw) -> dict[str, Any]:
    return {**hunyuan(draw), "controlnet_block_samples": [draw.noise(2, 4, 64)]}


def control(draw: Draw) -> dict[str, Any]:
    return {**hunyuan(draw), "controlnet_cond": draw.noise(2, 4, 4, 4), "conditioning_scale": 0.7}


CASES = [
    Case("HunyuanDiT2DModel", {**HUNYUAN, "num_layers": 4}, controlled),
    Case(
        "HunyuanDiT2DModel",
        {**HUNYUAN, **V1_2, "num_layers": 4, "learn_sigma": False},
        hunyuan,
        option="no style, no sigma",
    ),
    Case("HunyuanDiT2DControlNetModel", {**HUNYUAN, "transformer_num_layers": 6}, control),
    Case(
        "HunyuanDiT2DControlNetModel",
        {**HUNYUAN, **V1_2, "transformer_num_layers": 6},
        control,
        option="no style",
    ),
]

WIDE = {
    "in_channels": 4,
    "patch_size": 2,
    "sample_size": 128,
    "hidden_size": 1408,
    "mlp_ratio": 4.3637,
}

PUBLISHED = [
    Published(
        "Tencent-Hunyuan/HunyuanDiT-Diffusers", "HunyuanDiT2DModel", {**WIDE, "num_layers": 40}
    ),
    Published(
        "Tencent-Hunyuan/HunyuanDiT-v1.2-Diffusers",
        "HunyuanDiT2DModel",
        {**WIDE, **V1_2, "num_layers": 40},
    ),
    Published(
        "Tencent-Hunyuan/HunyuanDiT-v1.2-ControlNet-Diffusers-Pose",
        "HunyuanDiT2DControlNetModel",
        {**WIDE, **V1_2},
    ),
]
