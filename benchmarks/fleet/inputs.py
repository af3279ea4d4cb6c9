"""What the arithmetic rests on: inputs, each with its source, and the bytes of five pipelines."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

SCALE = {"kB": 1e3, "MB": 1e6, "GB": 1e9, "MiB": 2**20, "GiB": 2**30}
WHOLE_FILE_BYTES = 10e9  # diffusers' default: a larger checkpoint is split
PART_BYTES = 4e9  # shardc's default: a larger rank file comes in parts

Way = Literal["full", "build", "own"]  # sliced at load; built into a set on the host; own files
BOTH: tuple[Way, Way] = ("full", "own")


@dataclass(frozen=True, slots=True)
class Input:
    """One number, its range in the same unit, what it rests on, and the source with its year."""

    value: float
    low: float
    high: float
    unit: str
    kind: Literal["documented", "reported", "measured", "assumed"]
    source: str

    def base(self, value: float) -> float:
        """In bytes, bytes a second, or as it is."""
        return value * SCALE.get(self.unit.removesuffix("/s"), 1)


PROTOTYPE = "shardc's prototypes (klein-4B tp 8, 2 cores, 2026)"
# fmt: off
INPUTS = {
    "hub_host": Input(
        0.3, 0.1, 2.3, "GB/s", "reported",
        "huggingface_hub issue 4893, 2026: 0.3 sustained on 25 Gbit/s, 2.3 for half a minute"),
    "hub_ceiling": Input(
        12.5, 1, 125, "GB/s", "assumed", "what the Hub gives one fleet; no figure is published"),
    "hub_quota": Input(
        5_000, 3_000, 100_000, "resolves", "documented",
        "Hub docs, rate limits, 2025: free account; anonymous 3,000 an address, Enterprise 50,000"),
    "hub_window": Input(
        300, 300, 300, "s", "documented", "Hub docs, rate limits, 2025: fixed windows"),
    "hub_resolves": Input(
        2, 1, 2, "a file", "assumed", "a HEAD, and a GET for what does not come by Xet"),
    "small_files": Input(
        15, 5, 40, "files", "assumed", "configs, tokenizer, scheduler of a pipeline"),
    "s3_gets": Input(
        5_500, 5_500, 55_000, "GET/s", "documented",
        "S3 user guide, optimizing performance, 2024: at least, a partitioned prefix; high: 10"),
    "s3_part": Input(
        8, 8, 64, "MiB", "assumed", "bytes a GET: the usual part size of clients"),
    "s3_connection": Input(
        85, 85, 90, "MB/s", "documented",
        "S3 user guide, performance design patterns, 2024: a request for each 85 to 90 MB/s"),
    "s3_connections": Input(
        32, 8, 128, "a host", "assumed", "requests that a host's client keeps open"),
    "efs_ceiling": Input(
        60, 10, 60, "GiB/s", "documented",
        "EFS quotas, 2025: Elastic, Regional, the largest regions; 10 in the others"),
    "efs_client": Input(
        1_500, 500, 1_500, "MiB/s", "documented",
        "EFS performance, 2024: Elastic, with a recent efs-utils or CSI driver; else 500"),
    "gp3": Input(
        1_000, 125, 2_000, "MiB/s", "documented",
        "EC2 API, CreateVolume, 2025: 125 (default) to 2,000 a volume; until then 1,000"),
    "gp3_new": Input(
        300, 100, 300, "MiB/s", "documented",
        "EC2 API, CreateVolume, 2025: provisioned rate of filling a volume from a snapshot"),
    "nvme_read": Input(
        8, 2, 16, "GB/s", "assumed", "4 drives of instance store, striped"),
    "nvme_write": Input(
        4, 1, 8, "GB/s", "assumed", "as above"),
    "large_nic": Input(
        12.5, 6.25, 100, "GB/s", "documented",
        "S3 user guide, optimizing performance, 2024: up to 100 Gbit/s an instance; "
        "Neuron docs, Trn1, 2025: trn1.32xlarge has 800 in all"),
    "small_nic": Input(
        1.25, 0.25, 3.1, "GB/s", "assumed", "10 Gbit/s; small sizes have it for a while only"),
    "small_internet": Input(
        0.625, 0.625, 0.625, "GB/s", "documented",
        "EC2 user guide, network bandwidth, 2024: 5 Gbit/s below 32 vCPUs; else half of the NIC"),
    "large_cache": Input(
        400, 100, 1_800, "GB", "assumed", "of 512 GiB (Neuron docs, Trn1, 2025: trn1.32xlarge)"),
    "small_cache": Input(
        12, 4, 100, "GB", "assumed", "of 16 GiB (Neuron docs, Inf2, 2025: inf2.xlarge)"),
    "copy": Input(
        2, 1, 5, "GB/s", "assumed",
        f"page cache to staging, a rank; 0.9 into fresh memory to 4.8 in {PROTOTYPE}"),
    "host_copy": Input(
        50, 20, 200, "GB/s", "assumed", "the same, all ranks of a host together"),
    "slicing": Input(
        4, 1, 7.3, "times", "measured",
        f"slices slower than own files, warm: 3.9 to 7.3 in {PROTOTYPE}, about 4 to 5 in "
        "docs/benchmarks.md; low: no slower"),
    "slice_reads": Input(
        0.8, 0.38, 1, "of all", "measured",
        "what one rank's slices read: 6.2 of 7.75 GB in docs/benchmarks.md, 2026; low: what "
        "its plan touches"),
    "device": Input(
        4, 1, 16, "GB/s", "assumed", "host to device, a rank"),
    "build": Input(
        1, 0.3, 2, "GB/s", "assumed", "of the full checkpoint: about the rate of a plain copy"),
}
# fmt: on
Values = Mapping[str, float]


def values(**changed: float) -> Values:
    """The inputs in bytes and seconds, with some changed (each in its own unit)."""
    return {name: one.base(changed.get(name, one.value)) for name, one in INPUTS.items()}


@dataclass(frozen=True, slots=True)
class Part:
    """A component's bytes: its full file; of one rank, replicated tensors included; those alone.

    A `rank_bytes` of 0 is a component that is kept whole. Made by plans (`tests.zoo.sizes`).
    """

    name: str
    full_bytes: int
    rank_bytes: int = 0
    replicated_bytes: int = 0
    padded: bool = False  # with zero heads: its own degrees stop below

    def held_bytes(self, ranks: int) -> int:
        """What the files of some different ranks take, the replicated one once."""
        own = self.rank_bytes - self.replicated_bytes
        return ranks * own + self.replicated_bytes if self.rank_bytes else self.full_bytes

    def files(self, way: Way, ranks: int) -> int:
        if way != "own" or not self.rank_bytes:
            return math.ceil(self.full_bytes / WHOLE_FILE_BYTES)
        return ranks * math.ceil(self.rank_bytes / PART_BYTES) + 2  # replicated, index


@dataclass(frozen=True, slots=True)
class Model:
    """A pipeline's weights at one degree, bf16, profile compact."""

    name: str
    tp: int
    parts: tuple[Part, ...]

    @property
    def full_bytes(self) -> int:
        return sum(part.full_bytes for part in self.parts)

    @property
    def placed_bytes(self) -> int:
        """What one rank puts on its device."""
        return sum(part.rank_bytes or part.full_bytes for part in self.parts)

    def pulled_bytes(self, way: Way, ranks: int) -> int:
        """What a host with so many different ranks fetches."""
        if way != "own":
            return self.full_bytes
        return sum(part.held_bytes(ranks) for part in self.parts)

    def read_bytes(self, way: Way, ranks: int, slice_reads: float) -> float:
        """What a cold load reads: the ranks of a host share its page cache."""
        if way != "full":
            return self.pulled_bytes("own", ranks)
        share = slice_reads + (1 - slice_reads) * (ranks - 1) / max(self.tp - 1, 1)
        return sum(part.full_bytes * (share if part.rank_bytes else 1) for part in self.parts)

    def resolves(self, way: Way, ranks: int, told: Values) -> float:
        files = sum(part.files(way, ranks) for part in self.parts) + told["small_files"]
        return files * told["hub_resolves"]


