"""What ranks with a process of their own do: one case a function, its result a line of JSON."""

from __future__ import annotations

import ctypes
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardc.errors import ShardcError

Case = Callable[..., Any]
CASES: dict[str, Case] = {}


def case(function: Case) -> Case:
    CASES[function.__name__] = function
    return function


def status_bytes(key: str) -> int:
    """A figure of this process's memory: VmRSS, or VmHWM for its peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{key}:"))


def reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def inputs(
    spec: Mapping[str, Any], device: torch.device | str, dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """Arguments of a forward: a shape makes random values, always the same; a number is itself."""
    generator = torch.Generator().manual_seed(1)
    made = {}
    for name, value in spec.items():
        if isinstance(value, float):
            tensor = torch.tensor([value])
        elif name == "input_ids":
            tensor = torch.randint(10, value, generator=generator)
        elif name.endswith("_ids"):
            tensor = torch.randint(10, value, generator=generator).float()
        else:
            tensor = torch.randn(value, generator=generator).to(dtype)
        made[name] = tensor.to(device)
    return made


def forward(
    model: nn.Module,
    spec: Mapping[str, Any],
    device: torch.device | str,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """The model's output in float32, from inputs made as `spec` says."""
    with torch.inference_mode():
        output: torch.Tensor = model(**inputs(spec, device, dtype), return_dict=False)[0]
    return output.float()


def mesh() -> Any:
    import torch_neuronx  # noqa: F401
    from torch.distributed.device_mesh import init_device_mesh

    dist.init_process_group("neuron")
    return init_device_mesh("neuron", (dist.get_world_size(),), mesh_dim_names=("tp",))


def tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """All parameters and buffers, the ones that no state dict names included."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


@case
def state_dict(out: str, rank: int, tp: int, reads: Any) -> Any:
    """Load one rank's tensors, and measure what that took of the host."""
    import torch_neuronx

    from shardc.loaders import load_state_dict

    torch.zeros(8, device="neuron")  # what the stack itself takes is no part of it
    torch_neuronx.reset_counters()
    reset_peak()
    before = status_bytes("VmRSS")
    held = load_state_dict(out, rank, tp=tp, device="neuron", reads=reads)
    peak = status_bytes("VmHWM") - before
    counters = torch_neuronx.counters()
    host = load_state_dict(out, rank, tp=tp)
    return {
        "bytes": sum(tensor.nbytes for tensor in held.values()),
        "peak_bytes": peak,
        "devices": sorted({str(tensor.device) for tensor in held.values()}),
        "counters": counters,
        "differ": [name for name in host if not torch.equal(host[name], held[name].cpu())],
    }


def _refused(load: Callable[[], object]) -> str:
    try:
        load()
    except ShardcError as error:
        return str(error)
    return ""


@case
def full(out: str) -> Any:
    """Load onto a core that is too small, with its free bytes known and without."""
    from shardc.loaders import load_model

    tp = mesh()
    known = _refused(lambda: load_model(out, mesh=tp))
    del torch.neuron.mem_get_info  # type: ignore[attr-defined]
    return [known, _refused(lambda: load_model(out, mesh=tp))]


@case
def no_group(out: str, touch: bool) -> Any:
    """Load under a launcher, but without the process group."""
    import torch_neuronx  # noqa: F401

    from shardc.loaders import load_model, load_state_dict

    if touch:
        torch.zeros(8, device="neuron")
    return [
        _refused(lambda: load_model(out, device="neuron")),
        _refused(lambda: load_state_dict(out, 0, device="neuron")),
    ]


@case
def wrong_group(out: str) -> Any:
    """Touch the device, then find that only gloo can be initialised."""
    import torch_neuronx  # noqa: F401

    from shardc.loaders import load_model

    torch.zeros(8, device="neuron")
    try:
        dist.init_process_group("neuron")
    except AssertionError as error:
        late = str(error)
    dist.destroy_process_group() if dist.is_initialized() else None
    dist.init_process_group("gloo")
    return [late, _refused(lambda: load_model(out, device="neuron"))]


@case
def other_core() -> Any:
    """Ask for the core of another rank."""
    from shardc.loaders import devices

    tp = mesh()
    own = devices.resolve(None, tp)
    other = (own.index + 1) % dist.get_world_size()
    return [str(own), _refused(lambda: devices.resolve(f"neuron:{other}", tp))]


@case
def touch_memory() -> Any:
    """Read device memory as if it were the host's."""
    import torch_neuronx  # noqa: F401

    tensor = torch.ones(1024, device="neuron")
    ctypes.string_at(tensor.data_ptr(), 4)


@case
def copies() -> Any:
    """Each kind of copy that must not happen in a load, and what its counter says."""
    import torch_neuronx

    host = torch.arange(64, dtype=torch.float32).view(8, 8)
    counted = {}

    def count(kind: str, copy: Callable[[], object]) -> None:
        torch_neuronx.reset_counters()
        copy()
        counted[kind] = torch_neuronx.counters()

    placed = torch.empty(8, 8, device="neuron")
    count("plain", lambda: placed.copy_(host))
    count("strided", lambda: placed.copy_(host.t()))
    count("cast", lambda: placed.copy_(host.to(torch.float16)))
    count("asynchronous", lambda: placed.copy_(host, non_blocking=True))
    count("back", placed.cpu)
    count("computed", lambda: placed @ placed)
    image = placed.view(1, 1, 8, 8)
    count("convolved", lambda: nn.functional.conv2d(image, image))
    return counted


if __name__ == "__main__":
    result = CASES[sys.argv[1]](**json.loads(sys.argv[2]))
    if dist.is_initialized():
        dist.destroy_process_group()
    print(json.dumps(result))  # noqa: T201
