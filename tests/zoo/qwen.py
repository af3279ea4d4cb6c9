"""Qwen-Image and Qwen-Image 2.1."""

from __future__ import annotations

from typing import Any

import torch

from tests.zoo.case import Case, Draw, Published

QWEN = {
    "in_channels": 16,
    "out_channels": 4,
    "num_layers": 2,
    "attention_head_dim": 16,
    "num_attention_heads": 8,
    "joint_attention_dim": 32,
    "axes_dims_rope": (4, 4, 8),
}
QWEN21 = {
    "in_channels": 16,
    "out_channels": 16,
    "num_layers": 2,
    "attention_head_dim": 16,
    "num_attention_heads": 8,
    "context_in_dim": 32,
    "axes_dims_rope": (4, 4, 8),
}


def qwen(draw: Draw) -> dict[str, Any]:
    mask = torch.ones(1, 4, dtype=torch.bool)
    mask[:, 3] = False
    return {
        "hidden_states": draw.noise(1, 6, 16),
        "encoder_hidden_states": draw.noise(1, 4, 32),
        "encoder_hidden_states_mask": mask,
        "timestep": draw.times(1),
        "img_shapes": [[(1, 2, 3)]],
    }


def qwen_edit(draw: Draw) -> dict[str, Any]:
    """The image that is made, and one that it is made from."""
    return {
        **qwen(draw),
        "hidden_states": draw.noise(1, 10, 16),
        "img_shapes": [[(1, 2, 3), (1, 2, 2)]],
    }


def qwen_layered(draw: Draw) -> dict[str, Any]:
    """Two layers, and the image that they are made from."""
    return {
        **qwen(draw),
        "hidden_states": draw.noise(1, 16, 16),
        "img_shapes": [[(1, 2, 3), (1, 2, 3), (1, 2, 2)]],
        "additional_t_cond": draw.ids(2, 1),
    }


def qwen_controlled(draw: Draw) -> dict[str, Any]:
    """With what a ControlNet adds to each block's output."""
    return {**qwen(draw), "controlnet_block_samples": [draw.noise(1, 6, 128)]}


def qwen21(draw: Draw) -> dict[str, Any]:
    """Four tokens of text and a target image: each of its slots is four latent tokens."""
    return {
        "hidden_states": draw.noise(1, 8, 16),
        "encoder_hidden_states": draw.noise(1, 4, 32),
        "timestep": draw.times(1),
        "img_shapes": [[(1, 2, 4)]],
        "img_mask": torch.tensor([[False] * 4 + [True] * 2]),
    }


def qwen21_edit(draw: Draw) -> dict[str, Any]:
    """Text, a condition image among it, and the target image; the last of the text is padding."""
    return {
        "hidden_states": draw.noise(1, 12, 16),
        "encoder_hidden_states": draw.noise(1, 5, 32),
        "encoder_hidden_states_mask": torch.tensor([[True, True, True, True, False]]),
        "timestep": draw.times(1),
        "img_shapes": [[(1, 2, 2), (1, 2, 4)]],
        "img_mask": torch.tensor([[False, True, False, False, False, True, True]]),
    }


def qwen21_extract(draw: Draw) -> dict[str, Any]:
    """The first denoising step, which fills a cache of keys and values."""
    from diffusers.models.transformers.transformer_qwenimage21 import QwenImage21KVCache

    return {**qwen21(draw), "kv_cache": QwenImage21KVCache(2), "kv_cache_mode": "extract"}


CASES = [
    Case("QwenImageTransformer2DModel", QWEN, qwen, ranks=(2, 4, 8)),
    Case(
        "QwenImageTransformer2DModel",
        {**QWEN, "zero_cond_t": True},
        qwen_edit,
        option="edit, reference at time 0",
    ),
    Case(
        "QwenImageTransformer2DModel",
        {**QWEN, "use_additional_t_cond": True, "use_layer3d_rope": True},
        qwen_layered,
        option="layered",
    ),
    Case("QwenImageTransformer2DModel", QWEN, qwen_controlled, option="controlled"),
    Case("QwenImage21Transformer2DModel", QWEN21, qwen21, ranks=(2, 4, 8)),
    Case("QwenImage21Transformer2DModel", QWEN21, qwen21_edit, option="condition image"),
    Case("QwenImage21Transformer2DModel", QWEN21, qwen21_extract, option="cache filled"),
    Case(
        "QwenImage21Transformer2DModel",
        {**QWEN21, "causal_condition": False},
        qwen21_edit,
        option="no causal condition",
    ),
]

PUBLISHED = [
    Published("Qwen/Qwen-Image", "QwenImageTransformer2DModel", {}),
    Published("Qwen/Qwen-Image-Edit-2511", "QwenImageTransformer2DModel", {"zero_cond_t": True}),
    Published(
        "Qwen/Qwen-Image-Layered",
        "QwenImageTransformer2DModel",
        {"use_additional_t_cond": True, "use_layer3d_rope": True},
    ),
    Published("Qwen/Qwen-Image-2.1", "QwenImage21Transformer2DModel", {}),
]
