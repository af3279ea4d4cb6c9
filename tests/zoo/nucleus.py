"""Nucleus-Image."""

from __future__ import annotations

from typing import Any

import torch

from tests.zoo.case import Case, Draw, Published

NUCLEUS = {
    "in_channels": 8,
    "out_channels": 2,
    "num_layers": 3,
    "attention_head_dim": 8,
    "num_attention_heads": 8,
    "joint_attention_dim": 24,
    "axes_dims_rope": (4, 2, 2),
    "mlp_ratio": 4.0,
    "dense_moe_strategy": "leave_first_block_dense",
    "num_experts": 4,
    "moe_intermediate_dim": 32,
    "capacity_factors": 2.0,
}


def nucleus(draw: Draw) -> dict[str, Any]:
    return {
        "hidden_states": draw.noise(1, 8, 8),
        "img_shapes": [(1, 2, 4)],
        "encoder_hidden_states": draw.noise(1, 5, 24),
        "timestep": torch.tensor([0.5], dtype=draw.dtype),
    }


def nucleus_masked(draw: Draw) -> dict[str, Any]:
    mask = torch.tensor([[True, True, True, False, False]])
    return {**nucleus(draw), "encoder_hidden_states_mask": mask}


CASES = [
    Case("NucleusMoEImageTransformer2DModel", NUCLEUS, nucleus),
    Case(
        "NucleusMoEImageTransformer2DModel",
        {**NUCLEUS, "moe_enabled": False, "num_key_value_heads": 2},
        nucleus,
        option="dense, grouped heads",
    ),
    Case(
        "NucleusMoEImageTransformer2DModel",
        {**NUCLEUS, "use_sigmoid": True, "dense_moe_strategy": "all_moe", "use_grouped_mm": True},
        nucleus,
        option="sigmoid router, all layers MoE",
    ),
]

PUBLISHED: list[Published] = []
