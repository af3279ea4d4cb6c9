"""What is built like FLUX.1: Chroma, Bria, FIBO, LongCat-Image, Ovis-Image, Motif-Video; FIBO 2."""

from __future__ import annotations

from typing import Any

import torch

from tests.zoo.case import Case, Draw, Published

SMALL = {
    "in_channels": 16,
    "num_layers": 1,
    "num_single_layers": 2,
    "attention_head_dim": 16,
    "num_attention_heads": 8,
    "joint_attention_dim": 32,
    "axes_dims_rope": [4, 4, 8],
}
CHROMA = {**SMALL, "num_layers": 2, "approximator_hidden_dim": 50, "approximator_layers": 2}
FIBO = {**SMALL, "text_encoder_dim": 24}
FIBO2 = {
    "in_channels": 4,
    "dim": 128,
    "n_layers": 3,
    "n_refiner_layers": 1,
    "n_heads": 8,
    "cap_feat_dim": 24,
    "injection_layer_ids": (1,),
    "perceiver_num_layers": 1,
    "min_num_gist_tokens": 4,
    "max_num_gist_tokens": 8,
    "gist_step": 4,
    "gist_min_text_len": 4,
    "gist_max_text_len": 16,
    "axes_dims": (4, 6, 6),
    "axes_lens": (32, 8, 8),
}
MOTIF = {
    "in_channels": 5,
    "out_channels": 4,
    "num_attention_heads": 8,
    "attention_head_dim": 16,
    "num_layers": 1,
    "num_single_layers": 2,
    "text_embed_dim": 24,
    "rope_axes_dim": (4, 6, 6),
}


def small(draw: Draw) -> dict[str, Any]:
    return {
        "hidden_states": draw.noise(1, 6, 16),
        "encoder_hidden_states": draw.noise(1, 4, 32),
        "timestep": draw.times(1),
        "img_ids": draw.ids(4, 6, 3).float(),
        "txt_ids": draw.ids(4, 4, 3).float(),
    }


def small_controlled(draw: Draw) -> dict[str, Any]:
    """With what a ControlNet adds to each double block's output."""
    return {**small(draw), "controlnet_block_samples": [draw.noise(1, 6, 128)]}


def chroma_masked(draw: Draw) -> dict[str, Any]:
    mask = torch.ones(1, 10)
    mask[:, 3] = 0  # the last of the text
    return {**small(draw), "attention_mask": mask.to(draw.dtype)}


def fibo(draw: Draw) -> dict[str, Any]:
    layers = [draw.noise(1, 4, 24) for _ in range(3)]
    return {**small(draw), "text_encoder_layers": layers}


def fibo_guidance(draw: Draw) -> dict[str, Any]:
    return {**fibo(draw), "guidance": draw.times(1)}


def fibo2(draw: Draw) -> dict[str, Any]:
    return {
        "hidden_states": draw.noise(1, 4, 4, 8),
        "timestep": draw.times(1),
        "encoder_hidden_states": draw.noise(1, 2, 6, 24),
    }


def fibo2_padded(draw: Draw) -> dict[str, Any]:
    """Two prompts of different lengths, so of different counts of Perceiver tokens."""
    mask = torch.ones(2, 14, dtype=torch.bool)
    mask[1, 4:] = False
    return {
        "hidden_states": draw.noise(2, 4, 4, 8),
        "timestep": draw.times(2),
        "encoder_hidden_states": draw.noise(2, 2, 14, 24),
        "encoder_attention_mask": mask,
    }


def fibo2_edit(draw: Draw) -> dict[str, Any]:
    return {**fibo2(draw), "context_latents": [draw.noise(1, 4, 4, 4)]}


def motif(draw: Draw) -> dict[str, Any]:
    mask = torch.ones(1, 4)
    mask[:, 3] = 0
    return {
        "hidden_states": draw.noise(1, 5, 2, 4, 4),
        "timestep": draw.ids(1000, 1),
        "encoder_hidden_states": draw.noise(1, 4, 24),
        "encoder_attention_mask": mask,
    }


def motif_image(draw: Draw) -> dict[str, Any]:
    return {**motif(draw), "image_embeds": draw.noise(1, 3, 20)}


CASES = [
    Case("ChromaTransformer2DModel", CHROMA, small),
    Case("ChromaTransformer2DModel", CHROMA, chroma_masked, option="masked"),
    Case("ChromaTransformer2DModel", CHROMA, small_controlled, option="controlled"),
    Case("BriaTransformer2DModel", SMALL, small),
    Case("BriaTransformer2DModel", SMALL, small_controlled, option="controlled"),
    Case("BriaFiboTransformer2DModel", FIBO, fibo),
    Case(
        "BriaFiboTransformer2DModel",
        {**FIBO, "guidance_embeds": True},
        fibo_guidance,
        option="guidance embeds",
    ),
    Case("BriaFibo2Transformer2DModel", FIBO2, fibo2),
    Case("BriaFibo2Transformer2DModel", FIBO2, fibo2_padded, option="padded prompts"),
    Case("BriaFibo2Transformer2DModel", FIBO2, fibo2_edit, option="context image"),
    Case("LongCatImageTransformer2DModel", SMALL, small),
    Case("OvisImageTransformer2DModel", {**SMALL, "out_channels": 8}, small),
    Case("MotifVideoTransformer3DModel", MOTIF, motif),
    Case(
        "MotifVideoTransformer3DModel",
        {
            **MOTIF,
            "image_embed_dim": 20,
            "enable_text_cross_attention_dual": True,
            "enable_text_cross_attention_single": True,
        },
        motif_image,
        option="image, text cross attention",
    ),
    Case(
        "MotifVideoTransformer3DModel",
        {
            **MOTIF,
            "num_single_layers": 3,
            "num_decoder_layers": 1,
            "enable_text_cross_attention_single": True,
        },
        motif,
        option="decoder layers",
    ),
    Case(
        "MotifVideoTransformer3DModel",
        {**MOTIF, "qk_norm": "layer_norm", "mlp_ratio": 2.5},
        motif,
        option="layer norm of queries and keys",
    ),
]

PUBLISHED = [
    Published("lodestones/Chroma1-HD", "ChromaTransformer2DModel", {}),
    Published("briaai/BRIA-3.2", "BriaTransformer2DModel", {}),
    Published("briaai/FIBO", "BriaFiboTransformer2DModel", {}),
    Published("briaai/Fibo-2.0-dev", "BriaFibo2Transformer2DModel", {}),
    Published(
        "meituan-longcat/LongCat-Image",
        "LongCatImageTransformer2DModel",
        {"num_layers": 10, "num_single_layers": 20},
    ),
    Published("AIDC-AI/Ovis-Image-7B", "OvisImageTransformer2DModel", {}),
]
