"""Decoders that pipelines encode text with."""

from __future__ import annotations

from typing import Any

from tests.zoo.case import Case, Draw, Published

DECODER = {
    "vocab_size": 101,  # no degree divides it: padding is always there
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,  # four ranks: each key and value is held twice
    "head_dim": 8,  # the heads are wider than the model
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
TIED = {"tie_word_embeddings": True}
UNTIED = {"tie_word_embeddings": False}


def tokens(draw: Draw) -> dict[str, Any]:
    """Two prompts, the second padded on the left; all that pipelines take is in the output."""
    mask = draw.ids(1, 2, 9) + 1
    mask[1, :3] = 0
    return {
        "input_ids": draw.ids(101, 2, 9),
        "attention_mask": mask,
        "output_hidden_states": True,
        "use_cache": False,
    }


def case(class_name: str, option: str = "", /, *, lacks: str = "", **config: Any) -> Case:
    own = {key: value for key, value in {**DECODER, **config}.items() if key != lacks}
    return Case(class_name, own, tokens, option, library="transformers")


def zero_heads(class_name: str, heads: int, kv_heads: int, padded: int) -> Case:
    """Grouped queries that `padded` ranks cannot share out: each group gets zero heads."""
    sizes = {"num_attention_heads": heads, "num_key_value_heads": kv_heads}
    option = f"{heads} heads in {kv_heads} groups"
    own = {**DECODER, **sizes, "hidden_size": 42, "intermediate_size": 45}
    return Case(class_name, own, tokens, option, "transformers", (1,), (padded,))


CASES = [
    case("LlamaModel"),
    case("LlamaModel", "no head_dim", lacks="head_dim"),
    case("LlamaModel", "as many KV heads", lacks="num_key_value_heads"),
    case("LlamaModel", "one KV head", num_key_value_heads=1),
    case("LlamaModel", "biases", attention_bias=True, mlp_bias=True),
    zero_heads("LlamaModel", 6, 2, 4),  # two ranks share a group of three
    zero_heads("LlamaModel", 6, 3, 2),  # the second rank has a group, and one of zeros
    zero_heads("LlamaModel", 7, 1, 4),
    case("LlamaForCausalLM", **UNTIED),
    case("LlamaForCausalLM", "tied", **TIED),
    case("SmolLM3Model", lacks="head_dim", num_hidden_layers=4),  # the last without RoPE
    case("SmolLM3ForCausalLM", "tied", lacks="head_dim", num_hidden_layers=4, **TIED),
    case("GlmModel"),
    case("GlmForCausalLM", **UNTIED),
    case("MistralModel"),
    case("MistralModel", "sliding window", sliding_window=4),
    case("MistralForCausalLM", **UNTIED),
    case("MistralForCausalLM", "tied", **TIED),
    case("MinistralModel", sliding_window=4),
    case("MinistralForCausalLM", **UNTIED),
    case("Ministral3Model"),
    case("Ministral3ForCausalLM", **UNTIED),
    case("Ministral3ForCausalLM", "tied", **TIED),
    case("Qwen2Model", lacks="head_dim"),
    case(
        "Qwen2Model",
        "sliding window",
        lacks="head_dim",
        use_sliding_window=True,
        sliding_window=4,
        max_window_layers=1,
    ),
    case("Qwen2ForCausalLM", lacks="head_dim", **UNTIED),
    case("Qwen2ForCausalLM", "tied", lacks="head_dim", **TIED),
    case("Qwen3Model"),
    case("Qwen3Model", "biases", attention_bias=True),
    case(
        "Qwen3Model",
        "sliding window",
        use_sliding_window=True,
        sliding_window=4,
        max_window_layers=1,
    ),
    case("Qwen3ForCausalLM", **UNTIED),
    case("Qwen3ForCausalLM", "tied", **TIED),
    case("GemmaModel", num_key_value_heads=1),
    case("GemmaForCausalLM", **TIED),
    case("Gemma2Model", sliding_window=4),
    case("Gemma2ForCausalLM", sliding_window=4, **TIED),
    case("Gemma3TextModel", sliding_window=4),
    case("Gemma3ForCausalLM", sliding_window=4, **TIED),
    case("Gemma3ForCausalLM", "untied", sliding_window=4, **UNTIED),
]

LLAMA_8B = {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}
QWEN25_VL_7B = {
    "vocab_size": 152064,
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
}
QWEN3_4B = {
    "vocab_size": 151936,
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
}
QWEN3_8B = {**QWEN3_4B, "hidden_size": 4096, "intermediate_size": 12288}
GEMMA_2B = {
    "hidden_size": 2048,
    "intermediate_size": 16384,
    "num_hidden_layers": 18,
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
}


def published(repo: str, class_name: str, config: dict[str, Any]) -> Published:
    return Published(repo, class_name, config, "transformers")


PUBLISHED = [
    published("meta-llama/Llama-3.1-8B-Instruct", "LlamaForCausalLM", LLAMA_8B),
    published(
        "hunyuanvideo-community/HunyuanVideo", "LlamaModel", {**LLAMA_8B, "vocab_size": 128320}
    ),
    published("HuggingFaceTB/SmolLM3-3B", "SmolLM3ForCausalLM", {}),
    published("THUDM/glm-4-9b-hf", "GlmModel", {}),
    published("Qwen/Qwen2.5-VL-7B-Instruct", "Qwen2_5_VLTextModel", QWEN25_VL_7B),
    published("Qwen/Qwen3-4B", "Qwen3ForCausalLM", {**QWEN3_4B, **TIED}),
    published("Qwen/Qwen3-8B", "Qwen3ForCausalLM", {**QWEN3_8B, **UNTIED}),
    published("google/gemma-2b", "GemmaModel", GEMMA_2B),
    published("google/gemma-2-2b", "Gemma2Model", {}),
]
