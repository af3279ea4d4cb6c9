"""The examples: they say how they are run, and those that need no accelerator run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import shardc

pytest.importorskip("torch")
pytest.importorskip("diffusers")

EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("*.py"))
ON_CPU = ["flux2_cuda", "text_encoder_and_transformer"]


def test_there_are_examples() -> None:
    assert [path.stem for path in EXAMPLES] == ["flux2_cuda", "flux2_neuron", ON_CPU[1]]


@pytest.mark.slow
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_help(path: Path) -> None:
    done = subprocess.run([sys.executable, path, "--help"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (
        f"torchrun --nproc-per-node {8 if 'neuron' in path.stem else 2} examples/{path.name}"
        in (done.stdout)
    )
    assert "shardc build" in done.stdout


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny FLUX.2 klein whose encoder is as deep as the pipeline's defaults want it."""
    import transformers

    from tests import models, pipelines

    folder = tmp_path_factory.mktemp("klein")
    pipeline = pipelines.flux2_klein()
    deep = {**models.DECODER, "vocab_size": 291, "num_hidden_layers": 28}
    config = transformers.Qwen3Config(**deep, tie_word_embeddings=True)
    pipeline.register_modules(text_encoder=models.randomised(transformers.Qwen3ForCausalLM(config)))
    pipeline.register_to_config(is_distilled=True)
    pipeline.save_pretrained(folder / "source")
    shardc.build(folder / "source", folder / "tp2", 2)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", ON_CPU)
def test_an_image_is_the_unsharded_pipelines(shards: Path, tmp_path: Path, name: str) -> None:
    import numpy as np
    import torch
    from diffusers import DiffusionPipeline
    from PIL import Image

    example = next(path for path in EXAMPLES if path.stem == name)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", str(example), str(shards / "tp2"), "--device", "cpu"]
    command += ["--size", "16", "--steps", "2"]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    whole = DiffusionPipeline.from_pretrained(shards / "source")
    expected = whole(
        prompt="a red fox in the snow",
        num_inference_steps=2,
        height=16,
        width=16,
        guidance_scale=1.0,
        generator=torch.Generator("cpu").manual_seed(0),
    ).images[0]
    found = np.asarray(Image.open(tmp_path / "flux2.png")).astype(int)
    assert found.std() > 1
    assert np.abs(found - np.asarray(expected).astype(int)).max() <= 1
