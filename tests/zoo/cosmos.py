"""Cosmos 1, 2, 2.5 and 3."""

from __future__ import annotations

from typing import Any

import torch

from tests.zoo.case import Case, Draw, Published

COSMOS = {
    "in_channels": 4,
    "out_channels": 4,
    "num_attention_heads": 8,
    "attention_head_dim": 12,
    "num_layers": 2,
    "mlp_ratio": 2.0,
    "text_embed_dim": 16,
    "adaln_lora_dim": 8,
    "max_size": (4, 16, 16),
    "concat_padding_mask": False,
}
IMAGE_CONTEXT = {
    **COSMOS,
    "extra_pos_embed_type": None,
    "use_crossattn_projection": True,
    "crossattn_proj_in_channels": 24,
    "encoder_hidden_states_channels": 16,
    "controlnet_block_every_n": 1,
    "img_context_dim_in": 8,
    "img_context_num_tokens": 3,
    "img_context_dim_out": 96,
}
OMNI = {
    "head_dim": 16,
    "hidden_size": 48,
    "intermediate_size": 40,
    "latent_channel": 4,
    "latent_patch_size": 2,
    "patch_latent_dim": 16,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 51,
    "rope_axes_dim": (4, 2, 2),
}


def text(draw: Draw) -> dict[str, Any]:
    return {
        "hidden_states": draw.noise(1, 4, 2, 4, 4),
        "timestep": torch.tensor([0.5], dtype=draw.dtype),
        "encoder_hidden_states": draw.noise(1, 5, 16),
        "fps": 30,
    }


def video(draw: Draw) -> dict[str, Any]:
    """Frames to go on from, a timestep a frame, and a masked text."""
    return {
        **text(draw),
        "condition_mask": draw.noise(1, 1, 2, 4, 4),
        "timestep": (draw.ids(8, 1, 1, 2, 1, 1) / 8).to(draw.dtype),
        "attention_mask": torch.tensor([[True, True, True, False, False]]),
    }


def image_context(draw: Draw) -> dict[str, Any]:
    """Text and image, and what a ControlNet adds after each block."""
    return {
        **text(draw),
        "encoder_hidden_states": (draw.noise(1, 5, 24), draw.noise(1, 3, 8)),
        "block_controlnet_hidden_states": [draw.noise(1, 8, 96) for _ in range(2)],
    }


def image_context_72(draw: Draw) -> dict[str, Any]:
    return {
        **image_context(draw),
        "block_controlnet_hidden_states": [draw.noise(1, 8, 72) for _ in range(2)],
    }


def omni(draw: Draw, sound: int = 0, action: int = 0) -> dict[str, Any]:
    """5 tokens of text, then 2 frames of 4 patches, the first of them given; sound; actions."""
    seen = 5 + 8
    inputs = {
        "input_ids": draw.ids(51, 5),
        "text_indexes": torch.arange(5),
        "position_ids": draw.ids(9, 3, seen + sound + action),
        "und_len": 5,
        "sequence_length": seen + sound + action,
        "vision_tokens": [draw.noise(1, 4, 2, 4, 3)],
        "vision_token_shapes": [(2, 2, 2)],
        "vision_sequence_indexes": torch.arange(5, seen),
        "vision_mse_loss_indexes": torch.arange(9, seen),
        "vision_timesteps": torch.full((4,), 500.0),
        "vision_noisy_frame_indexes": [torch.tensor([1])],
    }
    if sound:
        inputs |= {
            "sound_tokens": [draw.noise(6, sound)],
            "sound_token_shapes": [(sound, 1, 1)],
            "sound_sequence_indexes": torch.arange(seen, seen + sound),
            "sound_mse_loss_indexes": torch.arange(seen, seen + sound),
            "sound_timesteps": torch.full((sound,), 250.0),
            "sound_noisy_frame_indexes": [torch.arange(sound)],
        }
    if action:
        inputs |= {
            "action_tokens": [draw.noise(action, 3)],
            "action_token_shapes": [(action, 1, 1)],
            "action_sequence_indexes": torch.arange(seen + sound, seen + sound + action),
            "action_mse_loss_indexes": torch.arange(seen + sound, seen + sound + action),
            "action_timesteps": torch.full((action,), 750.0),
            "action_noisy_frame_indexes": [torch.arange(action)],
            "action_domain_ids": [torch.tensor(1)],
        }
    return inputs


