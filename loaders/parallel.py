"""The TP runtime: plain local tensors, and the few layers that must speak with the other ranks.

Nothing here knows an architecture: the index says each tensor's style, the manifest stored with
the set which attributes are a rank's own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed._functional_collectives as collectives
from torch import nn
from torch.nn import functional

from shardc import pattern
from shardc.errors import Problem, ShardSetError
from shardc.expression import ExpressionError
from shardc.index import Index, TensorEntry
from shardc.manifest import Manifest
from shardc.placing import Dims

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

# torch 2.13 renamed it
_all_gather = getattr(collectives, "all_gather_single", None) or collectives.all_gather_tensor

# Styles whose layers need nothing but their own slice.
SILENT = frozenset({"colwise", "packed_colwise", "replicate"})


def reduce(x: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    """Sum over the ranks; a functional collective, so that a compiler can trace it."""
    return _wait(collectives.all_reduce(x, "sum", group))


def gather(x: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    """All ranks' parts of the last dim, in rank order."""
    return _wait(_all_gather(x.contiguous(), x.dim() - 1, group))


def _wait(x: torch.Tensor) -> torch.Tensor:
    done: torch.Tensor = collectives.wait_tensor(x)  # type: ignore[no-untyped-call]
    return done


class RowwiseLinear(nn.Linear):
    """This rank's input columns; the partial sums are reduced, then the bias is added once."""

    shardc_group: ProcessGroup

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = reduce(functional.linear(x, self.weight), self.shardc_group)
        return y if self.bias is None else y + self.bias


class GatheredLinear(nn.Linear):
    """This rank's output rows, gathered to the full `shardc_width` (padding is cut off)."""

    shardc_group: ProcessGroup
    shardc_width: int

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = gather(functional.linear(x, self.weight, self.bias), self.shardc_group)
        return y[..., : self.shardc_width]


class VocabParallel:
    """Mixed into an embedding's class: rows of other ranks embed to zero, then all is summed."""

    shardc_group: ProcessGroup
    shardc_first: int
    weight: torch.Tensor

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        local = ids - self.shardc_first
        mine = (local >= 0) & (local < self.weight.shape[0])
        # the class's own forward: Gemma scales in it
        y: torch.Tensor = super().forward(local.where(mine, 0))  # type: ignore[misc]
        return reduce(y * mine.unsqueeze(-1).to(y.dtype), self.shardc_group)


def _as(module: nn.Module, cls: type[nn.Module], group: ProcessGroup, **facts: Any) -> None:
    """Give a layer its parallel class in place: names, hooks and parameters stay."""
    module.__class__ = cls
    for name, value in {"shardc_group": group, **facts}.items():
        object.__setattr__(module, name, value)


def parallelize(
    model: nn.Module, index: Index, manifest: Manifest, dims: Dims, rank: int, group: ProcessGroup
) -> None:
    """Make each layer of a model whose parameters are the rank's own speak as its style demands.

    Raises ShardSetError naming each layer or attribute that does not fit.
    """
    problems: list[Problem] = []
    modules = dict(model.named_modules())
    for name, entry in index.tensors.items():
        owner, _, kind = name.rpartition(".")
        if entry.placement.dim is None or kind != "weight":
            continue
        reason = _wire(modules[owner], entry, rank, group)
        if reason is not None:
            problems.append(Problem(owner, reason))
    problems += _set_locals(modules, manifest, dims)
    if problems:
        raise ShardSetError(problems)


def _wire(module: nn.Module, entry: TensorEntry, rank: int, group: ProcessGroup) -> str | None:
    style = entry.style
    linear = type(module) is nn.Linear
    if style in ("rowwise", "packed_rowwise"):
        if not linear:
            return f"{style} is not supported for a {type(module).__name__}"
        _as(module, RowwiseLinear, group)
    elif style == "colwise_gather":
        if not linear:
            return f"{style} is not supported for a {type(module).__name__}"
        _as(module, GatheredLinear, group, shardc_width=entry.shape[0])
    elif style == "vocab_parallel":
        if not isinstance(module, nn.Embedding):
            return f"{style} is not supported for a {type(module).__name__}"
        own = type(module)
        cls = type(f"VocabParallel{own.__name__}", (VocabParallel, own), {})
        local = module.weight.shape[0]
        _as(module, cls, group, shardc_first=rank * local)
        module.num_embeddings, module.padding_idx = local, None
        return None
    elif style not in SILENT:
        return f"this release's runtime has no style {style}"
    if isinstance(module, nn.Linear):
        module.out_features, module.in_features = module.weight.shape
    return None


def gather_tied(module: nn.Module, width: int, group: ProcessGroup) -> None:
    """An output head that shares its weight with a vocab-parallel embedding."""
    _as(module, GatheredLinear, group, shardc_width=width)


def _set_locals(
    modules: Mapping[str, nn.Module], manifest: Manifest, dims: Dims
) -> Iterable[Problem]:
    names = [tuple(name.split(".")) for name in modules]
    for number, local in enumerate(manifest.locals, 1):
        where = f"{manifest.name}: local {number}"
        found = set()
        for text in local.patterns:
            expanded = pattern.expand(text, manifest.prefixes)
            index = pattern.Index(components for _, components in expanded)
            found |= {".".join(name) for name in names if list(index.matches(name))}
        if not found and not local.optional:
            yield Problem(where, f"{', '.join(local.patterns)} matches no module")
        for attribute, size in local.set_.items():
            try:
                value = dims.value(size)
            except ExpressionError as error:
                yield Problem(where, str(error))
                continue
            for name in sorted(found):
                if not isinstance(getattr(modules[name], attribute, None), int):
                    yield Problem(where, f"{name} has no integer attribute {attribute!r}")
                else:
                    setattr(modules[name], attribute, value)
