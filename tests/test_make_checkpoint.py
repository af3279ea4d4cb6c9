"""The synthetic checkpoints have the names, shapes and files of the real ones."""

from __future__ import annotations

import dataclasses
import json
import math
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from safetensors import safe_open
from safetensors.numpy import save_file

from benchmarks import make_checkpoint as mc
from shardc import synthetic

ROOT = Path(__file__).parents[1]

BILLIONS = {"flux2-klein-4b": 3.88, "flux2-klein-9b": 9.08, "flux1-dev": 11.90, "qwen-image": 20.43}
KLEIN = ("flux2-klein-4b", "flux2-klein-9b")


def read(path: Path) -> Any:
    return json.loads(path.read_text())


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def check_weights(folder: Path, stem: str, expected: list[mc.Tensor], dtype: str) -> None:
    """safetensors opens the files, and they hold what the index and `expected` say."""
    paths = sorted(folder.glob("*.safetensors"))
    found: dict[str, str] = {}
    for path in paths:
        with safe_open(path, "np") as file:
            assert file.metadata() == {"format": "pt"}
            for name in file.keys():  # noqa: SIM118 - not a dict
                found[name] = path.name
                part = file.get_slice(name)
                assert (part.get_dtype(), tuple(part.get_shape())) == (dtype, dict(expected)[name])
    assert set(found) == {name for name, _ in expected}
    index_path = folder / f"{stem}.safetensors.index.json"
    if len(paths) == 1:
        assert paths[0].name == f"{stem}.safetensors"
        assert not index_path.exists()
        return
    index = read(index_path)
    item_bytes = {"BF16": 2, "F16": 2, "F32": 4}[dtype]
    assert index["weight_map"] == found
    assert index["metadata"] == {
        "total_size": sum(math.prod(shape) for _, shape in expected) * item_bytes
    }
    assert [p.name for p in paths] == [
        f"{stem}-{i:05d}-of-{len(paths):05d}.safetensors" for i in range(1, len(paths) + 1)
    ]


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> str:
    """flux2-klein-4b made narrow, so that writing it is quick; returns its name."""
    name = "flux2-klein-4b"
    shape = mc.SHAPES[name]
    assert shape.text_encoder is not None
    transformer = {"num_attention_heads": 2, "attention_head_dim": 4, "joint_attention_dim": 24}
    text_encoder = {"hidden_size": 8, "intermediate_size": 12, "head_dim": 4, "vocab_size": 33}
    monkeypatch.setitem(
        mc.SHAPES,
        name,
        dataclasses.replace(
            shape,
            transformer={**shape.transformer, **transformer},
            text_encoder={**shape.text_encoder, **text_encoder},
        ),
    )
    return name


def run(*arguments: str | Path) -> None:
    result = CliRunner().invoke(mc.main, [str(a) for a in arguments])
    assert result.exit_code == 0, result.output
    assert result.output == ""  # no terminal, no progress


@pytest.mark.parametrize("shape", mc.SHAPES)
def test_parameter_totals(shape: str) -> None:
    total = sum(math.prod(dims) for _, dims in mc.tensors(shape))
    assert round(total / 1e9, 2) == BILLIONS[shape]


@pytest.mark.slow
@pytest.mark.parametrize("scale", [1.0, 0.1])
@pytest.mark.parametrize("shape", mc.SHAPES)
def test_the_real_class_agrees(shape: str, scale: float) -> None:
    torch = pytest.importorskip("torch")
    diffusers = pytest.importorskip("diffusers")
    config = mc.transformer_config(shape, scale)
    cls = getattr(diffusers, config["_class_name"])
    with torch.device("meta"):
        model = cls.from_config(config)
    expected = [(name, tuple(value.shape)) for name, value in model.state_dict().items()]
    assert mc.tensors(shape, scale) == expected
    saved = json.loads(model.to_json_string())
    saved["_diffusers_version"] = config["_diffusers_version"]
    assert saved == config


