"""Manifests: every rule of the vocabulary, every refusal with its place, and the bundled ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import shardc
from shardc import library
from shardc.errors import ManifestError, PlanError
from shardc.layout import REPLICATE, Block, PackedShard, Placement, Shard
from shardc.manifest import Manifest, parse_manifest
from shardc.placing import Dims, place
from tests import checkpoints as ck

HEAD = 'schema = 1\nlibrary = "diffusers"\nclass = "TinyModel"\n'
RULE = '[[rule]]\nmatch = "m"\nstyle = "colwise"\n'


def parse(text: str) -> Manifest:
    return parse_manifest(text, "tiny.toml")


def rule(**keys: Any) -> Manifest:
    return parse(ck.manifest_text([{"match": "m", **keys}]))


def test_minimal() -> None:
    manifest = parse(HEAD + RULE)
    assert manifest.classes == ("TinyModel",)
    assert (manifest.name, manifest.text) == ("tiny.toml", HEAD + RULE)
    assert manifest.rules[0].patterns == ("m",)
    assert manifest.where(0) == "tiny.toml:4 (rule 1)"
    assert manifest.digest != parse(HEAD + RULE + "\n").digest


WRONG = {
    "no TOML": ("schema = ", "tiny.toml: not valid TOML: "),
    "no schema": (
        'library = "diffusers"\nclass = "A"\n' + RULE,
        "tiny.toml: schema: field required",
    ),
    "schema 2": (HEAD.replace("1", "2") + RULE, "tiny.toml: schema: input should be 1"),
    "library": (
        HEAD.replace("diffusers", "timm") + RULE,
        "tiny.toml: library: input should be 'diffusers' or 'transformers'",
    ),
    "no rules": (HEAD, "tiny.toml: rule: field required"),
    "unknown key": (HEAD + "colour = 1\n" + RULE, "tiny.toml: colour: extra inputs are not"),
    "no class": (HEAD.replace('"TinyModel"', "[]") + RULE, "tiny.toml: class: names no class"),
    "style": (
        HEAD + RULE.replace("colwise", "diagonal"),
        "tiny.toml:4 (rule 1): style: input should be 'colwise', 'rowwise'",
    ),
    "no style": (HEAD + '[[rule]]\nmatch = "m"\n', "tiny.toml:4 (rule 1): style: field required"),
    "no match": (
        HEAD + '[[rule]]\nstyle = "colwise"\n',
        "tiny.toml:4 (rule 1): match: field required",
    ),
    "rule key": (HEAD + RULE + "dims = 0\n", "tiny.toml:4 (rule 1): dims: extra inputs are not"),
    "line of the second rule": (
        HEAD + RULE + "\n" + RULE + "axis = 1\n",
        "tiny.toml:8 (rule 2): axis: extra inputs are not permitted",
    ),
    "negative block": (HEAD + RULE + "blocks = [-1]\n", "tiny.toml:4 (rule 1): blocks.0"),
    "float block": (HEAD + RULE + "blocks = [1.5]\n", "tiny.toml:4 (rule 1): blocks.0"),
    "dim": (
        HEAD + RULE + 'dim = "1"\n',
        "tiny.toml:4 (rule 1): dim: input should be a valid integer",
    ),
    "layout": (HEAD + RULE + 'layout = "woven"\n', "(rule 1): layout: input should be 'blocked'"),
    "profile": (
        HEAD + RULE + 'profile = "big"\n',
        "(rule 1): profile: input should be 'compact' or",
    ),
    "packed without blocks": (
        HEAD + RULE.replace("colwise", "packed_rowwise"),
        "tiny.toml:4 (rule 1): packed_rowwise needs blocks: the fused pieces along the dim",
    ),
    "packed with no blocks": (
        HEAD + RULE.replace("colwise", "packed_colwise") + "blocks = []\n",
        "packed_colwise needs blocks",
    ),
    "too many blocks": (
        HEAD + RULE + "blocks = [1, 2]\n",
        "tiny.toml:4 (rule 1): colwise takes one block, 2 are declared",
    ),
    "layout of a plain style": (
        HEAD + RULE + 'layout = "per_head"\n',
        "layout per_head goes with a packed style",
    ),
    "deinterleave of blocked": (
        HEAD + RULE.replace("colwise", "packed_colwise") + "blocks = [1]\ndeinterleave = true\n",
        "deinterleave goes with layout per_head or per_kv_head",
    ),
    "units": (
        HEAD + RULE.replace("colwise", "packed_colwise") + "blocks = [1, 2, 3]\nunit = [1, 1]\n",
        "2 values of unit for 3 blocks",
    ),
    "repeats": (
        HEAD + RULE.replace("colwise", "packed_colwise") + "blocks = [1]\nrepeat = [true, true]\n",
        "2 values of repeat for 1 blocks",
    ),
    "pad_to": (
        HEAD + RULE + "pad_to = 1\n",
        "pad_to goes with colwise_gather or vocab_parallel, not with colwise",
    ),
    "pad_to with a unit": (
        HEAD + RULE.replace("colwise", "colwise_gather") + "pad_to = 1\nunit = 4\n",
        "tiny.toml:4 (rule 1): pad_to shares out single rows: it goes with neither unit nor repeat",
    ),
    "pad_to with repeat": (
        HEAD + RULE.replace("colwise", "vocab_parallel") + "pad_to = 1\nrepeat = true\n",
        "tiny.toml:4 (rule 1): pad_to shares out single rows: it goes with neither unit nor repeat",
    ),
    "local pattern": (
        HEAD + RULE + '[[local]]\nmatch = "a.b*"\nset = {heads = "n"}\n',
        "tiny.toml: local 1: match 'a.b*': 'b*' is no name component",
    ),
    "local expression": (
        HEAD + RULE + '[[local]]\nmatch = "a"\nset = {heads = "n /"}\n',
        "tiny.toml: local 1: 'n /' is not an expression",
    ),
    "local match": (
        HEAD + RULE + "[[local]]\nmatch = []\nset = {heads = 1}\n",
        "tiny.toml: local 1: match names nothing",
    ),
    "local sets nothing": (
        HEAD + RULE + '[[local]]\nmatch = "a"\nset = {}\n',
        "tiny.toml: local 1: says nothing: set, slice, gather or reduce",
    ),
    "replicate with a unit": (
        HEAD + RULE.replace("colwise", "replicate") + "unit = 2\ndim = 0\n",
        "replicate takes no dim, unit",
    ),
    "empty match": (HEAD + RULE.replace('"m"', "[]"), "match names nothing"),
    "pattern": (HEAD + RULE.replace('"m"', '"a.b*"'), "match 'a.b*': 'b*' is no name component"),
    "prefix": (HEAD + RULE.replace('"m"', '"$d.x"'), "match '$d.x': prefix $d is not declared"),
    "expression": (
        HEAD + RULE + 'blocks = ["a ** 2"]\n',
        "tiny.toml:4 (rule 1): 'a ** 2': only",
    ),
    "unit expression": (HEAD + RULE + 'unit = "a +"\n', "tiny.toml:4 (rule 1): 'a +' is not an"),
    "dims": (HEAD + '[dims]\nq = "a / 2"\n' + RULE, "tiny.toml: dims.q: 'a / 2': only names"),
    "defaults": (HEAD + '[defaults]\nq = "a("\n' + RULE, "tiny.toml: defaults.q: 'a(' is not an"),
    "too large": (HEAD + "#" * 1_000_001, "tiny.toml: larger than 1000000 bytes"),
}


@pytest.mark.parametrize("case", WRONG)
def test_refused(case: str, tmp_path: Path) -> None:
    text, message = WRONG[case]
    with pytest.raises(ManifestError) as caught:
        parse(text)
    assert message in str(caught.value)
    # and so by way of a build, with nothing written
    (tmp_path / "tiny.toml").write_text(text)
    source = ck.component(tmp_path / "source", {"m.weight": ck.Data.count("F32", [2, 2])})
    with pytest.raises(ManifestError) as caught:
        shardc.build(source, tmp_path / "out", 2, manifest=tmp_path / "tiny.toml")
    assert message in str(caught.value)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["source", "tiny.toml"]


def test_all_problems_at_once() -> None:
    text = HEAD + RULE + "pad_to = 1\nblocks = [1, 2]\n" + RULE.replace('"m"', '"$x.m"')
    with pytest.raises(ManifestError) as caught:
        parse(text)
    assert [p.where for p in caught.value.problems] == [
        "tiny.toml:4 (rule 1)",
        "tiny.toml:4 (rule 1)",
        "tiny.toml:9 (rule 2)",
    ]


PLACED: list[tuple[dict[str, Any], tuple[int, ...], str, Placement]] = [
    ({"style": "colwise"}, (8, 4), "weight", Shard(0, Block(8), 8)),
    ({"style": "colwise"}, (8,), "bias", Shard(0, Block(8), 8)),
    ({"style": "colwise", "unit": 2}, (8, 4), "weight", Shard(0, Block(8, 2), 8)),
    ({"style": "colwise", "dim": 1}, (8, 4), "weight", Shard(1, Block(4), 4)),
    ({"style": "colwise", "dim": 1}, (4,), "bias", Shard(0, Block(4), 4)),
    ({"style": "colwise"}, (8, 4, 3, 3), "weight", Shard(0, Block(8), 8)),
    ({"style": "rowwise"}, (8, 4), "weight", Shard(1, Block(4), 4)),
    ({"style": "rowwise"}, (8,), "bias", REPLICATE),
    ({"style": "rowwise", "dim": -2}, (8, 4), "weight", Shard(0, Block(8), 8)),
    ({"style": "replicate"}, (8, 4), "weight", REPLICATE),
    ({"style": "colwise_gather"}, (8, 4), "weight", Shard(0, Block(8), 8)),
    ({"style": "vocab_parallel"}, (8, 4), "weight", Shard(0, Block(8), 8)),
    ({"style": "vocab_parallel", "pad_to": 1}, (7, 4), "weight", Shard(0, Block(7), 8)),
    ({"style": "vocab_parallel", "pad_to": 3}, (7, 4), "weight", Shard(0, Block(7), 12)),
    ({"style": "colwise_gather", "pad_to": "n * 5"}, (7,), "bias", Shard(0, Block(7), 20)),
    ({"style": "sharded_norm"}, (8,), "weight", Shard(0, Block(8), 8)),
    (
        {"style": "sharded_norm", "unit": "n", "repeat": True},
        (8,),
        "raw",
        Shard(0, Block(8, 4, True), 8),
    ),
    ({"style": "colwise"}, (8,), "raw", Shard(0, Block(8), 8)),
    ({"style": "colwise", "dim": 2}, (2, 4, 8), "raw", Shard(2, Block(8), 8)),
    (
        {"style": "packed_colwise", "blocks": ["n", "n - 2"], "unit": ["n", 1]},
        (6, 4),
        "weight",
        PackedShard(0, (Block(4, 4), Block(2, 1))),
    ),
    (
        {"style": "packed_rowwise", "blocks": [3, 1], "repeat": [False, True]},
        (6, 4),
        "weight",
        PackedShard(1, (Block(3), Block(1, 1, True))),
    ),
    (
        {
            "style": "packed_colwise",
            "blocks": [2, 1],
            "layout": "per_kv_head",
            "deinterleave": True,
        },
        (6,),
        "bias",
        PackedShard(0, (Block(2), Block(1)), "per_kv_head", True),
    ),
]


@pytest.mark.parametrize(("keys", "shape", "kind", "expected"), PLACED)
def test_place(keys: dict[str, Any], shape: Any, kind: Any, expected: Placement) -> None:
    manifest = rule(**keys)
    dims = Dims(manifest, {"n": 4})
    assert place(manifest.rules[0], dims, shape=shape, kind=kind, tp=2) == expected


MISFITS: list[tuple[dict[str, Any], tuple[int, ...], str, str]] = [
    (
        {"style": "colwise", "blocks": [6]},
        (8, 4),
        "weight",
        "along dim 0, blocks [6] sum to 6, the dim has 8",
    ),
    (
        {"style": "colwise", "unit": 3},
        (8, 4),
        "weight",
        "along dim 0, block of 8 is not whole units of 3",
    ),
    ({"style": "colwise", "blocks": ["gone"]}, (8, 4), "weight", "config.json has no 'gone'"),
    (
        {"style": "colwise", "blocks": ["text"]},
        (8, 4),
        "weight",
        "config.json's 'text': 'abc' is not a number",
    ),
    (
        {"style": "colwise", "blocks": ["n - 9"]},
        (8, 4),
        "weight",
        "blocks [-5] must not be negative",
    ),
    (
        {"style": "colwise", "unit": 0},
        (8, 4),
        "weight",
        "unit [0] and pad_to None must be at least 1",
    ),
    (
        {"style": "vocab_parallel", "pad_to": 0},
        (8, 4),
        "weight",
        "unit [1] and pad_to 0 must be at",
    ),
    (
        {"style": "colwise", "unit": "half"},
        (8, 4),
        "weight",
        "'half' is 0.5 here, not a whole number",
    ),
    ({"style": "colwise", "dim": -3}, (8, 4), "weight", "dim -3 is outside shape [8, 4]"),
    ({"style": "colwise"}, (8, 4), "bias", "a bias of shape [8, 4] is not 1-d"),
    ({"style": "colwise"}, (8, 4), "raw", "a raw parameter of shape [8, 4] needs a declared `dim`"),
    (
        {"style": "colwise"},
        (),
        "raw",
        "colwise needs a weight of 2 dims or more, this one has shape []",
    ),
    ({"style": "sharded_norm"}, (8, 4), "weight", "a norm's weight of shape [8, 4] is not 1-d"),
    (
        {"style": "rowwise"},
        (8,),
        "weight",
        "rowwise needs a weight of 2 dims or more, this one has shape [8]",
    ),
    (
        {"style": "packed_colwise", "blocks": [2, 1], "layout": "per_head"},
        (8, 4),
        "weight",
        "along dim 0, groups of [2, 1] take 3 each, which does not divide 8",
    ),
]


@pytest.mark.parametrize(("keys", "shape", "kind", "message"), MISFITS)
def test_misfits(keys: dict[str, Any], shape: Any, kind: Any, message: str, tmp_path: Path) -> None:
    manifest = rule(**keys)
    config = {"n": 4, "half": 0.5, "text": "abc"}
    found = place(manifest.rules[0], Dims(manifest, config), shape=shape, kind=kind, tp=2)
    assert isinstance(found, str)
    assert message in found
    # the build's message names the tensor, its shape, and the rule's place
    name = "m" if kind == "raw" else f"m.{kind}"
    source = ck.component(tmp_path / "s", {name: ck.Data.count("F32", shape)}, config=config)
    path = ck.manifest(tmp_path / "tiny.toml", [{"match": "m", **keys}])
    with pytest.raises(PlanError) as caught:
        shardc.build(source, tmp_path / "out", 2, manifest=path)
    expected = f"{name} F32 {list(shape)}, tiny.toml:5 (rule 1): {message}"
    assert expected in str(caught.value)


def test_dims() -> None:
    manifest = parse(
        HEAD
        + '[defaults]\nhead = "hidden // heads"\n"deep.er" = 3\n'
        + '[dims]\ninner = "heads * head"\nmlp = "inner * ratio"\nsum = "deep.er + deep.x"\n'
        + RULE
    )
    config = {"hidden": 64, "heads": 4, "ratio": 2.5, "deep": {"x": 5}}
    dims = Dims(manifest, config)
    assert [dims.value(n) for n in ("inner", "mlp", "sum", "head", 7)] == [64, 160, 8, 16, 7]
    assert Dims(manifest, {**config, "head": 8}).value("inner") == 32  # config.json goes first
    assert Dims(manifest, {**config, "head": None}).value("inner") == 64  # null is absence
    assert dims.problems() == []


@pytest.mark.parametrize(
    ("tables", "config", "message"),
    [
        ('[dims]\na = "b"\n', {}, "tiny.toml: dims.a: config.json has no 'b'"),
        ('[dims]\na = "b.c"\n', {"b": 3}, "tiny.toml: dims.a: config.json has no 'b.c'"),
        ('[dims]\na = "b"\n', {"b": [1]}, "dims.a: [1] is not a number"),
        ('[dims]\na = "b"\nb = "a"\n', {}, "dims.a: b -> a -> b is a circle"),
        ('[dims]\na = "a"\n', {}, "dims.a: a -> a is a circle"),
        ('[dims]\na = "b // c"\n', {"b": 1, "c": 0}, "dims.a: 'b // c' divides by zero"),
    ],
)
def test_dims_without_a_value(
    tables: str, config: dict[str, Any], message: str, tmp_path: Path
) -> None:
    manifest = parse(HEAD + tables + RULE)
    problems = Dims(manifest, config).problems()
    assert any(message in str(problem) for problem in problems)
    (tmp_path / "tiny.toml").write_text(HEAD + tables + RULE)
    source = ck.component(tmp_path / "s", {"m.weight": ck.Data.count("F32", [2, 2])}, config=config)
    with pytest.raises(PlanError) as caught:
        shardc.plan(source, 2, manifest=tmp_path / "tiny.toml")
    assert message in str(caught.value)


def test_bundled_manifests_are_sound() -> None:
    bundled = library.bundled()
    assert list(bundled) == sorted(bundled)
    assert {
        "Flux2Transformer2DModel",
        "FluxTransformer2DModel",
        "QwenImageTransformer2DModel",
        "QwenImage21Transformer2DModel",
        "Qwen3ForCausalLM",
        "MistralForCausalLM",
        "Mistral3ForConditionalGeneration",
    } <= set(bundled)
    served = [name for manifest in bundled.values() for name in manifest.classes]
    assert len(served) == len(set(served)), "a class has two manifests"
    for name, manifest in bundled.items():
        assert name in manifest.classes
        assert library.load(name) is manifest
        for class_name in manifest.classes:
            assert library.for_class(class_name) is manifest
            assert library.load(class_name) is manifest
    assert library.for_class("NoSuchModel") is None
    assert library.for_class(None) is None


def test_load_refuses(tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match=r"none\.toml: neither a bundled manifest nor a file"):
        library.load(str(tmp_path / "none.toml"))
    with pytest.raises(ManifestError, match=r"cannot read it: .*Is a directory"):
        library.load(str(tmp_path))
    (tmp_path / "latin.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ManifestError, match=r"latin\.toml: cannot read it: 'utf-8' codec"):
        library.load(str(tmp_path / "latin.toml"))
