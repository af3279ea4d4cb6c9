"""SANA-WM.

Its softmax blocks round fp32 queries, keys and values to bf16, where one bit that falls otherwise
is 2e-5 in the whole model's output: with a camera the cases have none of those blocks.
"""

from __future__ import annotations

from typing import Any

import torch

from tests.zoo.case import Case, Draw, Published

SANA_WM = {
    "in_channels": 4,
    "num_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "softmax_every_n": 0,
    "linear_head_dim": 16,
    "chunk_plucker_channels": 6,
    "caption_channels": 20,
}


def camera(draw: Draw) -> dict[str, Any]:
    """What a pipeline can prepare: ray transforms of each token, for a camera that moves."""
    transforms = torch.eye(4).repeat(1, 48, 1, 1)
    transforms[0, :, 0, 3] = torch.arange(48) // 16 * 0.1
    return {
        "camera_conditions": draw.noise(1, 3, 20),
        "cam_pos_embeds": {
            "P": transforms.to(draw.dtype),
            "P_inv": transforms.inverse().to(draw.dtype),
            "absmap": draw.noise(1, 3, 3, 4, 4),
        },
    }


def sana_wm(draw: Draw) -> dict[str, Any]:
    return {
        "hidden_states": draw.noise(1, 4, 3, 4, 4),
        "timestep": draw.ids(1000, 1, 1, 3),
        "encoder_hidden_states": draw.noise(1, 6, 20),
        "mask": draw.ids(2, 1, 6),
        "chunk_plucker": draw.noise(1, 6, 3, 4, 4),
        **camera(draw),
    }


def no_camera(draw: Draw) -> dict[str, Any]:
    inputs = sana_wm(draw)
    return {**inputs, "camera_conditions": None, "cam_pos_embeds": None, "chunk_plucker": None}


CASES = [
    Case("SanaWMTransformer3DModel", SANA_WM, sana_wm),
    Case(
        "SanaWMTransformer3DModel",
        {**SANA_WM, "k_conv_only": False, "qk_norm": False, "cross_norm": False},
        sana_wm,
        option="no qk norm, all filtered",
    ),
    Case(
        "SanaWMTransformer3DModel",
        {**SANA_WM, "ffn_type": "mlp", "use_chunk_plucker_post_attn": False},
        sana_wm,
        option="plain MLP, rays embedded",
    ),
    Case(
        "SanaWMTransformer3DModel",
        {**SANA_WM, "softmax_every_n": 2},
        no_camera,
        option="softmax, no camera",
    ),
]

PUBLISHED = [
    Published(
        "Efficient-Large-Model/SANA-WM_bidirectional-diffusers", "SanaWMTransformer3DModel", {}
    ),
]