@pytest.mark.slow
@pytest.mark.parametrize("shape", mc.SHAPES)
def test_the_real_pipeline_agrees(shape: str) -> None:
    diffusers = pytest.importorskip("diffusers")
    pipeline = mc.SHAPES[shape].pipeline
    cls = getattr(diffusers, pipeline["_class_name"])
    types = cls._get_signature_types()
    modules = {name: entry[1] for name, entry in pipeline.items() if isinstance(entry, list)}
    assert set(modules) <= set(types)
    for name in ("scheduler", "transformer", "vae"):
        assert hasattr(diffusers, modules[name])
    config = {**mc.SCHEDULER, **mc.SHAPES[shape].scheduler}
    saved = json.loads(
        getattr(diffusers, modules["scheduler"]).from_config(config).to_json_string()
    )
    del saved["_diffusers_version"]
    assert saved == config


@pytest.mark.slow
@pytest.mark.parametrize("scale", [1.0, 0.1])
@pytest.mark.parametrize("shape", KLEIN)
def test_the_real_text_encoder_agrees(shape: str, scale: float) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config = transformers.Qwen3Config.from_dict(mc.text_encoder_config(shape, scale))
    with torch.device("meta"):
        model = transformers.Qwen3ForCausalLM(config)
    tied = set(model._tied_weights_keys) if config.tie_word_embeddings else set()
    assert mc.text_encoder_tensors(shape, scale) == [
        (name, tuple(value.shape)) for name, value in model.state_dict().items() if name not in tied
    ]
    # klein concatenates three hidden states
    assert 3 * config.hidden_size == mc.transformer_config(shape)["joint_attention_dim"]


@pytest.mark.parametrize("options", [(), ("--files", "3"), ("--max-file-size", "20KB")])
def test_a_folder_is_whole_and_reproducible(
    narrow: str, tmp_path: Path, options: tuple[str, ...]
) -> None:
    for out in ("a", "b"):
        run(narrow, tmp_path / out, "--scale", "0.1", "--text-encoder", *options)
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    folder = tmp_path / "a"
    check_weights(
        folder / "transformer", "diffusion_pytorch_model", mc.tensors(narrow, 0.1), "BF16"
    )
    check_weights(folder / "text_encoder", "model", mc.text_encoder_tensors(narrow, 0.1), "BF16")
    if "--files" in options:
        assert len(list((folder / "transformer").glob("*.safetensors"))) == 3
    assert read(folder / "transformer" / "config.json") == mc.transformer_config(narrow, 0.1)
    assert read(folder / "text_encoder" / "config.json")["dtype"] == "bfloat16"
    assert read(folder / "model_index.json")["_class_name"] == "Flux2KleinPipeline"
    assert (folder / "scheduler" / "scheduler_config.json").is_file()
    assert (folder / "tokenizer" / "tokenizer_config.json").is_file()


def test_the_seed_changes_the_weights_and_nothing_else(narrow: str, tmp_path: Path) -> None:
    run(narrow, tmp_path / "a", "--scale", "0.1")
    run(narrow, tmp_path / "b", "--scale", "0.1", "--seed", "1")
    a, b = contents(tmp_path / "a"), contents(tmp_path / "b")
    assert a.keys() == b.keys()
    assert {name for name in a if a[name] != b[name]} == {
        "transformer/diffusion_pytorch_model.safetensors"
    }


def test_weights_do_not_depend_on_the_files(narrow: str, tmp_path: Path) -> None:
    def weights(*options: str) -> dict[str, bytes]:
        out = tmp_path / "-".join(("out", *options))
        run(narrow, out, "--dtype", "fp32", *options)
        found: dict[str, bytes] = {}
        for path in (out / "transformer").glob("*.safetensors"):
            with safe_open(path, "np") as file:
                found |= {name: file.get_tensor(name).tobytes() for name in file.keys()}  # noqa: SIM118
        return found

    assert weights() == weights("--files", "5")


