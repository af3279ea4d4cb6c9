"""Write a pipeline folder with a published model's tensor names and shapes, and random weights.

The names, shapes and their order are those of the diffusers and transformers classes, generated
here from config values: neither library is imported. Weights are streamed, so that memory stays
flat whatever the size, and depend only on the seed and the tensor's name. model_index.json names
only what is written: no VAE, and a text encoder where one is asked for.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import click
import numpy as np
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn

from shardc.header import dump_header, lay_out

Config = dict[str, Any]
Tensor = tuple[str, tuple[int, ...]]
Row = tuple[str, *tuple[int, ...]]  # a module's name, then the shape of its weight

CHUNK_BYTES = 4 << 20
DIFFUSERS_VERSION = "0.42.1"  # the config keys below are those this version saves
LAYER_KEYS = ("num_layers", "num_single_layers", "num_hidden_layers")


def _each(names: str, *shape: int) -> list[Row]:
    return [(name, *shape) for name in names.split()]


def _embedder(name: str, out: int, into: int) -> list[Row]:
    return [(f"{name}.linear_1", out, into), (f"{name}.linear_2", out, out)]


def _state_dict(
    stem: list[Row], blocks: dict[str, tuple[int, list[Row]]], end: list[Row], *, bias: bool
) -> Iterator[Tensor]:
    """Every tensor of a model: its stem, each list of blocks with their count, and its end."""
    repeated: Iterator[Row] = (
        (f"{blocks_name}.{i}.{name}", *shape)
        for blocks_name, (count, rows) in blocks.items()
        for i in range(count)
        for name, *shape in rows
    )
    for name, *shape in chain(stem, repeated, end):
        yield f"{name}.weight", tuple(shape)
        if bias and len(shape) == 2:  # a 1-d weight is an RMSNorm's, which has no bias
            yield f"{name}.bias", (shape[0],)


def _flux2(c: Config) -> Iterator[Tensor]:
    unit = c["attention_head_dim"]
    d = c["num_attention_heads"] * unit
    mlp = int(d * c["mlp_ratio"])
    stem = [
        *_embedder("time_guidance_embed.timestep_embedder", d, c["timestep_guidance_channels"]),
        *_each("double_stream_modulation_img.linear double_stream_modulation_txt.linear", 6 * d, d),
        *_each("single_stream_modulation.linear", 3 * d, d),
        *_each("x_embedder", d, c["in_channels"]),
        *_each("context_embedder", d, c["joint_attention_dim"]),
    ]
    double = [
        *_each("attn.to_q attn.to_k attn.to_v", d, d),
        *_each("attn.norm_q attn.norm_k", unit),
        *_each("attn.to_out.0", d, d),
        *_each("attn.norm_added_q attn.norm_added_k", unit),
        *_each("attn.add_q_proj attn.add_k_proj attn.add_v_proj attn.to_add_out", d, d),
        *_each("ff.linear_in", 2 * mlp, d),
        *_each("ff.linear_out", d, mlp),
        *_each("ff_context.linear_in", 2 * mlp, d),
        *_each("ff_context.linear_out", d, mlp),
    ]
    single = [
        *_each("attn.to_qkv_mlp_proj", 3 * d + 2 * mlp, d),
        *_each("attn.norm_q attn.norm_k", unit),
        *_each("attn.to_out", d, d + mlp),
    ]
    end = [
        *_each("norm_out.linear", 2 * d, d),
        *_each("proj_out", c["patch_size"] ** 2 * (c["out_channels"] or c["in_channels"]), d),
    ]
    blocks = {
        "transformer_blocks": (c["num_layers"], double),
        "single_transformer_blocks": (c["num_single_layers"], single),
    }
    return _state_dict(stem, blocks, end, bias=False)


def _flux1(c: Config) -> Iterator[Tensor]:
    unit = c["attention_head_dim"]
    d = c["num_attention_heads"] * unit
    mlp = 4 * d
    qkv = [
        *_each("attn.norm_q attn.norm_k", unit),
        *_each("attn.to_q attn.to_k attn.to_v", d, d),
    ]
    stem = [
        *_embedder("time_text_embed.timestep_embedder", d, 256),
        *(_embedder("time_text_embed.guidance_embedder", d, 256) if c["guidance_embeds"] else ()),
        *_embedder("time_text_embed.text_embedder", d, c["pooled_projection_dim"]),
        *_each("context_embedder", d, c["joint_attention_dim"]),
        *_each("x_embedder", d, c["in_channels"]),
    ]
    double = [
        *_each("norm1.linear norm1_context.linear", 6 * d, d),
        *qkv,
        *_each("attn.to_out.0", d, d),
        *_each("attn.norm_added_q attn.norm_added_k", unit),
        *_each("attn.add_q_proj attn.add_k_proj attn.add_v_proj attn.to_add_out", d, d),
        *_each("ff.net.0.proj", mlp, d),
        *_each("ff.net.2", d, mlp),
        *_each("ff_context.net.0.proj", mlp, d),
        *_each("ff_context.net.2", d, mlp),
    ]
    single = [
        *_each("norm.linear", 3 * d, d),
        *_each("proj_mlp", mlp, d),
        *_each("proj_out", d, d + mlp),
        *qkv,
    ]
    end = [
        *_each("norm_out.linear", 2 * d, d),
        *_each("proj_out", c["patch_size"] ** 2 * (c["out_channels"] or c["in_channels"]), d),
    ]
    blocks = {
        "transformer_blocks": (c["num_layers"], double),
        "single_transformer_blocks": (c["num_single_layers"], single),
    }
    return _state_dict(stem, blocks, end, bias=True)


def _qwen_image(c: Config) -> Iterator[Tensor]:
    unit = c["attention_head_dim"]
    d = c["num_attention_heads"] * unit
    stem = [
        *_embedder("time_text_embed.timestep_embedder", d, 256),
        *_each("txt_norm", c["joint_attention_dim"]),
        *_each("img_in", d, c["in_channels"]),
        *_each("txt_in", d, c["joint_attention_dim"]),
    ]
    block = [
        *_each("img_mod.1", 6 * d, d),
        *_each("attn.norm_q attn.norm_k", unit),
        *_each("attn.to_q attn.to_k attn.to_v", d, d),
        *_each("attn.add_k_proj attn.add_v_proj attn.add_q_proj", d, d),
        *_each("attn.to_out.0 attn.to_add_out", d, d),
        *_each("attn.norm_added_q attn.norm_added_k", unit),
        *_each("img_mlp.net.0.proj", 4 * d, d),
        *_each("img_mlp.net.2", d, 4 * d),
        *_each("txt_mod.1", 6 * d, d),
        *_each("txt_mlp.net.0.proj", 4 * d, d),
        *_each("txt_mlp.net.2", d, 4 * d),
    ]
    end = [
        *_each("norm_out.linear", 2 * d, d),
        *_each("proj_out", c["patch_size"] ** 2 * c["out_channels"], d),
    ]
    return _state_dict(stem, {"transformer_blocks": (c["num_layers"], block)}, end, bias=True)


def _qwen3(c: Config) -> Iterator[Tensor]:
    d, unit, mlp = c["hidden_size"], c["head_dim"], c["intermediate_size"]
    q, kv = c["num_attention_heads"] * unit, c["num_key_value_heads"] * unit
    layer = [
        *_each("self_attn.q_proj", q, d),
        *_each("self_attn.k_proj self_attn.v_proj", kv, d),
        *_each("self_attn.o_proj", d, q),
        *_each("self_attn.q_norm self_attn.k_norm", unit),
        *_each("mlp.gate_proj mlp.up_proj", mlp, d),
        *_each("mlp.down_proj", d, mlp),
        *_each("input_layernorm post_attention_layernorm", d),
    ]
    stem = _each("model.embed_tokens", c["vocab_size"], d)
    end = _each("model.norm", d)
    if not c["tie_word_embeddings"]:  # a tied head is not saved
        end += _each("lm_head", c["vocab_size"], d)
    return _state_dict(stem, {"model.layers": (c["num_hidden_layers"], layer)}, end, bias=False)


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
        KLEIN, _flux2,
        FLUX2 | {
            "joint_attention_dim": 7680, "num_attention_heads": 24,
            "num_layers": 5, "num_single_layers": 20,
        },
        QWEN3 | {"hidden_size": 2560, "intermediate_size": 9728, "tie_word_embeddings": True},
    ),
    "flux2-klein-9b": Shape(
        KLEIN, _flux2,
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
class DType:
    """A float dtype and the masks that turn random bits into finite values of it.

    The sign, the mantissa and the two lowest exponent bits stay random, the rest of the exponent
    is set: magnitudes lie in [1/128, 1/8).
    """

    name: str  # in safetensors
    torch_name: str  # in config.json of transformers
    item_bytes: int
    keep: int
    put: int

    def bits(self, mask: int) -> np.uint64:
        """`mask` repeated over 64 bits."""
        return np.uint64(int.from_bytes(mask.to_bytes(self.item_bytes) * (8 // self.item_bytes)))


DTYPES = {
    "bf16": DType("BF16", "bfloat16", 2, 0x81FF, 0x3C00),
    "fp16": DType("F16", "float16", 2, 0x8FFF, 0x2000),
    "fp32": DType("F32", "float32", 4, 0x81FFFFFF, 0x3C000000),
}


def random_bytes(name: str, size_bytes: int, dtype: DType, seed: int) -> Iterator[memoryview]:
    """A tensor's little-endian bytes in chunks, the same for a seed, name, size and dtype."""
    # Raw bits, because numpy promises their stream, not that of Generator's methods.
    source = np.random.SFC64([seed, *name.encode()])
    keep, put = dtype.bits(dtype.keep), dtype.bits(dtype.put)
    for start in range(0, size_bytes, CHUNK_BYTES):
        chunk_bytes = min(CHUNK_BYTES, size_bytes - start)
        words = source.random_raw(-(-chunk_bytes // 8))
        words &= keep
        words |= put
        yield words.astype("<u8", copy=False).data.cast("B")[:chunk_bytes]


def split(
    sizes: Mapping[str, int], *, files: int | None = None, max_file_bytes: int = 0
) -> list[list[str]]:
    """Cut tensors, in order, into `files` of about equal size, or as huggingface_hub does.

    Its rule: a file is closed before the tensor that would make it exceed `max_file_bytes`.
    ValueError where there are fewer tensors than files.
    """
    if files is not None and files > len(sizes):
        raise ValueError(f"{len(sizes)} tensors do not fill {files} files")
    groups: list[list[str]] = [[]]
    total = sum(sizes.values())
    at = start = 0
    for i, (name, size) in enumerate(sizes.items()):
        if files is None:
            full = at + size - start > max_file_bytes
        else:
            due = (at + size / 2) * files >= total * len(groups)
            full = due or len(sizes) - i <= files - len(groups)
        if full and groups[-1]:
            groups.append([])
            start = at
        groups[-1].append(name)
        at += size
    return groups


def write_json(path: Path, document: Mapping[str, Any]) -> None:
    """Write JSON as diffusers does."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def write_weights(
    folder: Path,
    stem: str,
    contents: Iterable[Tensor],
    *,
    dtype: DType,
    seed: int = 0,
    files: int | None = None,
    max_file_bytes: int = 5 * 10**9,
    advance: Callable[[int], object] = lambda _bytes: None,
) -> None:
    """Write STEM.safetensors, or STEM-0000i-of-0000n.safetensors and their index.

    As safetensors does, tensors are ordered by name within a file.
    """
    shapes = dict(contents)
    sizes = {name: math.prod(shape) * dtype.item_bytes for name, shape in shapes.items()}
    groups = split(sizes, files=files, max_file_bytes=max_file_bytes)
    weight_map: dict[str, str] = {}
    folder.mkdir(parents=True, exist_ok=True)
    for i, group in enumerate(groups, 1):
        part = f"-{i:05d}-of-{len(groups):05d}" if len(groups) > 1 else ""
        file_name = f"{stem}{part}.safetensors"
        weight_map.update(dict.fromkeys(group, file_name))
        infos = lay_out((name, dtype.name, shapes[name]) for name in sorted(group))
        with (folder / file_name).open("wb") as file:
            file.write(dump_header(infos, {"format": "pt"}, alignment=8))
            for info in infos:
                for chunk in random_bytes(info.name, info.size_bytes, dtype, seed):
                    advance(file.write(chunk))
    if len(groups) > 1:
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map}
        write_json(folder / f"{stem}.safetensors.index.json", index)


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
