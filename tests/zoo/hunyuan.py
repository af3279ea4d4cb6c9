"""HunyuanVideo, HunyuanVideo 1.5, FramePack and HunyuanImage."""

from __future__ import annotations

from typing import Any

import torch

from tests.zoo.case import Case, Draw, Published

VIDEO = {
    "in_channels": 4,
    "out_channels": 4,
    "num_attention_heads": 8,
    "attention_head_dim": 16,
    "num_layers": 1,
    "num_single_layers": 2,
    "num_refiner_layers": 1,
    "text_embed_dim": 24,
    "pooled_projection_dim": 20,
    "rope_axes_dim": (4, 6, 6),
}
VIDEO15 = {
    "in_channels": 9,
    "out_channels": 4,
    "num_attention_heads": 8,
    "attention_head_dim": 16,
    "num_layers": 2,
    "num_refiner_layers": 1,
    "text_embed_dim": 24,
    "text_embed_2_dim": 20,
    "image_embed_dim": 12,
    "rope_axes_dim": (4, 6, 6),
}
FRAMEPACK = {**VIDEO, "has_image_proj": True, "image_proj_dim": 12, "has_clean_x_embedder": True}
IMAGE = {
    "in_channels": 4,
    "out_channels": 4,
    "num_attention_heads": 8,
    "attention_head_dim": 16,
    "num_layers": 1,
    "num_single_layers": 2,
    "num_refiner_layers": 1,
    "text_embed_dim": 24,
    "rope_axes_dim": (8, 8),
}


def padded(count: int, valid: int) -> torch.Tensor:
    """A mask over one sample's tokens, of which `valid` are text."""
    return (torch.arange(count) < valid).long().unsqueeze(0)


def video(draw: Draw) -> dict[str, Any]:
    return {
        "hidden_states": draw.noise(1, 4, 2, 4, 4),
        "timestep": draw.ids(1000, 1),
        "encoder_hidden_states": draw.noise(1, 5, 24),
        "encoder_attention_mask": padded(5, 4),
        "pooled_projections": draw.noise(1, 20),
        "guidance": draw.ids(1000, 1),
    }


def video_no_guidance(draw: Draw) -> dict[str, Any]:
    return {**video(draw), "guidance": None}


def video_concat(draw: Draw) -> dict[str, Any]:
    return {**video_no_guidance(draw), "hidden_states": draw.noise(1, 9, 2, 4, 4)}


def video15(draw: Draw) -> dict[str, Any]:
    return {
        "hidden_states": draw.noise(1, 9, 2, 4, 4),
        "timestep": draw.times(1),
        "encoder_hidden_states": draw.noise(1, 5, 24),
        "encoder_attention_mask": padded(5, 4),
        "encoder_hidden_states_2": draw.noise(1, 3, 20),
        "encoder_attention_mask_2": padded(3, 2),
        "image_embeds": draw.noise(1, 4, 12),
    }


def video15_text(draw: Draw) -> dict[str, Any]:
    """No image: its features are all zero, and their tokens are masked."""
    return {**video15(draw), "image_embeds": torch.zeros(1, 4, 12, dtype=draw.dtype)}


def video15_mean_flow(draw: Draw) -> dict[str, Any]:
    return {**video15(draw), "timestep_r": draw.times(1)}


def framepack(draw: Draw) -> dict[str, Any]:
    return {
        "hidden_states": draw.noise(1, 4, 2, 8, 8),
        "timestep": draw.ids(1000, 1),
        "encoder_hidden_states": draw.noise(1, 5, 24),
        "encoder_attention_mask": padded(5, 4),
        "pooled_projections": draw.noise(1, 20),
        "image_embeds": draw.noise(1, 3, 12),
        "indices_latents": torch.arange(7, 9),
        "guidance": draw.ids(1000, 1),
        "latents_clean": draw.noise(1, 4, 1, 8, 8),
        "indices_latents_clean": torch.arange(6, 7),
        "latents_history_2x": draw.noise(1, 4, 2, 8, 8),
        "indices_latents_history_2x": torch.arange(4, 6),
        "latents_history_4x": draw.noise(1, 4, 4, 8, 8),
        "indices_latents_history_4x": torch.arange(0, 4),
    }


def image(draw: Draw) -> dict[str, Any]:
    return {
        "hidden_states": draw.noise(1, 4, 3, 4),
        "timestep": draw.times(1),
        "encoder_hidden_states": draw.noise(1, 5, 24),
        "encoder_attention_mask": padded(5, 4),
    }


def image_distilled(draw: Draw) -> dict[str, Any]:
    return {**image(draw), "guidance": draw.times(1), "timestep_r": draw.times(1)}


