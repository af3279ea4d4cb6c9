"""Write a pipeline folder with a published model's tensor names and shapes, and random weights.

The names, shapes and their order are those of the diffusers and transformers classes, generated
here from config values: neither library is imported. Weights are streamed, so that memory stays
flat whatever the size, and depend only on the seed and the tensor's name. model_index.json names
only what is written: no VAE, and a text encoder where one is asked for.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn

from shardc.synthetic import (
    DTYPES,
    Config,
    Tensor,
    each,
    embedder,
    flux2_tensors,
    state_dict,
    write_json,
    write_weights,
)

DIFFUSERS_VERSION = "0.42.1"  # the config keys below are those this version saves
LAYER_KEYS = ("num_layers", "num_single_layers", "num_hidden_layers")


def _flux1(c: Config) -> Iterator[Tensor]:
    unit = c["attention_head_dim"]
    d = c["num_attention_heads"] * unit
    mlp = 4 * d
    qkv = [
        *each("attn.norm_q attn.norm_k", unit),
        *each("attn.to_q attn.to_k attn.to_v", d, d),
    ]
    stem = [
        *embedder("time_text_embed.timestep_embedder", d, 256),
        *(embedder("time_text_embed.guidance_embedder", d, 256) if c["guidance_embeds"] else ()),
        *embedder("time_text_embed.text_embedder", d, c["pooled_projection_dim"]),
        *each("context_embedder", d, c["joint_attention_dim"]),
        *each("x_embedder", d, c["in_channels"]),
    ]
    double = [
        *each("norm1.linear norm1_context.linear", 6 * d, d),
        *qkv,
        *each("attn.to_out.0", d, d),
        *each("attn.norm_added_q attn.norm_added_k", unit),
        *each("attn.add_q_proj attn.add_k_proj attn.add_v_proj attn.to_add_out", d, d),
        *each("ff.net.0.proj", mlp, d),
        *each("ff.net.2", d, mlp),
        *each("ff_context.net.0.proj", mlp, d),
        *each("ff_context.net.2", d, mlp),
    ]
    single = [
        *each("norm.linear", 3 * d, d),
        *each("proj_mlp", mlp, d),
        *each("proj_out", d, d + mlp),
        *qkv,
    ]
    end = [
        *each("norm_out.linear", 2 * d, d),
        *each("proj_out", c["patch_size"] ** 2 * (c["out_channels"] or c["in_channels"]), d),
    ]
    blocks = {
        "transformer_blocks": (c["num_layers"], double),
        "single_transformer_blocks": (c["num_single_layers"], single),
    }
    return state_dict(stem, blocks, end, bias=True)


def _qwen_image(c: Config) -> Iterator[Tensor]:
    unit = c["attention_head_dim"]
    d = c["num_attention_heads"] * unit
    stem = [
        *embedder("time_text_embed.timestep_embedder", d, 256),
        *each("txt_norm", c["joint_attention_dim"]),
        *each("img_in", d, c["in_channels"]),
        *each("txt_in", d, c["joint_attention_dim"]),
    ]
    block = [
        *each("img_mod.1", 6 * d, d),
        *each("attn.norm_q attn.norm_k", unit),
        *each("attn.to_q attn.to_k attn.to_v", d, d),
        *each("attn.add_k_proj attn.add_v_proj attn.add_q_proj", d, d),
        *each("attn.to_out.0 attn.to_add_out", d, d),
        *each("attn.norm_added_q attn.norm_added_k", unit),
        *each("img_mlp.net.0.proj", 4 * d, d),
        *each("img_mlp.net.2", d, 4 * d),
        *each("txt_mod.1", 6 * d, d),
        *each("txt_mlp.net.0.proj", 4 * d, d),
        *each("txt_mlp.net.2", d, 4 * d),
    ]
    end = [
        *each("norm_out.linear", 2 * d, d),
        *each("proj_out", c["patch_size"] ** 2 * c["out_channels"], d),
    ]
    return state_dict(stem, {"transformer_blocks": (c["num_layers"], block)}, end, bias=True)


def _qwen3(c: Config) -> Iterator[Tensor]:
    d, unit, mlp = c["hidden_size"], c["head_dim"], c["intermediate_size"]
    q, kv = c["num_attention_heads"] * unit, c["num_key_value_heads"] * unit
    layer = [
        *each("self_attn.q_proj", q, d),
        *each("self_attn.k_proj self_attn.v_proj", kv, d),
        *each("self_attn.o_proj", d, q),
        *each("self_attn.q_norm self_attn.k_norm", unit),
        *each("mlp.gate_proj mlp.up_proj", mlp, d),
        *each("mlp.down_proj", d, mlp),
        *each("input_layernorm post_attention_layernorm", d),
    ]
    stem = each("model.embed_tokens", c["vocab_size"], d)
    end = each("model.norm", d)
    if not c["tie_word_embeddings"]:  # a tied head is not saved
        end += each("lm_head", c["vocab_size"], d)
    return state_dict(stem, {"model.layers": (c["num_hidden_layers"], layer)}, end, bias=False)


@dataclass(frozen=True, slots=True)
class Shape:
    """A published pipeline: what its configs say and how its transformer's tensors follow."""

    pipeline: Config  # model_index.json
    generate: Callable[[Config], Iterator[Tensor]]
    transformer: Config
    text_encoder: Config | None = None
    scheduler: Config = field(default_factory=dict)  # where it differs from SCHEDULER


