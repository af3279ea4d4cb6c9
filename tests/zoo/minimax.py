"""MiniMax-H3 (video with sound) and MiniMax Music 3."""

from __future__ import annotations

from typing import Any

import torch

from tests.zoo.case import Case, Draw, Published

H3 = {
    "num_attention_heads": 8,
    "attention_head_dim": 16,
    "hidden_size": 48,
    "num_layers": 2,
    "num_refiner_layers": 1,
    "ffn_dim": 40,
    "in_channels": 4,
    "audio_in_channels": 8,
    "text_dim": 24,
    "freq_dim": 16,
    "time_embed_hidden_dim": 48,
    "time_embed_dim": 24,
    "rope_freq_dim": 2,
}
MUSIC3 = {
    "in_channels": 8,
    "condition_dim": 16,
    "num_layers": 2,
    "num_attention_heads": 8,
    "attention_head_dim": 8,
    "ff_inner_dim": 40,
    "rotary_dim": 4,
    "fourier_embedding_dim": 16,
}


def h3(draw: Draw) -> dict[str, Any]:
    """4 tokens of text, then 6 of video and 3 of audio, each at a noise level of its own."""
    return {
        "hidden_states": draw.noise(1, 6, 16),
        "audio_hidden_states": draw.noise(1, 3, 8),
        "encoder_hidden_states": draw.noise(1, 4, 24),
        "timestep": torch.tensor([0.25, 0.5], dtype=draw.dtype),
        "timestep_indices": torch.tensor([0] * 10 + [1] * 3),
        "token_tags": torch.tensor([1] * 4 + [0] * 6 + [2] * 3),
        "position_ids": draw.ids(5, 13, 3),
        "video_indices": torch.arange(4, 10),
        "audio_indices": torch.arange(10, 13),
        "text_indices": torch.arange(4),
    }


def music3(draw: Draw) -> dict[str, Any]:
    return {
        "hidden_states": draw.noise(1, 8, 6),
        "timestep": torch.tensor([0.5], dtype=draw.dtype),
        "encoder_hidden_states": draw.noise(1, 6, 16),
    }


CASES = [
    Case("MiniMaxH3Transformer3DModel", H3, h3),
    Case("MiniMaxMusic3Transformer1DModel", MUSIC3, music3),
]

PUBLISHED = [
    Published("MiniMaxAI/MiniMax-H3", "MiniMaxH3Transformer3DModel", {}),
    Published("MiniMaxAI/MiniMax-Music3", "MiniMaxMusic3Transformer1DModel", {}),
]
