"""load_model: the sharded model's outputs are the whole model's, and failures reach every rank."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

import shardc
from tests import ranks

torch = pytest.importorskip("torch")
pytest.importorskip("diffusers")

from tests import models  # noqa: E402

pytestmark = pytest.mark.slow

NAMES = [
    "flux2",
    "flux2-guidance",
    "flux1",
    "qwen-image",
    "qwen-image21",
    "qwen3",
    "qwen3-tied",
    "mistral",
]


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Each tiny model saved, and its own output beside it."""
    folder = tmp_path_factory.mktemp("sources")
    for name in NAMES:
        model = models.save(name, folder / name)
        with torch.no_grad():
            torch.save(model(**models.inputs(name))[0], folder / f"{name}.pt")
    return {name: folder / name for name in NAMES}


def state_of(model: Any) -> dict[str, Any]:
    return {
        "meta": [n for n, p in model.named_parameters() if p.is_meta],
        "devices": sorted({t.device.type for t in (*model.parameters(), *model.buffers())}),
        "grad": any(p.requires_grad for p in model.parameters()),
        "training": model.training,
        "bytes": sum(p.numel() * p.element_size() for p in set(model.parameters())),
    }


def forward(rank: int, name: str, path: Path) -> Any:
    from shardc.loaders import load_model

    model = load_model(path)
    with torch.no_grad():
        out = model(**models.inputs(name))[0]
    return out.numpy(), state_of(model), model.shardc.to_json()


@pytest.mark.parametrize("profile", ["compact", "native"])
@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("name", NAMES)
def test_outputs_are_those_of_the_whole_model(
    sources: dict[str, Path], tmp_path: Path, name: str, tp: int, profile: Any
) -> None:
    shardc.build(sources[name], tmp_path / "o", tp, profile=profile)
    whole = torch.load(sources[name].parent / f"{name}.pt")
    found = ranks.values(ranks.run(forward, tp, name, tmp_path / "o"))
    for rank, (out, state, loaded) in enumerate(found):
        error = (torch.from_numpy(out) - whole).abs().max() / whole.abs().max()
        assert error < 1e-5
        assert (out == found[0][0]).all()  # bit for bit the same on every rank
        assert state["meta"] == []
        assert state["devices"] == ["cpu"]
        assert not state["grad"]
        assert not state["training"]
        assert (loaded["rank"], loaded["tp"]) == (rank, tp)
        assert loaded["timings"]["placed_bytes"] == state["bytes"]


def test_a_wrong_cut_would_be_seen(sources: dict[str, Path], tmp_path: Path) -> None:
    """The comparison has teeth: a fused weight cut as one block gives another output."""
    text = shardc.api.library.load("Flux2Transformer2DModel").text
    wrong = text.replace(
        'blocks = ["inner", "inner", "inner", "mlp", "mlp"]\nunit = ["head", "head", "head", 1, 1]',
        'blocks = ["inner * 3 + mlp * 2"]',
    )
    assert wrong != text
    (tmp_path / "wrong.toml").write_text(wrong)
    shardc.build(sources["flux2"], tmp_path / "o", 2, manifest=tmp_path / "wrong.toml")
    whole = torch.load(sources["flux2"].parent / "flux2.pt")
    out, _, _ = ranks.values(ranks.run(forward, 2, "flux2", tmp_path / "o"))[0]
    assert (torch.from_numpy(out) - whole).abs().max() / whole.abs().max() > 0.01


def test_bfloat16_is_no_worse_than_the_whole_model(tmp_path: Path) -> None:
    model = models.save("flux2", tmp_path / "src", torch.bfloat16)
    with torch.no_grad():
        whole = model(**models.inputs("flux2", torch.bfloat16))[0].float()
        exact = models.build("flux2").to(torch.bfloat16).float()(**models.inputs("flux2"))[0]
    shardc.build(tmp_path / "src", tmp_path / "o", 2)
    out = ranks.values(ranks.run(forward_bf16, 2, tmp_path / "o"))[0]
    mine = (torch.from_numpy(out) - exact).abs().max()
    assert mine <= 1.5 * (whole - exact).abs().max()


def forward_bf16(rank: int, path: Path) -> Any:
    from shardc.loaders import load_model

    model = load_model(path)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    with torch.no_grad():
        return model(**models.inputs("flux2", torch.bfloat16))[0].float().numpy()


def on_an_axis(rank: int, path: Path) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    from shardc.loaders import load_model

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp", "dp"))
    model = load_model(path, mesh=mesh["tp"])  # the slow axis: its ranks are 0, 2 and 1, 3
    with torch.no_grad():
        return model(**models.inputs("flux2"))[0].numpy(), model.shardc.rank


def test_one_axis_of_a_larger_mesh(sources: dict[str, Path], tmp_path: Path) -> None:
    shardc.build(sources["flux2"], tmp_path / "o", 2)
    whole = torch.load(sources["flux2"].parent / "flux2.pt")
    found = ranks.values(ranks.run(on_an_axis, 4, tmp_path / "o"))
    assert [rank for _, rank in found] == [0, 0, 1, 1]
    for out, _ in found:
        assert (torch.from_numpy(out) - whole).abs().max() / whole.abs().max() < 1e-5