def _pipeline(name: str, transformer: str, vae: str, **others: str) -> Config:
    return {
        "_class_name": name,
        "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
        "transformer": ["diffusers", transformer],
        "vae": ["diffusers", vae],
        **{component: ["transformers", cls] for component, cls in others.items()},
    }


# fmt: off
SCHEDULER: Config = {
    "_class_name": "FlowMatchEulerDiscreteScheduler", "base_image_seq_len": 256, "base_shift": 0.5,
    "invert_sigmas": False, "max_image_seq_len": 4096, "max_shift": 1.15,
    "num_train_timesteps": 1000, "shift": 3.0, "shift_terminal": None,
    "stochastic_sampling": False, "time_shift_type": "exponential", "use_beta_sigmas": False,
    "use_dynamic_shifting": True, "use_exponential_sigmas": False, "use_karras_sigmas": False,
}
FLUX2: Config = {
    "_class_name": "Flux2Transformer2DModel", "attention_head_dim": 128,
    "axes_dims_rope": [32, 32, 32, 32], "eps": 1e-6, "guidance_embeds": False, "in_channels": 128,
    "mlp_ratio": 3.0, "out_channels": None, "patch_size": 1, "rope_theta": 2000,
    "timestep_guidance_channels": 256,
}
FLUX1: Config = {
    "_class_name": "FluxTransformer2DModel", "attention_head_dim": 128,
    "axes_dims_rope": [16, 56, 56], "guidance_embeds": True, "in_channels": 64,
    "joint_attention_dim": 4096, "num_attention_heads": 24, "num_layers": 19,
    "num_single_layers": 38, "out_channels": None, "patch_size": 1, "pooled_projection_dim": 768,
}
QWEN_IMAGE: Config = {
    "_class_name": "QwenImageTransformer2DModel", "attention_head_dim": 128,
    "axes_dims_rope": [16, 56, 56], "guidance_embeds": False, "in_channels": 64,
    "joint_attention_dim": 3584, "num_attention_heads": 24, "num_layers": 60, "out_channels": 16,
    "patch_size": 2, "use_additional_t_cond": False, "use_layer3d_rope": False,
    "zero_cond_t": False,
}
QWEN3: Config = {
    "architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "bos_token_id": 151643, "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu",
    "initializer_range": 0.02, "max_position_embeddings": 40960, "max_window_layers": 36,
    "model_type": "qwen3", "num_attention_heads": 32, "num_hidden_layers": 36,
    "num_key_value_heads": 8, "rms_norm_eps": 1e-6, "rope_scaling": None, "rope_theta": 1000000,
    "sliding_window": None, "transformers_version": "4.57.3", "use_cache": True,
    "use_sliding_window": False, "vocab_size": 151936,
}
KLEIN: Config = {
    **_pipeline(
        "Flux2KleinPipeline", "Flux2Transformer2DModel", "AutoencoderKLFlux2",
        text_encoder="Qwen3ForCausalLM", tokenizer="Qwen2TokenizerFast",
    ),
    "is_distilled": True,
}
SHAPES: dict[str, Shape] = {
    "flux2-klein-4b": Shape(
        KLEIN, flux2_tensors,
        FLUX2 | {
            "joint_attention_dim": 7680, "num_attention_heads": 24,
            "num_layers": 5, "num_single_layers": 20,
        },
        QWEN3 | {"hidden_size": 2560, "intermediate_size": 9728, "tie_word_embeddings": True},
    ),
    "flux2-klein-9b": Shape(
        KLEIN, flux2_tensors,
        FLUX2 | {
            "joint_attention_dim": 12288, "num_attention_heads": 32,
            "num_layers": 8, "num_single_layers": 24,
        },
        QWEN3 | {"hidden_size": 4096, "intermediate_size": 12288, "tie_word_embeddings": False},
    ),
    "flux1-dev": Shape(
        _pipeline(
            "FluxPipeline", "FluxTransformer2DModel", "AutoencoderKL",
            text_encoder="CLIPTextModel", text_encoder_2="T5EncoderModel",
            tokenizer="CLIPTokenizer", tokenizer_2="T5TokenizerFast",
        ),
        _flux1, FLUX1,
    ),
    "qwen-image": Shape(
        _pipeline(
            "QwenImagePipeline", "QwenImageTransformer2DModel", "AutoencoderKLQwenImage",
            text_encoder="Qwen2_5_VLForConditionalGeneration", tokenizer="Qwen2Tokenizer",
        ),
        _qwen_image, QWEN_IMAGE,
        scheduler={
            "max_image_seq_len": 8192, "max_shift": 0.9, "shift": 1.0, "shift_terminal": 0.02,
        },
    ),
}
# fmt: on


