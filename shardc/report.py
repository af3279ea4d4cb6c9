"""What a plan, a checkpoint or a shard set is, as plain documents for people and machines. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from shardc import library
from shardc.checkpoint import Checkpoint, Component
from shardc.errors import ShardcError
from shardc.layout import Replicate
from shardc.planner import ComponentPlan, Plan, PlannedTensor, plan_component
from shardc.resolve import legal_degrees
from shardc.shardset import ShardSet
from shardc.targets import rank_bytes

MAX_DEGREE_SHOWN = 64
PROFILES = ("compact", "native")


def plan_report(plan: Plan) -> dict[str, Any]:
    """Everything that `shardc plan` tells; bytes throughout."""
    return {
        "source": plan.checkpoint.where,
        "kind": plan.checkpoint.kind,
        "tp": plan.options.tp,
        "profile": plan.options.profile,
        "dtype": plan.options.dtype,
        "rank_bytes": rank_bytes(plan),
        "components": [_component(part) for part in plan.components],
        "kept": [
            {
                "name": component.name,
                "class": component.class_name,
                "bytes": component.size_bytes,
                "why": why,
            }
            for component, why in plan.kept
        ],
        "left_out": [
            *plan.checkpoint.left_out,
            *(
                f"{component.name}/{name}" if component.name else name
                for component in plan.checkpoint.components
                for name in component.left_out
            ),
        ],
    }


def _component(part: ComponentPlan) -> dict[str, Any]:
    degrees = legal_degrees(part.resolution, part.manifest, part.dims, MAX_DEGREE_SHOWN)
    held = part.rank_bytes()
    replicated = part.replicated_bytes()
    whole = [p for p in part.tensors if isinstance(p.placement, Replicate)]
    whole.sort(key=lambda p: -p.targets[0].info.size_bytes)
    return {
        "name": part.component.name,
        "class": part.component.class_name,
        "manifest": part.manifest.name,
        "parameters": sum(math.prod(p.tensor.shape) for p in part.tensors),
        "tensors": len(part.tensors),
        "source_bytes": part.component.size_bytes,
        "files": len(part.files),
        "rank_bytes": held,
        "replicated_bytes": replicated,
        "replicated_share": replicated / max(held) if max(held) else 0.0,
        "padding_bytes": sum(map(_padding_bytes, part.tensors)),
        "profiles": _profiles(part, max(held)),
        "largest_replicated": [
            {"name": p.tensor.name, "bytes": p.targets[0].info.size_bytes} for p in whole[:3]
        ],
        "dtypes": _dtypes((p.dtype, p.tensor.shape) for p in part.tensors),
        "cast": sum(p.dtype != p.tensor.dtype for p in part.tensors),
        "legal_degrees": [tp for tp, reason in degrees.items() if reason is None],
        "illegal_degrees": _grouped(degrees),
        "unused_optional": list(part.resolution.unused),
    }


def _padding_bytes(planned: PlannedTensor) -> int:
    """Bytes of zeros that a tensor gets on all ranks: of heads, columns or a vocabulary's rows."""
    total = sum(stored.info.size_bytes for stored in planned.targets)
    lengths = [piece.length for held in planned.pieces for piece in held]
    zeros = sum(piece.length for held in planned.pieces for piece in held if piece.zeros)
    return total * zeros // sum(lengths) if zeros else 0


def _profiles(part: ComponentPlan, own: int) -> dict[str, int | None]:
    """The fullest rank's bytes in either profile; None where the other has no such degree."""
    found: dict[str, int | None] = {}
    for profile in PROFILES:
        if profile == part.options.profile:
            found[profile] = own
            continue
        try:
            options = replace(part.options, profile=profile)  # type: ignore[arg-type]
            other = plan_component(part.component, part.manifest, options)
            found[profile] = max(other.rank_bytes())
        except ShardcError:
            found[profile] = None
    return found


def _dtypes(tensors: Iterable[tuple[str, tuple[int, ...]]]) -> dict[str, dict[str, int]]:
    mix: dict[str, dict[str, int]] = {}
    for dtype, shape in tensors:
        entry = mix.setdefault(dtype, {"tensors": 0, "parameters": 0})
        entry["tensors"] += 1
        entry["parameters"] += math.prod(shape)
    return mix


def _grouped(degrees: dict[int, str | None]) -> list[dict[str, Any]]:
    """Illegal degrees by what forbids them, so that one line tells many."""
    groups: dict[str, list[int]] = {}
    for tp, reason in degrees.items():
        if reason is None:
            continue
        match = re.match(
            r"(\S+) .*cannot be cut at tp \d+: (\d+ [\w ]+?|padded size \d+) %", reason
        )
        what = f"{match[2]} in {match[1]} do not divide" if match else reason
        groups.setdefault(what, []).append(tp)
    return [{"degrees": tps, "why": what} for what, tps in groups.items()]


def checkpoint_report(checkpoint: Checkpoint) -> dict[str, Any]:
    """What a full checkpoint is: its components, and which manifest would cut each."""
    return {
        "path": checkpoint.where,
        "what": "checkpoint",
        "kind": checkpoint.kind,
        "components": [_full(component) for component in checkpoint.components],
        "missing": list(checkpoint.missing),
        "left_out": list(checkpoint.left_out),
    }


def _full(component: Component) -> dict[str, Any]:
    manifest = library.for_class(component.class_name)
    return {
        "name": component.name,
        "class": component.class_name,
        "manifest": None if manifest is None else manifest.name,
        "parameters": sum(math.prod(t.shape) for t in component.tensors),
        "tensors": len(component.tensors),
        "bytes": component.size_bytes,
        "files": len(component.files),
        "dtypes": _dtypes((t.dtype, t.shape) for t in component.tensors),
    }


def shard_set_report(shard_set: ShardSet) -> dict[str, Any]:
    """What a shard set is: degree, profile, what made it, and bytes a rank."""
    return {
        "path": str(shard_set.path),
        "what": "shard set",
        "components": [
            {
                "name": name,
                "class": index.source.class_,
                "manifest": index.manifest.name,
                "tp": index.tp,
                "profile": index.profile,
                "dtype": index.dtype,
                "version": index.version,
                "tool": index.tool,
                "parameters": sum(math.prod(t.shape) for t in index.tensors.values()),
                "tensors": len(index.tensors),
                "bytes": sum(f.size for f in index.files.values()),
                "files": len(index.files),
                "rank_bytes": [
                    sum(f.size for f in index.files.values() if f.rank in (None, rank))
                    for rank in range(index.tp)
                ],
                "dtypes": _dtypes((t.dtype, t.shape) for t in index.tensors.values()),
            }
            for name, index in shard_set.components.items()
        ],
    }
