"""Mochi."""

from __future__ import annotations

from typing import Any

from tests.zoo.case import Case, Draw, Published

MOCHI = {
    "num_attention_heads": 8,
    "attention_head_dim": 12,
    "num_layers": 3,
    "pooled_projection_dim": 48,
    "in_channels": 4,
    "text_embed_dim": 32,
    "time_embed_dim": 16,
}


def mochi(draw: Draw) -> dict[str, Any]:
    mask = draw.ids(2, 2, 6)
    mask[:, 0] = 1  # some text at least
    return {
        "hidden_states": draw.noise(2, 4, 2, 4, 4),
        "encoder_hidden_states": draw.noise(2, 6, 32),
        "timestep": draw.ids(1000, 2),
        "encoder_attention_mask": mask.bool(),
    }


CASES = [Case("MochiTransformer3DModel", MOCHI, mochi)]

PUBLISHED = [Published("genmo/mochi-1-preview", "MochiTransformer3DModel", {})]
