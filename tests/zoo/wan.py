"""Wan and what is built on it: SkyReels-V2, ChronoEdit, Helios, AnyFlow."""

from __future__ import annotations

from typing import Any

from tests.zoo.case import Case, Draw, Published

WAN = {
    "num_attention_heads": 8,
    "attention_head_dim": 12,
    "in_channels": 4,
    "out_channels": 4,
    "text_dim": 16,
    "freq_dim": 16,
    "ffn_dim": 64,
    "num_layers": 2,
}
IMAGES = {**WAN, "image_dim": 16, "added_kv_proj_dim": 96}


def wan(draw: Draw) -> dict[str, Any]:
    return {
        "hidden_states": draw.noise(1, 4, 2, 4, 4),
        "timestep": draw.ids(1000, 1),
        "encoder_hidden_states": draw.noise(1, 6, 16),
    }


def wan_per_token(draw: Draw) -> dict[str, Any]:
    return {**wan(draw), "timestep": draw.ids(1000, 1, 8)}


def wan_images(draw: Draw) -> dict[str, Any]:
    return {
        **wan(draw),
        "encoder_hidden_states": draw.noise(1, 512, 16),  # what comes before the last 512 is image
        "encoder_hidden_states_image": draw.noise(1, 5, 16),
    }


def wan_two_images(draw: Draw) -> dict[str, Any]:
    return {**wan_images(draw), "encoder_hidden_states_image": draw.noise(2, 5, 16)}


def vace(draw: Draw) -> dict[str, Any]:
    return {
        **wan(draw),
        "control_hidden_states": draw.noise(1, 6, 2, 4, 4),
        "control_hidden_states_scale": draw.noise(2),
    }


def vace_images(draw: Draw) -> dict[str, Any]:
    return {**vace(draw), **wan_images(draw)}


ANIMATE = {
    **IMAGES,
    "in_channels": 12,
    "latent_channels": 4,
    "motion_encoder_channel_sizes": {"16": 4, "8": 4, "4": 8},
    "motion_encoder_size": 16,
    "motion_style_dim": 8,
    "motion_dim": 4,
    "motion_encoder_dim": 8,
    "face_encoder_hidden_dim": 8,
    "face_encoder_num_heads": 2,
    "inject_face_latents_blocks": 1,
}


def animate(draw: Draw) -> dict[str, Any]:
    return {
        **wan_images(draw),
        "hidden_states": draw.noise(1, 12, 3, 4, 4),
        "pose_hidden_states": draw.noise(1, 4, 2, 4, 4),
        "face_pixel_values": draw.noise(1, 3, 5, 16, 16),  # two latent frames
    }


def animate_text(draw: Draw) -> dict[str, Any]:
    found = {**animate(draw), "encoder_hidden_states": draw.noise(1, 6, 16)}
    del found["encoder_hidden_states_image"]
    return found


ANIMATE2 = {
    "text_len": 8,
    "in_dim": 12,
    "dim": 96,
    "ffn_dim": 64,
    "freq_dim": 16,
    "text_dim": 16,
    "out_dim": 4,
    "num_heads": 8,
    "num_layers": 2,
}


def animate2(draw: Draw) -> dict[str, Any]:
    import torch
    from diffusers.models.transformers.transformer_wan_animate_2 import WanAnimate2KVCache

    return {
        "hidden_states": [draw.noise(4, 2, 4, 4)],
        "condition_latents": [draw.noise(8, 2, 4, 4)],
        "timestep": draw.ids(1000, 1),
        "encoder_hidden_states": [draw.noise(6, 16)],
        "encoder_hidden_states_image": draw.noise(1, 5, 1280),
        "kv_cache": WanAnimate2KVCache(2),
        "kv_cache_mode": "extract",
        "seq_len": 8,
        "offset_grid_sizes": torch.tensor([[2, 2, 2]]),
    }


def skyreels_forcing(draw: Draw) -> dict[str, Any]:
    return {**wan(draw), "timestep": draw.ids(1000, 1, 2), "enable_diffusion_forcing": True}


def skyreels_rate(draw: Draw) -> dict[str, Any]:
    return {**wan(draw), "fps": [1]}


def skyreels_rate_forcing(draw: Draw) -> dict[str, Any]:
    return {**skyreels_forcing(draw), "fps": [1]}


def skyreels_causal(draw: Draw) -> dict[str, Any]:
    return {**wan(draw), "hidden_states": draw.noise(1, 4, 4, 4, 4)}


HELIOS = {**WAN, "rope_dim": (4, 4, 4)}


