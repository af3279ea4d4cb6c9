"""A stand-in for AWS's torch_neuronx, test only: a simulated "neuron" device on the CPU.

Read from the environment: NEURONSIM_LIBRARY, the built native part; NEURONSIM_HBM_BYTES, a core's
memory; and as on the real stack NEURON_RT_VISIBLE_CORES and NEURON_RT_NUM_CORES.
"""

from __future__ import annotations

import importlib.util
import os
from types import ModuleType

import torch

IS_SIMULATION = True
NAME = "neuronsim_native"
DEFAULT_HBM_BYTES = 24 << 30  # a core of Trn2 with two physical cores in one
DEFAULT_CORES = 4  # trn2.3xlarge


def _native() -> ModuleType:
    spec = importlib.util.spec_from_file_location(NAME, os.environ["NEURONSIM_LIBRARY"])
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def visible_cores() -> int:
    """How many cores the environment gives this process."""
    if ranges := os.environ.get("NEURON_RT_VISIBLE_CORES"):
        ends = [part.partition("-") for part in ranges.split(",")]
        return sum(int(last or first) - int(first) + 1 for first, _, last in ends)
    return int(os.environ.get("NEURON_RT_NUM_CORES", DEFAULT_CORES))


native = _native()
native.register(int(os.environ.get("NEURONSIM_HBM_BYTES", DEFAULT_HBM_BYTES)), visible_cores())


def counters() -> dict[str, int]:
    """Bytes copied since the last reset: h2d, staged, cast, bounce, d2h."""
    counted: dict[str, int] = native.counters()
    return counted


def reset_counters() -> None:
    native.reset_counters()
    distributed.collectives.clear()


# The device module needs `native`; the process group needs the device.
from torch_neuronx import device  # noqa: E402

torch.utils.rename_privateuse1_backend("neuron")
torch._register_device_module("neuron", device)
torch.utils.generate_methods_for_privateuse1_backend()

from torch_neuronx import distributed  # noqa: E402
