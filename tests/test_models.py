"""Real classes, tiny: diffusers' own slicing and the oracle judge every rank's every tensor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import shardc
from tests import checkpoints as ck
from tests import oracle
from tests.casts import of_torch

diffusers = pytest.importorskip("diffusers")
transformers = pytest.importorskip("transformers")
tensor_parallel = pytest.importorskip("diffusers.hooks.tensor_parallel")

pytestmark = pytest.mark.slow

HEADS = {"attention_head_dim": 8, "num_attention_heads": 8, "joint_attention_dim": 24}
DIFFUSERS: dict[str, tuple[str, dict[str, Any]]] = {
    "flux2": (
        "Flux2Transformer2DModel",
        {
            **HEADS,
            "in_channels": 16,
            "num_layers": 2,
            "num_single_layers": 2,
            "timestep_guidance_channels": 16,
            "axes_dims_rope": (2, 2, 2, 2),
        },
    ),
    "flux2 mlp 4, no guidance": (
        "Flux2Transformer2DModel",
        {
            **HEADS,
            "in_channels": 16,
            "num_layers": 1,
            "num_single_layers": 1,
            "timestep_guidance_channels": 16,
            "axes_dims_rope": (2, 2, 2, 2),
            "mlp_ratio": 4.0,
            "guidance_embeds": False,
        },
    ),
    "flux": (
        "FluxTransformer2DModel",
        {
            **HEADS,
            "in_channels": 16,
            "num_layers": 2,
            "num_single_layers": 2,
            "pooled_projection_dim": 16,
            "axes_dims_rope": (2, 2, 4),
        },
    ),
    "flux guidance": (
        "FluxTransformer2DModel",
        {
            **HEADS,
            "in_channels": 16,
            "num_layers": 1,
            "num_single_layers": 1,
            "pooled_projection_dim": 16,
            "axes_dims_rope": (2, 2, 4),
            "guidance_embeds": True,
        },
    ),
    "qwen-image": (
        "QwenImageTransformer2DModel",
        {
            **HEADS,
            "in_channels": 16,
            "out_channels": 4,
            "num_layers": 2,
            "axes_dims_rope": (2, 2, 4),
        },
    ),
    "qwen-image 2.1": (
        "QwenImage21Transformer2DModel",
        {
            "attention_head_dim": 8,
            "num_attention_heads": 8,
            "context_in_dim": 24,
            "in_channels": 16,
            "out_channels": 16,
            "num_layers": 2,
            "axes_dims_rope": (2, 2, 4),
        },
    ),
}


class Mesh:
    """What diffusers' slicing asks of a device mesh."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size

    def get_local_rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size


def randomize(model: torch.nn.Module) -> None:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))


def tiny(case: str, folder: Path) -> torch.nn.Module:
    name, config = DIFFUSERS[case]
    model = getattr(diffusers, name)(**config).to(torch.bfloat16)
    randomize(model)
    model.save_pretrained(folder, max_shard_size="200KB")
    return model


@pytest.mark.parametrize("tp", [2, 4, 8])
@pytest.mark.parametrize("case", DIFFUSERS)
def test_native_is_what_diffusers_cuts(case: str, tp: int, tmp_path: Path) -> None:
    model = tiny(case, tmp_path / "source")
    shardc.build(tmp_path / "source", tmp_path / "out", tp, profile="native")
    specs = tensor_parallel.resolve_tp_shard_specs(model, model._tp_plan, tp)
    state = model.state_dict()
    index = ck.read_index(tmp_path / "out")
    cut = {n for n, e in index["tensors"].items() if e["placement"]["kind"] != "replicate"}
    assert cut == {name for name, spec in specs.items() if spec.dim is not None}
    for rank, held in enumerate(ck.read_ranks(tmp_path / "out", tp)):
        assert held.keys() == state.keys()
        for name, full in state.items():
            spec = specs.get(name)
            wanted = full
            if spec is not None and spec.dim is not None:
                wanted = tensor_parallel._local_shard(
                    full, spec.dim, spec.block_sizes, Mesh(rank, tp)
                )
            assert held[name] == of_torch(wanted), f"{name} of rank {rank}"
    assert shardc.verify(tmp_path / "out", tmp_path / "source").ok
    shardc.merge(tmp_path / "out", tmp_path / "full")
    merged = type(model).from_pretrained(tmp_path / "full", torch_dtype=torch.bfloat16)
    for name, full in merged.state_dict().items():
        assert torch.equal(full, state[name])


@pytest.mark.parametrize("tp", [2, 8])
@pytest.mark.parametrize("case", DIFFUSERS)
def test_compact_cuts_every_linear(case: str, tp: int, tmp_path: Path) -> None:
    """What diffusers leaves whole is cut in plain order of its rows, to be gathered."""
    model = tiny(case, tmp_path / "source")
    shardc.build(tmp_path / "source", tmp_path / "out", tp)
    specs = tensor_parallel.resolve_tp_shard_specs(model, model._tp_plan, tp)
    linears = {n for n, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    linears.remove("proj_out")  # a few hundred rows: whole, so that more degrees are legal
    ranks = ck.read_ranks(tmp_path / "out", tp)
    index = ck.read_index(tmp_path / "out")
    for name, tensor in model.state_dict().items():
        full = of_torch(tensor)
        spec = specs.get(name)
        if name.rpartition(".")[0] not in linears or (spec is not None and spec.dim is None):
            expected = [full.words] * tp
        elif spec is None:
            expected = oracle.shards(full.words, tp, "colwise_gather", dim=0)
        else:
            expected = oracle.shards(
                full.words, tp, "packed_colwise", dim=spec.dim, blocks=spec.block_sizes
            )
        for held, words in zip(ranks, expected, strict=True):
            assert held[name] == ck.Data.of("BF16", words), name
        whole = expected[0].shape == full.shape
        assert (index["tensors"][name]["placement"]["kind"] == "replicate") == whole
    shared = sum(f["size"] for f in index["files"].values() if f["rank"] is None)
    assert shared < 40_000  # norms, the biases after a reduce, tables: nothing that weighs
    assert shardc.verify(tmp_path / "out", tmp_path / "source").ok


def test_heads_that_do_not_divide(tmp_path: Path) -> None:
    """Every dim of this model divides by 16; its 8 heads do not."""
    tiny("flux2", tmp_path / "source")
    with pytest.raises(shardc.api.PlanError, match="8 units of 8 % 16 != 0"):
        shardc.build(tmp_path / "source", tmp_path / "out", 16)


# --- decoders ------------------------------------------------------------------------------------

VOCAB = 37
HEAD_DIM = 4
TEXT = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "head_dim": HEAD_DIM,
    "max_position_embeddings": 64,
}