def helios(draw: Draw) -> dict[str, Any]:
    return {
        **wan(draw),
        "indices_hidden_states": draw.ids(9, 1, 2),
        "indices_latents_history_short": draw.ids(9, 1, 2),
        "indices_latents_history_mid": draw.ids(9, 1, 2),
        "indices_latents_history_long": draw.ids(9, 1, 4),
        "latents_history_short": draw.noise(1, 4, 2, 4, 4),
        "latents_history_mid": draw.noise(1, 4, 2, 4, 4),
        "latents_history_long": draw.noise(1, 4, 4, 4, 4),
    }


def anyflow(draw: Draw) -> dict[str, Any]:
    return {
        "hidden_states": draw.noise(1, 2, 4, 4, 4),
        "timestep": draw.ids(1000, 1, 2),
        "r_timestep": draw.ids(1000, 1, 2),
        "encoder_hidden_states": draw.noise(1, 6, 16),
    }


def anyflow_images(draw: Draw) -> dict[str, Any]:
    return {**anyflow(draw), "encoder_hidden_states_image": draw.noise(1, 5, 16)}


def anyflow_far(draw: Draw) -> dict[str, Any]:
    return {
        "hidden_states": draw.noise(1, 4, 4, 4, 4),
        "timestep": draw.ids(1000, 1, 4),
        "r_timestep": draw.ids(1000, 1, 4),
        "encoder_hidden_states": draw.noise(1, 6, 16),
        "chunk_partition": [1, 1, 1, 1],  # the first is compressed
    }


def anyflow_far_images(draw: Draw) -> dict[str, Any]:
    return {**anyflow_far(draw), "encoder_hidden_states_image": draw.noise(1, 5, 16)}


def anyflow_far_clean(draw: Draw) -> dict[str, Any]:
    return {
        **anyflow_far(draw),
        "clean_hidden_states": draw.noise(1, 3, 4, 4, 4),
        "clean_timestep": draw.ids(1000, 1, 3),
    }


TWO_IMAGES = {**IMAGES, "pos_embed_seq_len": 10}
NO_NORM2 = {**WAN, "cross_attn_norm": False}
VACE = {**WAN, "vace_layers": [0, 1], "vace_in_channels": 6}
SCALAR = {"is_amplify_history": True, "history_scale_mode": "scalar"}
NO_HISTORY = {**HELIOS, "has_multi_term_memory_patch": False}
ANYFLOW = "AnyFlowTransformer3DModel"
FAR = "AnyFlowFARTransformer3DModel"
SKYREELS = "SkyReelsV2Transformer3DModel"
ANIMATE_TEXT = {**ANIMATE, "image_dim": None, "added_kv_proj_dim": None}

CASES = [
    Case("WanTransformer3DModel", WAN, wan, ranks=(2, 4, 8)),
    Case("WanTransformer3DModel", WAN, wan_per_token, option="per-token timesteps"),
    Case(
        "WanTransformer3DModel",
        {**WAN, "num_attention_heads": 6, "ffn_dim": 66},
        wan,
        option="6 heads",
        ranks=(2,),
        padded=(4,),
    ),
    Case("WanTransformer3DModel", IMAGES, wan_images, option="image", ranks=(2, 4, 8)),
    Case("WanTransformer3DModel", TWO_IMAGES, wan_two_images, option="first and last image"),
    Case("WanTransformer3DModel", NO_NORM2, wan, option="no cross-attention norm"),
    Case("WanVACETransformer3DModel", VACE, vace),
    Case("WanVACETransformer3DModel", {**VACE, **IMAGES}, vace_images, option="image"),
    Case("WanAnimateTransformer3DModel", ANIMATE, animate),
    Case("WanAnimateTransformer3DModel", ANIMATE_TEXT, animate_text, option="no image"),
    Case("WanAnimate2Transformer3DModel", ANIMATE2, animate2),
    Case(
        "WanAnimate2Transformer3DModel",
        {**ANIMATE2, "use_img_emb": False, "cross_attn_norm": False},
        animate2,
        option="no image",
    ),
    Case(SKYREELS, WAN, wan),
    Case(SKYREELS, WAN, skyreels_forcing, option="diffusion forcing"),
    Case(SKYREELS, {**WAN, "inject_sample_info": True}, skyreels_rate, option="frame rate"),
    Case(
        SKYREELS,
        {**WAN, "inject_sample_info": True},
        skyreels_rate_forcing,
        option="frame rate, diffusion forcing",
    ),
    Case(SKYREELS, {**WAN, "num_frame_per_block": 2}, skyreels_causal, option="causal blocks"),
    Case(SKYREELS, IMAGES, wan_images, option="image"),
    Case("ChronoEditTransformer3DModel", IMAGES, wan_images),
    Case("ChronoEditTransformer3DModel", WAN, wan, option="no image"),
    Case("HeliosTransformer3DModel", HELIOS, helios),
    Case(
        "HeliosTransformer3DModel",
        {**HELIOS, "is_amplify_history": True},
        helios,
        option="amplified history",
        bf16=False,  # diffusers keeps the scale in fp32, and attention refuses the mix
    ),
    Case(
        "HeliosTransformer3DModel",
        {**HELIOS, **SCALAR},
        helios,
        option="history amplified by a scalar",
        bf16=False,
    ),
    Case("HeliosTransformer3DModel", NO_HISTORY, wan, option="no history"),
    Case(
        "HeliosTransformer3DModel",
        {**HELIOS, "guidance_cross_attn": False, "zero_history_timestep": False},
        helios,
        option="history like the rest",
    ),
    Case(ANYFLOW, WAN, anyflow),
    Case(ANYFLOW, {**WAN, "deltatime_type": "t-r"}, anyflow, option="intervals"),
    Case(ANYFLOW, {**WAN, "image_dim": 16}, anyflow_images, option="image"),
    Case(FAR, WAN, anyflow_far),
    Case(FAR, WAN, anyflow_far_clean, option="clean frames"),
    Case(FAR, {**WAN, "image_dim": 16}, anyflow_far_images, option="image"),
]

