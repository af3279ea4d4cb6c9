"""The ways to load one rank, each in a process of its own: `python -m benchmarks.load_ways JOB`.

A way prepares (imports, the model on meta, whatever a server has before it loads), then loads from
the files to the device: that alone is measured.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import load_peers
from benchmarks.load_peers import Load
from benchmarks.worker import Channel, Job, measured, serve, wait

COMPONENT = "transformer"


# --- diffusers ------------------------------------------------------------------------------------


class _Mesh:
    """A rank of a mesh without a process group: all that slicing asks."""

    device_type = "cpu"

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size

    def get_local_rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size


class _Local:
    """In the place of DTensor, which takes time but is no part of loading: the local tensor."""

    @staticmethod
    def from_local(local: Any, *_: object, **__: object) -> Any:
        return local


def diffusers(job: Job) -> Load:
    """diffusers' own streaming load of the full checkpoint, by its functions."""
    import torch
    import torch.distributed.tensor
    from accelerate import init_empty_weights
    from diffusers import Flux2Transformer2DModel as Model
    from diffusers import TensorParallelConfig
    from diffusers.hooks.tensor_parallel import resolve_tp_shard_specs
    from diffusers.models.model_loading_utils import _load_shard_file_tp

    folder = Path(job["source"]) / COMPONENT
    config = json.loads((folder / "config.json").read_text())
    with init_empty_weights():
        model = Model.from_config(config).to(torch.bfloat16)
    specs = resolve_tp_shard_specs(model, Model._tp_plan, job["tp"])
    state: Any = model.state_dict()
    parallel = TensorParallelConfig(tp_degree=job["tp"])
    rank, size = job["rank"], job["tp"]
    mesh: Any = _Mesh(rank, size)
    parallel.setup(rank, size, load_peers.device_of(job), mesh)
    torch.distributed.tensor.DTensor = _Local  # type: ignore[assignment,misc]
    files = sorted(folder.glob("*.safetensors"))

    def load() -> None:
        for path in files:
            _load_shard_file_tp(path, model, state, specs, parallel, dtype=torch.bfloat16)

    return load


# --- shardc ---------------------------------------------------------------------------------------


def _lane(device: Any) -> Any:
    """The way onto the stand-in: as onto a device that copies straight from the mapping."""
    from shardc.loaders import devices

    class Lane:
        def __init__(self, own: object) -> None:
            self.threads = devices.put_threads()  # as a Neuron core's

        def put(self, view: Any, done: Any = None) -> Any:
            view = view.contiguous()
            placed = devices.empty(view, device)
            at = 0
            for part, target in devices.slices(view, placed):
                target.copy_(part)
                if done is not None:
                    done(at, at + part.nbytes)
                at += part.nbytes
            return placed

        def sync(self) -> None:
            pass

        def free_bytes(self) -> None:
            return None

    return Lane


def shardc(job: Job) -> Load:
    """The rank's shard onto the device: index, headers, checks, reads, copies."""
    from shardc.loaders import devices, storage
    from shardc.loaders.opening import Opening

    device = load_peers.device_of(job)
    devices.LANES.setdefault(device.type, _lane(device))

    def load() -> dict[str, Any]:
        with Opening(job["shards"]) as opening:
            shard_set = opening.open()
            name = storage.choose_component(shard_set, None)
            index, folder = shard_set.components[name], shard_set.folder(name)
            storage.check_rank(index, job["rank"], job["tp"], folder)
            held = storage.open_rank(folder, index, job["rank"])
            return dict(storage.place_on(held, device, job.get("reads", "auto")))

    return load


def views(job: Job) -> Load:
    """The rank's shard as views of its mapped files: nothing is read before it is used."""
    from shardc.loaders import load_state_dict

    return lambda: load_state_dict(job["shards"], job["rank"], tp=job["tp"])


WAYS: dict[str, Callable[[Job], Load]] = {
    "diffusers": diffusers,
    "shardc": shardc,
    "views": views,
    **load_peers.WAYS,
}
UNCOPIED = ("floor", "floor, direct", "views")  # torch is not needed, or not copied with


def work(job: Job, channel: Channel) -> dict[str, Any]:
    staging: Any = None
    if job["way"] not in UNCOPIED:
        import torch

        torch.set_num_threads(1)  # as torchrun has it
        if job["device"] == "meta":
            from benchmarks.staging import Staging

            staging = Staging(check=job["check"])
    load = WAYS[job["way"]](job)
    if staging is not None:
        staging.forget()  # a model that is made on meta is copied there
    channel.tell({"ready": True})
    wait()
    kept: list[object] = []  # until the end: freeing is not loading

    def action() -> dict[str, Any]:
        kept.append(load())
        return {"delivered_bytes": 0}

    told = measured(action)
    if staging is not None:
        told["delivered_bytes"] = staging.size_bytes
        told["checksum"] = staging.checksum if job["check"] else None
    elif job["device"] == "neuron":
        import torch_neuronx

        told["delivered_bytes"] = torch_neuronx.counters()["h2d"]
    elif job["way"].startswith("floor"):
        told["delivered_bytes"] = kept[0]
    return told


if __name__ == "__main__":
    serve(work)
