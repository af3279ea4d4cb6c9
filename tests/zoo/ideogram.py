"""Ideogram 4."""

from __future__ import annotations

from typing import Any

import torch

from tests.zoo.case import Case, Draw, Published

IDEOGRAM4 = {
    "in_channels": 8,
    "num_layers": 2,
    "attention_head_dim": 8,
    "num_attention_heads": 8,
    "intermediate_size": 48,
    "adaln_dim": 10,
    "llm_features_dim": 24,
    "mrope_section": (2, 1, 1),
}
TEXT, IMAGE = 3, 2  # roles of tokens


def ideogram4(draw: Draw) -> dict[str, Any]:
    return {
        "hidden_states": draw.noise(1, 10, 8),
        "timestep": torch.tensor([0.5], dtype=draw.dtype),
        "encoder_hidden_states": draw.noise(1, 10, 24),
        "position_ids": draw.ids(6, 1, 10, 3),
        "segment_ids": torch.zeros(1, 10, dtype=torch.long),
        "indicator": torch.tensor([[TEXT] * 4 + [IMAGE] * 6]),
    }


def two_samples(draw: Draw) -> dict[str, Any]:
    """Two samples in one sequence, and a timestep a token."""
    return {
        **ideogram4(draw),
        "timestep": (draw.ids(8, 1, 10) / 8).to(draw.dtype),
        "segment_ids": torch.tensor([[0] * 5 + [1] * 5]),
        "indicator": torch.tensor([[TEXT] * 2 + [IMAGE] * 3 + [TEXT] * 2 + [IMAGE] * 3]),
    }


CASES = [
    Case("Ideogram4Transformer2DModel", IDEOGRAM4, ideogram4),
    Case("Ideogram4Transformer2DModel", IDEOGRAM4, two_samples, option="timestep a token"),
]

PUBLISHED = [Published("ideogram-ai/ideogram-v4", "Ideogram4Transformer2DModel", {})]
