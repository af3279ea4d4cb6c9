"""Qwen-Image's rotation in real numbers, as the device has no complex ones.

diffusers 0.42 multiplies by complex frequencies wherever a model is; releases after it choose the
rotation by the device. Until then this stands in for it: the frequencies are made on the host and
go to the device as pairs of real numbers.
"""

from __future__ import annotations

from typing import Any

import torch
from diffusers.models.transformers import transformer_qwenimage, transformer_qwenimage21


def in_real_numbers() -> None:
    """Replace the rotation in this process, where diffusers has no other for the device."""
    for module, embedder in (
        (transformer_qwenimage, transformer_qwenimage.QwenEmbedRope),
        (transformer_qwenimage21, transformer_qwenimage21.QwenImage21Rope),
    ):
        if not hasattr(module, "ROPE_PER_DEVICE"):
            _replace(module, embedder)


def _replace(module: Any, embedder: Any) -> None:
    complex_frequencies = embedder.forward

    def frequencies(self: Any, *args: Any, device: torch.device, **kwargs: Any) -> Any:
        host = [arg.cpu() if isinstance(arg, torch.Tensor) else arg for arg in args]
        made = complex_frequencies(self, *host, device=torch.device("cpu"), **kwargs)
        if isinstance(made, torch.Tensor):
            return torch.view_as_real(made).to(device)
        return tuple(torch.view_as_real(part).to(device) for part in made)

    embedder.forward = frequencies
    module.apply_rotary_emb_qwen = _rotated


def _rotated(x: torch.Tensor, pairs: torch.Tensor, use_real: bool = True) -> torch.Tensor:
    cos, sin = pairs.unsqueeze(1).unbind(-1)  # of [tokens, dim // 2, 2], for all heads
    real, imaginary = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack([real * cos - imaginary * sin, real * sin + imaginary * cos], -1)
    return turned.flatten(3).type_as(x)
