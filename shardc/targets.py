"""What a Neuron target can take: degrees, memory a core, dtypes. None of it needs the device.

Figures: Neuron documentation v2.33 and the SDK 2.32 documentation source; not checked on hardware.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shardc.errors import Problem
from shardc.planner import Plan

GB = 1_000_000_000
# Of a core's memory, what weights may take: activations, collectives' buffers and the runtime
# need the rest.
WEIGHT_SHARE = 0.8


@dataclass(frozen=True, slots=True)
class Target:
    """A device family. `degrees` are None where they are not published."""

    name: str
    instance: str
    degrees: tuple[int, ...] | None
    hbm_bytes: int | None
    lacks: frozenset[str]


_NO_FP8 = frozenset({"F8_E4M3"})  # Trn2's own E4M3 ends at 240: not the format's 448
_NEVER = frozenset({"F64", "C64", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "F4", "F6_E2M3", "F6_E3M2"})

TARGETS: Mapping[str, Target] = {
    target.name: target
    for target in (
        Target("trn1", "trn1.32xlarge", (1, 2, 8, 16, 32), 16 * GB, _NEVER | _NO_FP8),
        Target("inf2", "inf2.48xlarge", (1, 2, 4, 8, 24), 16 * GB, _NEVER | _NO_FP8),
        Target(
            "trn2", "trn2.48xlarge (LNC 2)", (1, 2, 4, 8, 16, 32, 64), 24 * GB, _NEVER | _NO_FP8
        ),
        Target("trn3", "trn3", None, None, _NEVER),
    )
}


def check(plan: Plan, target: Target) -> list[Problem]:
    """Everything about `plan` that `target` cannot take."""
    problems = []
    tp = plan.options.tp
    if target.degrees is not None and tp not in target.degrees:
        told = ", ".join(map(str, target.degrees))
        problems.append(Problem(target.name, f"tp {tp} is not among {target.instance}'s: {told}"))
    held = rank_bytes(plan)
    room = None if target.hbm_bytes is None else int(target.hbm_bytes * WEIGHT_SHARE)
    if room is not None and held > room:
        problems.append(
            Problem(
                target.name,
                f"a rank's weights take {held} bytes, {room} of a core's {target.hbm_bytes} bytes "
                "are for weights",
                "a higher degree, or --dtype bf16",
            )
        )
    problems += [
        Problem(
            planned.tensor.name,
            f"{planned.dtype} {list(planned.tensor.shape)}: {target.name} has no such dtype",
            "--dtype casts F64; quantised kinds need a checkpoint of another kind",
        )
        for part in plan.components
        for planned in part.tensors
        if planned.dtype in target.lacks
    ]
    return problems


def rank_bytes(plan: Plan) -> int:
    """Bytes of weights on the fullest rank: its shards, replicated tensors and whole components."""
    shards = [part.rank_bytes() for part in plan.components]
    fullest = max((sum(held) for held in zip(*shards, strict=True)), default=0)
    return fullest + sum(component.size_bytes for component, _ in plan.kept)
