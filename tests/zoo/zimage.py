"""Z-Image."""

from __future__ import annotations

from typing import Any

import torch

from tests.zoo.case import Case, Draw, Published

ZIMAGE = {
    "dim": 96,
    "n_layers": 2,
    "n_refiner_layers": 1,
    "n_heads": 8,
    "n_kv_heads": 8,
    "cap_feat_dim": 24,
    "axes_dims": (4, 4, 4),
    "axes_lens": (128, 32, 32),
}

TIMES = torch.tensor([0.125, 0.5])  # a thousand times these is exact in bf16 too


def zimage(draw: Draw) -> dict[str, Any]:
    return {
        "x": [draw.noise(16, 1, 4, 4), draw.noise(16, 1, 4, 8)],
        "t": TIMES.to(draw.dtype),
        "cap_feats": [draw.noise(5, 24), draw.noise(40, 24)],
    }


def omni(draw: Draw) -> dict[str, Any]:
    """Two clean images and a noisy one, the second clean image seen by SigLIP only."""
    return {
        "x": [[draw.noise(16, 1, 4, 4), None, draw.noise(16, 1, 4, 8)]],
        "t": TIMES[:1].to(draw.dtype),
        "cap_feats": [[draw.noise(5, 24), draw.noise(3, 24), draw.noise(7, 24)]],
        "siglip_feats": [[draw.noise(2, 2, 20), draw.noise(2, 3, 20), None]],
        "image_noise_mask": [[0, 0, 1]],
    }


CASES = [
    Case("ZImageTransformer2DModel", ZIMAGE, zimage, ranks=(2, 4, 8)),
    Case("ZImageTransformer2DModel", {**ZIMAGE, "qk_norm": False}, zimage, option="no qk norm"),
    Case(
        "ZImageTransformer2DModel",
        {**ZIMAGE, "dim": 72, "n_heads": 6, "n_kv_heads": 6},
        zimage,
        option="6 heads",
        ranks=(2,),
        padded=(4,),
    ),
    Case(
        "ZImageTransformer2DModel",
        {**ZIMAGE, "siglip_feat_dim": 20},
        omni,
        option="omni",
    ),
]

PUBLISHED = [
    Published("Tongyi-MAI/Z-Image-Turbo", "ZImageTransformer2DModel", {}),
    Published("Tongyi-MAI/Z-Image", "ZImageTransformer2DModel", {}),
]
