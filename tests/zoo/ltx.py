"""LTX-Video, and LTX-2 with its audio."""

from __future__ import annotations

from typing import Any

from tests.zoo.case import Case, Draw, Published

LTX = {
    "in_channels": 4,
    "out_channels": 4,
    "num_attention_heads": 8,
    "attention_head_dim": 8,
    "cross_attention_dim": 64,
    "num_layers": 2,
    "caption_channels": 16,
}


def ltx(draw: Draw) -> dict[str, Any]:
    return {
        "hidden_states": draw.noise(1, 8, 4),
        "encoder_hidden_states": draw.noise(1, 6, 16),
        "timestep": draw.ids(1000, 1),
        "encoder_attention_mask": draw.ids(2, 1, 6),
        "num_frames": 2,
        "height": 2,
        "width": 2,
        "rope_interpolation_scale": (0.5, 32.0, 32.0),
    }


def ltx_per_token(draw: Draw) -> dict[str, Any]:
    coords = draw.ids(99, 1, 3, 8).float()
    return {**ltx(draw), "timestep": draw.ids(1000, 1, 8), "video_coords": coords}


LTX2 = {
    "in_channels": 4,
    "out_channels": 4,
    "num_attention_heads": 8,
    "attention_head_dim": 8,
    "cross_attention_dim": 64,
    "audio_in_channels": 4,
    "audio_out_channels": 4,
    "audio_num_attention_heads": 8,
    "audio_attention_head_dim": 4,
    "audio_cross_attention_dim": 32,
    "num_layers": 2,
    "caption_channels": 16,
}
SPLIT = {**LTX2, "rope_type": "split"}
GATED = {**SPLIT, "gated_attn": True, "audio_gated_attn": True, "perturbed_attn": True}
MODULATED = {
    **GATED,
    "cross_attn_mod": True,
    "audio_cross_attn_mod": True,
    "use_prompt_embeddings": False,
}


def ltx2(draw: Draw) -> dict[str, Any]:
    return {
        "hidden_states": draw.noise(1, 8, 4),
        "audio_hidden_states": draw.noise(1, 3, 4),
        "encoder_hidden_states": draw.noise(1, 6, 16),
        "audio_encoder_hidden_states": draw.noise(1, 6, 16),
        "timestep": draw.ids(1000, 1),
        "encoder_attention_mask": draw.ids(2, 1, 6),
        "audio_encoder_attention_mask": draw.ids(2, 1, 6),
        "num_frames": 2,
        "height": 2,
        "width": 2,
        "audio_num_frames": 3,
    }


def ltx2_per_token(draw: Draw) -> dict[str, Any]:
    return {
        **ltx2(draw),
        "timestep": draw.ids(1000, 1, 8),
        "audio_timestep": draw.ids(1000, 1, 3),
        "video_self_attention_mask": draw.ids(2, 1, 8, 8),
        "isolate_modalities": True,
    }


def ltx2_perturbed(draw: Draw) -> dict[str, Any]:
    """Guidance that skips the attention of one block for one video of two."""
    found = {}
    for name, value in ltx2(draw).items():
        found[name] = value.repeat(2, *[1] * (value.ndim - 1)) if hasattr(value, "ndim") else value
    return {
        **found,
        "spatio_temporal_guidance_blocks": [1],
        "perturbation_mask": draw.ids(2, 2).new_tensor([0, 1]).to(draw.dtype),
    }


def ltx2_all_perturbed(draw: Draw) -> dict[str, Any]:
    return {**ltx2(draw), "spatio_temporal_guidance_blocks": [1]}


def ltx2_modulated(draw: Draw) -> dict[str, Any]:
    return {
        **ltx2(draw),
        "encoder_hidden_states": draw.noise(1, 6, 64),
        "audio_encoder_hidden_states": draw.noise(1, 6, 32),
        "sigma": draw.ids(1000, 1),
        "use_cross_timestep": True,
    }


def ltx2_keyframes(draw: Draw) -> dict[str, Any]:
    return {**ltx2_modulated(draw), "video_keyframes_mask": draw.ids(2, 1, 8, 1)}


CASES = [
    Case("LTXVideoTransformer3DModel", LTX, ltx),
    Case("LTXVideoTransformer3DModel", LTX, ltx_per_token, option="per-token timesteps"),
    Case(
        "LTXVideoTransformer3DModel",
        {**LTX, "num_attention_heads": 6, "cross_attention_dim": 48},
        ltx,
        option="6 heads",
        ranks=(2,),
        padded=(4,),
    ),
    Case(
        "LTXVideoTransformer3DModel",
        {
            **LTX,
            "attention_bias": False,
            "attention_out_bias": False,
            "norm_elementwise_affine": True,
        },
        ltx,
        option="no biases, learned norms",
    ),
    Case("LTX2VideoTransformer3DModel", LTX2, ltx2),
    Case("LTX2VideoTransformer3DModel", SPLIT, ltx2, option="split rope"),
    Case("LTX2VideoTransformer3DModel", LTX2, ltx2_per_token, option="per-token timesteps"),
    Case("LTX2VideoTransformer3DModel", GATED, ltx2_perturbed, option="gated, perturbed"),
    Case("LTX2VideoTransformer3DModel", GATED, ltx2_all_perturbed, option="gated, all perturbed"),
    Case("LTX2VideoTransformer3DModel", MODULATED, ltx2_modulated, option="modulated captions"),
    Case(
        "LTX2VideoTransformer3DModel",
        {
            **MODULATED,
            "ff_bias": False,
            "audio_ff_bias": False,
            "use_prompt_adaln_single": False,
            "use_keyframes_abs_pos_embedding": True,
        },
        ltx2_keyframes,
        option="fixed caption modulation, keyframes, no feed-forward biases",
    ),
    Case(
        "LTX2VideoTransformer3DModel",
        {
            **LTX2,
            "gated_attn": True,
            "attention_bias": False,
            "attention_out_bias": False,
            "norm_elementwise_affine": True,
            "rope_double_precision": False,
        },
        ltx2,
        option="gated video, no biases, learned norms",
    ),
]

PUBLISHED = [
    Published("Lightricks/LTX-Video", "LTXVideoTransformer3DModel", {}),
    Published("Lightricks/LTX-Video-0.9.5", "LTXVideoTransformer3DModel", {}),
    Published(
        "Lightricks/LTX-Video-0.9.7-dev",
        "LTXVideoTransformer3DModel",
        {"attention_head_dim": 128, "cross_attention_dim": 4096, "num_layers": 48},
    ),
    Published("Lightricks/LTX-2", "LTX2VideoTransformer3DModel", {"rope_type": "split"}),
    Published(
        "diffusers/LTX-2.3-Diffusers",
        "LTX2VideoTransformer3DModel",
        {
            "gated_attn": True,
            "cross_attn_mod": True,
            "audio_gated_attn": True,
            "audio_cross_attn_mod": True,
            "rope_type": "split",
            "use_prompt_embeddings": False,
            "perturbed_attn": True,
        },
    ),
]
