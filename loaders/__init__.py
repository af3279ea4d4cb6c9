"""The runtime: each rank's shard, straight onto its device, the model ready to run."""

from __future__ import annotations

from shardc.loaders.model import load_model, load_pipeline
from shardc.loaders.storage import load_state_dict

__all__ = ["load_model", "load_pipeline", "load_state_dict"]
