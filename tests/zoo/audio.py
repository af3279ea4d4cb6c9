"""Sound: ACE-Step, Stable Audio and LongCat-AudioDiT."""

from __future__ import annotations

from typing import Any

import torch

from tests.zoo.case import Case, Draw, Published

ACE_STEP = {
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "in_channels": 12,
    "audio_acoustic_hidden_dim": 4,
    "sliding_window": 2,
}
STABLE_AUDIO = {
    "sample_size": 8,
    "in_channels": 6,
    "num_layers": 2,
    "attention_head_dim": 8,
    "num_attention_heads": 8,
    "num_key_value_attention_heads": 2,
    "out_channels": 6,
    "cross_attention_dim": 16,
    "time_proj_dim": 8,
    "global_states_input_dim": 24,
    "cross_attention_input_dim": 24,
}
STABLE_AUDIO3 = {
    "io_channels": 6,
    "embed_dim": 64,
    "depth": 2,
    "num_heads": 8,
    "cond_token_dim": 24,
    "global_cond_dim": 16,
    "local_add_cond_dim": 7,
    "timestep_features_dim": 16,
    "ff_mult": 1.5,
    "num_memory_tokens": 3,
}
LONGCAT = {
    "dit_dim": 64,
    "dit_depth": 2,
    "dit_heads": 8,
    "dit_text_dim": 24,
    "latent_dim": 6,
    "ff_mult": 2.0,
}


def half(draw: Draw) -> torch.Tensor:
    return torch.tensor([0.5], dtype=draw.dtype)


def ace_step(draw: Draw) -> dict[str, Any]:
    return {
        "hidden_states": draw.noise(1, 11, 4),
        "timestep": half(draw),
        "timestep_r": half(draw) / 2,
        "encoder_hidden_states": draw.noise(1, 5, 48),
        "context_latents": draw.noise(1, 11, 8),
    }


def ace_step_narrow(draw: Draw) -> dict[str, Any]:
    return {**ace_step(draw), "encoder_hidden_states": draw.noise(1, 5, 24)}


def stable_audio(draw: Draw) -> dict[str, Any]:
    angles = draw.noise(8, 4).float()
    return {
        "hidden_states": draw.noise(1, 6, 7),
        "timestep": half(draw),
        "encoder_hidden_states": draw.noise(1, 5, 24),
        "global_hidden_states": draw.noise(1, 1, 24),
        "rotary_embedding": (angles.cos(), angles.sin()),
    }


def stable_audio_masked(draw: Draw) -> dict[str, Any]:
    return {
        **stable_audio(draw),
        "attention_mask": torch.tensor([[True] * 5 + [False] * 2]),
        "encoder_attention_mask": torch.tensor([[True, True, True, False, False]]),
    }


def stable_audio3(draw: Draw) -> dict[str, Any]:
    return {
        "hidden_states": draw.noise(1, 6, 8),
        "timestep": half(draw),
        "encoder_hidden_states": draw.noise(1, 5, 24),
        "global_hidden_states": draw.noise(1, 16),
    }


def inpainting(draw: Draw) -> dict[str, Any]:
    """Sound to fill in, and a masked text."""
    return {
        **stable_audio3(draw),
        "encoder_attention_mask": torch.tensor([[True, True, True, False, False]]),
        "local_add_cond": draw.noise(1, 7, 8),
    }


def longcat(draw: Draw) -> dict[str, Any]:
    return {
        "hidden_states": draw.noise(1, 7, 6),
        "encoder_hidden_states": draw.noise(1, 5, 24),
        "encoder_attention_mask": torch.tensor([[True, True, True, True, False]]),
        "timestep": half(draw),
        "latent_cond": draw.noise(1, 7, 6),
    }


def longcat_text(draw: Draw) -> dict[str, Any]:
    """No sound to go on from."""
    found = longcat(draw)
    del found["latent_cond"]
    return found


CASES = [
    Case("AceStepTransformer1DModel", ACE_STEP, ace_step),
    Case(
        "AceStepTransformer1DModel",
        {**ACE_STEP, "attention_bias": True, "encoder_hidden_size": 24, "num_key_value_heads": 8},
        ace_step_narrow,
        option="narrow conditions, biases",
    ),
    Case("StableAudioDiTModel", STABLE_AUDIO, stable_audio),
    Case("StableAudioDiTModel", STABLE_AUDIO, stable_audio_masked, option="masked sound"),
    Case("StableAudio3DiTModel", STABLE_AUDIO3, stable_audio3),
    Case(
        "StableAudio3DiTModel",
        {**STABLE_AUDIO3, "use_differential_attention": False},
        inpainting,
        option="plain attention, inpainting",
    ),
    Case("LongCatAudioDiTTransformer", LONGCAT, longcat),
    Case(
        "LongCatAudioDiTTransformer",
        {
            **LONGCAT,
            "adaln_type": "local",
            "adaln_use_text_cond": False,
            "qk_norm": False,
            "cross_attn_norm": True,
            "text_conv": False,
            "use_latent_condition": False,
            "bias": False,
        },
        longcat_text,
        option="modulation a block, no norm of heads, normed cross attention",
    ),
    Case(
        "LongCatAudioDiTTransformer",
        {**LONGCAT, "cross_attn": False, "long_skip": False, "adaln_use_text_cond": False},
        longcat,
        option="no cross attention",
    ),
]

ACE_STEP_XL = {
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "encoder_hidden_size": 2048,
    "is_turbo": True,
}

PUBLISHED = [
    Published("ACE-Step/Ace-Step1.5", "AceStepTransformer1DModel", {"is_turbo": True}),
    Published("ACE-Step/acestep-v15-xl-turbo-diffusers", "AceStepTransformer1DModel", ACE_STEP_XL),
    Published("stabilityai/stable-audio-open-1.0", "StableAudioDiTModel", {}),
    Published("stabilityai/stable-audio-3-medium", "StableAudio3DiTModel", {}),
]
