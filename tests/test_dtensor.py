"""runtime="dtensor": parameters, hooks and guards are diffusers' own tensor parallelism's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import shardc
from shardc.errors import ShardSetError
from tests import ranks

torch = pytest.importorskip("torch")
pytest.importorskip("diffusers.hooks.tensor_parallel", reason="diffusers below 0.42")

from tests import loads, models  # noqa: E402
from tests.neuronsim import launch  # noqa: E402

pytestmark = pytest.mark.slow

NAMES = ["flux2", "flux1", "qwen-image", "qwen-image21"]


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Each tiny model saved, and its own output beside it."""
    folder = tmp_path_factory.mktemp("sources")
    for name in [*NAMES, "qwen3"]:
        model = models.save(name, folder / name)
        with torch.no_grad():
            torch.save(model(**models.inputs(name))[0], folder / f"{name}.pt")
    return {name: folder / name for name in [*NAMES, "qwen3"]}


def forward(rank: int, name: str, path: Path, source: Path) -> Any:
    import torch.distributed as dist
    from torch.distributed.tensor import DTensor, Replicate, Shard

    from shardc.loaders import load_model

    model: Any
    model, moved = loads.watched(lambda: load_model(path, runtime="dtensor"))
    placed = loads.places(model)
    with loads.Watch() as running:
        out = loads.forward(model, models.inputs(name))

    from diffusers.hooks import tensor_parallel as theirs

    whole: Any = type(model).from_pretrained(source)
    size = dist.get_world_size()
    specs = theirs.resolve_tp_shard_specs(whole, whole._tp_plan, size)
    mesh = model._parallel_config.tensor_parallel_config._mesh
    differing = []
    for key, full in whole.named_parameters():
        own = model.get_parameter(key)
        spec = specs.get(key)
        if spec is None:
            same = not isinstance(own, DTensor) and torch.equal(own.cpu(), full)
        else:
            local, placement = full, Replicate()
            if spec.dim is not None:
                local = theirs._local_shard(full, spec.dim, spec.block_sizes, mesh)
                placement = Shard(spec.dim)
            same = (
                isinstance(own, DTensor)
                and own.placements == (placement,)
                and own.shape == full.shape
                and own.stride() == full.stride()
                and torch.equal(own.to_local().cpu(), local)
            )
        if not same:
            differing.append(key)
    hooks = {
        key: (len(module._forward_pre_hooks), len(module._forward_hooks))
        for key, module in model.named_modules()
        if module._forward_pre_hooks or module._forward_hooks
    }
    return {
        "out": out.numpy(),
        "moved": moved,
        "placed": placed,
        "running": dict(running.moved),
        "differing": differing,
        "planned": len(specs),
        "hooks": hooks,
        "wanted": sorted({key.rpartition(".")[0] for key in specs}),
        "heads": model.config.num_attention_heads,
        "local heads": sorted({m.heads for m in model.modules() if hasattr(m, "heads")}),
        "training": model.training,
        "grad": any(p.requires_grad for p in model.parameters()),
        "mesh": (mesh.size(), mesh.get_local_rank(), mesh.device_type),
    }


@pytest.mark.parametrize("device", ["cpu", "neuron"])
@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("name", NAMES)
def test_it_is_what_diffusers_does(
    sources: dict[str, Path], tmp_path: Path, name: str, tp: int, device: str
) -> None:
    shardc.build(sources[name], tmp_path / "o", tp, profile="native")
    whole = torch.load(sources[name].parent / f"{name}.pt")
    found = launch.run(device, forward, tp, name, tmp_path / "o", sources[name])
    for rank, facts in enumerate(found):
        error = (torch.from_numpy(facts["out"]) - whole).abs().max() / whole.abs().max()
        assert error < 1e-5
        assert facts["planned"] > 0
        assert facts["differing"] == []
        assert facts["moved"]["meetings"] == 2
        loads.check(device, rank, facts["moved"], facts["placed"])
        assert facts["running"]["all_reduce"] > 0  # so the watch sees what there is to see
        assert facts["hooks"] == dict.fromkeys(facts["wanted"], (1, 1))
        assert facts["local heads"] == [facts["heads"]]  # whole, as diffusers keeps them
        assert not facts["training"]
        assert not facts["grad"]
        assert facts["mesh"] == (tp, rank, device)


def left_plain(rank: int, path: Path) -> Any:
    """What would be seen if a planned layer kept a plain parameter."""
    from diffusers.hooks import tensor_parallel

    from shardc.loaders import load_model

    resolve = tensor_parallel.resolve_tp_shard_specs

    def without_biases(*args: Any) -> Any:
        return {k: v for k, v in resolve(*args).items() if not k.endswith("bias")}

    tensor_parallel.resolve_tp_shard_specs = without_biases
    from shardc.loaders import dtensor

    dtensor._differs = lambda *_: None  # type: ignore[assignment]
    return loads.watched(lambda: load_model(path, runtime="dtensor"))[1]


