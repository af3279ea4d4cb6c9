"""ERNIE-Image."""

from __future__ import annotations

from typing import Any

import torch

from tests.zoo.case import Case, Draw, Published

ERNIE = {
    "hidden_size": 64,
    "num_attention_heads": 8,
    "num_layers": 2,
    "ffn_hidden_size": 48,
    "in_channels": 4,
    "out_channels": 4,
    "text_in_dim": 24,
    "rope_axes_dim": (4, 2, 2),
}


def ernie(draw: Draw) -> dict[str, Any]:
    return {
        "hidden_states": draw.noise(1, 4, 2, 4),
        "timestep": torch.tensor([0.5], dtype=draw.dtype),
        "text_bth": draw.noise(1, 5, 24),
        "text_lens": torch.tensor([3]),
    }


def wide_text(draw: Draw) -> dict[str, Any]:
    return {**ernie(draw), "text_bth": draw.noise(1, 5, 64)}


CASES = [
    Case("ErnieImageTransformer2DModel", ERNIE, ernie),
    Case(
        "ErnieImageTransformer2DModel",
        {**ERNIE, "text_in_dim": 64, "patch_size": 2},
        wide_text,
        option="text as wide as the model",
    ),
]

ERNIE_8B = {
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_layers": 36,
    "ffn_hidden_size": 12288,
    "text_in_dim": 3072,
}

PUBLISHED = [Published("baidu/ERNIE-Image", "ErnieImageTransformer2DModel", ERNIE_8B)]
