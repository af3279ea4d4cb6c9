"""The TP runtime: plain local tensors, and the few layers that must speak with the other ranks.

Nothing here knows an architecture: the index says each tensor's style, the manifest stored with
the set what else a module must compute as a rank's own.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from shardc import pattern
from shardc.errors import Problem, ShardSetError
from shardc.expression import ExpressionError
from shardc.index import Index, TensorEntry, pieces_of
from shardc.loaders import layers
from shardc.loaders.layers import CONVOLUTIONS, mix
from shardc.manifest import ROWWISE, Local, Manifest
from shardc.placing import Dims

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

# Styles whose layers need nothing but their own slice.
SILENT = frozenset({"colwise", "packed_colwise"})


class Misfit(Exception):
    """Why a layer cannot be made to speak as its style demands."""


def parallelize(
    model: nn.Module, index: Index, manifest: Manifest, dims: Dims, rank: int, group: ProcessGroup
) -> None:
    """Make each layer of a model whose parameters are the rank's own speak as its style demands.

    Raises ShardSetError naming each layer or attribute that does not fit.
    """
    problems: list[Problem] = []
    modules = dict(model.named_modules())
    wired: set[int] = set()  # one module may have several names
    for name, entry in index.tensors.items():
        owner, _, leaf = name.rpartition(".")
        module = modules[owner]
        if entry.placement.dim is None or leaf == "bias" or (wired and id(module) in wired):
            continue
        try:
            if leaf == "weight":
                wired.add(id(module))
                _wire(module, entry, rank, group)
            elif entry.style not in SILENT:
                raise Misfit(f"{entry.style} is not for the raw parameter {leaf!r}")
        except Misfit as misfit:
            problems.append(Problem(owner, str(misfit)))
    problems += _localize(modules, manifest, index.profile, dims, rank, group)
    if problems:
        raise ShardSetError(problems)


def _wire(module: nn.Module, entry: TensorEntry, rank: int, group: ProcessGroup) -> None:
    style = entry.style
    if style == "sharded_norm":
        _wire_norm(module, entry, rank, group)
    elif _is_plain(module, nn.Linear):
        _wire_linear(module, entry, group)
    elif isinstance(module, CONVOLUTIONS) and _is_plain(module, type(module)):
        _wire_convolution(module, entry, group)
    elif isinstance(module, nn.Embedding):
        wire_embedding(module, entry, rank, group)
    elif style not in SILENT:
        raise Misfit(f"{style} is not supported for a {type(module).__name__}")


def _is_plain(module: nn.Module, cls: type[nn.Module]) -> bool:
    """Whether a layer computes what `cls` does, so that its forward may be replaced."""
    of_torch = next(c for c in (nn.Linear, *CONVOLUTIONS, cls) if issubclass(cls, c))
    return isinstance(module, of_torch) and type(module).forward is of_torch.forward


def _expect_dim(entry: TensorEntry, rowwise: bool) -> None:
    wanted = 1 if rowwise else 0
    if entry.placement.dim != wanted:
        raise Misfit(f"{entry.style} cuts dim {wanted} of its weight, not {entry.placement.dim}")


def _wire_linear(module: nn.Module, entry: TensorEntry, group: ProcessGroup) -> None:
    assert isinstance(module, nn.Linear)
    _expect_dim(entry, entry.style in ROWWISE)
    if entry.style in ROWWISE:
        mix(module, layers.RowwiseLinear, group)
    elif entry.style == "colwise_gather":
        gather_rows(module, entry.shape[0], group)
    elif entry.style not in SILENT:
        raise Misfit(f"{entry.style} is not supported for a Linear")
    module.out_features, module.in_features = module.weight.shape


def _wire_convolution(module: nn.Module, entry: TensorEntry, group: ProcessGroup) -> None:
    assert isinstance(module, CONVOLUTIONS)
    _expect_dim(entry, entry.style in ROWWISE)
    rows, groups = module.weight.shape[0], module.groups
    if entry.style in SILENT:
        if groups > 1:
            if groups * rows % entry.shape[0]:
                raise Misfit(f"{rows} of {entry.shape[0]} channels cut one of its {groups} groups")
            module.groups = groups * rows // entry.shape[0]
            module.in_channels = module.in_channels * rows // entry.shape[0]
    elif groups > 1:
        raise Misfit(f"{entry.style} is not supported for a convolution of {groups} groups")
    elif entry.style in ROWWISE:
        mix(module, layers.RowwiseConvolution, group)
        module.in_channels = module.weight.shape[1]
    elif entry.style == "colwise_gather":
        dim = 1 - module.weight.dim()
        mix(module, layers.Gathered, group, shardc_width=entry.shape[0], shardc_dim=dim)
    else:
        raise Misfit(f"{entry.style} is not supported for a convolution")
    module.out_channels = rows


def wire_embedding(module: nn.Module, entry: TensorEntry, rank: int, group: ProcessGroup) -> None:
    """An embedding of this rank's rows, or of its columns."""
    assert isinstance(module, nn.Embedding)
    local = module.weight.shape[0]
    if entry.style == "vocab_parallel":
        mix(module, layers.VocabParallel, group, shardc_first=rank * local)
        module.num_embeddings, module.padding_idx = local, None
    elif entry.style not in SILENT or entry.placement.dim != 1:
        raise Misfit(
            f"{entry.style} of dim {entry.placement.dim} is not supported for an Embedding"
        )
    else:
        module.embedding_dim = module.weight.shape[1]


