"""Vision-language models that pipelines encode text and images with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tests.zoo.case import Case, Draw, Published

TEXT = {
    "vocab_size": 101,  # no degree divides it: padding is always there
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,  # four ranks: each key and value is held twice
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
QWEN_TEXT = {
    **TEXT,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]},
}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
QWEN_VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "depth": 2,
    "num_heads": 4,
    "patch_size": 4,
    "out_hidden_size": 64,
}
IMAGE = 100  # the id of an image's tokens
SPECIAL = {
    "image_token_id": IMAGE,
    "video_token_id": 99,
    "vision_start_token_id": 98,
    "vision_end_token_id": 97,
}
SEQUENCE = 12


def prompt(draw: Draw, images: int = 0) -> dict[str, Any]:
    """Two prompts, the second padded on the left; from the fifth token on, image tokens."""
    ids = draw.ids(97, 2, SEQUENCE)
    mask = torch.ones(2, SEQUENCE, dtype=torch.int64)
    mask[1, :3] = 0
    ids[:, 4 : 4 + images] = IMAGE
    return {
        "input_ids": ids,
        "attention_mask": mask,
        "output_hidden_states": True,
        "use_cache": False,
    }


def qwen_images(draw: Draw) -> dict[str, Any]:
    """An image of 4 x 4 patches a prompt, merged to 4 tokens."""
    found = prompt(draw, 4)
    kinds = (found["input_ids"] == IMAGE).int()
    return {
        **found,
        "pixel_values": draw.noise(2 * 16, 3 * 2 * 4 * 4),
        "image_grid_thw": torch.tensor([[1, 4, 4]] * 2),
        "mm_token_type_ids": kinds,
    }


def mistral_images(draw: Draw) -> dict[str, Any]:
    """An image of 4 x 4 patches a prompt, merged to 4 tokens."""
    return {
        **prompt(draw, 4),
        "pixel_values": draw.noise(2, 3, 16, 16),
        "image_sizes": torch.tensor([[16, 16]] * 2),
    }


def llava_images(draw: Draw) -> dict[str, Any]:
    """An image of 2 x 2 patches a prompt."""
    return {**prompt(draw, 4), "pixel_values": draw.noise(2, 3, 8, 8)}


def gemma_images(draw: Draw) -> dict[str, Any]:
    """An image of 4 x 4 patches a prompt, pooled to 4 tokens."""
    found = prompt(draw, 4)
    kinds = (found["input_ids"] == IMAGE).long()
    return {**found, "pixel_values": draw.noise(2, 3, 16, 16), "token_type_ids": kinds}


def qwen25(text: dict[str, Any] | None = None, **config: Any) -> dict[str, Any]:
    text = {**QWEN_TEXT, **(text or {})}
    vision = {
        **QWEN_VISION,
        "window_size": 8,  # 2 x 2 patches: four windows an image
        "fullatt_block_indexes": (1,),
        "out_hidden_size": text["hidden_size"],
    }
    return {"text_config": text, "vision_config": vision, **SPECIAL, **config}


def qwen2(**config: Any) -> dict[str, Any]:
    vision = {
        "embed_dim": 32,
        "hidden_size": 64,
        "depth": 2,
        "num_heads": 4,
        "mlp_ratio": 2,
        "patch_size": 4,
    }
    return {"text_config": QWEN_TEXT, "vision_config": vision, **SPECIAL, **config}


def qwen3(text: dict[str, Any] | None = None, **config: Any) -> dict[str, Any]:
    vision = {
        **QWEN_VISION,
        "num_position_embeddings": 16,
        "deepstack_visual_indexes": (0,),
    }
    text = {**TEXT, "head_dim": 16, **(text or {})}
    return {"text_config": text, "vision_config": vision, **SPECIAL, **config}


def mistral(model_type: str, **config: Any) -> dict[str, Any]:
    text = {"model_type": model_type, **TEXT, "head_dim": 16}
    vision = {"model_type": "pixtral", **VISION, "image_size": 16, "patch_size": 4, "head_dim": 8}
    return {"text_config": text, "vision_config": vision, "image_token_index": IMAGE, **config}


def gemma3(text: dict[str, Any] | None = None, **config: Any) -> dict[str, Any]:
    vision = {
        "model_type": "siglip_vision_model",
        **VISION,
        "image_size": 16,
        "patch_size": 4,
        "vision_use_head": False,
    }
    return {
        "text_config": {**TEXT, "head_dim": 16, "sliding_window": 4, **(text or {})},
        "vision_config": vision,
        "image_token_index": IMAGE,
        "mm_tokens_per_image": 4,
        **config,
    }


def llava(**config: Any) -> dict[str, Any]:
    vision = {"model_type": "clip_vision_model", **VISION, "image_size": 8, "patch_size": 4}
    return {
        "text_config": {"model_type": "llama", **TEXT},
        "vision_config": vision,
        "image_token_index": IMAGE,
        **config,
    }


def case(
    class_name: str,
    config: dict[str, Any],
    inputs: Callable[[Draw], dict[str, Any]],
    option: str = "",
) -> Case:
    return Case(class_name, config, inputs, option, library="transformers")


UNTIED = {"tie_word_embeddings": False}
TIED = {"tie_word_embeddings": True}
QWEN2 = "Qwen2VLForConditionalGeneration"
QWEN25 = "Qwen2_5_VLForConditionalGeneration"
QWEN3 = "Qwen3VLForConditionalGeneration"
MISTRAL = "Mistral3ForConditionalGeneration"
GEMMA = "Gemma3ForConditionalGeneration"
LLAVA = "LlavaForConditionalGeneration"

CASES = [
    case(QWEN25, qwen25(**UNTIED), qwen_images),
    case(QWEN25, qwen25(**UNTIED), prompt, "text alone"),
    case(QWEN25, qwen25(**TIED), qwen_images, "tied"),
    Case(
        QWEN25,
        qwen25({"hidden_size": 56, "num_attention_heads": 7, "num_key_value_heads": 1}, **UNTIED),
        qwen_images,
        "7 heads in a group",
        "transformers",
        ranks=(1,),
        padded=(2, 4),
    ),
    case(
        QWEN25,
        qwen25({"hidden_size": 128, "num_attention_heads": 16}, **UNTIED),
        qwen_images,
        "16 heads: columns that 8 ranks do not divide",
    ),
    case("Qwen2_5_VLModel", qwen25(), qwen_images),
    case("Qwen2VLModel", qwen2(), qwen_images),
    case("Qwen2_5_VLTextModel", QWEN_TEXT, prompt),
    case(QWEN2, qwen2(**UNTIED), qwen_images),
    case(QWEN2, qwen2(**TIED), prompt, "text alone, tied"),
    case(QWEN3, qwen3(**UNTIED), qwen_images),
    case(QWEN3, qwen3(**UNTIED), prompt, "text alone"),
    case(QWEN3, qwen3({"attention_bias": True}, **TIED), qwen_images, "tied, biases"),
    case("Qwen3VLModel", qwen3(), qwen_images),
    case("Qwen3VLTextModel", {**TEXT, "head_dim": 16}, prompt),
    case(MISTRAL, mistral("mistral", **UNTIED), mistral_images),
    case(MISTRAL, mistral("mistral", **TIED), prompt, "text alone, tied"),
    case(MISTRAL, mistral("ministral3", **UNTIED), mistral_images, "Ministral 3"),
    case(
        MISTRAL,
        mistral("mistral", multimodal_projector_bias=True, vision_feature_layer=-2, **UNTIED),
        mistral_images,
        "another feature layer, biases",
    ),
    case("Mistral3Model", mistral("mistral"), mistral_images),
    case(GEMMA, gemma3(**TIED), gemma_images),
    case(GEMMA, gemma3(**TIED), prompt, "text alone"),
    case(GEMMA, gemma3(**UNTIED), gemma_images, "untied"),
    case("Gemma3Model", gemma3(), gemma_images),
    case(LLAVA, llava(**UNTIED), llava_images),
    case(LLAVA, llava(**UNTIED), prompt, "text alone"),
    case(LLAVA, llava(vision_feature_layer=[-2, -1], **UNTIED), llava_images, "two feature layers"),
    case("LlavaModel", llava(), llava_images),
]

QWEN_7B = {
    "vocab_size": 152064,
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
}
QWEN25_3B = {
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 11008,
    "num_hidden_layers": 36,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
}
QWEN3_8B = {
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
}
QWEN3_4B = {**QWEN3_8B, "hidden_size": 2560, "intermediate_size": 9728}
QWEN3_4B_VISION = {
    "depth": 24,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "out_hidden_size": 2560,
    "deepstack_visual_indexes": (5, 11, 17),
}
GEMMA_12B = {
    "hidden_size": 3840,
    "intermediate_size": 15360,
    "num_hidden_layers": 48,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 256,
}
SO400M_896 = {
    "model_type": "siglip_vision_model",
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "image_size": 896,
    "patch_size": 14,
    "vision_use_head": False,
}
LLAMA_8B = {
    "model_type": "llama",
    "vocab_size": 128320,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}
VIT_L_336 = {
    "model_type": "clip_vision_model",
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "image_size": 336,
    "patch_size": 14,
}


def published(
    repo: str, class_name: str, text: dict[str, Any], vision: dict[str, Any], **config: Any
) -> Published:
    own = {"text_config": text, "vision_config": vision, **config}
    return Published(repo, class_name, own, "transformers")


PUBLISHED = [
    published("Qwen/Qwen2-VL-7B-Instruct", QWEN2, QWEN_7B, {}),
    published("Qwen/Qwen2.5-VL-7B-Instruct", QWEN25, QWEN_7B, {"hidden_size": 1280}),
    published(
        "Qwen/Qwen2.5-VL-3B-Instruct",
        QWEN25,
        QWEN25_3B,
        {"hidden_size": 1280, "out_hidden_size": 2048},
        **TIED,
    ),
    published("Qwen/Qwen3-VL-8B-Instruct", QWEN3, QWEN3_8B, {"out_hidden_size": 4096}, **UNTIED),
    published("Qwen/Qwen3-VL-4B-Instruct", QWEN3, QWEN3_4B, QWEN3_4B_VISION, **TIED),
    Published("mistralai/Mistral-Small-3.2-24B-Instruct-2506", MISTRAL, UNTIED, "transformers"),
    published("google/gemma-3-12b-it", GEMMA, GEMMA_12B, SO400M_896),
    published("xtuner/llava-llama-3-8b-v1_1-transformers", LLAVA, LLAMA_8B, VIT_L_336),
]