SMALL = {"num_attention_heads": 12, "ffn_dim": 8960, "num_layers": 30}  # 1.3B
LARGE = {"num_attention_heads": 40, "ffn_dim": 13824, "num_layers": 40}  # 14B
LARGE_IMAGES = {"in_channels": 36, "image_dim": 1280, "added_kv_proj_dim": 5120}

PUBLISHED = [
    Published("Wan-AI/Wan2.1-T2V-1.3B-Diffusers", "WanTransformer3DModel", SMALL),
    Published("Wan-AI/Wan2.1-T2V-14B-Diffusers", "WanTransformer3DModel", {}),
    Published("Wan-AI/Wan2.2-T2V-A14B-Diffusers", "WanTransformer3DModel", {}),
    Published("Wan-AI/Wan2.2-I2V-A14B-Diffusers", "WanTransformer3DModel", {"in_channels": 36}),
    Published("Wan-AI/Wan2.1-I2V-14B-480P-Diffusers", "WanTransformer3DModel", LARGE_IMAGES),
    Published("Wan-AI/Wan2.1-I2V-14B-720P-Diffusers", "WanTransformer3DModel", LARGE_IMAGES),
    Published(
        "Wan-AI/Wan2.1-FLF2V-14B-720P-diffusers",
        "WanTransformer3DModel",
        {**LARGE_IMAGES, "pos_embed_seq_len": 514},
    ),
    Published(
        "Wan-AI/Wan2.2-TI2V-5B-Diffusers",
        "WanTransformer3DModel",
        {
            "num_attention_heads": 24,
            "ffn_dim": 14336,
            "num_layers": 30,
            "in_channels": 48,
            "out_channels": 48,
        },
    ),
    Published(
        "Wan-AI/Wan2.1-VACE-1.3B-diffusers",
        "WanVACETransformer3DModel",
        {**SMALL, "vace_layers": list(range(0, 30, 2))},
    ),
    Published("Wan-AI/Wan2.1-VACE-14B-diffusers", "WanVACETransformer3DModel", {}),
    Published(
        "Wan-AI/Wan2.2-Animate-14B-Diffusers",
        "WanAnimateTransformer3DModel",
        {"added_kv_proj_dim": 5120},
    ),
    Published("Wan-AI/Wan2.2-Animate-2-14B-Diffusers", "WanAnimate2Transformer3DModel", {}),
    Published(
        "Skywork/SkyReels-V2-DF-1.3B-540P-Diffusers",
        SKYREELS,
        {**SMALL, "inject_sample_info": True},
    ),
    Published("Skywork/SkyReels-V2-DF-14B-540P-Diffusers", SKYREELS, LARGE),
    Published("Skywork/SkyReels-V2-DF-14B-720P-Diffusers", SKYREELS, LARGE),
    Published("Skywork/SkyReels-V2-T2V-14B-540P-Diffusers", SKYREELS, LARGE),
    Published("Skywork/SkyReels-V2-T2V-14B-720P-Diffusers", SKYREELS, LARGE),
    Published("Skywork/SkyReels-V2-I2V-14B-720P-Diffusers", SKYREELS, {**LARGE, **LARGE_IMAGES}),
    Published("nvidia/ChronoEdit-14B-Diffusers", "ChronoEditTransformer3DModel", LARGE_IMAGES),
    Published("BestWishYsh/Helios-Base", "HeliosTransformer3DModel", {}),
    Published("nvidia/AnyFlow-Wan2.1-T2V-1.3B-Diffusers", ANYFLOW, SMALL),
    Published("nvidia/AnyFlow-Wan2.1-T2V-14B-Diffusers", ANYFLOW, {}),
    Published("nvidia/AnyFlow-FAR-Wan2.1-1.3B-Diffusers", FAR, SMALL),
    Published("nvidia/AnyFlow-FAR-Wan2.1-14B-Diffusers", FAR, {}),
]