def _wire_norm(module: nn.Module, entry: TensorEntry, rank: int, group: ProcessGroup) -> None:
    kind = type(module).__name__
    weight = getattr(module, "weight", None)
    assert isinstance(weight, torch.Tensor)
    local, width = weight.shape[0], entry.shape[0]
    if isinstance(module, nn.GroupNorm):
        if module.num_groups * local % width:
            raise Misfit(f"{local} of {width} channels cut one of its {module.num_groups} groups")
        module.num_groups, module.num_channels = module.num_groups * local // width, local
        return
    mixin = layers.ShardedRMSNorm if "RMS" in kind else layers.ShardedLayerNorm
    eps = getattr(module, "eps", getattr(module, "variance_epsilon", None))
    for name in ("normalized_shape", "dim"):
        if isinstance(getattr(module, name, None), tuple):
            setattr(module, name, (local,))
    held = [sum(p.length for p in pieces_of(s) if not p.zeros) for s in entry.shards]
    if not _computes(module, mixin, eps, local):
        raise Misfit(f"a {kind} does not compute what {mixin.__name__} does")
    facts = {"shardc_count": sum(held), "shardc_real": held[rank], "shardc_eps": eps}
    mix(module, mixin, group, **facts)


def _computes(
    module: nn.Module, mixin: type[layers.ShardedNorm], eps: float | None, width: int
) -> bool:
    """Whether a norm's own forward, over its local width, is the formula that replaces it."""
    probe = copy.copy(module)
    generator = torch.Generator().manual_seed(0)
    draws: dict[str, Any] = {
        name: None if p is None else nn.Parameter(torch.rand(p.shape, generator=generator))
        for name, p in module._parameters.items()
    }
    object.__setattr__(probe, "_parameters", draws)
    x = torch.randn(3, width, generator=generator)
    with torch.no_grad():
        y = x - x.mean(-1, keepdim=True) if mixin is layers.ShardedLayerNorm else x
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + (eps or 0.0)) * draws["weight"]
        bias = draws.get("bias")
        y = y if bias is None else y + bias
        return torch.allclose(probe(x), y, rtol=1e-4, atol=1e-4)


def gather_rows(module: nn.Module, width: int, group: ProcessGroup) -> None:
    """A Linear's outputs, of which each rank computes its rows, become all of them."""
    mix(module, layers.Gathered, group, shardc_width=width, shardc_dim=-1)


def _localize(
    modules: Mapping[str, nn.Module],
    manifest: Manifest,
    profile: str,
    dims: Dims,
    rank: int,
    group: ProcessGroup,
) -> Iterable[Problem]:
    names = [tuple(name.split(".")) for name in modules]
    for number, local in enumerate(manifest.locals, 1):
        where = f"{manifest.name}: local {number}"
        if local.profile not in (None, profile) or not dims.applies(local):
            continue
        found = set()
        for text in local.patterns:
            expanded = pattern.expand(text, manifest.prefixes)
            index = pattern.Index(components for _, components in expanded)
            found |= {".".join(name) for name in names if list(index.matches(name))}
        if not found and not local.optional:
            yield Problem(where, f"{', '.join(local.patterns)} matches no module")
        for name in sorted(found):
            own = dict(vars(modules[name]))  # as it was, whatever is set first
            for attribute, size in local.set_.items():
                try:
                    value = dims.value(size, own)
                except ExpressionError as error:
                    yield Problem(f"{where}: {name}", str(error))
                    continue
                if not _set(modules[name], attribute, value):
                    yield Problem(where, f"{name} has no integer attribute {attribute!r}")
        for name in sorted(found):
            _share_output(modules[name], local, dims, rank, group)


def _set(module: nn.Module, attribute: str, value: int) -> bool:
    owner: Any = module
    *path, last = attribute.split(".")
    for part in path:
        owner = getattr(owner, part, None)
    known = getattr(owner, last, None)
    if not isinstance(known, int) or isinstance(known, bool):
        return False
    setattr(owner, last, value)
    return True


def _share_output(
    module: nn.Module, local: Local, dims: Dims, rank: int, group: ProcessGroup
) -> None:
    if local.slice_ is not None:
        mix(
            module,
            layers.Sliced,
            group,
            shardc_slice=local.slice_,
            shardc_unit=1 if local.unit is None else dims.value(local.unit),
            shardc_pad=dims.pad_heads,
            shardc_rank=rank,
            shardc_ranks=group.size(),
        )
    if local.gather is not None:
        mix(module, layers.GatheredOutput, group, shardc_dim=local.gather)
    if local.reduce:
        mix(module, layers.Reduced, group)
