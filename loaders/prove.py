"""A manifest proven: a tiny random model, sharded and run on ranks, against the unsharded one."""

from __future__ import annotations

import importlib
import runpy
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardc import api, library
from shardc.errors import ManifestError, Problem
from shardc.loaders import local
from shardc.manifest import Manifest

if TYPE_CHECKING:
    import numpy as np
    import torch
    from torch import nn

    Outputs = list[np.ndarray]

TOLERANCE = 1e-5  # of the largest output, or of 1 where that is smaller; fp32


@dataclass(frozen=True, slots=True)
class Proof:
    """The error of one profile at one degree; `ok` where the sharded model is the whole one."""

    class_name: str
    tp: int
    profile: str
    error: float

    @property
    def ok(self) -> bool:
        return self.error <= TOLERANCE

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "ok": self.ok}


def prove(manifest: str, case: Path, tp: int) -> list[Proof]:
    """Prove `manifest` (a name or a file) on `tp` ranks of this machine, in each of its profiles.

    case: a Python file with `config`, the keyword arguments of a tiny model (or of its config, for
    transformers), and `inputs()`, those of its forward. Raises what a build and a load raise.
    """
    rules = library.load(manifest)
    profiles = ["compact", "native"] if any(rule.profile for rule in rules.rules) else ["compact"]
    with tempfile.TemporaryDirectory(prefix="shardc-prove-") as name:
        folder = Path(name)
        class_name = read_case(case, rules)[0]
        told = (str(case), rules.library, class_name, name)
        wanted = local.run(_whole, 1, *told)[0]
        for profile in profiles:
            api.build(folder / "whole", folder / profile, tp, manifest=manifest, profile=profile)  # type: ignore[arg-type]
        found = local.run(_sharded, tp, *told[:1], name, profiles)
    return [
        Proof(class_name, tp, profile, max(error(rank[profile], wanted) for rank in found))
        for profile in profiles
    ]


def read_case(
    case: Path, rules: Manifest | None = None
) -> tuple[str, Mapping[str, Any], Callable[[], dict[str, Any]]]:
    """(class, config, inputs) of a case file; the class is its own, or the first of the rules."""
    try:
        said = runpy.run_path(str(case))
    except OSError as error:
        raise ManifestError(Problem(str(case), f"cannot read it: {error.strerror}")) from error
    missing = [name for name in ("config", "inputs") if name not in said]
    if missing:
        raise ManifestError(
            Problem(str(case), f"defines no {' and no '.join(missing)}", "see docs/new-model.md")
        )
    first = rules.classes[0] if rules is not None else ""
    return said.get("class_name", first), said["config"], said["inputs"]


def _whole(case: str, library_name: str, class_name: str, folder: str) -> Outputs:
    _, config, inputs = read_case(Path(case))
    cls: Any = getattr(importlib.import_module(library_name), class_name)
    model = cls(**config) if library_name == "diffusers" else cls(cls.config_class(**config))
    randomise(model)
    model.save_pretrained(Path(folder) / "whole")
    return outputs(model, inputs())


def _sharded(case: str, folder: str, profiles: list[str]) -> dict[str, Outputs]:
    from shardc.loaders import load_model

    inputs = read_case(Path(case))[2]
    return {p: outputs(load_model(Path(folder) / p), inputs()) for p in profiles}


def randomise(model: nn.Module) -> None:
    """Every parameter random, norms and gates too, so that no mistake hides behind a zero.

    Matrices keep the scale of what goes through them, so that the output depends on every layer.
    """
    import torch

    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim > 1:
                parameter.copy_(noise * parameter[0].numel() ** -0.5)
            else:
                parameter.copy_(noise * 0.1 if name.endswith("bias") else 1 + noise * 0.2)
    model.eval()


def outputs(model: nn.Module, inputs: Mapping[str, Any]) -> Outputs:
    """Every floating tensor of what the model returns, as float64 arrays."""
    import torch

    torch.manual_seed(2)  # a model may draw noise of its own
    with torch.no_grad():
        return [tensor.double().numpy() for tensor in _tensors(model(**inputs))]


def _tensors(output: Any) -> Iterator[torch.Tensor]:
    import torch

    if isinstance(output, torch.Tensor):
        if output.is_floating_point():
            yield output
    elif isinstance(output, Mapping):
        for value in output.values():
            yield from _tensors(value)
    elif isinstance(output, list | tuple):
        for value in output:
            yield from _tensors(value)
    elif hasattr(output, "__dict__"):
        yield from _tensors(vars(output))


def error(found: Outputs, wanted: Outputs) -> float:
    """The largest difference, relative to the largest output where that exceeds 1."""
    import numpy as np

    if not wanted or [f.shape for f in found] != [w.shape for w in wanted]:
        return float("inf")
    scale = max(1.0, *(np.abs(w).max(initial=0) for w in wanted))
    gaps = [np.abs(f - w).max(initial=0) for f, w in zip(found, wanted, strict=True)]
    return float(np.nan_to_num(max(gaps) / scale, nan=np.inf))