def image_glyphs(draw: Draw) -> dict[str, Any]:
    """With what a second text encoder says of text that is to be written in the image."""
    return {
        **image(draw),
        "encoder_hidden_states_2": draw.noise(1, 3, 20),
        "encoder_attention_mask_2": padded(3, 2),
    }


def image_refiner(draw: Draw) -> dict[str, Any]:
    return {
        **image(draw),
        "hidden_states": draw.noise(1, 4, 1, 3, 4),
        "guidance": draw.times(1),
    }


CASES = [
    Case("HunyuanVideoTransformer3DModel", VIDEO, video, ranks=(2, 4, 8)),
    Case(
        "HunyuanVideoTransformer3DModel",
        {
            **VIDEO,
            "in_channels": 9,
            "guidance_embeds": False,
            "image_condition_type": "latent_concat",
        },
        video_concat,
        option="image concatenated",
    ),
    Case(
        "HunyuanVideoTransformer3DModel",
        {**VIDEO, "num_layers": 2, "image_condition_type": "token_replace"},
        video,
        option="image replaces tokens",
    ),
    Case(
        "HunyuanVideoTransformer3DModel",
        {**VIDEO, "guidance_embeds": False, "mlp_ratio": 2.5},
        video_no_guidance,
        option="no guidance, fractional MLP ratio",
    ),
    Case("HunyuanVideo15Transformer3DModel", VIDEO15, video15, ranks=(2, 4, 8)),
    Case("HunyuanVideo15Transformer3DModel", VIDEO15, video15_text, option="text only"),
    Case(
        "HunyuanVideo15Transformer3DModel",
        {**VIDEO15, "use_meanflow": True},
        video15_mean_flow,
        option="mean flow",
    ),
    Case("HunyuanVideoFramepackTransformer3DModel", FRAMEPACK, framepack),
    Case("HunyuanImageTransformer2DModel", IMAGE, image),
    Case(
        "HunyuanImageTransformer2DModel",
        {**IMAGE, "num_attention_heads": 6},
        image,
        option="6 heads",
        ranks=(2,),
        padded=(4,),
    ),
    Case(
        "HunyuanImageTransformer2DModel",
        {**IMAGE, "guidance_embeds": True, "use_meanflow": True},
        image_distilled,
        option="guidance embeds, mean flow",
    ),
    Case(
        "HunyuanImageTransformer2DModel",
        {**IMAGE, "text_embed_2_dim": 20},
        image_glyphs,
        option="second text encoder",
    ),
    Case(
        "HunyuanImageTransformer2DModel",
        {
            **IMAGE,
            "patch_size": (1, 1, 1),
            "rope_axes_dim": (4, 6, 6),
            "guidance_embeds": True,
        },
        image_refiner,
        option="refiner",
    ),
]

VIDEO15_REPOS = (
    "hunyuanvideo-community/HunyuanVideo-1.5-480p_t2v",
    "hunyuanvideo-community/HunyuanVideo-1.5-480p_i2v",
)
PUBLISHED = [
    Published("hunyuanvideo-community/HunyuanVideo", "HunyuanVideoTransformer3DModel", {}),
    Published(
        "hunyuanvideo-community/HunyuanVideo-I2V",
        "HunyuanVideoTransformer3DModel",
        {"image_condition_type": "token_replace"},
    ),
    Published(
        "hunyuanvideo-community/HunyuanVideo-I2V-33ch",
        "HunyuanVideoTransformer3DModel",
        {
            "in_channels": 33,
            "guidance_embeds": False,
            "image_condition_type": "latent_concat",
        },
    ),
    *(Published(repo, "HunyuanVideo15Transformer3DModel", {}) for repo in VIDEO15_REPOS),
    Published(
        "lllyasviel/FramePackI2V_HY",
        "HunyuanVideoFramepackTransformer3DModel",
        {"has_image_proj": True, "has_clean_x_embedder": True},
    ),
    Published(
        "hunyuanvideo-community/HunyuanImage-2.1-Diffusers",
        "HunyuanImageTransformer2DModel",
        {"text_embed_2_dim": 1472},
    ),
    Published(
        "hunyuanvideo-community/HunyuanImage-2.1-Distilled-Diffusers",
        "HunyuanImageTransformer2DModel",
        {"text_embed_2_dim": 1472, "guidance_embeds": True, "use_meanflow": True},
    ),
    Published(
        "hunyuanvideo-community/HunyuanImage-2.1-Refiner-Diffusers",
        "HunyuanImageTransformer2DModel",
        {
            "in_channels": 128,
            "num_attention_heads": 26,
            "patch_size": (1, 1, 1),
            "rope_axes_dim": (16, 56, 56),
            "guidance_embeds": True,
        },
    ),
]
