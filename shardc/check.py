"""What every plan must satisfy, each as a checker: run by the tests, and by `--debug`."""

from __future__ import annotations

from collections.abc import Iterator

from shardc.errors import CheckpointError, Problem
from shardc.header import parse_header
from shardc.layout import PackedShard, Piece, Replicate, blocks_of
from shardc.planner import ComponentPlan, OutFile, Plan, PlannedTensor, move_of, region_copies
from shardc.region import Region, tiling_problem


def check_plan(plan: Plan) -> list[Problem]:
    """Every violated invariant of every component; empty for a sound plan."""
    return [problem for part in plan.components for problem in check_component(part)]


def check_component(plan: ComponentPlan) -> list[Problem]:
    """All invariants of one component's plan."""
    found = []
    for planned in plan.tensors:
        for checker in (
            destinations_tile_shards,
            ranks_tile_source,
            blocks_in_order,
            units_are_whole,
        ):
            reason = checker(planned)
            if reason is not None:
                found.append(Problem(planned.tensor.name, reason))
    found += [Problem(name, reason) for name, reason in bias_follows_weight(plan)]
    for file in plan.files:
        reason = header_matches(file)
        if reason is not None:
            found.append(Problem(file.name, reason))
    return found


def destinations_tile_shards(planned: PlannedTensor) -> str | None:
    """The copies into a shard, and its declared padding, tile the shard exactly once."""
    move = move_of(planned.tensor, planned.dtype, planned.placement, planned.targets)
    into: list[list[Region]] = [[] for _ in planned.targets]
    for _, source, target, region in region_copies(move):
        if source.shape != region.shape:
            return f"a copy takes shape {source.shape} to {region.shape}"
        into[target].append(region)
    for rank, stored in enumerate(planned.targets):
        shape = stored.info.shape
        if not isinstance(planned.placement, Replicate):
            at = 0
            for piece in planned.pieces[rank]:
                if piece.zeros:
                    dim = planned.placement.dim
                    into[rank].append(Region.span(shape, dim, at, at + piece.length))
                at += piece.length
        reason = tiling_problem(into[rank], shape)
        if reason is not None:
            return f"shard {rank}: {reason}"
    return None


def ranks_tile_source(planned: PlannedTensor) -> str | None:
    """The ranks' pieces cover the dim, and overlap only where a block is declared to repeat."""
    placement = planned.placement
    if isinstance(placement, Replicate):
        return None
    size = planned.tensor.shape[placement.dim]
    pieces = [piece for held in planned.pieces for piece in held if not piece.zeros]
    repeated = any(block.repeat for block in blocks_of(placement))
    if not repeated:
        return tiling_problem((Region((p.start,), (p.stop,)) for p in pieces), (size,))
    at = 0
    for piece in sorted(pieces, key=lambda p: (p.start, p.stop)):
        if piece.start > at:
            return f"rows {at} to {piece.start} are on no rank"
        at = max(at, piece.stop)
    return None if at == size else f"rows {at} to {size} are on no rank"


def blocks_in_order(planned: PlannedTensor) -> str | None:
    """A shard holds its rows in the source's order, unless they are asked to be de-interleaved."""
    placement = planned.placement
    if isinstance(placement, Replicate):
        return None
    if isinstance(placement, PackedShard) and placement.deinterleave:
        return None
    for rank, held in enumerate(planned.pieces):
        at = -1
        for piece in held:
            if not piece.zeros and piece.start < at:
                return f"shard {rank} holds row {piece.start} behind row {at - 1}"
            at = max(at, piece.stop) if not piece.zeros else at
    return None


def units_are_whole(planned: PlannedTensor) -> str | None:
    """No piece begins or ends inside a unit of its block."""
    placement = planned.placement
    if isinstance(placement, Replicate):
        return None
    size = planned.tensor.shape[placement.dim]
    blocks = blocks_of(placement)
    width = sum(block.size for block in blocks)
    padded = not isinstance(placement, PackedShard) and placement.padded != size
    if padded or width == 0:
        return None

    def whole(edge: int) -> bool:
        """The edge lies between two units: at a multiple from the start of the block it is in."""
        inside = edge % width
        for block in blocks:
            if inside < block.size:
                return inside % block.unit == 0
            inside -= block.size
        return True

    for rank, held in enumerate(planned.pieces):
        for edge in _edges(held):
            if not whole(edge):
                return f"shard {rank} cuts a unit at row {edge}"
    return None


def _edges(pieces: tuple[Piece, ...]) -> Iterator[int]:
    for piece in pieces:
        if not piece.zeros:
            yield piece.start
            yield piece.stop


def bias_follows_weight(plan: ComponentPlan) -> Iterator[tuple[str, str]]:
    """A bias along a weight's sharded output dim is cut at the very same rows."""
    tensors = {planned.tensor.name: planned for planned in plan.tensors}
    for name, bias in tensors.items():
        module, _, kind = name.rpartition(".")
        weight = tensors.get(f"{module}.weight")
        if kind != "bias" or weight is None or bias.style != weight.style:
            continue
        if isinstance(bias.placement, Replicate):
            continue  # a rowwise bias, added once after the reduce
        if bias.pieces != weight.pieces:
            yield name, f"is cut at {bias.pieces}, its weight at {weight.pieces}"


def header_matches(file: OutFile) -> str | None:
    """A file's header bytes parse back to its tensors, by the reader for foreign files."""
    try:
        header = parse_header(file.header[8:], file_bytes=file.size_bytes, where=file.name)
    except CheckpointError as error:
        return str(error)
    if sorted(header.tensors, key=lambda t: t.name) != sorted(file.tensors, key=lambda t: t.name):
        return "its header does not parse back to its tensors"
    return None if header.data_start == len(file.header) else "its data does not follow its header"