def _scaled(config: Config, scale: float) -> Config:
    """Fewer layers of each kind, at least one; every width stays true."""
    layers = {key: max(1, round(config[key] * scale)) for key in LAYER_KEYS if key in config}
    return {**config, **layers}


def transformer_config(shape_name: str, scale: float = 1.0) -> Config:
    """The transformer's config.json."""
    config = _scaled(SHAPES[shape_name].transformer, scale)
    return {**config, "_diffusers_version": DIFFUSERS_VERSION}


def text_encoder_config(shape_name: str, scale: float = 1.0) -> Config:
    """The text encoder's config.json, less its dtype; ValueError where the shape has none here."""
    full = SHAPES[shape_name].text_encoder
    if full is None:
        raise ValueError(f"{shape_name} has no text encoder here, only the klein shapes do")
    config = _scaled(full, scale)
    return {**config, "layer_types": ["full_attention"] * config["num_hidden_layers"]}


def tensors(shape_name: str, scale: float = 1.0) -> list[Tensor]:
    """Names and shapes of the transformer's tensors, in the order of its state dict."""
    return list(SHAPES[shape_name].generate(transformer_config(shape_name, scale)))


def text_encoder_tensors(shape_name: str, scale: float = 1.0) -> list[Tensor]:
    """Names and shapes of the text encoder's tensors, in the order of its state dict."""
    return list(_qwen3(text_encoder_config(shape_name, scale)))


@dataclass(frozen=True, slots=True)
class Component:
    """One folder of weights: the stem of its files, its config.json and its tensors."""

    stem: str
    config: Config
    contents: list[Tensor]


def components(
    shape_name: str, *, scale: float = 1.0, text_encoder: bool = False
) -> dict[str, Component]:
    """The components to write, by folder; ValueError for a text encoder the shape has not."""
    config, contents = transformer_config(shape_name, scale), tensors(shape_name, scale)
    found = {"transformer": Component("diffusion_pytorch_model", config, contents)}
    if text_encoder:
        config = text_encoder_config(shape_name, scale)
        contents = text_encoder_tensors(shape_name, scale)
        found["text_encoder"] = Component("model", config, contents)
    return found


