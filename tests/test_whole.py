"""What a library does as it loads a model, beside the weights: generation configs, conversions."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest

import shardc

torch = pytest.importorskip("torch")
diffusers = pytest.importorskip("diffusers")
transformers = pytest.importorskip("transformers")
pytest.importorskip("tokenizers")

from safetensors import safe_open  # noqa: E402

from shardc.loaders import load_model, load_pipeline  # noqa: E402
from tests import models, pipelines  # noqa: E402

OWN = {"max_new_tokens": 77, "do_sample": True, "temperature": 0.3, "eos_token_id": [5, 6]}


@pytest.mark.parametrize("own", [True, False])
def test_a_sharded_encoders_generation_config(tmp_path: Path, own: bool) -> None:
    models.save("qwen3", tmp_path / "src")
    file = tmp_path / "src" / "generation_config.json"
    if own:
        file.write_text(json.dumps(OWN))
    else:
        file.unlink()
    shardc.build(tmp_path / "src", tmp_path / "o", 1)
    model: Any = load_model(tmp_path / "o")
    theirs: Any = transformers.Qwen3ForCausalLM.from_pretrained(tmp_path / "src")
    assert model.generation_config.to_dict() == theirs.generation_config.to_dict()
    assert (model.generation_config.max_new_tokens == 77) == own
    assert model.generation_config._from_model_config != own
    tokens = torch.arange(2, 9).view(1, 7)
    wanted = {"do_sample": False, "max_new_tokens": 5}
    assert torch.equal(model.generate(tokens, **wanted), theirs.generate(tokens, **wanted))


def test_a_whole_encoders_generation_config(tmp_path: Path) -> None:
    pipelines.save("flux2-klein", tmp_path / "src")
    (tmp_path / "src" / "text_encoder" / "generation_config.json").write_text(json.dumps(OWN))
    shardc.build(tmp_path / "src", tmp_path / "o", 1, components=["transformer"])
    found = load_pipeline(tmp_path / "o").text_encoder.generation_config
    theirs = transformers.Qwen3ForCausalLM.from_pretrained(tmp_path / "src" / "text_encoder")
    assert found.to_dict() == theirs.generation_config.to_dict()
    assert found.eos_token_id == [5, 6]


def test_a_model_that_does_not_generate(tmp_path: Path) -> None:
    pipelines.save("flux1", tmp_path / "src")
    shardc.build(tmp_path / "src", tmp_path / "o", 1, components=["transformer"])
    pipe = load_pipeline(tmp_path / "o")
    for encoder in (pipe.text_encoder, pipe.text_encoder_2):
        assert getattr(encoder, "generation_config", None) is None


def mixture() -> Any:
    """A Qwen3 whose experts are stored one by one, and fused as the library loads them."""
    torch.manual_seed(0)
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    config = transformers.Qwen3MoeConfig(**models.DECODER, **experts, tie_word_embeddings=True)
    return models.randomised(transformers.Qwen3MoeForCausalLM(config))


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A pipeline with such an encoder, as it was saved, and the encoder."""
    folder = tmp_path_factory.mktemp("converted") / "src"
    pipelines.save("flux2-klein", folder)
    encoder = mixture().to(torch.bfloat16)
    shutil.rmtree(folder / "text_encoder")
    encoder.save_pretrained(folder / "text_encoder")
    listed = json.loads((folder / "model_index.json").read_text())
    listed["text_encoder"] = ["transformers", type(encoder).__name__]
    (folder / "model_index.json").write_text(json.dumps(listed))
    return folder, encoder


def test_a_whole_component_that_its_library_converts(
    converted: tuple[Path, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Such a one is loaded by the library itself: in its stored dtype, ready, and told of."""
    source, encoder = converted
    with safe_open(source / "text_encoder" / "model.safetensors", "pt") as file:
        assert not set(file.keys()) <= encoder.state_dict().keys()
    shardc.build(source, tmp_path / "o", 1, components=["transformer"])
    with caplog.at_level(logging.INFO, "shardc.loaders"):
        found = load_pipeline(tmp_path / "o").text_encoder
    assert "text_encoder: transformers converts its tensors: not mapped, but copied" in caplog.text
    expected = encoder.state_dict()
    assert type(found) is type(encoder)
    assert found.state_dict().keys() == expected.keys()
    for name, tensor in found.state_dict().items():
        assert tensor.dtype == torch.bfloat16
        assert torch.equal(tensor, expected[name])
    assert found.lm_head.weight is found.model.embed_tokens.weight
    assert not found.training
    assert not any(p.requires_grad for p in found.parameters())
    theirs: Any = type(encoder).from_pretrained(source / "text_encoder", dtype="auto")
    tokens = torch.arange(2, 16).view(2, 7)
    with torch.no_grad():
        assert torch.equal(found(input_ids=tokens).logits, theirs(input_ids=tokens).logits)
