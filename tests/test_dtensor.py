"""runtime="dtensor": parameters, hooks and guards are those of diffusers' own tensor parallelism."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import shardc
from tests import ranks

torch = pytest.importorskip("torch")
pytest.importorskip("diffusers.hooks.tensor_parallel", reason="diffusers below 0.42")

from tests import models  # noqa: E402

pytestmark = pytest.mark.slow

NAMES = ["flux2", "flux2-guidance", "flux1", "qwen-image", "qwen-image21"]


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Each tiny model saved, and its own output beside it."""
    folder = tmp_path_factory.mktemp("sources")
    for name in [*NAMES, "qwen3"]:
        model = models.save(name, folder / name)
        with torch.no_grad():
            torch.save(model(**models.inputs(name))[0], folder / f"{name}.pt")
    return {name: folder / name for name in [*NAMES, "qwen3"]}


def counted() -> Counter[str]:
    """Count the tensors that collectives move from here on, at the process group itself."""
    import torch.distributed as dist

    calls: Counter[str] = Counter()
    for name in dir(dist.ProcessGroup):
        plain = getattr(dist.ProcessGroup, name)
        if not name.startswith(("all", "_all", "broadcast", "scatter", "gather", "reduce")):
            continue
        if not callable(plain):
            continue

        def wrapped(self: Any, *args: Any, _name: str = name, _plain: Any = plain, **kw: Any) -> Any:
            calls[_name] += 1
            return _plain(self, *args, **kw)

        setattr(dist.ProcessGroup, name, wrapped)
    return calls


def forward(rank: int, name: str, path: Path, source: Path) -> Any:
    import torch.distributed as dist
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from torch.utils._python_dispatch import TorchDispatchMode

    from shardc.loaders import load_model

    moved: Counter[str] = Counter()

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func.namespace in ("c10d", "_c10d_functional"):
                moved[func._opname] += 1
            return func(*args, **(kwargs or {}))

    control: list[int] = []
    gather_object = dist.all_gather_object

    def agreeing(*args: Any, **kwargs: Any) -> None:
        before = moved.total()
        gather_object(*args, **kwargs)
        control.append(moved.total() - before)

    dist.all_gather_object = agreeing
    with Watch():
        model: Any = load_model(path, runtime="dtensor")
        loading = moved.total() - sum(control)
        moved.clear()
        with torch.no_grad():
            out = model(**models.inputs(name))[0]
    dist.all_gather_object = gather_object

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
            same = not isinstance(own, DTensor) and torch.equal(own, full)
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
                and torch.equal(own.to_local(), local)
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
        "control": len(control),
        "loading": loading,
        "running": dict(moved),
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


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("name", NAMES)
def test_it_is_what_diffusers_does(
    sources: dict[str, Path], tmp_path: Path, name: str, tp: int
) -> None:
    shardc.build(sources[name], tmp_path / "o", tp, profile="native")
    whole = torch.load(sources[name].parent / f"{name}.pt")
    found = ranks.values(ranks.run(forward, tp, name, tmp_path / "o", sources[name]))
    for rank, facts in enumerate(found):
        error = (torch.from_numpy(facts["out"]) - whole).abs().max() / whole.abs().max()
        assert error < 1e-5
        assert facts["planned"] > 0
        assert facts["differing"] == []
        assert (facts["control"], facts["loading"]) == (2, 0)  # they met twice, and no weight moved
        assert facts["running"]["all_reduce"] > 0  # so the watch sees what there is to see
        assert facts["hooks"] == dict.fromkeys(facts["wanted"], (1, 1))
        assert facts["local heads"] == [facts["heads"]]  # whole, as diffusers keeps them
        assert not facts["training"]
        assert not facts["grad"]
        assert facts["mesh"] == (tp, rank, "cpu")
