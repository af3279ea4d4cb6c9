"""The layers that must speak with the other ranks, each mixed into the class of the whole one.

A layer keeps its name, hooks and parameters; only its class changes, in place.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed._functional_collectives as collectives
from torch import nn
from torch.nn import functional

from shardc.layout import share_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

# torch 2.13 renamed it
_all_gather = getattr(collectives, "all_gather_single", None) or collectives.all_gather_tensor

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


def reduce(x: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    """Sum over the ranks; a functional collective, so that a compiler can trace it."""
    return _wait(collectives.all_reduce(x, "sum", group))


def gather(x: torch.Tensor, dim: int, group: ProcessGroup) -> torch.Tensor:
    """All ranks' parts of a dim (counted from the end), in rank order."""
    return _wait(_all_gather(x.contiguous(), x.dim() + dim, group))


def _wait(x: torch.Tensor) -> torch.Tensor:
    done: torch.Tensor = collectives.wait_tensor(x)  # type: ignore[no-untyped-call]
    return done


class Parallel(nn.Module):
    """What every mixed-in layer knows."""

    shardc_group: ProcessGroup


class RowwiseLinear(Parallel, nn.Linear):
    """This rank's input columns; the partial sums are reduced, then the bias is added once."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = reduce(functional.linear(x, self.weight), self.shardc_group)
        return y if self.bias is None else y + self.bias


class RowwiseConvolution(Parallel):
    """A convolution of this rank's input channels, reduced, then the bias added once."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    _conv_forward: Any

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = reduce(self._conv_forward(x, self.weight, None), self.shardc_group)
        return y if self.bias is None else y + self.bias.view(-1, *[1] * (self.weight.dim() - 2))


class Gathered(Parallel):
    """This rank's output rows, gathered to the full `shardc_width` (padding is cut off)."""

    shardc_width: int
    shardc_dim: int  # of the outputs, from the end

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = gather(super().forward(x), self.shardc_dim, self.shardc_group)
        return y.narrow(self.shardc_dim, 0, self.shardc_width)


class VocabParallel(Parallel):
    """Rows of other ranks embed to zero, then all is summed."""

    shardc_first: int
    weight: torch.Tensor

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        local = ids - self.shardc_first
        mine = (local >= 0) & (local < self.weight.shape[0])
        # the class's own forward: Gemma scales in it
        y: torch.Tensor = super().forward(local.where(mine, 0))
        return reduce(y * mine.unsqueeze(-1).to(y.dtype), self.shardc_group)


class ShardedNorm(Parallel):
    """A norm over a dim that is cut: its moments are those of all ranks' elements.

    `shardc_count` elements are summed over the ranks: the width, times the copies of what repeats.
    The first `shardc_real` of this rank's are such, the others padding.
    """

    shardc_count: int
    shardc_real: int
    shardc_eps: float | None
    weight: torch.Tensor
    bias: torch.Tensor | None

    def mean(self, x: torch.Tensor) -> torch.Tensor:
        """Over the last dim of all ranks, in fp32."""
        real = x if x.shape[-1] == self.shardc_real else x[..., : self.shardc_real]
        return reduce(real.sum(-1, keepdim=True), self.shardc_group) / self.shardc_count

    def centred(self, x: torch.Tensor) -> torch.Tensor:
        """What is normalized: fp32 in and out."""
        raise NotImplementedError

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.centred(x.float())
        eps = torch.finfo(x.dtype).eps if self.shardc_eps is None else self.shardc_eps
        y = y * torch.rsqrt(self.mean(y * y) + eps) * self.weight
        bias = getattr(self, "bias", None)
        if bias is not None:
            y = y + bias
        return y.to(torch.promote_types(x.dtype, self.weight.dtype))


class ShardedRMSNorm(ShardedNorm):
    """x / sqrt(mean(x * x) + eps) * weight."""

    def centred(self, x: torch.Tensor) -> torch.Tensor:
        return x


class ShardedLayerNorm(ShardedNorm):
    """As the RMS norm of x - mean(x)."""

    def centred(self, x: torch.Tensor) -> torch.Tensor:
        return x - self.mean(x)


class Sliced(Parallel):
    """This rank's share of each tensor of the output, along `shardc_slice`, in whole units.

    shardc_pad: where the units do not divide, the last ranks get zeros.
    """

    shardc_slice: int
    shardc_unit: int
    shardc_pad: bool
    shardc_rank: int
    shardc_ranks: int

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._share(super().forward(*args, **kwargs))

    def _share(self, output: Any) -> Any:
        if isinstance(output, tuple | list):
            return type(output)(self._share(one) for one in output)
        if not isinstance(output, torch.Tensor):
            return output
        dim, size = self.shardc_slice, output.shape[self.shardc_slice]
        share = share_of(size // self.shardc_unit, self.shardc_ranks, pad=self.shardc_pad)
        if size % self.shardc_unit or share is None:
            raise ValueError(
                f"an output of {list(output.shape)} has no equal shares for {self.shardc_ranks} "
                f"ranks along dim {dim} in units of {self.shardc_unit}"
            )
        each = share[0] * self.shardc_unit
        start = min(self.shardc_rank * each, size)
        part = output.narrow(dim, start, min(each, size - start))
        if part.shape[dim] == each:
            return part
        missing = list(part.shape)
        missing[dim] = each - part.shape[dim]
        return torch.cat([part, part.new_zeros(missing)], dim)


class GatheredOutput(Parallel):
    """Each tensor of the output, of all ranks' parts along `shardc_dim`."""

    shardc_dim: int

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._whole(super().forward(*args, **kwargs))

    def _whole(self, output: Any) -> Any:
        if isinstance(output, tuple | list):
            return type(output)(self._whole(one) for one in output)
        if not isinstance(output, torch.Tensor):
            return output
        return gather(output, self.shardc_dim, self.shardc_group)


class Reduced(Parallel):
    """The module's output, summed over the ranks."""

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return reduce(super().forward(*args, **kwargs), self.shardc_group)


def mix(module: nn.Module, mixin: type[Parallel], group: ProcessGroup, **facts: Any) -> None:
    """Give a layer, in place, the class that is `mixin` over its own."""
    module.__class__ = _mixed(mixin, type(module))  # type: ignore[arg-type]
    for name, value in {"shardc_group": group, **facts}.items():
        object.__setattr__(module, name, value)


@cache  # alike layers share one class: a compiler that guards on it compiles once
def _mixed(mixin: type[Parallel], own: type[nn.Module]) -> type[nn.Module]:
    if issubclass(mixin, own):
        return mixin
    return type(f"{mixin.__name__}{own.__name__}", (mixin, own), {"__module__": __name__})
