"""`python -m benchmarks growth`: how a build's time and memory grow, against copying its files.

Each axis is a generator of points.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import shardc
from benchmarks import build
from benchmarks.harness import Result, Say, series
from benchmarks.make_checkpoint import SHAPES as PUBLISHED
from benchmarks.shapes import MANY, Shape, Workplace, many, size_bytes, source_files
from shardc.planner import ComponentPlan
from shardc.resolve import legal_degrees

GB = 1e9
SIZES_GB = (1, 2, 4, 8, 16)
DEGREES = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
LATENCIES_MS = (0, 20, 100)
TENSORS = (1_000, 10_000, 100_000)
FEW_TENSORS = (50, 100)  # where the shape is a tiny one
SHARES = (0.25, 0.5, 1.0)  # of the single blocks of a shape that is no published model's


@dataclass(frozen=True, slots=True)
class Point:
    """A source and a degree, and where it lies on the axis. `passing`: remove the source after.

    address, environment: what shardc builds from instead, and how it gets there.
    """

    group: str
    x: float
    place: Workplace
    tp: int
    passing: bool
    address: str | None = None
    environment: Mapping[str, str] | None = None


def _bytes_of(shape: Shape) -> int:
    assert shape.published is not None
    from math import prod

    generate = PUBLISHED[shape.published].generate
    return sum(2 * prod(dims) for _, dims in generate(shape.transformer))


def by_size(shape: Shape, folder: Path, tp: int) -> Iterator[Point]:
    """The same widths with fewer layers, or more."""
    scaled = []
    if shape.published is None:
        full = shape.config["num_single_layers"]
        for layers in sorted({max(1, round(full * share)) for share in SHARES}):
            config = {**shape.config, "num_single_layers": layers}
            scaled.append(Shape(f"{shape.name}-{layers}-layers", config=config))
    else:
        whole = _bytes_of(replace(shape, scale=1.0))
        for size in SIZES_GB:
            scale = size * GB / whole
            scaled.append(Shape(f"{shape.published}-{size}gb", shape.published, scale))
    for one in scaled:
        place = Workplace(one, folder)
        size = size_bytes(source_files(place.make_source()))
        yield Point(f"size: {size / GB:.3g} GB", size, place, tp, passing=True)


def by_degree(shape: Shape, folder: Path, tp: int) -> Iterator[Point]:
    """The degrees of DEGREES that the model allows."""
    place = Workplace(shape, folder)
    part: ComponentPlan = shardc.plan(place.make_source(), 1).components[0]
    legal = legal_degrees(part.resolution, part.manifest, part.dims)
    for degree in DEGREES:
        if legal.get(degree, "too many") is None:
            yield Point(f"degree: {degree}", degree, place, degree, passing=False)


def by_tensors(shape: Shape, folder: Path, tp: int) -> Iterator[Point]:
    """A FLUX.2 of many blocks and small widths; its heads allow 2 ranks, whatever `tp` is."""
    for count in FEW_TENSORS if shape.name == "tiny" else TENSORS:
        place = Workplace(many(count), folder)
        place.make_source()
        degree = min(tp, MANY["num_attention_heads"])
        yield Point(f"tensors: {count}", count, place, degree, passing=True)


def by_latency(shape: Shape, folder: Path, tp: int) -> Iterator[Point]:
    """The same source, streamed from a Hub on this machine that answers after so many ms.

    The server is a Python process's threads: at no latency it takes about as much of the processor
    as the build does.
    """
    from tests.servers.hub import Hub

    place = Workplace(shape, folder)
    source = place.make_source()
    with tempfile.TemporaryDirectory(dir=folder) as home, Hub(Path(home, "hub")) as hub:
        hub.upload("org/model", source)
        environment = {**hub.environ, "HF_HOME": str(Path(home, "hf"))}
        for latency in LATENCIES_MS:
            hub.latency = latency / 1000
            group = f"latency: {latency} ms"
            yield Point(group, latency, place, tp, False, "org/model", environment)


AXES: dict[str, Callable[[Shape, Path, int], Iterator[Point]]] = {
    "size": by_size,
    "degree": by_degree,
    "tensors": by_tensors,
    "latency": by_latency,
}


def run(
    template: build.Job, shape: Shape, folder: Path, axes: Sequence[str], rounds: int, say: Say
) -> list[Result]:
    """shardc against `cp` at each point of each axis; template: a build but for source and tp."""
    results: list[Result] = []
    for axis in axes or AXES:
        for point in AXES[axis](shape, folder, template.tp):
            job = replace(
                template,
                source=point.place.source,
                tp=point.tp,
                address=point.address,
                environment=point.environment,
            )
            matches = [
                replace(match, group=point.group, x=point.x)
                for match in build.matches(job, ["shardc"])
            ]
            try:
                results += series(matches, rounds, say)[0]
            finally:
                if point.passing:
                    point.place.remove()
    return results