def decoder(kind: str, kv_heads: int, tied: bool) -> Any:
    text = {**TEXT, "num_key_value_heads": kv_heads, "tie_word_embeddings": tied}
    if kind == "qwen3":
        return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**text))
    if kind == "mistral":
        return transformers.MistralForCausalLM(transformers.MistralConfig(**text))
    vision = {
        "hidden_size": 64,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 8,
        "image_size": 16,
        "patch_size": 4,
    }
    config = transformers.Mistral3Config(
        text_config={"model_type": "mistral", **text},
        vision_config={"model_type": "pixtral", **vision},
        tie_word_embeddings=tied,
    )
    return transformers.Mistral3ForConditionalGeneration(config)


# What each Linear of a decoder is, by the last part of its name, from the architecture itself.
KINDS: dict[str, dict[str, Any]] = {
    "q_proj": {"style": "colwise", "units": [HEAD_DIM]},
    "k_proj": {"style": "colwise", "units": [HEAD_DIM], "repeats": [True]},
    "v_proj": {"style": "colwise", "units": [HEAD_DIM], "repeats": [True]},
    "o_proj": {"style": "rowwise"},
    "gate_proj": {"style": "colwise"},
    "up_proj": {"style": "colwise"},
    "down_proj": {"style": "rowwise"},
}
VISION_HEAD = {"units": [8], "repeats": [False]}
PROJECTOR = {"linear_1": {"style": "colwise"}, "linear_2": {"style": "rowwise"}}


@pytest.mark.parametrize("profile", ["compact", "native"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("kv_heads", "tp"), [(8, 2), (2, 2), (2, 4), (4, 8), (1, 8)])
@pytest.mark.parametrize("kind", ["qwen3", "mistral", "mistral3"])
def test_decoders(
    kind: str, kv_heads: int, tp: int, tied: bool, profile: Any, tmp_path: Path
) -> None:
    model = decoder(kind, kv_heads, tied).to(torch.float32)
    randomize(model)
    model.save_pretrained(tmp_path / "source", max_shard_size="20KB")
    source = ck.read_all(tmp_path / "source")
    assert any(name.endswith("lm_head.weight") for name in source) != tied
    shardc.build(tmp_path / "source", tmp_path / "out", tp, profile=profile)
    ranks = ck.read_ranks(tmp_path / "out", tp)
    padded = -(-VOCAB // tp) * tp
    cut = set()
    for name, data in source.items():
        module = name.split(".")[-2]
        told = KINDS.get(module, {"style": "replicate"})
        if module in ("embed_tokens", "lm_head") and profile == "compact":
            told = {"style": "vocab_parallel", "padded": padded}
        if "vision_tower" in name and "units" in told:
            told = {**told, **VISION_HEAD}
        if "multi_modal" in name and name.endswith("weight"):
            told = PROJECTOR.get(module, told)
        if told["style"] != "replicate":
            cut.add(name)
        for held, words in zip(ranks, oracle.shards(data.words, tp, **told), strict=True):
            assert held[name] == ck.Data.of(data.dtype, words), name
    index = ck.read_index(tmp_path / "out")["tensors"]
    assert {n for n, e in index.items() if e["placement"]["kind"] != "replicate"} == cut
    others = len(KINDS) + len(PROJECTOR) if kind == "mistral3" else 0
    vocabularies = (1 if tied else 2) if profile == "compact" else 0
    assert len(cut) == 2 * len(KINDS) + others + vocabularies
    assert shardc.verify(tmp_path / "out", tmp_path / "source").ok
    shardc.merge(tmp_path / "out", tmp_path / "full")
    assert ck.read_all(tmp_path / "full") == source


def test_a_decoder_without_its_head(tmp_path: Path) -> None:
    """A pipeline's text encoder may be saved without the causal LM around it: no `model.`."""
    config = transformers.Qwen3Config(**TEXT, num_key_value_heads=2)
    model = transformers.Qwen3Model(config)
    randomize(model)
    model.save_pretrained(tmp_path / "source")
    shardc.build(tmp_path / "source", tmp_path / "out", 4)
    ranks = ck.read_ranks(tmp_path / "out", 4)
    full = ck.read_all(tmp_path / "source")["layers.0.self_attn.k_proj.weight"].words
    for rank, held in enumerate(ranks):
        head = rank // 2
        np.testing.assert_array_equal(
            held["layers.0.self_attn.k_proj.weight"].words,
            full[head * HEAD_DIM : (head + 1) * HEAD_DIM],
        )
