"""A process that starts a rank and has the model ready: `python -m benchmarks.startup_ways JOB`.

Each way imports what it needs, joins the process group, and loads. Ready is a model on the cpu
whose every page of weights has been touched. Where only one rank of several is run, its group is
torch's fake one and shardc's ranks do not meet: there is nobody to meet.
"""

from __future__ import annotations

import time

STARTED = time.monotonic()  # before anything else is imported

import os  # noqa: E402
from collections.abc import Callable, Iterator  # noqa: E402
from contextlib import contextmanager  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

from benchmarks.worker import NOTHING, Channel, Job, difference, figures, serve  # noqa: E402

COMPONENT = "transformer"
PAGE = 4096


class Phases:
    """Seconds of each phase, in order."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        begun = time.monotonic()
        try:
            yield
        finally:
            self.add(name, time.monotonic() - begun)

    def add(self, name: str, seconds: float) -> None:
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds

    def wrap(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            with self(name):
                return call(*args, **kwargs)

        return timed


def join(job: Job) -> None:
    import torch.distributed as dist

    rank, tp = job["rank"], job["tp"]
    if job["ranks"] == tp:
        meet = f"file://{job['meet']}"
        dist.init_process_group("gloo", init_method=meet, rank=rank, world_size=tp)
        return
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=tp)


def shardc(job: Job, phases: Phases) -> Any:
    if job["prefetch"]:
        from shardc.loaders import prefetch

        prefetch(job["shards"], job["rank"])
    with phases("import torch"):
        import torch  # noqa: F401
    with phases("import model"):
        import accelerate  # noqa: F401
        from diffusers import Flux2Transformer2DModel  # noqa: F401

        from shardc.loaders import group
        from shardc.loaders.model import load_model
    with phases("group"):
        join(job)
    if job["ranks"] != job["tp"]:
        group.Ranks._gloo = lambda self: None  # type: ignore[method-assign]
    begun = time.monotonic()
    model: Any = load_model(job["shards"], component=COMPONENT, reads=job["reads"])
    took = time.monotonic() - begun
    timings = model.shardc.to_json()["timings"]
    own = {name: value for name, value in timings.items() if isinstance(value, float) and value}
    for name, value in own.items():
        phases.add(name, value)
    phases.add("rest", took - sum(own.values()))
    return model


def diffusers(job: Job, phases: Phases) -> Any:
    with phases("import torch"):
        import torch
    with phases("import model"):
        import accelerate  # noqa: F401
        from diffusers import Flux2Transformer2DModel as Model
        from diffusers import TensorParallelConfig
        from diffusers.hooks import tensor_parallel
        from diffusers.models import modeling_utils
        from torch.distributed.device_mesh import init_device_mesh
    with phases("group"):
        join(job)
        mesh = init_device_mesh("cpu", (job["tp"],), mesh_dim_names=("tp",))
    _on_cpu(Model, tensor_parallel, torch.device("cpu"), job["rank"])
    built: Any = Model
    built.from_config = phases.wrap("build", Model.from_config)
    load: Any = modeling_utils
    load._load_shard_file_tp = phases.wrap("place", load._load_shard_file_tp)
    hooks: Any = tensor_parallel
    hooks.apply_tensor_parallel = phases.wrap("wire", hooks.apply_tensor_parallel)
    before = sum(phases.seconds.values())
    begun = time.monotonic()
    model = Model.from_pretrained(
        Path(job["source"]),
        subfolder=COMPONENT,
        torch_dtype=torch.bfloat16,
        parallel_config=TensorParallelConfig(mesh=mesh),
    ).eval()
    took = time.monotonic() - begun
    phases.add("rest", took - (sum(phases.seconds.values()) - before))
    return model


def _on_cpu(model: Any, hooks: Any, device: Any, rank: int) -> None:
    """Tensor parallelism works on the cpu, but diffusers refuses it, or asks for an accelerator."""
    from diffusers.models._modeling_parallel import ParallelConfig

    hooks._SUPPORTED_TP_DEVICES = ("cpu",)

    def resolve(self: Any, config: Any) -> Any:
        if not isinstance(config, ParallelConfig):
            config = ParallelConfig(tensor_parallel_config=config)
        mesh = config.tensor_parallel_config.mesh
        config.setup(rank, mesh.size(), device, mesh=mesh)
        self._parallel_config = config
        return config

    model._resolve_parallel_config = resolve


def imports(job: Job, phases: Phases) -> None:
    """Only what every way must import: no process is ready sooner."""
    with phases("import torch"):
        import torch  # noqa: F401
    with phases("import model"):
        from diffusers import Flux2Transformer2DModel  # noqa: F401


WAYS: dict[str, Callable[[Job, Phases], Any]] = {
    "shardc": shardc,
    "diffusers": diffusers,
    "imports": imports,
}


def touch(model: Any) -> int:
    """One byte of every page of every tensor; how many bytes there are in all."""
    import torch

    total = 0
    for tensor in (*model.parameters(), *model.buffers()):
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        total += local.nbytes
        flat = local.detach().contiguous().view(-1)
        if flat.numel():
            flat.view(torch.uint8)[::PAGE].sum()
    return total


def work(job: Job, channel: Channel) -> dict[str, Any]:
    phases = Phases()
    phases.add("start", STARTED - job["begun"])
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # else gloo looks the host name up
    model = WAYS[job["way"]](job, phases)
    total = 0
    if model is not None:
        with phases("touch"):
            total = touch(model)
    ended = time.monotonic()
    told = difference(NOTHING, figures())
    return {
        **told,
        "begun": job["begun"],
        "ended": ended,
        "delivered_bytes": total,
        "phases": phases.seconds,
    }


if __name__ == "__main__":
    serve(work)
