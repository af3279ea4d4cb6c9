"""A deliberately wrong manifest is caught: refused, or shown wrong by running it.

One for each thing that manifests can say. "wrong" are those that nothing but the comparison sees:
shapes fit, the build and the load succeed, and the output is off by far more than rounding.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tomli_w
import torch

pytest.importorskip("diffusers")
pytest.importorskip("transformers")

import shardc
from shardc import library
from shardc.errors import ShardcError
from shardc.loaders.prove import error
from tests.zoo.case import by_name
from tests.zoo.proof import forward, on_ranks

pytestmark = pytest.mark.slow

Values = dict[str, Any]
WRONG = 1e-2  # a thousand times what rounding makes


def entry(values: Values, kind: str, text: str) -> Values:
    """The rule or local whose pattern has `text`."""
    return next(e for e in values[kind] if text in str(e["match"]))


def contiguous(text: str) -> Callable[[Values], None]:
    """A fused weight cut as if it were one block."""

    def edit(values: Values) -> None:
        rule = entry(values, "rule", text)
        rule["style"] = rule["style"].removeprefix("packed_")
        for key in ("blocks", "unit", "layout", "repeat"):
            rule.pop(key, None)

    return edit


def changed(text: str, **keys: Any) -> Callable[[Values], None]:
    """A rule that says something else."""

    def edit(values: Values) -> None:
        rule = entry(values, "rule", text)
        rule.update(keys)
        for key in [key for key, value in keys.items() if value is None]:
            del rule[key]

    return edit


def without(kind: str, text: str) -> Callable[[Values], None]:
    """A rule or a local that was forgotten."""

    def edit(values: Values) -> None:
        values[kind].remove(entry(values, kind, text))

    return edit


FLUX2, LLAMA = "Flux2Transformer2DModel", "LlamaModel"
CASES: dict[str, tuple[str, int, Callable[[Values], None], str]] = {
    "fused Q, K, V and MLP": (FLUX2, 2, contiguous("to_qkv_mlp_proj"), "wrong"),
    "fused attention and MLP columns": (
        FLUX2,
        2,
        contiguous("single_transformer_blocks.*.attn.to_out"),
        "wrong",
    ),
    "fused SwiGLU": (FLUX2, 2, contiguous("linear_in"), "wrong"),
    "order of blocks": (
        "Qwen2_5_VLForConditionalGeneration",
        2,
        changed("attn.qkv", layout="per_head", blocks=["vision_head"] * 3, groups=None),
        "wrong",
    ),
    "a norm over cut heads": (
        "WanTransformer3DModel",
        2,
        changed("norm_q", style="colwise", dim=0),
        "caught",
    ),
    "summed experts": (
        "NucleusMoEImageTransformer2DModel",
        2,
        without("local", "experts"),
        "wrong",
    ),
    "a convolution's fused channels": (
        "SanaTransformer2DModel",
        2,
        contiguous("conv_inverted"),
        "wrong",
    ),
    "a group norm": (
        "UNet2DConditionModel convolutions project",
        2,
        changed("norm2", style="colwise", dim=0),
        "caught",
    ),
    "sliced tables": ("LTXVideoTransformer3DModel", 2, without("local", "rope"), "caught"),
    "gathered outputs": ("SD3Transformer2DModel", 2, without("local", "pos_embed"), "caught"),
    "local head counts": ("SD3Transformer2DModel", 2, without("local", "blocks.*.attn"), "caught"),
    "a raw parameter": ("LuminaNextDiT2DModel", 2, without("rule", "gate"), "caught"),
    "an embedding's columns": (
        "T5EncoderModel",
        2,
        without("rule", "relative_attention_bias"),
        "caught",
    ),
    "repeated keys and values": (LLAMA, 4, changed("k_proj", repeat=False), "refused"),
    "a vocabulary's rows": (
        LLAMA,
        2,
        changed("embed_tokens", style="colwise", pad_to=None),
        "refused",
    ),
    "an output that is used whole": (FLUX2, 2, changed("x_embedder", style="colwise"), "refused"),
    "a unit that is cut": (FLUX2, 2, changed("to_q", unit="inner"), "refused"),
    "blocks of another size": (FLUX2, 2, changed("linear_in", blocks=["mlp", "inner"]), "refused"),
}


@pytest.mark.parametrize("name", CASES)
def test_caught(name: str, tmp_path: Path) -> None:
    case_name, size, edit, verdict = CASES[name]
    case = by_name(case_name)
    manifest = library.for_class(case.class_name)
    assert manifest is not None
    values = tomllib.loads(manifest.text)
    edit(values)
    (tmp_path / "wrong.toml").write_text(tomli_w.dumps(values))
    model = case.build()
    model.save_pretrained(tmp_path / "source")
    wanted = forward(model, case, torch.float32)

    def gap(rules: str) -> float:
        out = tmp_path / Path(rules).stem
        shardc.build(tmp_path / "source", out, size, manifest=rules)
        found = on_ranks(case, size, {"it": (str(out), torch.float32)})["it"]
        return error(found, wanted)

    assert gap(manifest.name.removesuffix(".toml")) < 1e-5
    if verdict == "wrong":
        with pytest.raises(AssertionError, match=r"ranks differ|is wrong by"):
            assert gap(str(tmp_path / "wrong.toml")) < WRONG, "is wrong by much"
    elif verdict == "refused":
        with pytest.raises(ShardcError):
            shardc.build(
                tmp_path / "source", tmp_path / "o", size, manifest=tmp_path / "wrong.toml"
            )
    else:  # a shape that does not fit, or a wrong output
        with pytest.raises(AssertionError, match=r"ranks failed|ranks differ|is wrong by"):
            assert gap(str(tmp_path / "wrong.toml")) < WRONG, "is wrong by much"
