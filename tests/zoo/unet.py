"""UNets of Stable Diffusion."""

from __future__ import annotations

from typing import Any

from tests.zoo.case import Case, Draw, Published

XL = {
    "sample_size": 8,
    "block_out_channels": (16, 32, 64),
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
    "transformer_layers_per_block": (1, 1, 2),
    "attention_head_dim": (2, 4, 8),
    "norm_num_groups": 8,
    "cross_attention_dim": 20,
    "use_linear_projection": True,
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 8,
    "projection_class_embeddings_input_dim": 60,
}
SD = {
    "sample_size": 8,
    "block_out_channels": (32, 64),
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
    "attention_head_dim": 8,
    "norm_num_groups": 8,
    "cross_attention_dim": 20,
}


TWO = {
    **SD,
    "block_out_channels": (20, 40),
    "attention_head_dim": (5, 10),
    "norm_num_groups": 4,
    "use_linear_projection": True,
}


def sd(draw: Draw) -> dict[str, Any]:
    return {
        "sample": draw.noise(2, 4, 8, 8),
        "timestep": draw.ids(1000, 2),
        "encoder_hidden_states": draw.noise(2, 5, 20),
    }


def upscaler(draw: Draw) -> dict[str, Any]:
    return {
        **sd(draw),
        "sample": draw.noise(2, 7, 8, 8),
        "class_labels": draw.ids(10, 2),
        "encoder_attention_mask": draw.ids(2, 2, 5),
    }


def xl(draw: Draw) -> dict[str, Any]:
    added = {"text_embeds": draw.noise(2, 12), "time_ids": draw.noise(2, 6)}
    return {**sd(draw), "added_cond_kwargs": added}


CASES = [
    Case("UNet2DConditionModel", XL, xl),
    Case("UNet2DConditionModel", SD, sd, option="convolutions project"),
    Case(
        "UNet2DConditionModel",
        {**SD, "in_channels": 7, "num_class_embeds": 10, "only_cross_attention": (True, False)},
        upscaler,
        option="upscaler",
    ),
    Case(
        "UNet2DConditionModel",
        {**SD, "resnet_time_scale_shift": "scale_shift"},
        sd,
        option="scale and shift",
    ),
    Case("UNet2DConditionModel", TWO, sd, option="5 heads", ranks=(5,), padded=(2, 4)),
]

PUBLISHED = [
    Published(
        "stabilityai/stable-diffusion-xl-base-1.0",
        "UNet2DConditionModel",
        {
            "sample_size": 128,
            "block_out_channels": (320, 640, 1280),
            "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
            "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
            "transformer_layers_per_block": (1, 2, 10),
            "attention_head_dim": (5, 10, 20),
            "cross_attention_dim": 2048,
            "use_linear_projection": True,
            "addition_embed_type": "text_time",
            "addition_time_embed_dim": 256,
            "projection_class_embeddings_input_dim": 2816,
        },
    ),
    Published(
        "stable-diffusion-v1-5/stable-diffusion-v1-5",
        "UNet2DConditionModel",
        {"sample_size": 64, "cross_attention_dim": 768},
    ),
    Published(
        "stabilityai/stable-diffusion-2-1",
        "UNet2DConditionModel",
        {
            "sample_size": 96,
            "cross_attention_dim": 1024,
            "attention_head_dim": (5, 10, 20, 20),
            "use_linear_projection": True,
        },
    ),
]
