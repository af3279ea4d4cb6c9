"""PixArt and DiT, also as the class that once was both."""

from __future__ import annotations

from typing import Any

from tests.zoo.case import Case, Draw, Published

PIXART = {
    "num_attention_heads": 8,
    "attention_head_dim": 6,
    "num_layers": 2,
    "cross_attention_dim": 48,
    "caption_channels": 20,
    "sample_size": 8,
    "use_additional_conditions": False,
}
DIT = {
    "num_attention_heads": 8,
    "attention_head_dim": 4,
    "num_layers": 2,
    "sample_size": 8,
    "num_embeds_ada_norm": 12,
    "out_channels": 8,
}
OLD_PIXART = {
    **PIXART,
    "in_channels": 4,
    "out_channels": 8,
    "patch_size": 2,
    "attention_bias": True,
    "activation_fn": "gelu-approximate",
    "norm_type": "ada_norm_single",
    "norm_elementwise_affine": False,
    "num_embeds_ada_norm": 1000,
}
OLD_DIT = {
    **DIT,
    "in_channels": 4,
    "patch_size": 2,
    "attention_bias": True,
    "activation_fn": "gelu-approximate",
    "norm_type": "ada_norm_zero",
    "norm_elementwise_affine": False,
}


def pixart(draw: Draw) -> dict[str, Any]:
    return {
        "hidden_states": draw.noise(2, 4, 8, 8),
        "encoder_hidden_states": draw.noise(2, 5, 20),
        "encoder_attention_mask": draw.ids(2, 2, 5),
        "timestep": draw.ids(1000, 2),
        "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
    }


def sized(draw: Draw) -> dict[str, Any]:
    sizes = {"resolution": draw.noise(2, 2), "aspect_ratio": draw.noise(2, 1)}
    return {**pixart(draw), "added_cond_kwargs": sizes}


def uncaptioned(draw: Draw) -> dict[str, Any]:
    return {**pixart(draw), "encoder_hidden_states": draw.noise(2, 5, 48)}


def dit(draw: Draw) -> dict[str, Any]:
    return {
        "hidden_states": draw.noise(2, 4, 8, 8),
        "timestep": draw.ids(1000, 2),
        "class_labels": draw.ids(13, 2),
    }


CASES = [
    Case("PixArtTransformer2DModel", PIXART, pixart),
    Case(
        "PixArtTransformer2DModel",
        {**PIXART, "use_additional_conditions": True},
        sized,
        option="sizes",
    ),
    Case(
        "PixArtTransformer2DModel",
        {**PIXART, "caption_channels": None},
        uncaptioned,
        option="no caption projection",
    ),
    Case("DiTTransformer2DModel", DIT, dit),
    Case("Transformer2DModel", OLD_PIXART, pixart, option="PixArt"),
    Case("Transformer2DModel", OLD_DIT, dit, option="DiT"),
]

XL = {"caption_channels": 4096}
SIGMA = {**XL, "interpolation_scale": 2, "use_additional_conditions": False}

PUBLISHED = [
    Published("PixArt-alpha/PixArt-XL-2-1024-MS", "PixArtTransformer2DModel", XL),
    Published("PixArt-alpha/PixArt-Sigma-XL-2-1024-MS", "PixArtTransformer2DModel", SIGMA),
    Published("facebook/DiT-XL-2-256", "DiTTransformer2DModel", {"out_channels": 8}),
    Published(
        "facebook/DiT-XL-2-512",
        "DiTTransformer2DModel",
        {"out_channels": 8, "sample_size": 64},
    ),
]
