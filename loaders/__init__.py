"""The runtime: each rank's shard, straight onto its device, the model ready to run.

torch is imported with the first function that is taken from here, not before.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardc.loaders.ahead import prefetch
    from shardc.loaders.model import load_model
    from shardc.loaders.pipeline import load_pipeline
    from shardc.loaders.rank_weights import load_rank_weights
    from shardc.loaders.storage import load_state_dict

__all__ = ["load_model", "load_pipeline", "load_rank_weights", "load_state_dict", "prefetch"]

_HOMES = {
    "load_model": "model",
    "load_pipeline": "pipeline",
    "load_rank_weights": "rank_weights",
    "load_state_dict": "storage",
    "prefetch": "ahead",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        found = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        what = "shardc.loaders needs torch: pip install 'shardc[runtime]'"
        raise ModuleNotFoundError(what, name="torch") from error
    globals()[name] = found
    return found
