"""EasyAnimate."""

from __future__ import annotations

from typing import Any

from tests.zoo.case import Case, Draw, Published

EASYANIMATE = {
    "num_attention_heads": 8,
    "attention_head_dim": 16,
    "in_channels": 4,
    "out_channels": 4,
    "patch_size": 2,
    "num_layers": 2,
    "mmdit_layers": 2,
    "time_embed_dim": 24,
    "text_embed_dim": 20,
}


def easyanimate(draw: Draw) -> dict[str, Any]:
    return {
        "hidden_states": draw.noise(1, 4, 2, 4, 4),
        "timestep": draw.times(1),
        "encoder_hidden_states": draw.noise(1, 5, 20),
    }


def two_encoders(draw: Draw) -> dict[str, Any]:
    return {**easyanimate(draw), "encoder_hidden_states_t5": draw.noise(1, 3, 20)}


def inpainting(draw: Draw) -> dict[str, Any]:
    return {**easyanimate(draw), "inpaint_latents": draw.noise(1, 5, 2, 4, 4)}


CASES = [
    Case("EasyAnimateTransformer3DModel", EASYANIMATE, easyanimate),
    Case(
        "EasyAnimateTransformer3DModel",
        {**EASYANIMATE, "in_channels": 9},
        inpainting,
        option="inpainting",
    ),
    Case(
        "EasyAnimateTransformer3DModel",
        {**EASYANIMATE, "add_norm_text_encoder": True, "text_embed_dim_t5": 20, "after_norm": True},
        two_encoders,
        option="two text encoders, norms",
    ),
    Case(
        "EasyAnimateTransformer3DModel",
        {**EASYANIMATE, "text_embed_dim_t5": 20},
        two_encoders,
        option="two text encoders",
    ),
]

V5_1 = {"out_channels": 16, "patch_size": 2, "add_norm_text_encoder": True}

PUBLISHED = [
    Published(
        "alibaba-pai/EasyAnimateV5.1-12b-zh-InP",
        "EasyAnimateTransformer3DModel",
        {**V5_1, "in_channels": 33},
    ),
    Published(
        "alibaba-pai/EasyAnimateV5.1-12b-zh-Control",
        "EasyAnimateTransformer3DModel",
        {**V5_1, "in_channels": 48},
    ),
]