def compiled(rank: int, path: Path) -> Any:
    from shardc.loaders import load_model

    model = load_model(path)
    whole = torch.compile(model, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        eager = model(**models.inputs("flux2"))[0]
        return (whole(**models.inputs("flux2"))[0] - eager).abs().max().item()


def norms_compiled(rank: int, path: Path) -> Any:
    from shardc.loaders import load_model
    from tests.zoo.case import Draw, by_name

    inputs = by_name("WanTransformer3DModel").inputs
    model = load_model(path)
    layer = torch.compile(model.blocks[0].attn1.norm_q, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        model(**inputs(Draw()))
        x = torch.randn(2, 3, model.blocks[0].attn1.norm_q.weight.shape[0])
        return (layer(x) - model.blocks[0].attn1.norm_q(x)).abs().max().item()


def test_a_compiler_traces_a_norm_across_ranks(tmp_path: Path) -> None:
    from tests.zoo.case import by_name

    by_name("WanTransformer3DModel").build().save_pretrained(tmp_path / "s")
    shardc.build(tmp_path / "s", tmp_path / "o", 2)
    assert max(ranks.values(ranks.run(norms_compiled, 2, tmp_path / "o"))) < 1e-5


def test_a_compiler_traces_the_reduces(sources: dict[str, Path], tmp_path: Path) -> None:
    shardc.build(sources["flux2"], tmp_path / "o", 2)
    assert max(ranks.values(ranks.run(compiled, 2, tmp_path / "o"))) < 1e-4


def forbidden(rank: int, path: Path) -> Any:
    from shardc.loaders import load_model

    model = load_model(path)
    told = {}
    for call in ("save_pretrained", "load_lora_adapter", "add_adapter", "enable_group_offload"):
        try:
            getattr(model, call)("x")
        except Exception as error:
            told[call] = f"{type(error).__name__}: {error}"
    return told


def test_calls_that_would_take_a_part_for_the_whole(
    sources: dict[str, Path], tmp_path: Path
) -> None:
    shardc.build(sources["flux2"], tmp_path / "o", 2)
    told = ranks.values(ranks.run(forbidden, 2, tmp_path / "o"))[0]
    assert len(told) == 4
    assert all("ShardSetError" in text and "one rank's shard" in text for text in told.values())
    assert "shardc merge" in told["save_pretrained"]


def load(rank: int, path: Path, tampered: Path | None = None) -> str:
    from shardc.loaders import load_model

    load_model(tampered if tampered is not None and rank == 1 else path)
    return "loaded"


def test_the_wrong_number_of_ranks(sources: dict[str, Path], tmp_path: Path) -> None:
    shardc.build(sources["flux2"], tmp_path / "o", 4)
    for outcome in ranks.run(load, 2, tmp_path / "o"):
        assert "is cut for tp 4, 2 was asked for" in str(outcome.error)
        assert outcome.seconds < 10


def test_one_rank_without_its_file_fails_all(sources: dict[str, Path], tmp_path: Path) -> None:
    shardc.build(sources["flux2"], tmp_path / "o", 2)
    (tmp_path / "o" / "rank-00001-of-00002.safetensors").unlink()
    zero, one = ranks.run(load, 2, tmp_path / "o")
    assert "rank-00001-of-00002.safetensors: is missing" in str(one.error)
    assert "rank 1: " in str(zero.error)
    assert "rank-00001-of-00002.safetensors: is missing" in str(zero.error)
    assert max(zero.seconds, one.seconds) < 10


def test_ranks_that_load_different_sets(sources: dict[str, Path], tmp_path: Path) -> None:
    shardc.build(sources["flux2"], tmp_path / "o", 2)
    shardc.build(sources["flux2"], tmp_path / "other", 2, profile="native")
    for outcome in ranks.run(load, 2, tmp_path / "o", tmp_path / "other"):
        assert "do not load the same shard set" in str(outcome.error)


def test_a_config_that_was_changed(sources: dict[str, Path], tmp_path: Path) -> None:
    shardc.build(sources["flux2"], tmp_path / "o", 2)
    config = tmp_path / "o" / "config.json"
    config.write_text(config.read_text().replace("2000", "2001"))
    for outcome in ranks.run(load, 2, tmp_path / "o"):
        assert "config.json: is not the one that the set was built with" in str(outcome.error)


def load_and_die(rank: int, path: Path) -> str:
    from shardc.loaders import model

    if rank == 1:
        place = model.place

        def dies(*args: Any) -> None:
            place(*args)
            os.kill(os.getpid(), signal.SIGKILL)

        model.place = dies
    started = time.monotonic()
    try:
        model.load_model(path)
    except Exception as error:
        return f"{time.monotonic() - started:.1f} {type(error).__name__}: {error}"
    return "loaded"


def test_a_rank_killed_in_the_middle_ends_the_others(
    sources: dict[str, Path], tmp_path: Path
) -> None:
    shardc.build(sources["flux2"], tmp_path / "o", 2)
    zero, one = ranks.run(load_and_die, 2, tmp_path / "o")
    assert one.error == "died"
    seconds, _, text = str(zero.value).partition(" ")
    assert float(seconds) < 10
    assert "another rank is gone" in text


def test_one_process_alone_takes_a_set_of_degree_one(
    sources: dict[str, Path], tmp_path: Path
) -> None:
    from shardc.loaders import load_model

    shardc.build(sources["flux1"], tmp_path / "o", 1)
    whole = torch.load(sources["flux1"].parent / "flux1.pt")
    with torch.no_grad():
        out = load_model(tmp_path / "o")(**models.inputs("flux1"))[0]
    assert torch.equal(out, whole)
