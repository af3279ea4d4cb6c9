"""ControlNets of FLUX.1, Qwen-Image and Stable Diffusion 3."""

from __future__ import annotations

from typing import Any

from tests.zoo.case import Case, Draw, Published
from tests.zoo.flux import FLUX1, flux1
from tests.zoo.qwen import QWEN, qwen
from tests.zoo.sd3 import SD3, sd3


def flux(draw: Draw) -> dict[str, Any]:
    return {**flux1(draw), "controlnet_cond": draw.noise(1, 6, 16)}


def flux_guidance(draw: Draw) -> dict[str, Any]:
    return {**flux(draw), "guidance": draw.times(1)}


def flux_union(draw: Draw) -> dict[str, Any]:
    return {**flux_guidance(draw), "controlnet_mode": draw.ids(4, 1, 1)}


def flux_hint(draw: Draw) -> dict[str, Any]:
    """The condition is an image, which convolutions turn into latents."""
    return {
        **flux_guidance(draw),
        "hidden_states": draw.noise(1, 4, 16),
        "img_ids": draw.ids(4, 4, 3).float(),
        "controlnet_cond": draw.noise(1, 3, 32, 32),
    }


def qwen_condition(draw: Draw) -> dict[str, Any]:
    return {**qwen(draw), "controlnet_cond": draw.noise(1, 6, 16)}


def qwen_inpaint(draw: Draw) -> dict[str, Any]:
    return {**qwen(draw), "controlnet_cond": draw.noise(1, 6, 20)}


def sd3_condition(draw: Draw) -> dict[str, Any]:
    return {**sd3(draw), "controlnet_cond": draw.noise(2, 4, 8, 8)}


def sd3_inpaint(draw: Draw) -> dict[str, Any]:
    return {**sd3(draw), "controlnet_cond": draw.noise(2, 5, 8, 8)}


def sd3_image_only(draw: Draw) -> dict[str, Any]:
    """What the transformer's own patch embedding gave, and no text."""
    return {
        "hidden_states": draw.noise(2, 16, 64),
        "controlnet_cond": draw.noise(2, 4, 8, 8),
        "pooled_projections": draw.noise(2, 20),
        "timestep": draw.ids(1000, 2),
    }


QWEN_CONTROLNET = {key: QWEN[key] for key in QWEN if key != "out_channels"}

CASES = [
    Case("FluxControlNetModel", FLUX1, flux),
    Case(
        "FluxControlNetModel",
        {**FLUX1, "guidance_embeds": True, "num_mode": 4},
        flux_union,
        option="union",
    ),
    Case(
        "FluxControlNetModel",
        {**FLUX1, "guidance_embeds": True, "num_layers": 2, "num_single_layers": 0},
        flux_guidance,
        option="no single blocks",
    ),
    Case(
        "FluxControlNetModel",
        {
            **FLUX1,
            "guidance_embeds": True,
            "patch_size": 2,
            "num_single_layers": 0,
            "conditioning_embedding_channels": 4,
        },
        flux_hint,
        option="condition is an image",
    ),
    Case("QwenImageControlNetModel", QWEN_CONTROLNET, qwen_condition),
    Case(
        "QwenImageControlNetModel",
        {**QWEN_CONTROLNET, "extra_condition_channels": 4},
        qwen_inpaint,
        option="inpainting",
    ),
    Case("SD3ControlNetModel", SD3, sd3_condition),
    Case(
        "SD3ControlNetModel",
        {
            **SD3,
            "extra_conditioning_channels": 1,
            "qk_norm": "rms_norm",
            "dual_attention_layers": (0, 1),
        },
        sd3_inpaint,
        option="inpainting, dual attention",
    ),
    Case(
        "SD3ControlNetModel",
        {**SD3, "joint_attention_dim": None, "use_pos_embed": False, "pos_embed_type": None},
        sd3_image_only,
        option="no text",
    ),
]

PUBLISHED = [
    Published(
        "InstantX/FLUX.1-dev-Controlnet-Union",
        "FluxControlNetModel",
        {"guidance_embeds": True, "num_layers": 5, "num_single_layers": 10, "num_mode": 10},
    ),
    Published(
        "XLabs-AI/flux-controlnet-canny-diffusers",
        "FluxControlNetModel",
        {
            "guidance_embeds": True,
            "num_layers": 2,
            "num_single_layers": 0,
            "patch_size": 2,
            "conditioning_embedding_channels": 16,
        },
    ),
    Published(
        "InstantX/Qwen-Image-ControlNet-Union", "QwenImageControlNetModel", {"num_layers": 5}
    ),
    Published(
        "stabilityai/stable-diffusion-3.5-large-controlnet-canny",
        "SD3ControlNetModel",
        {
            "num_layers": 19,
            "num_attention_heads": 38,
            "joint_attention_dim": None,
            "caption_projection_dim": 2048,
            "pos_embed_max_size": None,
            "pos_embed_type": None,
            "use_pos_embed": False,
            "force_zeros_for_pooled_projection": False,
        },
    ),
]
