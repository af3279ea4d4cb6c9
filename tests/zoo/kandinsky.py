"""Kandinsky 5.0 and 6.0, and 6.0's super-resolution."""

from __future__ import annotations

from typing import Any

import torch

from tests.zoo.case import Case, Draw, Published

KANDINSKY5 = {
    "in_visual_dim": 4,
    "in_text_dim": 24,
    "in_text_dim2": 16,
    "time_dim": 32,
    "out_visual_dim": 4,
    "model_dim": 128,
    "ff_dim": 48,
    "num_text_blocks": 1,
    "num_visual_blocks": 2,
    "axes_dims": (4, 6, 6),
}
KANDINSKY6 = {
    **KANDINSKY5,
    "in_audio_dim": 6,
    "out_audio_dim": 6,
    "text_token_padding": True,
    "ca_rope": True,
    "cross_gates": True,
    "fix_modulation": True,
    "visual_token_type_num_embeddings": 2,
}
NARROW_SOUND = {
    "model_dim_a": 64,
    "time_dim_a": 16,
    "ff_dim_a": 40,
    "axes_dims_a": (4, 6, 6),
    "audio_freqs_scaling": 0.5,
}
SUPER_RESOLUTION = {
    "in_visual_dim": 3,
    "out_visual_dim": 5,
    "time_dim": 32,
    "model_dim": 128,
    "ff_dim": 48,
    "num_visual_blocks": 2,
    "axes_dims": (4, 6, 6),
    "nabla_window": (1, 1, 1),
}


def kandinsky5(draw: Draw) -> dict[str, Any]:
    return {
        "hidden_states": draw.noise(1, 2, 4, 4, 4),
        "encoder_hidden_states": draw.noise(1, 5, 24),
        "timestep": torch.tensor([500.0], dtype=draw.dtype),
        "pooled_projections": draw.noise(1, 16),
        "visual_rope_pos": tuple(torch.arange(2) for _ in range(3)),
        "text_rope_pos": torch.arange(5),
    }


def conditioned(draw: Draw) -> dict[str, Any]:
    """Frames to go on from, and a mask."""
    return {**kandinsky5(draw), "hidden_states": draw.noise(1, 2, 4, 4, 9)}


def video_and_sound(draw: Draw) -> dict[str, Any]:
    found = conditioned(draw)
    del found["text_rope_pos"]
    return {
        **found,
        "audio_hidden_states": draw.noise(1, 6, 6),
        "visual_token_type_ids": torch.tensor([[0, 1]]),
    }


def video(draw: Draw) -> dict[str, Any]:
    """Pictures only."""
    found = conditioned(draw)
    del found["text_rope_pos"]
    return found


def tiles(draw: Draw) -> dict[str, Any]:
    return {
        "hidden_states": draw.noise(1, 2, 8, 16, 7),
        "timestep": torch.tensor([500.0], dtype=draw.dtype),
    }


CASES = [
    Case("Kandinsky5Transformer3DModel", KANDINSKY5, kandinsky5),
    Case(
        "Kandinsky5Transformer3DModel",
        {**KANDINSKY5, "visual_cond": True},
        conditioned,
        option="conditioned",
    ),
    Case("Kandinsky6Transformer3DModel", {**KANDINSKY6, **NARROW_SOUND}, video_and_sound),
    Case(
        "Kandinsky6Transformer3DModel",
        {**KANDINSKY6, "ca_rope": False, "cross_gates": False, "fix_modulation": False},
        video_and_sound,
        option="sound as wide as video, plain gates",
    ),
    Case("Kandinsky6Transformer3DModel", KANDINSKY6, video, option="video only"),
    Case("Kandinsky6SRTransformer3DModel", SUPER_RESOLUTION, tiles),
]

LITE = {
    "in_visual_dim": 16,
    "out_visual_dim": 16,
    "model_dim": 1792,
    "ff_dim": 7168,
    "visual_cond": True,
}
PRO = {
    "in_visual_dim": 16,
    "out_visual_dim": 16,
    "time_dim": 1024,
    "model_dim": 4096,
    "ff_dim": 16384,
    "num_text_blocks": 4,
    "num_visual_blocks": 60,
    "axes_dims": (32, 48, 48),
    "visual_cond": True,
}
PRO6 = {
    "in_audio_dim": 40,
    "out_audio_dim": 40,
    "model_dim_a": 2048,
    "time_dim_a": 1024,
    "ff_dim_a": 7168,
    "axes_dims_a": (32, 48, 48),
    "audio_freqs_scaling": 0.144,
    "text_token_padding": True,
    "ca_rope": True,
    "cross_gates": True,
    "fix_modulation": True,
    "visual_token_type_num_embeddings": 2,
}

PUBLISHED = [
    Published(
        "kandinskylab/Kandinsky-5.0-T2V-Lite-sft-5s-Diffusers",
        "Kandinsky5Transformer3DModel",
        LITE,
    ),
    Published(
        "kandinskylab/Kandinsky-5.0-I2V-Pro-sft-5s-Diffusers", "Kandinsky5Transformer3DModel", PRO
    ),
    Published(
        "kandinskylab/Kandinsky-6.0-Pro-distill-5s-Diffusers", "Kandinsky6Transformer3DModel", PRO6
    ),
    Published(
        "kandinskylab/Kandinsky-6.0-VSR-distilled2steps-5s-Diffusers",
        "Kandinsky6SRTransformer3DModel",
        {},
    ),
]
