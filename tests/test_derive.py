"""Manifests derived from a class's own plan cut as the bundled ones do."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardc import library
from shardc.derive import derive
from shardc.errors import ManifestError
from shardc.manifest import Manifest, as_tuple, parse_manifest

pytest.importorskip("diffusers")
transformers = pytest.importorskip("transformers")


def by_module(manifest: Manifest) -> dict[str, tuple[object, ...]]:
    return {p: (r.style, r.unit, r.blocks) for r in manifest.rules for p in r.patterns}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "Flux2Transformer2DModel",
        "FluxTransformer2DModel",
        "QwenImageTransformer2DModel",
        "QwenImage21Transformer2DModel",
    ],
)
def test_diffusers_plans(name: str) -> None:
    manifest = parse_manifest(derive(name), f"{name}.toml")
    assert manifest.classes == (name,)
    import diffusers

    assert set(by_module(manifest)) == set(getattr(diffusers, name)._tp_plan)
    heads = [rule for rule in manifest.rules if ".attn." in rule.patterns[0]]
    # 128 is every one of these classes' default head: no attention Linear may be cut inside it
    assert all(128 in as_tuple(rule.unit) for rule in heads)


@pytest.mark.slow
def test_fused_blocks_come_from_the_module(tmp_path: Path) -> None:
    rules = by_module(parse_manifest(derive("Flux2Transformer2DModel"), "x.toml"))
    assert rules["single_transformer_blocks.*.attn.to_qkv_mlp_proj"] == (
        "packed_colwise",
        (128, 128, 128, 1, 1),
        (6144, 6144, 6144, 18432, 18432),
    )
    assert rules["single_transformer_blocks.*.attn.to_out"] == (
        "packed_rowwise",
        (128, 1),
        (6144, 18432),
    )


@pytest.mark.slow
def test_transformers_plan_with_grouped_queries(tmp_path: Path) -> None:
    config = transformers.Qwen3Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
    )
    config.save_pretrained(tmp_path)
    manifest = parse_manifest(derive("Qwen3ForCausalLM", tmp_path / "config.json"), "x.toml")
    rules = {pattern: rule for rule in manifest.rules for pattern in rule.patterns}
    assert rules["model.layers.*.self_attn.q_proj"].repeat is False
    assert rules["model.layers.*.self_attn.k_proj"].repeat is True
    assert rules["model.layers.*.self_attn.k_proj"].unit == 8
    assert rules["model.layers.*.mlp.down_proj"].unit == 1
    assert rules["model.embed_tokens"].style == "vocab_parallel"
    bundled = library.load("Qwen3ForCausalLM")
    assert {rule.style for rule in manifest.rules} == {rule.style for rule in bundled.rules}


def test_a_class_that_nobody_has() -> None:
    with pytest.raises(ManifestError, match="NoSuchModel"):
        derive("NoSuchModel")


def test_a_class_without_a_plan() -> None:
    """Its modules' names tell what diffusers' own plans do for those that have one."""
    import diffusers

    from shardc import naming

    model = diffusers.FluxTransformer2DModel(num_layers=1, num_single_layers=1)
    plan = model._tp_plan
    told = naming.plan(model)
    assert told == {m: style for m, style in plan.items() if not m.startswith("single_")}


def test_a_class_whose_names_tell_nothing() -> None:
    with pytest.raises(ManifestError, match="no TP plan"):
        derive("AutoencoderTiny")
