"""Tiny models of the bundled architectures, all parameters random, and inputs for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers

from tests.zoo import flux

FLUX2 = {
    "in_channels": 16,
    "num_layers": 1,
    "num_single_layers": 2,
    "attention_head_dim": 16,
    "num_attention_heads": 8,
    "joint_attention_dim": 32,
    "timestep_guidance_channels": 16,
    "axes_dims_rope": (4, 4, 4, 4),
    "guidance_embeds": False,
}
FLUX1 = {**flux.FLUX1, "guidance_embeds": True}
QWEN_IMAGE = {
    "in_channels": 16,
    "out_channels": 4,
    "num_layers": 2,
    "attention_head_dim": 16,
    "num_attention_heads": 8,
    "joint_attention_dim": 32,
    "axes_dims_rope": (4, 4, 8),
}
QWEN_IMAGE21 = {
    "in_channels": 16,
    "out_channels": 16,
    "num_layers": 2,
    "attention_head_dim": 16,
    "num_attention_heads": 8,
    "context_in_dim": 32,
    "axes_dims_rope": (4, 4, 8),
}
DECODER = {
    "vocab_size": 101,  # no degree divides it: padding is always there
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,  # four ranks: each key and value is held twice
    "head_dim": 8,
}


def build(name: str) -> Any:
    """The model by name, random, in eval mode, fp32."""
    torch.manual_seed(0)
    model: Any
    if name == "flux2":
        model = diffusers.Flux2Transformer2DModel(**FLUX2)
    elif name == "flux2-guidance":
        model = diffusers.Flux2Transformer2DModel(**{**FLUX2, "guidance_embeds": True})
    elif name == "flux1":
        model = diffusers.FluxTransformer2DModel(**FLUX1)
    elif name == "qwen-image":
        model = diffusers.QwenImageTransformer2DModel(**QWEN_IMAGE)
    elif name == "qwen-image21":
        model = diffusers.QwenImage21Transformer2DModel(**QWEN_IMAGE21)
    elif name == "qwen3-tied":
        config = transformers.Qwen3Config(**DECODER, tie_word_embeddings=True)
        model = transformers.Qwen3ForCausalLM(config)
    elif name == "qwen3":
        config = transformers.Qwen3Config(**DECODER, tie_word_embeddings=False)
        model = transformers.Qwen3ForCausalLM(config)
    elif name == "mistral":
        config = transformers.MistralConfig(**DECODER, tie_word_embeddings=False)
        model = transformers.MistralForCausalLM(config)
    else:
        raise ValueError(name)
    return randomised(model)


def randomised(model: Any) -> Any:
    """Every parameter random, norms and gates too, so that no mistake hides behind a zero."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0 if parameter.ndim > 1 else 1.0, 0.2)
    return model.eval()


def save(name: str, folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """Build, save as its library does, and give the model back."""
    model = build(name).to(dtype)
    model.save_pretrained(folder)
    return model


def inputs(name: str, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """The same arguments for the whole model and for every rank."""
    generator = torch.Generator().manual_seed(1)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    def ids(*shape: int) -> torch.Tensor:
        return torch.randint(0, 4, shape, generator=generator).float()

    if name.startswith("flux2"):
        guidance = {"guidance": torch.tensor([3.5])} if name == "flux2-guidance" else {}
        return {
            "hidden_states": noise(1, 6, 16),
            "encoder_hidden_states": noise(1, 4, 32),
            "timestep": torch.tensor([0.5]),
            "img_ids": ids(1, 6, 4),
            "txt_ids": ids(1, 4, 4),
            "return_dict": False,
            **guidance,
        }
    if name == "flux1":
        return {
            "hidden_states": noise(1, 6, 16),
            "encoder_hidden_states": noise(1, 4, 32),
            "pooled_projections": noise(1, 32),
            "timestep": torch.tensor([0.5]),
            "guidance": torch.tensor([3.5]),
            "img_ids": ids(6, 3),
            "txt_ids": torch.zeros(4, 3),
            "return_dict": False,
        }
    if name == "qwen-image":
        return {
            "hidden_states": noise(1, 6, 16),
            "encoder_hidden_states": noise(1, 4, 32),
            "encoder_hidden_states_mask": torch.ones(1, 4).bool(),
            "timestep": torch.tensor([0.5]),
            "img_shapes": [[(1, 2, 3)]],
            "return_dict": False,
        }
    if name == "qwen-image21":
        return {
            "hidden_states": noise(1, 8, 16),
            "encoder_hidden_states": noise(1, 4, 32),
            "timestep": torch.tensor([0.5]),
            "img_shapes": [[(1, 2, 4)]],
            "img_mask": torch.tensor([[0, 0, 0, 0, 1, 1]]).bool(),
            "return_dict": False,
        }
    tokens = torch.randint(0, 101, (2, 7), generator=generator)
    return {"input_ids": tokens, "return_dict": False, "use_cache": False}
