"""Faults that others met with names, ties and loading, each shown not to happen here.

The case's number is in each test's name; those of I/O are in test_cases_io.py. Where another
answer than the case's is right here:

| case | what happens instead |
|---|---|
| D02 | sharded, the twin that a manifest names must be in the file or in its metadata |
| D05 | both twins are kept, with a warning, as transformers does: neither is chosen |
| D07 | such a prefix tells of another layout, whose other names differ, too: it is refused |
| D12 | a NUL in a name is refused: no other tool could show the name or pass it on |
| I06 | adapters are out of scope: refused as weights, and on the loaded model |
| I08 | on cpu nothing is staged: the test needs CUDA |
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardc
from shardc.errors import CheckpointError, PlanError, ShardcError, ShardSetError
from tests import checkpoints as ck
from tests import ranks
from tests.tiny import tiny

torch = pytest.importorskip("torch")
pytest.importorskip("diffusers")

from safetensors.torch import load_file, save_file  # noqa: E402

from shardc.loaders import load_model, load_pipeline, load_state_dict  # noqa: E402
from tests import models, pipelines  # noqa: E402

Tensors = dict[str, Any]


def dropped(name: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {k: v for k, v in tensors.items() if k != name}


def rewritten(file: Path, change: Callable[[Tensors], Tensors | None]) -> None:
    """A checkpoint's file with other tensors in it."""
    tensors = load_file(file)
    tensors = change(tensors) or tensors
    save_file({k: v.clone() for k, v in tensors.items()}, file, {"format": "pt"})


