"""T5 and UMT5 encoders."""

from __future__ import annotations

from typing import Any

from tests.zoo.case import Case, Draw, Published

T5 = {
    "vocab_size": 101,  # no degree divides it: padding is always there
    "d_model": 24,  # not the heads' width
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": 3,  # the first one's position bias serves all
    "num_heads": 8,
    "feed_forward_proj": "gated-gelu",
}


def tokens(draw: Draw) -> dict[str, Any]:
    mask = draw.ids(1, 2, 7) + 1
    mask[1, 4:] = 0
    return {"input_ids": draw.ids(101, 2, 7), "attention_mask": mask}


CASES = [
    Case("T5EncoderModel", T5, tokens, library="transformers"),
    Case(
        "T5EncoderModel",
        {**T5, "feed_forward_proj": "relu"},
        tokens,
        option="plain feed-forward",
        library="transformers",
    ),
    Case("UMT5EncoderModel", T5, tokens, library="transformers"),
    Case(
        "UMT5EncoderModel",
        {**T5, "feed_forward_proj": "relu"},
        tokens,
        option="plain feed-forward",
        library="transformers",
    ),
]

T5_XXL = {
    "d_model": 4096,
    "d_ff": 10240,
    "num_layers": 24,
    "num_heads": 64,
    "feed_forward_proj": "gated-gelu",
}
PILE_T5_XL = {**T5_XXL, "vocab_size": 32128, "d_model": 2048, "d_ff": 5120, "num_heads": 32}


def published(repo: str, class_name: str, config: dict[str, Any]) -> Published:
    return Published(repo, class_name, config, "transformers")


PUBLISHED = [
    published("google/t5-v1_1-xxl", "T5EncoderModel", T5_XXL),
    published("google/umt5-xxl", "UMT5EncoderModel", {**T5_XXL, "vocab_size": 256384}),
    published("EleutherAI/pile-t5-xl", "UMT5EncoderModel", PILE_T5_XL),
]
