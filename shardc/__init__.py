"""shardc: pre-shard diffusion checkpoints for tensor parallelism, offline and bit-exact."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardc.api import build, merge, plan, reshard, verify

__version__ = "0.1.0"
__all__ = ["__version__", "build", "merge", "plan", "reshard", "verify"]


def __getattr__(name: str) -> Any:
    # Lazy, so that `shardc.__version__` and `shardc --help` do not pay for numpy.
    if name in __all__:
        from shardc import api

        return getattr(api, name)
    raise AttributeError(f"module 'shardc' has no attribute {name!r}")
