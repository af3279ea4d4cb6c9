"""CogVideoX, and ConsisID that is built on it."""

from __future__ import annotations

from typing import Any

from tests.zoo.case import Case, Draw, Published

COGVIDEOX = {
    "num_attention_heads": 8,
    "attention_head_dim": 8,
    "in_channels": 4,
    "out_channels": 4,
    "time_embed_dim": 8,
    "text_embed_dim": 16,
    "num_layers": 2,
    "sample_width": 4,
    "sample_height": 4,
    "sample_frames": 5,
    "max_text_seq_length": 6,
}
ROTARY = {**COGVIDEOX, "use_rotary_positional_embeddings": True}
VERSION_15 = {**ROTARY, "patch_size_t": 2, "patch_bias": False}


def cogvideox(draw: Draw) -> dict[str, Any]:
    return {
        "hidden_states": draw.noise(1, 2, 4, 4, 4),
        "encoder_hidden_states": draw.noise(1, 6, 16),
        "timestep": draw.ids(1000, 1),
    }


def rotary(draw: Draw) -> dict[str, Any]:
    return {**cogvideox(draw), "image_rotary_emb": (draw.noise(8, 8), draw.noise(8, 8))}


def version_15(draw: Draw) -> dict[str, Any]:
    return {**cogvideox(draw), "image_rotary_emb": (draw.noise(4, 8), draw.noise(4, 8))}


def version_15_image(draw: Draw) -> dict[str, Any]:
    return {**version_15(draw), "ofs": draw.ids(3, 1)}


CONSISID = {
    **ROTARY,
    "attention_head_dim": 12,
    "is_train_face": True,
    "cross_attn_interval": 1,
    "cross_attn_dim_head": 4,
    "cross_attn_num_heads": 8,
    "LFE_id_dim": 8,
    "LFE_vit_dim": 16,
    "LFE_depth": 2,
    "LFE_dim_head": 4,
    "LFE_num_heads": 8,
    "LFE_num_id_token": 2,
    "LFE_num_querie": 3,
    "LFE_output_dim": 64,
    "LFE_ff_mult": 2,
    "LFE_num_scale": 2,
}
FACELESS = {key: value for key, value in CONSISID.items() if key != "is_train_face"}


def faceless(draw: Draw) -> dict[str, Any]:
    return {**cogvideox(draw), "image_rotary_emb": (draw.noise(8, 12), draw.noise(8, 12))}


def consisid(draw: Draw) -> dict[str, Any]:
    return {
        **faceless(draw),
        "id_cond": draw.noise(1, 8),
        "id_vit_hidden": [draw.noise(1, 5, 16), draw.noise(1, 5, 16)],
    }


CASES = [
    Case("CogVideoXTransformer3DModel", COGVIDEOX, cogvideox),
    Case("CogVideoXTransformer3DModel", ROTARY, rotary, option="rotary"),
    Case(
        "CogVideoXTransformer3DModel",
        {**ROTARY, "use_learned_positional_embeddings": True},
        rotary,
        option="rotary and learned positions",
    ),
    Case("CogVideoXTransformer3DModel", VERSION_15, version_15, option="1.5"),
    Case(
        "CogVideoXTransformer3DModel",
        {**VERSION_15, "ofs_embed_dim": 8},
        version_15_image,
        option="1.5 image",
    ),
    Case(
        "CogVideoXTransformer3DModel",
        {**ROTARY, "attention_bias": False, "norm_elementwise_affine": False},
        rotary,
        option="no attention biases, plain norms",
    ),
    Case("ConsisIDTransformer3DModel", CONSISID, consisid),
    Case("ConsisIDTransformer3DModel", FACELESS, faceless, option="no face"),
]

LARGE = {
    "num_attention_heads": 48,
    "num_layers": 42,
    "use_rotary_positional_embeddings": True,
}
LARGE_15 = {
    **LARGE,
    "sample_width": 300,
    "sample_height": 300,
    "sample_frames": 81,
    "patch_size_t": 2,
    "patch_bias": False,
}

PUBLISHED = [
    Published("zai-org/CogVideoX-2b", "CogVideoXTransformer3DModel", {}),
    Published("zai-org/CogVideoX-5b", "CogVideoXTransformer3DModel", LARGE),
    Published(
        "zai-org/CogVideoX-5b-I2V",
        "CogVideoXTransformer3DModel",
        {**LARGE, "in_channels": 32, "use_learned_positional_embeddings": True},
    ),
    Published("zai-org/CogVideoX1.5-5B", "CogVideoXTransformer3DModel", LARGE_15),
    Published(
        "zai-org/CogVideoX1.5-5B-I2V",
        "CogVideoXTransformer3DModel",
        {**LARGE_15, "in_channels": 32, "ofs_embed_dim": 512},
    ),
]
