"""What a cast must give: torch's own `.to`, on raw bytes."""

from __future__ import annotations

import numpy as np
import torch

from tests.checkpoints import Data

CASTABLE = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
WANTED = {"bf16": "BF16", "fp16": "F16", "fp32": "F32"}
SIGNED = {16: torch.int16, 32: torch.int32, 64: torch.int64}


def to_torch(data: Data) -> torch.Tensor:
    dtype = CASTABLE[data.dtype]
    if not data.raw:
        return torch.empty(data.shape, dtype=dtype)
    return torch.frombuffer(bytearray(data.raw), dtype=dtype).reshape(data.shape)


def of_torch(tensor: torch.Tensor) -> Data:
    (name,) = (name for name, dtype in CASTABLE.items() if dtype == tensor.dtype)
    bits = tensor.dtype.itemsize * 8
    raw = tensor.contiguous().view(SIGNED[bits]).numpy().tobytes() if tensor.numel() else b""
    return Data(name, tuple(tensor.shape), raw)


def cast(data: Data, option: str) -> Data:
    """`data` as a build with that --dtype must hold it; dtypes that are no floats stay."""
    if option == "keep" or data.dtype not in CASTABLE:
        return data
    return of_torch(to_torch(data).to(CASTABLE[WANTED[option]]))


def same(one: Data, other: Data) -> bool:
    """Bit for bit, but any NaN is as good as another."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    if one.raw == other.raw:
        return True
    if one.dtype not in CASTABLE:
        return False
    differ = np.flatnonzero(one.words.reshape(-1) != other.words.reshape(-1))
    nan = [to_torch(data).reshape(-1)[torch.from_numpy(differ)].isnan() for data in (one, other)]
    return bool((nan[0] & nan[1]).all())