@pytest.mark.parametrize("device", ["cpu", "neuron"])
def test_a_broadcast_would_be_seen(sources: dict[str, Path], tmp_path: Path, device: str) -> None:
    shardc.build(sources["flux1"], tmp_path / "o", 2, profile="native")
    for moved in launch.run(device, left_plain, 2, tmp_path / "o"):
        assert moved["collectives"]["broadcast_" if device == "cpu" else "broadcast"] > 0


def load(rank: int, path: Path, runtime: Any, mesh: bool = False) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    from shardc.loaders import load_model

    axis = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))["tp"] if mesh else None
    model = load_model(path, mesh=axis, runtime=runtime)
    with torch.no_grad():
        return model(**models.inputs("flux2"))[0].numpy()


def test_one_axis_of_a_larger_mesh(sources: dict[str, Path], tmp_path: Path) -> None:
    shardc.build(sources["flux2"], tmp_path / "o", 2, profile="native")
    whole = torch.load(sources["flux2"].parent / "flux2.pt")
    for out in ranks.values(ranks.run(load, 4, tmp_path / "o", "dtensor", True)):
        assert (torch.from_numpy(out) - whole).abs().max() / whole.abs().max() < 1e-5


@pytest.mark.parametrize(
    ("name", "profile", "runtime", "message"),
    [
        ("flux2", "compact", "dtensor", "build it with --profile native"),
        ("qwen3", "native", "dtensor", "diffusers has no _tp_plan for Qwen3ForCausalLM"),
        ("flux2", "native", "fast", "is none of 'plain', 'dtensor'"),
    ],
)
def test_what_it_cannot_take(
    sources: dict[str, Path], tmp_path: Path, name: str, profile: Any, runtime: str, message: str
) -> None:
    shardc.build(sources[name], tmp_path / "o", 2, profile=profile)
    for outcome in ranks.run(load, 2, tmp_path / "o", runtime):
        assert str(outcome.error).startswith("ShardSetError: ")
        assert message in str(outcome.error)
        assert outcome.seconds < 10


def test_a_set_that_is_cut_otherwise(sources: dict[str, Path], tmp_path: Path) -> None:
    """Same shapes, other rows: only the index can tell."""
    text = shardc.api.library.load("Flux2Transformer2DModel").text
    wrong = text.replace(
        'blocks = ["inner", "inner", "inner", "mlp", "mlp"]\nunit = ["head", "head", "head", 1, 1]',
        'blocks = ["inner * 3 + mlp * 2"]',
    )
    (tmp_path / "wrong.toml").write_text(wrong)
    shardc.build(
        sources["flux2"], tmp_path / "o", 2, manifest=tmp_path / "wrong.toml", profile="native"
    )
    for outcome in ranks.run(load, 2, tmp_path / "o", "dtensor"):
        assert "to_qkv_mlp_proj.weight': diffusers' _tp_plan gives rank" in str(outcome.error)


def test_one_process_alone(sources: dict[str, Path], tmp_path: Path) -> None:
    from shardc.loaders import load_model

    shardc.build(sources["flux2"], tmp_path / "o", 1, profile="native")
    with pytest.raises(ShardSetError, match="needs a process group"):
        load_model(tmp_path / "o", runtime="dtensor")


def forbidden(rank: int, path: Path) -> dict[str, str]:
    from shardc.loaders import load_model

    model: Any = load_model(path, runtime="dtensor")
    told = {}
    for call in ("save_pretrained", "add_adapter", "enable_group_offload", "push_to_hub"):
        arguments = (torch.device("cpu"),) if call == "enable_group_offload" else ("x",)
        try:
            getattr(model, call)(*arguments)
        except Exception as error:
            told[call] = f"{type(error).__name__}: {error}"
    return told


def test_the_guards_are_diffusers_own(sources: dict[str, Path], tmp_path: Path) -> None:
    shardc.build(sources["flux2"], tmp_path / "o", 2, profile="native")
    told = ranks.values(ranks.run(forbidden, 2, tmp_path / "o"))[0]
    assert told["save_pretrained"].startswith("NotImplementedError: ")
    assert told["enable_group_offload"].startswith("ValueError: ")
    for call in ("save_pretrained", "enable_group_offload"):
        assert "is sharded with tensor parallelism" in told[call]
    for call in ("add_adapter", "push_to_hub"):  # these it would let through, at least half way
        assert "one rank's shard" in told[call]
