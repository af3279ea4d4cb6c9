"""CLIP and SigLIP, text and image encoders."""

from __future__ import annotations

from typing import Any

from tests.zoo.case import Case, Draw, Published

ENCODER = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
}
TEXT = {
    **ENCODER,
    "vocab_size": 101,  # no degree divides it: padding is always there
    "max_position_embeddings": 16,
    "bos_token_id": 0,
    "eos_token_id": 100,
    "pad_token_id": 1,
}
IMAGE = {**ENCODER, "image_size": 8, "patch_size": 4}


def tokens(draw: Draw) -> dict[str, Any]:
    ids = draw.ids(100, 2, 7)
    ids[0, 6] = ids[1, 4] = 100  # where the pooled output is taken
    mask = draw.ids(1, 2, 7) + 1
    mask[1, 5:] = 0
    return {"input_ids": ids, "attention_mask": mask}


def pixels(draw: Draw) -> dict[str, Any]:
    return {"pixel_values": draw.noise(2, 3, 8, 8)}


def larger(draw: Draw) -> dict[str, Any]:
    return {"pixel_values": draw.noise(1, 3, 12, 8), "interpolate_pos_encoding": True}


def case(class_name: str, config: dict[str, Any], inputs: Any, option: str = "") -> Case:
    return Case(class_name, config, inputs, option, library="transformers")


CASES = [
    case("CLIPTextModel", {**TEXT, "projection_dim": 24}, tokens),
    case("CLIPTextModel", {**TEXT, "eos_token_id": 2}, tokens, "pooled at the highest id"),
    case("CLIPTextModelWithProjection", {**TEXT, "projection_dim": 24}, tokens),
    case(
        "CLIPTextModelWithProjection",
        {**TEXT, "projection_dim": 24, "hidden_act": "gelu"},
        tokens,
        "gelu",
    ),
    case("CLIPVisionModel", IMAGE, pixels),
    case("CLIPVisionModel", IMAGE, larger, "another image size"),
    case("CLIPVisionModelWithProjection", {**IMAGE, "projection_dim": 24}, pixels),
    case("SiglipTextModel", TEXT, tokens),
    case("SiglipTextModel", {**TEXT, "projection_size": 24}, tokens, "another output width"),
    case("SiglipVisionModel", IMAGE, pixels),
    case("SiglipVisionModel", {**IMAGE, "vision_use_head": False}, pixels, "no pooling head"),
]

VIT_L_TEXT = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_attention_heads": 12,
    "projection_dim": 768,
}
BIG_G_TEXT = {
    "hidden_size": 1280,
    "intermediate_size": 5120,
    "num_hidden_layers": 32,
    "num_attention_heads": 20,
    "projection_dim": 1280,
    "hidden_act": "gelu",
}
VIT_L = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "patch_size": 14,
    "projection_dim": 768,
}
VIT_H = {
    "hidden_size": 1280,
    "intermediate_size": 5120,
    "num_hidden_layers": 32,
    "num_attention_heads": 16,
    "patch_size": 14,
    "projection_dim": 1024,
    "hidden_act": "gelu",
}
SO400M = {
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "image_size": 384,
    "patch_size": 14,
}


def published(repo: str, class_name: str, config: dict[str, Any]) -> Published:
    return Published(repo, class_name, config, "transformers")


PUBLISHED = [
    published("openai/clip-vit-large-patch14", "CLIPTextModel", VIT_L_TEXT),
    published("openai/clip-vit-large-patch14", "CLIPTextModelWithProjection", VIT_L_TEXT),
    published(
        "laion/CLIP-ViT-bigG-14-laion2B-39B-b160k", "CLIPTextModelWithProjection", BIG_G_TEXT
    ),
    published("openai/clip-vit-large-patch14", "CLIPVisionModelWithProjection", VIT_L),
    published("laion/CLIP-ViT-H-14-laion2B-s32B-b79K", "CLIPVisionModel", VIT_H),
    published("google/siglip-so400m-patch14-384", "SiglipVisionModel", SO400M),
]
