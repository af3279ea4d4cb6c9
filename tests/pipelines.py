"""Tiny whole pipelines, saved as diffusers saves them, and one call of each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import diffusers
import tokenizers
import torch
import transformers

from tests import models

PAD = "<|endoftext|>"
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PROMPT = "a red fox in the snow"
VAE = {
    "block_out_channels": (8, 8),
    "down_block_types": ("DownEncoderBlock2D",) * 2,
    "up_block_types": ("UpDecoderBlock2D",) * 2,
    "layers_per_block": 1,
    "norm_num_groups": 4,
    "latent_channels": 4,
}


def tokenizer() -> Any:
    """Byte-level BPE, trained on a few words."""
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=290,
        special_tokens=[PAD, "<|im_start|>", "<|im_end|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator([PROMPT, "user assistant system"], trainer)
    return made


def _fast_tokenizer(template: str = TEMPLATE) -> Any:
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer(), pad_token=PAD, eos_token="<|im_end|>", chat_template=template
    )


def _vae(cls: Any, **config: Any) -> Any:
    """Random, with batch-norm statistics that are not those of a fresh one."""
    vae = models.randomised(cls(**{**VAE, **config}))
    with torch.no_grad():
        for name, buffer in vae.named_buffers():
            if name.endswith("running_mean"):
                buffer.normal_(0, 0.5)
            elif name.endswith("running_var"):
                buffer.uniform_(0.5, 2)
    return vae


def flux2_klein(heads: int = 8, channels: int = 8) -> Any:
    """Flux2Klein: a tied Qwen3 with grouped keys, so both it and the transformer are sharded."""
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        **{**models.DECODER, "vocab_size": 291}, tie_word_embeddings=True
    )
    # three layers of the encoder's 32
    transformer = {**models.FLUX2, "joint_attention_dim": 96, "num_attention_heads": heads}
    return diffusers.Flux2KleinPipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
        vae=_vae(diffusers.AutoencoderKLFlux2, block_out_channels=(channels, channels)),
        text_encoder=models.randomised(transformers.Qwen3ForCausalLM(config)),
        tokenizer=_fast_tokenizer(),
        transformer=models.randomised(diffusers.Flux2Transformer2DModel(**transformer)),
    )


def flux2_dev() -> Any:
    """Flux2: a Mistral 3 beside its vision tower; again both it and the transformer are sharded.

    Its tokenizer is one, not the processor around it: for text they do the same, and that one
    needs torchvision.
    """
    torch.manual_seed(0)
    template = "{% for m in messages if m.role == 'user' %}{{ m.content[0].text }}{% endfor %}"
    transformer = {**models.FLUX2, "joint_attention_dim": 96, "guidance_embeds": True}
    return diffusers.Flux2Pipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
        vae=_vae(diffusers.AutoencoderKLFlux2),
        text_encoder=mistral3(vocab_size=293),
        tokenizer=_fast_tokenizer(template),
        transformer=models.randomised(diffusers.Flux2Transformer2DModel(**transformer)),
    )


def flux1() -> Any:
    """FLUX.1: CLIP and T5 kept whole."""
    torch.manual_seed(0)
    clip = transformers.CLIPTextConfig(
        vocab_size=291,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=16,
        projection_dim=32,
        bos_token_id=1,
        eos_token_id=2,
    )
    t5 = transformers.T5Config(
        vocab_size=291, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4
    )
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer(), pad_token=PAD, eos_token="<|im_end|>", model_max_length=16
    )
    return diffusers.FluxPipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
        vae=_vae(diffusers.AutoencoderKL, scaling_factor=1.0, shift_factor=0.1),
        text_encoder=models.randomised(transformers.CLIPTextModel(clip)),
        tokenizer=fast,
        text_encoder_2=models.randomised(transformers.T5EncoderModel(t5)),
        tokenizer_2=fast,
        transformer=models.randomised(diffusers.FluxTransformer2DModel(**models.FLUX1)),
    )


def qwen_image() -> Any:
    """Qwen-Image: a Qwen2.5-VL kept whole, whose published names are not its modules'."""
    torch.manual_seed(0)
    config = transformers.Qwen2_5_VLConfig(
        text_config={
            "vocab_size": 291,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "mrope_section": [1, 1, 2],
            },
        },
        vision_config={
            "depth": 1,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_heads": 4,
            "out_hidden_size": 32,
            "fullatt_block_indexes": [0],
        },
    )
    vae = diffusers.AutoencoderKLQwenImage(
        base_dim=8,
        z_dim=4,
        dim_mult=[1, 1],
        num_res_blocks=1,
        attn_scales=[],
        temperal_downsample=[False],
        latents_mean=[0.1, 0.2, 0.3, 0.4],
        latents_std=[1.0, 1.1, 1.2, 1.3],
    )
    return diffusers.QwenImagePipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
        vae=models.randomised(vae),
        text_encoder=models.randomised(transformers.Qwen2_5_VLForConditionalGeneration(config)),
        tokenizer=_fast_tokenizer(),
        transformer=models.randomised(diffusers.QwenImageTransformer2DModel(**models.QWEN_IMAGE)),
    )


def mistral3(**text: Any) -> Any:
    """FLUX.2-dev's text encoder: a Mistral decoder beside a vision tower."""
    torch.manual_seed(0)
    vision = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "head_dim": 8,
        "image_size": 32,
        "patch_size": 8,
    }
    config = transformers.Mistral3Config(
        text_config={"model_type": "mistral", **models.DECODER, **text},
        vision_config={"model_type": "pixtral", **vision},
        image_token_index=1,
        spatial_merge_size=2,
        tie_word_embeddings=False,
    )
    return models.randomised(transformers.Mistral3ForConditionalGeneration(config))


MAKE = {
    "flux2-klein": flux2_klein,
    "flux2-dev": flux2_dev,
    "flux1": flux1,
    "qwen-image": qwen_image,
}
CALL: dict[str, dict[str, Any]] = {
    "flux2-klein": {"text_encoder_out_layers": (1, 2, 3), "max_sequence_length": 24},
    "flux2-dev": {"text_encoder_out_layers": (1, 2, 3), "max_sequence_length": 24},
    "flux1": {"max_sequence_length": 16, "guidance_scale": 3.5},
    "qwen-image": {
        "max_sequence_length": 24,
        "true_cfg_scale": 2.0,
        "negative_prompt": "snow",
    },
}


def save(name: str, folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """Make it, save it, and give it back."""
    pipeline = MAKE[name]()
    if dtype != torch.float32:
        pipeline = pipeline.to(dtype)
    pipeline.save_pretrained(folder)
    return pipeline


def generate(pipeline: Any, name: str) -> Any:
    """Latents and image, fp32 arrays, of two steps from a fixed seed."""
    pipeline.set_progress_bar_config(disable=True)
    seen = {}

    def keep(_: Any, step: int, __: Any, values: dict[str, Any]) -> dict[str, Any]:
        seen[step] = values["latents"].float().cpu().numpy().copy()
        return values

    image = pipeline(
        prompt=PROMPT,
        height=16,
        width=16,
        num_inference_steps=2,
        generator=torch.Generator().manual_seed(5),
        output_type="np",
        callback_on_step_end=keep,
        **CALL[name],
    ).images
    return seen[1], image
