"""Faults that others met (names and ties, I/O, loading), each shown not to happen here.

The case's number is in each test's name. Without a test:
# G06: does not apply on cpu, where nothing is read before it is used; large reads in file order
#   are tested with the reading itself (test_reads.py).
# I08: does not apply on cpu, where nothing is copied; the test is for machines with CUDA.
"""

from __future__ import annotations

import errno
import mmap
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import shardc
from shardc.errors import CheckpointError, PlanError, ShardcError, ShardSetError
from tests import checkpoints as ck
from tests import ranks

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


def tiny(folder: Path, tp: int = 2) -> Path:
    """A shard set of one component with one tensor a rank shares and one that it does not."""
    tensors = {
        "m.weight": ck.Data.count("F32", [8, 4]),
        "n.weight": ck.Data.count("F32", [4], first=100),
    }
    source = ck.component(folder / "source", tensors)
    rules = ck.manifest(folder / "rules.toml", [{"match": "m", "style": "colwise"}])
    shardc.build(source, folder / "out", tp, manifest=rules)
    return folder / "out"


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
    shardc.build(tmp_path / "src", tmp_path / "a", 1)
    encoder = load_pipeline(tmp_path / "a").text_encoder_2
    stored = load_file(tmp_path / "src" / "text_encoder_2" / "model.safetensors")
    assert encoder.encoder.embed_tokens.weight is encoder.shared.weight
    assert torch.equal(encoder.shared.weight, stored["shared.weight"])
    rewritten(tmp_path / "src" / "text_encoder_2" / "model.safetensors", with_a_head)
    shardc.build(tmp_path / "src", tmp_path / "b", 1)
    encoder = load_pipeline(tmp_path / "b").text_encoder_2
    assert (encoder.encoder.embed_tokens.weight == 1).all()
    assert (encoder.shared.weight == 1).all()


def test_d05_twins_that_differ_are_both_kept(tmp_path: Path) -> None:
    """Neither is chosen: the head is the file's head, the embedding the file's embedding."""
    models.save("qwen3-tied", tmp_path / "src")

    def twins(tensors: Tensors) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1

    rewritten(tmp_path / "src" / "model.safetensors", twins)
    shardc.build(tmp_path / "src", tmp_path / "o", 1)
    model: Any = load_model(tmp_path / "o")
    assert torch.equal(model.lm_head.weight, model.model.embed_tokens.weight + 1)


@pytest.mark.parametrize(
    "prefix", ["module._orig_mod.", "_orig_mod.module.", "model.diffusion_model.", "net."]
)
def test_d06_d07_wrapped_names_are_refused_not_guessed(tmp_path: Path, prefix: str) -> None:
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


# --- E02: a file shorter than its header says ------------------------------------------------


@pytest.mark.parametrize("cut", [8, 1, "header"])
def test_e02_a_short_file_is_refused_before_a_read(tmp_path: Path, cut: Any) -> None:
    out = tiny(tmp_path)
    for file in (out / "rank-00001-of-00002.safetensors", out / "replicated.safetensors"):
        whole = file.read_bytes()
        file.write_bytes(whole[:20] if cut == "header" else whole[:-cut])
        with pytest.raises(ShardSetError, match=file.name) as caught:
            load_state_dict(out, 1)
        if cut != "header":
            needed = len(whole) - 4096  # data starts there
            message = f"tensors take {needed} bytes, the file holds {needed - cut}"
            assert message in str(caught.value)
        file.write_bytes(whole)
    source = next((tmp_path / "source").glob("*.safetensors"))
    whole = source.read_bytes()
    source.write_bytes(whole[:20] if cut == "header" else whole[:-cut])
    with pytest.raises(CheckpointError, match=source.name):
        shardc.plan(tmp_path / "source", 2, manifest=tmp_path / "rules.toml")


# --- G: I/O --------------------------------------------------------------------------------------


def test_g01_a_file_cut_while_it_is_read_is_an_error_with_path_and_offset(tmp_path: Path) -> None:
    reads = pytest.importorskip("shardc.loaders.reads")
    path = tmp_path / "x"
    path.write_bytes(bytes(1 << 20))
    with reads.DirectFile(path) as file:
        os.truncate(path, 1 << 19)
        with pytest.raises(ShardSetError, match=r"x: ends at byte 524288"):
            list(file.pieces(0, 1 << 20))


@pytest.mark.parametrize("number", [errno.ENODEV, errno.ENOMEM])
def test_g02_g03_a_file_that_cannot_be_mapped_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """As on mounts without mmap, and where the address space is limited."""
    out = tiny(tmp_path)

    def fails(*_: Any, **__: Any) -> Any:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(mmap, "mmap", fails)
    with pytest.raises(ShardSetError, match=f"cannot be mapped: {os.strerror(number)}"):
        load_state_dict(out, 1)


def mapped(rank: int, path: Path) -> Any:
    held = load_state_dict(path, rank)
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {Path(line.split()[-1]).name for line in lines if str(path) in line}, len(held)


@pytest.mark.slow
def test_g05_a_rank_opens_its_own_files_only(tmp_path: Path) -> None:
    out = tiny(tmp_path, 4)
    for rank, (files, count) in enumerate(ranks.values(ranks.run(mapped, 4, out))):
        assert files == {f"rank-{rank:05d}-of-00004.safetensors", "replicated.safetensors"}
        assert count == 2


class Asked:
    """A span that only tells what was asked of it."""

    size_bytes = 1 << 30

    def __init__(self) -> None:
        self.bytes = 0
        self.threads: set[str] = set()

    def read_ahead(self, first: int, last: int) -> None:
        self.bytes += last - first
        self.threads.add(threading.current_thread().name)

    def drop(self, first: int, last: int) -> None:
        pass


def test_g07_what_is_read_ahead_is_bounded(tmp_path: Path) -> None:
    """One thread a rank, however many tensors, and a window of bytes before the slow consumer."""
    from shardc.loaders import pages

    spans: list[Any] = [Asked() for _ in range(8)]
    used = 0
    with pages.ReadAhead(spans) as ahead:
        for _ in range(20):
            threading.Event().wait(0.005)
            asked = sum(span.bytes for span in spans)
            assert asked - used <= pages.AHEAD_BYTES + pages.SLICE_BYTES
            ahead.used(16 << 20)
            used += 16 << 20
    assert sum(span.bytes for span in spans) > pages.SLICE_BYTES
    assert len(set.union(*(span.threads for span in spans))) == 1


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
    index["tensors"]["m.weight"]["shards"][1]["ranges"] = [[4, 7]]
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


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_i08_a_staging_buffer_is_not_filled_before_it_was_copied(tmp_path: Path) -> None:
    import numpy as np

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
    text = Path(__file__).read_text()
    cases = {
        "D": "01 02 03 05 06 07 09 10 12",
        "E": "02",
        "G": "01 02 03 05 06 07",
        "I": "01 02 03 04 06 08",
    }
    names = [f"{group}{number}" for group, numbers in cases.items() for number in numbers.split()]
    assert [n for n in names if f"_{n.lower()}_" not in text and f"# {n}: " not in text] == []
