"""What is measured on: checkpoints of FLUX.2's names and shapes, and their sets, made once."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import shardc
from benchmarks.make_checkpoint import DIFFUSERS_VERSION, FLUX2, make_checkpoint, transformer_config
from shardc.demo import write_flux2
from shardc.errors import OutputError

COMPONENT = "transformer"
# Widths for a model whose single blocks can be counted in tens of thousands.
MANY: dict[str, Any] = FLUX2 | {
    "_diffusers_version": DIFFUSERS_VERSION,
    "attention_head_dim": 16,
    "axes_dims_rope": [4, 4, 4, 4],
    "in_channels": 16,
    "joint_attention_dim": 64,
    "num_attention_heads": 4,
    "num_layers": 1,
    "timestep_guidance_channels": 32,
}
SMALL = FLUX2 | {
    "_diffusers_version": DIFFUSERS_VERSION,
    "joint_attention_dim": 2048,
    "num_attention_heads": 8,
    "num_layers": 5,
    "num_single_layers": 20,
}
HEADS_64 = FLUX2 | {  # a degree of 64, at klein-9B's width
    "_diffusers_version": DIFFUSERS_VERSION,
    "attention_head_dim": 64,
    "axes_dims_rope": [16, 16, 16, 16],
    "joint_attention_dim": 12288,
    "num_attention_heads": 64,
    "num_layers": 1,
    "num_single_layers": 6,
}


@dataclass(frozen=True, slots=True)
class Shape:
    """A published model with a share of its layers, or a FLUX.2 by its config."""

    name: str
    published: str | None = None
    scale: float = 1.0
    config: dict[str, Any] = field(default_factory=dict)

    @property
    def transformer(self) -> dict[str, Any]:
        if self.published is not None:
            return transformer_config(self.published, self.scale)
        return self.config

    def write(self, folder: Path) -> None:
        if self.published is not None:
            make_checkpoint(self.published, folder, scale=self.scale)
        else:
            write_flux2(folder, self.config, files=2)


def many(tensors: int) -> Shape:
    """A FLUX.2 of about so many tensors, four a single block, all small."""
    config = MANY | {"num_single_layers": max(1, (tensors - 28) // 4)}
    return Shape(f"{tensors}-tensors", config=config)


KLEIN = "flux2-klein-4b"
SHAPES = {
    shape.name: shape
    for shape in (
        Shape("klein-9b", "flux2-klein-9b"),
        Shape("klein-4b", KLEIN),  # 7.8 GB
        Shape("klein-2b", KLEIN, 0.5),
        Shape("klein-1b", KLEIN, 0.25),
        Shape("small", config=SMALL),  # 0.8 GB: as many tensors as klein-4b, a third as wide
        Shape("64-heads", config=HEADS_64),  # 3.9 GB
        Shape("tiny", config=MANY | {"num_attention_heads": 8, "num_single_layers": 2}),
    )
}


@dataclass(frozen=True, slots=True)
class Workplace:
    """The folder of one shape: its checkpoint, and the sets built of it."""

    shape: Shape
    folder: Path

    @property
    def source(self) -> Path:
        return self.folder / self.shape.name / "source"

    def make_source(self) -> Path:
        """The checkpoint's pipeline folder, made where it is not there; a part of one is not."""
        config = self.source / COMPONENT / "config.json"
        wanted = self.shape.transformer
        if config.is_file():
            if json.loads(config.read_text()) == json.loads(json.dumps(wanted)):
                return self.source
            shutil.rmtree(self.source)
        part = self.source.with_name("source.part")
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        self.shape.write(part)
        part.rename(self.source)
        return self.source

    def make_set(self, tp: int, profile: Any = "compact") -> Path:
        """The shard set at `tp`, built where it is not there or not of this checkpoint."""
        source, out = self.make_source(), self.folder / self.shape.name / f"tp{tp}-{profile}"
        try:
            shardc.build(source, out, tp, profile=profile)
        except OutputError:  # what stands there is of another checkpoint, or of another release
            shardc.build(source, out, tp, profile=profile, force=True)
        return out

    def remove(self) -> None:
        shutil.rmtree(self.folder / self.shape.name, ignore_errors=True)


def source_files(source: Path) -> list[Path]:
    return sorted((source / COMPONENT).glob("*.safetensors"))


def rank_files(shards: Path, tp: int, rank: int | None) -> list[Path]:
    """What one rank reads of a set: its own files and the replicated ones; all ranks' for None."""
    own = "rank-*" if rank is None else f"rank-{rank:05d}-of-{tp:05d}*"
    folder = shards / COMPONENT
    return sorted([*folder.glob(f"{own}.safetensors"), *folder.glob("replicated*.safetensors")])


def size_bytes(files: list[Path]) -> int:
    return sum(path.stat().st_size for path in files)