@pytest.fixture(scope="module")
def klein(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("klein")
    pipelines.save("flux2-klein", path)
    return path


# --- D: names and ties --------------------------------------------------------------------------


def test_d01_a_tied_head_is_stored_once_and_there_after_the_load(tmp_path: Path) -> None:
    models.save("qwen3-tied", tmp_path / "src")
    shardc.build(tmp_path / "src", tmp_path / "o", 1)
    assert "lm_head.weight" not in load_state_dict(tmp_path / "o", 0)
    model: Any = load_model(tmp_path / "o")
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_d01_no_head_and_not_tied_is_an_error(tmp_path: Path) -> None:
    models.save("qwen3", tmp_path / "src")
    rewritten(tmp_path / "src" / "model.safetensors", dropped("lm_head.weight"))
    shardc.build(tmp_path / "src", tmp_path / "o", 1)
    with pytest.raises(ShardSetError, match=r"has no tensor 'lm_head\.weight'"):
        load_model(tmp_path / "o")


def only_the_head(tensors: Tensors) -> None:
    tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")


def test_d02_the_other_twin_in_the_file(klein: Path, tmp_path: Path) -> None:
    """Whole, either twin serves; sharded, the rule for the absent one is an error."""
    shutil.copytree(klein, tmp_path / "src")
    rewritten(tmp_path / "src" / "text_encoder" / "model.safetensors", only_the_head)
    with pytest.raises(PlanError, match="embed_tokens"):
        shardc.build(tmp_path / "src", tmp_path / "refused", 1)
    shardc.build(tmp_path / "src", tmp_path / "o", 1, components=["transformer"])
    encoder = load_pipeline(tmp_path / "o").text_encoder
    stored = load_file(klein / "text_encoder" / "model.safetensors")["model.embed_tokens.weight"]
    assert encoder.lm_head.weight is encoder.model.embed_tokens.weight
    assert torch.equal(encoder.lm_head.weight, stored)


def test_d02_neither_twin_is_an_error(klein: Path, tmp_path: Path) -> None:
    shutil.copytree(klein, tmp_path / "src")
    file = tmp_path / "src" / "text_encoder" / "model.safetensors"
    rewritten(file, dropped("model.embed_tokens.weight"))
    shardc.build(tmp_path / "src", tmp_path / "o", 1, components=["transformer"])
    with pytest.raises(ShardSetError, match=r"embed_tokens\.weight"):
        load_pipeline(tmp_path / "o")


def with_a_head(tensors: Tensors) -> Tensors:
    embedding = torch.ones_like(tensors.pop("shared.weight"))
    return {**tensors, "encoder.embed_tokens.weight": embedding, "lm_head.weight": embedding * 2}


def test_d03_ties_come_from_the_class(tmp_path: Path) -> None:
    """T5: `shared` alone serves; an unlike lm_head is never taken for the embedding."""
    pipelines.save("flux1", tmp_path / "src")
    shardc.build(tmp_path / "src", tmp_path / "a", 1, components=["transformer"])
    encoder = load_pipeline(tmp_path / "a").text_encoder_2
    stored = load_file(tmp_path / "src" / "text_encoder_2" / "model.safetensors")
    assert encoder.encoder.embed_tokens.weight is encoder.shared.weight
    assert torch.equal(encoder.shared.weight, stored["shared.weight"])
    rewritten(tmp_path / "src" / "text_encoder_2" / "model.safetensors", with_a_head)
    shardc.build(tmp_path / "src", tmp_path / "b", 1, components=["transformer"])
    encoder = load_pipeline(tmp_path / "b").text_encoder_2
    assert (encoder.encoder.embed_tokens.weight == 1).all()
    assert (encoder.shared.weight == 1).all()


def noted(tensors: Tensors, file: Path) -> None:
    """Stored as save_model stores it: one twin, the other in the metadata."""
    other = {"model.embed_tokens.weight": "lm_head.weight"}
    save_file(
        {k: v.clone() for k, v in tensors.items()}, file, {"format": "pt", "pt": "x", **other}
    )


@pytest.mark.parametrize("sharded", [True, False])
def test_d02_a_twin_that_only_the_metadata_has(klein: Path, tmp_path: Path, sharded: bool) -> None:
    shutil.copytree(klein, tmp_path / "src")
    file = tmp_path / "src" / "text_encoder" / "model.safetensors"
    tensors = load_file(file)
    stored = tensors["model.embed_tokens.weight"]
    only_the_head(tensors)
    noted(tensors, file)
    chosen = None if sharded else ["transformer"]
    shardc.build(tmp_path / "src", tmp_path / "o", 1, components=chosen)
    assert shardc.verify(tmp_path / "o", tmp_path / "src").ok
    encoder = load_pipeline(tmp_path / "o").text_encoder
    assert hasattr(encoder, "shardc") == sharded
    for weight in (encoder.lm_head.weight, encoder.model.embed_tokens.weight):
        assert torch.equal(weight, stored)


def test_d02_metadata_that_names_no_twin(tmp_path: Path) -> None:
    """Of a tensor that is there, or by one that is not."""
    tensors = {"m.weight": ck.Data.count("F32", [4, 2]), "n.weight": ck.Data.count("F32", [2])}
    source = ck.component(tmp_path / "s", tensors)
    metadata = {"format": "m.weight", "m.weight": "n.weight", "x.weight": "gone.weight"}
    ck.save(next(source.glob("*.safetensors")), tensors, metadata)
    rules = ck.manifest(tmp_path / "r.toml", [{"match": "m", "style": "colwise"}])
    shardc.build(source, tmp_path / "o", 1, manifest=rules)
    assert ck.read_ranks(tmp_path / "o", 1)[0] == tensors


def test_d05_twins_that_differ_are_both_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither is chosen: the head is the file's head, the embedding the file's embedding."""
    import transformers

    models.save("qwen3-tied", tmp_path / "src")

    def twins(tensors: Tensors) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1

    rewritten(tmp_path / "src" / "model.safetensors", twins)
    shardc.build(tmp_path / "src", tmp_path / "o", 1)
    model: Any = load_model(tmp_path / "o")
    assert "lm_head.weight and model.embed_tokens.weight are one by config.json" in caplog.text
    theirs: Any = transformers.Qwen3ForCausalLM.from_pretrained(tmp_path / "src")
    assert torch.equal(model.lm_head.weight, theirs.lm_head.weight)
    assert torch.equal(model.model.embed_tokens.weight, theirs.model.embed_tokens.weight)
    assert torch.equal(model.lm_head.weight, model.model.embed_tokens.weight + 1)


WRAPPED = {
    "module._orig_mod.m.weight": "m.weight",
    "_orig_mod.module.layers.1.w": "layers.1.w",
    "layers.2._orig_mod.w": "layers.2.w",
    "_fsdp_wrapped_module.layers.3._checkpoint_wrapped_module.w": "layers.3.w",
    "submodule.w": "submodule.w",
    "layers.4.module.w": "layers.4.module.w",  # a module of the model may be called that
}


def test_d06_wrappers_are_taken_off_by_whole_components(tmp_path: Path) -> None:
    tensors = {
        name: ck.Data.count("F32", [4, 2], first=10 * number)
        for number, name in enumerate(WRAPPED, 1)
    }
    source = ck.component(tmp_path / "s", tensors, files=2)
    rules = ck.manifest(tmp_path / "r.toml", [{"match": "m", "style": "colwise"}])
    shardc.build(source, tmp_path / "o", 2, manifest=rules)
    assert shardc.verify(tmp_path / "o", source).ok
    shardc.merge(tmp_path / "o", tmp_path / "full")
    expected = {WRAPPED[name]: data for name, data in tensors.items()}
    assert ck.read_all(tmp_path / "full") == expected
    assert load_state_dict(tmp_path / "o", 0).keys() == expected.keys()


@pytest.mark.parametrize("whole", [False, True])
def test_d06_a_model_saved_while_compiled(klein: Path, tmp_path: Path, whole: bool) -> None:
    shutil.copytree(klein, tmp_path / "src")
    name = "text_encoder" if whole else "transformer"
    file = next((tmp_path / "src" / name).glob("*.safetensors"))
    rewritten(file, lambda t: {f"_orig_mod.{k}": v for k, v in t.items()})
    for source, out in ((klein, "plain"), (tmp_path / "src", "wrapped")):
        shardc.build(source, tmp_path / out, 1, components=["transformer"])
    plain, wrapped = (load_pipeline(tmp_path / out) for out in ("plain", "wrapped"))
    expected = getattr(plain, name).state_dict()
    found = getattr(wrapped, name).state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) for key in expected)


def test_d07_two_tensors_that_are_one_to_the_model(tmp_path: Path) -> None:
    names = ["m.weight", "module.m.weight"]
    source = ck.component(tmp_path / "s", {n: ck.Data.count("F32", [4, 2]) for n in names})
    rules = ck.manifest(tmp_path / "r.toml", [{"match": "m", "style": "colwise"}])
    with pytest.raises(CheckpointError) as caught:
        shardc.build(source, tmp_path / "o", 2, manifest=rules)
    assert "tensors 'm.weight' and 'module.m.weight' are both the model's 'm.weight'" in str(
        caught.value
    )


@pytest.mark.parametrize("prefix", ["model.diffusion_model.", "net.", "vae."])
def test_d07_another_layouts_names_are_refused_not_guessed(tmp_path: Path, prefix: str) -> None:
    models.save("flux2", tmp_path / "src")
    file = tmp_path / "src" / "diffusion_pytorch_model.safetensors"
    rewritten(file, lambda t: {prefix + k: v for k, v in t.items()})
    with pytest.raises(PlanError, match="matches no"):
        shardc.build(tmp_path / "src", tmp_path / "o", 2)


def test_d09_a_rule_that_matches_nothing(tmp_path: Path) -> None:
    source = ck.component(tmp_path / "s", {"blocks.0.w1.weight": ck.Data.count("F32", [4, 2])})
    rules = ck.manifest(tmp_path / "r.toml", [{"match": "blk.*.w1", "style": "colwise"}])
    with pytest.raises(PlanError, match=r"blk\.\*\.w1"):
        shardc.build(source, tmp_path / "o", 2, manifest=rules)


def test_d10_a_rule_for_a_matrix_on_a_vector(tmp_path: Path) -> None:
    source = ck.component(tmp_path / "s", {"ln_f.weight": ck.Data.count("F32", [4])})
    rules = ck.manifest(tmp_path / "r.toml", [{"match": "ln_f", "style": "rowwise"}])
    with pytest.raises(PlanError, match=r"ln_f\.weight"):
        shardc.build(source, tmp_path / "o", 2, manifest=rules)


def test_d12_odd_names_survive_and_name_no_file(tmp_path: Path) -> None:
    odd = ["../../up.weight", "a/b.weight", "\U0001f98a.weight", "x" * 300 + ".weight"]
    tensors = {"m.weight": ck.Data.count("F32", [4, 2])} | {
        name: ck.Data.count("F32", [2], first=10 * number) for number, name in enumerate(odd, 1)
    }
    source = ck.component(tmp_path / "deep" / "s", tensors)
    rules = ck.manifest(tmp_path / "r.toml", [{"match": "m", "style": "colwise"}])
    before = {p for p in tmp_path.rglob("*") if p.suffix == ".safetensors"}
    shardc.build(source, tmp_path / "o", 2, manifest=rules)
    new = {p for p in tmp_path.rglob("*") if p.suffix == ".safetensors"} - before
    assert {p.parent for p in new} == {tmp_path / "o"}
    for number, name in enumerate(odd, 1):
        held = load_state_dict(tmp_path / "o", 1)[name]
        assert held.numpy().tobytes() == ck.Data.count("F32", [2], first=10 * number).raw


def test_d12_a_tensor_with_the_reserved_name(tmp_path: Path) -> None:
    source = ck.component(tmp_path / "s", {"m.weight": ck.Data.count("F32", [4, 2])})
    entry = {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}
    raw = ck.raw_file({"__metadata__": entry}, bytes(16))
    next(source.glob("*.safetensors")).write_bytes(raw)
    rules = ck.manifest(tmp_path / "r.toml", [{"match": "m", "style": "colwise"}])
    with pytest.raises(CheckpointError, match="__metadata__"):
        shardc.build(source, tmp_path / "o", 2, manifest=rules)


def test_d12_a_name_with_a_nul(tmp_path: Path) -> None:
    tensors = {"m.weight": ck.Data.count("F32", [4, 2]), "a\0b": ck.Data.count("F32", [2])}
    source = ck.component(tmp_path / "s", tensors)
    rules = ck.manifest(tmp_path / "r.toml", [{"match": "m", "style": "colwise"}])
    with pytest.raises(CheckpointError, match=r"tensor 'a\\x00b': a name must be .* free of NUL"):
        shardc.plan(source, 2, manifest=rules)


# --- I: loading -----------------------------------------------------------------------------------


@pytest.mark.parametrize("tp", [4, 16])
def test_i01_another_degree(tmp_path: Path, tp: int) -> None:
    out = tiny(tmp_path, 8)
    (out / "rank-00000-of-00008.safetensors").unlink()  # so it is said before any file is opened
    with pytest.raises(ShardSetError, match=f"is cut for tp 8, {tp} was asked for"):
        load_state_dict(out, 0, tp=tp)


@pytest.mark.parametrize("rank", [8, -1])
def test_i01_a_rank_outside(tmp_path: Path, rank: int) -> None:
    with pytest.raises(ShardSetError, match=f"rank {rank} is outside tp 8"):
        load_state_dict(tiny(tmp_path, 8), rank)


def test_i01_the_local_shape_is_checked_against_the_global_one(tmp_path: Path) -> None:
    out = tiny(tmp_path)
    index = ck.read_index(out)
    shards = index["tensors"]["m.weight"]["shards"]
    shards[0]["ranges"], shards[1]["ranges"] = [[0, 5]], [[4, 7]]  # eight rows still
    ck.write_index(out, index)
    with pytest.raises(ShardSetError, match=r"'m\.weight' is F32 \[4, 4\], .* says F32 \[3, 4\]"):
        load_state_dict(out, 1)


def test_i02_another_ranks_file(tmp_path: Path) -> None:
    out = tiny(tmp_path)
    names = [f"rank-{rank:05d}-of-00002.safetensors" for rank in range(2)]
    shutil.copy(out / names[1], out / names[0])
    with pytest.raises(ShardSetError, match="metadata says rank 1, the index says 0"):
        load_state_dict(out, 0)


def test_i02_components_of_different_degrees(klein: Path, tmp_path: Path) -> None:
    for tp in (2, 4):
        shardc.build(klein, tmp_path / f"o{tp}", tp)
    shutil.rmtree(tmp_path / "o2" / "text_encoder")
    shutil.copytree(tmp_path / "o4" / "text_encoder", tmp_path / "o2" / "text_encoder")
    with pytest.raises(ShardSetError) as caught:
        load_pipeline(tmp_path / "o2")
    assert "text_encoder: is cut for tp 4, 1 was asked for" in str(caught.value)
    assert "transformer: is cut for tp 2, 1 was asked for" in str(caught.value)


def load(rank: int, path: Path, whole: bool) -> str:
    if whole:
        load_pipeline(path)
    else:
        load_model(path, component="transformer")
    return "loaded"


@pytest.mark.slow
def test_i03_one_rank_fails_and_all_say_why(klein: Path, tmp_path: Path) -> None:
    shardc.build(klein, tmp_path / "o", 4)
    file = tmp_path / "o" / "transformer" / "rank-00002-of-00004.safetensors"
    os.truncate(file, file.stat().st_size // 2)
    for whole in (True, False):
        for outcome in ranks.run(load, 4, tmp_path / "o", whole):
            assert file.name in str(outcome.error)
            assert outcome.seconds < 10


def load_or_lack(rank: int, path: Path) -> str:
    """As on two hosts, one of which has a damaged VAE."""
    if rank == 1:
        file = path.parent / "damaged" / "vae" / "diffusion_pytorch_model.safetensors"
        os.truncate(file, file.stat().st_size // 2)
        path = path.parent / "damaged"
    load_pipeline(path)
    return "loaded"


@pytest.mark.slow
def test_i03_a_whole_component_that_one_rank_cannot_open(klein: Path, tmp_path: Path) -> None:
    shardc.build(klein, tmp_path / "o", 2)
    shutil.copytree(tmp_path / "o", tmp_path / "damaged")
    zero, one = ranks.run(load_or_lack, 2, tmp_path / "o")
    assert "diffusion_pytorch_model.safetensors" in str(one.error)
    assert "rank 1: " in str(zero.error)
    assert max(zero.seconds, one.seconds) < 10


def test_i04_a_missing_parameter_is_named_never_zero(tmp_path: Path) -> None:
    models.save("flux2", tmp_path / "src")
    name = "transformer_blocks.0.attn.norm_q.weight"
    file = tmp_path / "src" / "diffusion_pytorch_model.safetensors"
    rewritten(file, dropped(name))
    shardc.build(tmp_path / "src", tmp_path / "o", 1)
    with pytest.raises(ShardSetError, match=name):
        load_model(tmp_path / "o")


def test_i04_buffers_that_no_file_holds_are_computed(tmp_path: Path) -> None:
    whole = models.save("qwen3", tmp_path / "src")
    shardc.build(tmp_path / "src", tmp_path / "o", 1)
    model = load_model(tmp_path / "o")
    expected = dict(whole.named_buffers())
    found = dict(model.named_buffers())
    assert found.keys() == expected.keys()
    assert found
    for name, buffer in found.items():
        assert torch.equal(buffer, expected[name])


def test_i06_adapters_are_refused(klein: Path, tmp_path: Path) -> None:
    shardc.build(klein, tmp_path / "o", 1)
    pipeline = load_pipeline(tmp_path / "o")
    refused = {
        pipeline: ["load_lora_weights", "enable_model_cpu_offload", "save_pretrained"],
        pipeline.transformer: ["load_lora_adapter", "add_adapter", "save_pretrained"],
        pipeline.text_encoder: ["load_adapter", "add_adapter", "save_pretrained"],
    }
    for owner, calls in refused.items():
        for call in calls:
            with pytest.raises(ShardcError, match="one rank's shard"):
                getattr(owner, call)("x")


LORA = {
    "base_model.model.m.lora_A.weight": ck.Data.count("F32", [2, 4]),
    "base_model.model.m.lora_B.weight": ck.Data.count("F32", [8, 2]),
}
WHOLE = {"m.weight": ck.Data.count("F32", [8, 4]), "n.weight": ck.Data.count("F32", [4])}
COLWISE = [{"match": "m", "style": "colwise"}]


@pytest.mark.parametrize("name", ["adapter_model.safetensors", "pytorch_lora_weights.safetensors"])
def test_i06_an_adapter_beside_the_weights_is_refused(tmp_path: Path, name: str) -> None:
    """A library may apply it as it loads; shardc would not."""
    source = ck.component(tmp_path / "s", WHOLE)
    ck.save(source / name, LORA)
    rules = ck.manifest(tmp_path / "r.toml", COLWISE)
    with pytest.raises(CheckpointError, match=f"{name} is an adapter.*fuse the adapter into"):
        shardc.build(source, tmp_path / "o", 2, manifest=rules)


def test_i06_an_adapter_is_no_model(tmp_path: Path) -> None:
    ck.component(tmp_path / "s", {})
    next((tmp_path / "s").glob("*.safetensors")).unlink()
    ck.save(tmp_path / "s" / "adapter_model.safetensors", LORA)
    rules = ck.manifest(tmp_path / "r.toml", COLWISE)
    for source in (tmp_path / "s", tmp_path / "s" / "adapter_model.safetensors"):
        with pytest.raises(CheckpointError, match=r"adapter.*fuse the adapter into the weights"):
            shardc.build(source, tmp_path / "o", 2, manifest=rules)


@pytest.mark.parametrize(
    "name",
    [
        "m.lora_A.default.weight",
        "m.lora_B",
        "to_q_lora.down.weight",
        "to_q.lora_linear_layer.up.weight",
        "lora_unet_blocks_0_q.lora_up.weight",
        "lora_unet_blocks_0_q.hada_w1_a",
        "lora_unet_blocks_0_q.lokr_w2",
    ],
)
def test_i06_adapters_within_the_weights_are_refused(tmp_path: Path, name: str) -> None:
    """As in a model that was saved with its adapter still beside each layer."""
    source = ck.component(tmp_path / "s", {**WHOLE, name: ck.Data.count("F32", [2, 4])})
    rules = ck.manifest(tmp_path / "r.toml", COLWISE)
    with pytest.raises(CheckpointError) as caught:
        shardc.build(source, tmp_path / "o", 2, manifest=rules)
    assert f"tensor {name!r} is an adapter's, one of 1" in str(caught.value)
    assert "diffusion_pytorch_model.safetensors" in str(caught.value)


def test_i06_adapters_elsewhere_are_told_of_and_left_out(tmp_path: Path) -> None:
    pipe = ck.pipeline(tmp_path / "pipe", {"transformer": ck.CLASS})
    ck.component(pipe / "transformer", {**WHOLE, "explora.down.weight": WHOLE["n.weight"]})
    ck.save(pipe / "pytorch_lora_weights.safetensors", LORA)
    ck.save(pipe / "transformer" / "style" / "adapter_model.safetensors", LORA)
    (pipe / "transformer" / "style" / "adapter_config.json").write_text("{}")
    rules = ck.manifest(tmp_path / "r.toml", COLWISE)
    plan = shardc.plan(pipe, 2, manifest=rules)
    left = {*plan.checkpoint.left_out, *plan.components[0].component.left_out}
    names = {"adapter_model.safetensors", "adapter_config.json", "pytorch_lora_weights.safetensors"}
    assert {Path(name).name for name in left} == names
    shardc.build(pipe, tmp_path / "o", 2, manifest=rules)
    assert not {path.name for path in (tmp_path / "o").rglob("*")} & names


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_i08_a_staging_buffer_is_not_filled_before_it_was_copied(tmp_path: Path) -> None:
    tensors = {
        f"t{n}.weight": ck.Data("F32", (1 << 20,), np.full(1 << 20, n, "<f4").tobytes())
        for n in range(50)
    }
    source = ck.component(tmp_path / "s", {"m.weight": ck.Data.count("F32", [4, 2]), **tensors})
    rules = ck.manifest(tmp_path / "r.toml", [{"match": "m", "style": "colwise"}])
    shardc.build(source, tmp_path / "o", 1, manifest=rules)
    for _ in range(20):
        held = load_state_dict(tmp_path / "o", 0, device="cuda")
        assert all(bool((held[f"t{n}.weight"] == n).all()) for n in range(50))


def test_the_cases_are_all_here() -> None:
    here = Path(__file__)
    text = here.read_text() + here.with_name("test_cases_io.py").read_text()
    cases = {
        "D": "01 02 03 05 06 07 09 10 12",
        "E": "02",
        "G": "01 02 03 05 06 07",
        "I": "01 02 03 04 06 08",
    }
    names = [f"{group}{number}" for group, numbers in cases.items() for number in numbers.split()]
    assert [n for n in names if f"_{n.lower()}_" not in text] == []