def test_the_file_is_what_safetensors_writes(narrow: str, tmp_path: Path) -> None:
    run(narrow, tmp_path / "out", "--dtype", "fp32")
    path = tmp_path / "out" / "transformer" / "diffusion_pytorch_model.safetensors"
    with safe_open(path, "np") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    save_file(tensors, tmp_path / "again", metadata={"format": "pt"})
    assert path.read_bytes() == (tmp_path / "again").read_bytes()


@pytest.mark.parametrize("dtype", synthetic.DTYPES)
def test_values_are_finite_and_weight_like(dtype: str) -> None:
    kind = synthetic.DTYPES[dtype]
    size_bytes = synthetic.CHUNK_BYTES + 4  # the last chunk is partial
    raw = b"".join(synthetic.random_bytes("x", size_bytes, kind, 0))
    assert len(raw) == size_bytes
    if dtype == "bf16":
        values = (np.frombuffer(raw, "<u2").astype(np.uint32) << 16).view(np.float32)
    else:
        values = np.frombuffer(raw, "<f2" if dtype == "fp16" else "<f4").astype(np.float32)
    assert np.isfinite(values).all()
    assert np.abs(values).min() >= 1 / 128
    assert np.abs(values).max() < 1 / 8
    assert abs(values.mean()) < 1e-3


def test_weights_are_pinned() -> None:
    """A change here changes every benchmark's input."""
    first = b"".join(synthetic.random_bytes("x_embedder.weight", 16, synthetic.DTYPES["bf16"], 0))
    assert first.hex() == "8cbd45bd22bc0ebd52bd7e3c94bd353d"


@pytest.mark.slow
@pytest.mark.parametrize("shape", mc.SHAPES)
def test_the_default_cut_is_hubs(shape: str) -> None:
    hub = pytest.importorskip("huggingface_hub.serialization._base")
    sizes = {name: 2 * math.prod(dims) for name, dims in mc.tensors(shape)}
    plan = hub.split_state_dict_into_shards_factory(
        sizes,
        get_storage_size=lambda size: size,
        filename_pattern="x{suffix}",
        max_shard_size="5GB",
    )
    groups = synthetic.split(sizes, max_file_bytes=5 * 10**9)
    assert groups == list(plan.filename_to_tensors.values())


@pytest.mark.parametrize("files", range(1, 6))
@pytest.mark.parametrize(
    "sizes", [{"a": 1, "b": 1, "c": 1, "d": 1, "e": 100}, dict.fromkeys("edcba", 3)]
)
def test_files_are_as_many_as_asked(sizes: Mapping[str, int], files: int) -> None:
    groups = synthetic.split(sizes, files=files)
    assert len(groups) == files
    assert all(groups)
    assert [name for group in groups for name in group] == list(sizes)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("flux1-dev", "--text-encoder"), "flux1-dev has no text encoder"),
        (("flux2-klein-4b", "--files", "999"), "do not fill 999 files"),
        (("flux2-klein-4b", "--max-file-size", "big"), "'big' is not a size"),
        (("flux2-klein-4b", "--scale", "0"), "0.0 is not in the range"),
        (("flux3", "--seed", "0"), "'flux3' is not one of"),
    ],
)
def test_usage_errors(tmp_path: Path, arguments: tuple[str, ...], message: str) -> None:
    shape, *options = arguments
    result = CliRunner().invoke(mc.main, [shape, str(tmp_path / "out"), *options])
    assert result.exit_code == 2
    assert message in result.output
    assert not (tmp_path / "out").exists()


def test_a_full_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "kept").touch()
    result = CliRunner().invoke(mc.main, ["flux1-dev", str(tmp_path)])
    assert result.exit_code == 2
    assert "is not empty" in result.output
    assert [p.name for p in tmp_path.iterdir()] == ["kept"]


def test_neither_torch_nor_a_model_library_is_imported() -> None:
    code = (
        "import sys, benchmarks.make_checkpoint; "
        "assert not {'torch', 'diffusers', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
