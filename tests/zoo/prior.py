"""Priors: text to image embeddings, and Shap-E's latents.

Their outputs are few, so the batches are wide: an error is a mean over hundreds of numbers.
"""

from __future__ import annotations

from typing import Any

import torch

from tests.zoo.case import Case, Draw, Published

PRIOR = {
    "num_attention_heads": 8,
    "attention_head_dim": 8,
    "num_layers": 2,
    "embedding_dim": 24,
    "num_embeddings": 5,
}
SHAP_E = {
    "additional_embeddings": 0,
    "time_embed_act_fn": "gelu",
    "norm_in_type": "layer",
    "encoder_hid_proj_type": None,
    "added_emb_type": None,
}


def prior(draw: Draw) -> dict[str, Any]:
    return {
        "hidden_states": draw.noise(16, 24),
        "timestep": draw.ids(1000, 16),
        "proj_embedding": draw.noise(16, 24),
        "encoder_hidden_states": draw.noise(16, 5, 24),
        "attention_mask": torch.arange(5) < torch.tensor([[5], [3]] * 8),
    }


def shap_e(draw: Draw) -> dict[str, Any]:
    return {
        "hidden_states": draw.noise(2, 5, 24),
        "timestep": draw.ids(1000, 2),
        "proj_embedding": draw.noise(2, 20),
    }


def from_image(draw: Draw) -> dict[str, Any]:
    return {**shap_e(draw), "proj_embedding": draw.noise(2, 3, 20)}


CASES = [
    Case("PriorTransformer", PRIOR, prior),
    Case(
        "PriorTransformer",
        {
            **PRIOR,
            **SHAP_E,
            "time_embed_dim": 48,
            "embedding_proj_dim": 20,
            "clip_embed_dim": 32,
        },
        shap_e,
        option="Shap-E",
    ),
    Case(
        "PriorTransformer",
        {
            **PRIOR,
            **SHAP_E,
            "embedding_proj_norm_type": "layer",
            "embedding_proj_dim": 20,
            "clip_embed_dim": 32,
        },
        from_image,
        option="Shap-E from images",
    ),
]

SHAP_E_300M = {
    **SHAP_E,
    "num_attention_heads": 16,
    "num_layers": 24,
    "embedding_dim": 1024,
    "num_embeddings": 1024,
    "time_embed_dim": 4096,
    "clip_embed_dim": 2048,
}

PUBLISHED = [
    Published(
        "kandinsky-community/kandinsky-2-2-prior", "PriorTransformer", {"embedding_dim": 1280}
    ),
    Published("kakaobrain/karlo-v1-alpha", "PriorTransformer", {}),
    Published("openai/shap-e", "PriorTransformer", {**SHAP_E_300M, "embedding_proj_dim": 768}),
    Published(
        "openai/shap-e-img2img",
        "PriorTransformer",
        {**SHAP_E_300M, "embedding_proj_dim": 1024, "embedding_proj_norm_type": "layer"},
    ),
]
