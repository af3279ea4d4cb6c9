"""The DTensor runtime: a shard set's parameters placed as diffusers' own tensor parallelism does.

Its forward hooks move the activations, and the model keeps its full head counts, as diffusers
keeps them. Its `_parallel_config` is set, so diffusers' guards apply.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import diffusers
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module

from shardc.errors import Problem, ShardSetError
from shardc.index import Index, TensorEntry, pieces_of
from shardc.loaders.group import Ranks

if TYPE_CHECKING:
    from diffusers.hooks.tensor_parallel import TPShardSpec

PROFILE = "native"  # the only one that cuts exactly what diffusers' plan does


def serves(class_name: str) -> bool:
    """Whether diffusers has a tensor-parallel plan for this class."""
    return getattr(getattr(diffusers, class_name, None), "_tp_plan", None) is not None


def check(index: Index, library: str, where: Path) -> None:
    """ShardSetError where a shard set cannot take this runtime, by its index alone."""
    name = index.source.class_
    if library != "diffusers" or not serves(name):
        raise ShardSetError(
            Problem(str(where), f"runtime 'dtensor': diffusers has no _tp_plan for {name}", "plain")
        )
    if index.profile != PROFILE:
        raise ShardSetError(
            Problem(
                str(where),
                f"runtime 'dtensor' needs profile {PROFILE}, the set has {index.profile}",
                f"build it with --profile {PROFILE}, or take runtime 'plain'",
            )
        )
    _hooks(where)


def mesh_for(ranks: Ranks, mesh: DeviceMesh | None, device: torch.device) -> DeviceMesh:
    """The caller's mesh, else one over all ranks of the default group; ShardSetError."""
    if mesh is None:
        if ranks.group is None:
            raise ShardSetError(
                Problem("runtime 'dtensor'", "needs a process group", "call init_process_group")
            )
        mesh = DeviceMesh.from_group(ranks.group, device.type)
    if mesh.device_type != device.type:  # each DTensor would be copied to the mesh's
        raise ShardSetError(
            Problem("runtime 'dtensor'", f"mesh is of {mesh.device_type}, the device is {device}")
        )
    return mesh


def specs(model: nn.Module, index: Index, rank: int, where: Path) -> Mapping[str, TPShardSpec]:
    """How diffusers' plan lays out each parameter, all that it does not name being replicated.

    model: built, not yet placed. Raises ShardSetError naming each tensor that the set cuts
    otherwise.
    """
    cls: Any = type(model)
    try:
        found: Mapping[str, TPShardSpec] = _hooks(where).resolve_tp_shard_specs(
            model, cls._tp_plan, index.tp
        )
    except ValueError as error:
        raise ShardSetError(Problem(str(where), f"diffusers' _tp_plan: {error}")) from error
    problems = []
    for name in dict.fromkeys([*index.tensors, *found]):
        spec, entry = found.get(name), index.tensors.get(name)
        if entry is None:
            problems.append(Problem(str(where), f"has no tensor {name!r}"))
            continue
        reason = _differs(spec, entry, rank, index.tp)
        if reason is not None:
            problems.append(Problem(str(where), f"tensor {name!r}: {reason}", "use runtime plain"))
    if problems:
        raise ShardSetError(problems)
    return found


def _differs(spec: TPShardSpec | None, entry: TensorEntry, rank: int, tp: int) -> str | None:
    dim = None if spec is None else spec.dim
    wanted = _merged(_ranges(spec, rank, tp))
    held: list[tuple[int, int]] | None = None
    if entry.placement.dim is not None:
        pieces = pieces_of(entry.shards[rank])
        held = _merged((p.start, p.stop) for p in pieces if not p.zeros)
    if entry.placement.dim == dim and (dim is None or held == wanted):
        return None
    how = "the whole" if dim is None else f"{wanted} of dim {dim}"
    return f"diffusers' _tp_plan gives rank {rank} {how}, the set does not"


def _ranges(spec: TPShardSpec | None, rank: int, tp: int) -> Iterable[tuple[int, int]]:
    start = 0
    for size in () if spec is None or spec.dim is None else spec.block_sizes or ():
        chunk = size // tp
        yield start + rank * chunk, start + (rank + 1) * chunk
        start += size


def _merged(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Ranges that touch, as one."""
    found: list[tuple[int, int]] = []
    for start, stop in ranges:
        if found and found[-1][1] == start:
            found[-1] = (found[-1][0], stop)
        else:
            found.append((start, stop))
    return found


def parallelize(
    model: nn.Module,
    plan: Mapping[str, TPShardSpec],
    mesh: DeviceMesh,
    device: torch.device,
    where: Path,
) -> None:
    """Make DTensors of a placed model's planned parameters, and register diffusers' hooks.

    Every parameter of a planned layer is made one here: `parallelize_module` would broadcast what
    it finds plain.
    """
    from diffusers.models._modeling_parallel import ParallelConfig, TensorParallelConfig

    cls: Any = type(model)
    hooks = _hooks(where)
    for name, spec in plan.items():
        owner, _, leaf = name.rpartition(".")
        module = model.get_submodule(owner)
        local = module._parameters[leaf]
        assert local is not None
        placement: Placement = Replicate() if spec.dim is None else Shard(spec.dim)
        whole = DTensor.from_local(local.data, mesh, [placement], run_check=False)
        module._parameters[leaf] = nn.Parameter(whole, requires_grad=False)
    # apply_tensor_parallel(weights_already_sharded=True) does the same, but refuses cpu meshes
    for block, relative in hooks._resolve_tp_plan(model, cls._tp_plan):
        parallelize_module(block, mesh, hooks._hooks_only_styles(relative))
    config = ParallelConfig(tensor_parallel_config=TensorParallelConfig(mesh=mesh))
    config.setup(dist.get_rank(), dist.get_world_size(), device, mesh=mesh)
    model._parallel_config = config  # type: ignore[assignment]


def _hooks(where: Path) -> Any:
    try:
        from diffusers.hooks import tensor_parallel
    except ImportError as error:
        raise ShardSetError(
            Problem(
                str(where),
                f"diffusers {diffusers.__version__} has no tensor parallelism",
                "install 0.42 or later, or take runtime 'plain'",
            )
        ) from error
    return tensor_parallel