def omni_sound_and_actions(draw: Draw) -> dict[str, Any]:
    return omni(draw, sound=3, action=2)


CASES = [
    Case("CosmosTransformer3DModel", COSMOS, text),
    Case(
        "CosmosTransformer3DModel",
        {**COSMOS, "in_channels": 5, "extra_pos_embed_type": None},
        video,
        option="timestep a frame",
    ),
    Case("CosmosTransformer3DModel", IMAGE_CONTEXT, image_context, option="image context"),
    Case(
        "CosmosTransformer3DModel",
        {**IMAGE_CONTEXT, "num_attention_heads": 6, "img_context_dim_out": 72},
        image_context_72,
        option="three ranks, rows filled up",
        ranks=(3,),
    ),
    Case("Cosmos3OmniTransformer", OMNI, omni),
    Case(
        "Cosmos3OmniTransformer",
        {
            **OMNI,
            "num_key_value_heads": 8,
            "sound_gen": True,
            "sound_dim": 6,
            "action_gen": True,
            "action_dim": 3,
            "num_embodiment_domains": 2,
        },
        omni_sound_and_actions,
        option="sound and actions",
    ),
    Case(
        "Cosmos3OmniTransformer",
        {
            **OMNI,
            "attention_bias": True,
            "hidden_act": "relu2",
            "qk_norm_for_text": False,
            "use_und_k_norm_for_gen": True,
        },
        omni,
        option="no gate, no norm of the text's heads, biases",
    ),
]

COSMOS_14B = {"num_attention_heads": 40, "num_layers": 36}
COSMOS_2B = {"num_attention_heads": 16}
VIDEO = {"in_channels": 17}
COSMOS2 = {"extra_pos_embed_type": None}
COSMOS25 = {
    **VIDEO,
    **COSMOS2,
    "rope_scale": (1.0, 3.0, 3.0),
    "use_crossattn_projection": True,
    "crossattn_proj_in_channels": 100352,
}
TRANSFER25 = {
    **COSMOS_2B,
    **COSMOS25,
    "controlnet_block_every_n": 7,
    "img_context_dim_in": 1152,
}

PUBLISHED = [
    Published(f"nvidia/{repo}", "CosmosTransformer3DModel", config)
    for repo, config in {
        "Cosmos-1.0-Diffusion-7B-Text2World": {},
        "Cosmos-1.0-Diffusion-7B-Video2World": VIDEO,
        "Cosmos-1.0-Diffusion-14B-Text2World": {**COSMOS_14B, "rope_scale": (2.0, 2.0, 2.0)},
        "Cosmos-1.0-Diffusion-14B-Video2World": {
            **COSMOS_14B,
            **VIDEO,
            "rope_scale": (2.0, 2.0, 2.0),
        },
        "Cosmos-Predict2-2B-Text2Image": {
            **COSMOS_2B,
            **COSMOS2,
            "rope_scale": (1.0, 4.0, 4.0),
        },
        "Cosmos-Predict2-2B-Video2World": {
            **COSMOS_2B,
            **VIDEO,
            **COSMOS2,
            "rope_scale": (1.0, 3.0, 3.0),
        },
        "Cosmos-Predict2-14B-Text2Image": {
            **COSMOS_14B,
            **COSMOS2,
            "rope_scale": (1.0, 4.0, 4.0),
        },
        "Cosmos-Predict2-14B-Video2World": {
            **COSMOS_14B,
            **VIDEO,
            **COSMOS2,
            "rope_scale": (20 / 24, 2.0, 2.0),
        },
        "Cosmos-Predict2.5-2B": {**COSMOS_2B, **COSMOS25},
        "Cosmos-Predict2.5-14B": {**COSMOS_14B, **COSMOS25},
        "Cosmos-Transfer2.5-2B": TRANSFER25,
    }.items()
] + [Published("nvidia/Cosmos3-Nano", "Cosmos3OmniTransformer", {})]
