"""JoyImage-Edit and JoyImage-Edit-Plus."""

from __future__ import annotations

from typing import Any

import torch

from tests.zoo.case import Case, Draw, Published

JOYIMAGE = {
    "in_channels": 4,
    "hidden_size": 64,
    "num_attention_heads": 8,
    "text_dim": 24,
    "mlp_width_ratio": 2.0,
    "num_layers": 2,
    "rope_dim_list": [2, 2, 4],
}


def image(draw: Draw) -> dict[str, Any]:
    return {
        "hidden_states": draw.noise(1, 4, 1, 4, 6),
        "timestep": torch.tensor([0.5], dtype=draw.dtype),
        "encoder_hidden_states": draw.noise(1, 5, 24),
    }


def images(draw: Draw) -> dict[str, Any]:
    """An image to edit beside the one to make."""
    return {**image(draw), "hidden_states": draw.noise(1, 2, 4, 1, 4, 6)}


def patches(draw: Draw) -> dict[str, Any]:
    """Patches of two images of unlike sizes, and padding."""
    return {
        "hidden_states": draw.noise(1, 12, 4, 1, 2, 2),
        "timestep": torch.tensor([0.5], dtype=draw.dtype),
        "encoder_hidden_states": draw.noise(1, 5, 24),
        "shape_list": [[(1, 2, 2), (1, 2, 3)]],
    }


def patches_masked(draw: Draw) -> dict[str, Any]:
    mask = torch.tensor([[1, 1, 1, 1, 0]])
    return {**patches(draw), "encoder_hidden_states_mask": mask}


CASES = [
    Case("JoyImageEditTransformer3DModel", JOYIMAGE, image),
    Case(
        "JoyImageEditTransformer3DModel",
        {**JOYIMAGE, "rope_type": "mrope"},
        images,
        option="mrope, more images",
    ),
    Case("JoyImageEditPlusTransformer3DModel", JOYIMAGE, patches),
    Case("JoyImageEditPlusTransformer3DModel", JOYIMAGE, patches_masked, option="masked text"),
]

JOYIMAGE_32 = {"hidden_size": 4096, "num_attention_heads": 32, "num_layers": 40, "theta": 10000}

PUBLISHED = [
    Published(
        "jdopensource/JoyAI-Image-Edit-Diffusers", "JoyImageEditTransformer3DModel", JOYIMAGE_32
    ),
    Published(
        "jdopensource/JoyAI-Image-Edit-Plus-Diffusers",
        "JoyImageEditPlusTransformer3DModel",
        JOYIMAGE_32,
    ),
]