# fmt: off
VAE2 = Part("VAE", 168_092_230)
MODELS = {model.name: model for model in (
    Model("klein-4B", 8, (
        Part("black-forest-labs/FLUX.2-klein-4B", 7_751_113_728, 969_587_712, 801_792),
        Part("Qwen/Qwen3-4B", 8_044_985_344, 1_005_960_192, 392_192),
        VAE2)),
    Model("klein-9B", 8, (
        Part("black-forest-labs/FLUX.2-klein-9B", 18_157_191_168, 2_270_580_736, 1_069_056),
        Part("Qwen/Qwen3-8B", 16_381_519_872, 2_048_223_232, 616_448),
        VAE2)),
    Model("FLUX.1-dev", 8, (
        Part("black-forest-labs/FLUX.1-dev", 23_802_955_904, 2_976_343_168, 1_132_672),
        Part("google/t5-v1_1-xxl", 11_537_915_904, 1_442_587_136, 401_408),
        Part("CLIP-L", 246_145_536), Part("VAE", 167_639_366))),
    Model("Qwen-Image", 8, (
        Part("Qwen/Qwen-Image", 40_861_031_552, 5_109_294_720, 1_936_512),
        Part("Qwen/Qwen2.5-VL-7B-Instruct", 16_584_423_424, 2_127_842_560, 3_756_544, padded=True),
        Part("VAE", 253_785_062))),
    Model("klein-9B tp 32", 32, (
        Part("black-forest-labs/FLUX.2-klein-9B", 18_157_191_168, 568_446_976, 1_069_056),
        Part("Qwen/Qwen3-8B", 16_381_519_872, 569_141_248, 616_448),
        VAE2)),
)}
# fmt: on