def make_checkpoint(
    shape_name: str,
    out: Path,
    *,
    scale: float = 1.0,
    dtype: str = "bf16",
    seed: int = 0,
    files: int | None = None,
    max_file_bytes: int = 5 * 10**9,
    text_encoder: bool = False,
    advance: Callable[[int], object] = lambda _bytes: None,
) -> None:
    """Write the pipeline folder; `advance` is told the bytes of every write of weights."""
    shape, kind = SHAPES[shape_name], DTYPES[dtype]
    parts = components(shape_name, scale=scale, text_encoder=text_encoder)
    for name, part in parts.items():
        write_weights(
            out / name,
            part.stem,
            part.contents,
            dtype=kind,
            seed=seed,
            files=files,
            max_file_bytes=max_file_bytes,
            advance=advance,
        )
        # diffusers' config.json has no dtype, transformers' has.
        extra = {"dtype": kind.torch_name} if name == "text_encoder" else {}
        write_json(out / name / "config.json", {**part.config, **extra})
    version = {"_diffusers_version": DIFFUSERS_VERSION}
    scheduler = {**SCHEDULER, **shape.scheduler, **version}
    write_json(out / "scheduler" / "scheduler_config.json", scheduler)
    for name, entry in shape.pipeline.items():
        if name.startswith("tokenizer"):
            write_json(out / name / "tokenizer_config.json", {"tokenizer_class": entry[1]})
    written = {
        name: entry
        for name, entry in shape.pipeline.items()
        if name.startswith("_") or (out / name).is_dir()
    }
    write_json(out / "model_index.json", {**written, **version})


def _size(_context: click.Context, _parameter: click.Parameter, text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)B?", text.strip().upper())
    if match is None:
        raise click.BadParameter(f"{text!r} is not a size like 5GB or 500MB")
    return int(float(match[1]) * 1000 ** " KMGT".index(match[2] or " "))


@click.command()
@click.argument("shape", type=click.Choice(list(SHAPES)))
@click.argument("out", type=click.Path(path_type=Path, file_okay=False))
@click.option(
    "--scale",
    type=click.FloatRange(0, 1, min_open=True),
    default=1.0,
    show_default=True,
    help="Share of the layers to keep, at least one of each kind; widths stay true.",
)
@click.option("--dtype", type=click.Choice(list(DTYPES)), default="bf16", show_default=True)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True)
@click.option(
    "--files",
    type=click.IntRange(min=1),
    help="Files a component, of about equal size; overrides --max-file-size.",
)
@click.option(
    "--max-file-size",
    "max_file_bytes",
    callback=_size,
    default="5GB",
    show_default=True,
    help="Cut as diffusers does, whose own default is 10GB.",
)
@click.option(
    "--text-encoder/--no-text-encoder",
    default=False,
    show_default=True,
    help="Write the Qwen3 text encoder too (klein only).",
)
def main(shape: str, out: Path, scale: float, text_encoder: bool, dtype: str, **cut: Any) -> None:
    """Write a pipeline folder OUT with the true names and shapes of SHAPE, and random weights.

    Example: python -m benchmarks.make_checkpoint flux2-klein-4b klein --scale 0.2
    """
    if out.is_dir() and any(out.iterdir()):
        raise click.UsageError(f"{out} is not empty; name a new folder")
    what: dict[str, Any] = {"scale": scale, "text_encoder": text_encoder}
    console = Console(stderr=True)
    columns = (BarColumn(), DownloadColumn(), TimeRemainingColumn())
    try:
        parts = components(shape, **what).values()
        count = sum(math.prod(dims) for part in parts for _, dims in part.contents)
        with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
            task = progress.add_task("", total=count * DTYPES[dtype].item_bytes)

            def advance(size_bytes: int) -> None:
                progress.advance(task, size_bytes)

            make_checkpoint(shape, out, dtype=dtype, advance=advance, **what, **cut)
    except ValueError as error:
        raise click.UsageError(str(error)) from error


if __name__ == "__main__":
    main()
