"""OmniGen."""

from __future__ import annotations

from typing import Any

import torch

from tests.zoo.case import Case, Draw, Published

OMNIGEN = {
    "hidden_size": 64,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "intermediate_size": 48,
    "num_layers": 2,
    "pad_token_id": 0,
    "vocab_size": 30,
    "rope_scaling": {"long_factor": [1.0, 1.1, 1.2, 1.3], "short_factor": [1.0, 1.0, 1.05, 1.1]},
    "pos_embed_max_size": 8,
    "time_step_dim": 16,
}


def omnigen(draw: Draw) -> dict[str, Any]:
    """Six tokens, four of them an input image's, one of time and the output image's four."""
    return {
        "hidden_states": draw.noise(1, 4, 4, 4),
        "timestep": draw.times(1),
        "input_ids": draw.ids(30, 1, 6),
        "input_img_latents": [draw.noise(1, 4, 4, 4)],
        "input_image_sizes": {0: [[1, 5]]},
        "attention_mask": torch.ones(1, 11, 11).tril(),
        "position_ids": torch.arange(11)[None],
    }


CASES = [Case("OmniGenTransformer2DModel", OMNIGEN, omnigen)]

PUBLISHED = [
    Published(
        "Shitao/OmniGen-v1-diffusers",
        "OmniGenTransformer2DModel",
        # only the lengths of the factors matter to the weights, and they touch none
        {"rope_scaling": {"long_factor": [1.0] * 48, "short_factor": [1.0] * 48}},
    ),
]
