"""`load_rank_weights`: several ranks' tensors in one process, as NxD Inference takes them."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from pathlib import Path

import torch

from shardc.errors import Problem, ShardSetError
from shardc.loaders.opening import Opening
from shardc.loaders.storage import (
    check_digests,
    check_rank,
    choose_component,
    open_ranks,
    place_on,
)


def load_rank_weights(
    path: str | Path,
    *,
    ranks: Iterable[int] | None = None,
    tp: int | None = None,
    component: str | None = None,
    verify: bool = False,
    revision: str | None = None,
    token: str | None = None,
    cache: bool = True,
) -> list[dict[str, torch.Tensor]]:
    """Each rank's tensors, by name and in rank order, for a process that drives several cores.

    It serves neuronx-distributed's `NxDModel.initialize(weights, start_rank_tensor)` of a traced
    model, and `NxDModel.set_weights(weights)` of the newer one, in the place of the
    `tp{rank}_sharded_checkpoint.safetensors` files. Written from their public sources; not
    verified on hardware.

    ranks: those of this host, one after another, as NxD counts them up from a start rank
    (default: all of the set's). path and all others: as in load_state_dict. The tensors are on the
    host: contiguous views of the mapped files, in the dtypes stored, nothing read before it is
    used (with cache=False in memory of their own); the replicated ones are the same tensors in
    every dict. The names are the checkpoint's: where the traced model has others, rename the dicts'
    keys, and add what no checkpoint holds (a rank tensor, say). Raises ShardSetError.
    """
    wanted = None if ranks is None else list(ranks)
    part = partial(choose_component, component=component)
    remote = Opening(path, revision=revision, token=token, cache=cache, part=part)
    with remote as opening, opening.told():
        opening.fetch(wanted, tp)
        shard_set = opening.open()
        name = choose_component(shard_set, component)
        index, folder = shard_set.components[name], shard_set.folder(name)
        wanted = list(range(index.tp)) if wanted is None else wanted
        for rank in wanted:
            check_rank(index, rank, tp, folder)
        if not wanted or wanted != list(range(wanted[0], wanted[0] + len(wanted))):
            what = f"ranks {wanted} are not one or more in a row"
            raise ShardSetError(Problem(str(folder), what, f"such as range(0, {index.tp})"))
        weights: list[dict[str, torch.Tensor]] = []
        for rank, held in zip(wanted, open_ranks(folder, index, wanted, opening.at), strict=True):
            first = weights[0] if weights else {}
            common = {n for n, (file, _) in held.items() if file.shared and n in first}
            own = {n: h for n, h in held.items() if n not in common}
            if verify:
                check_digests(own, index, rank)
            placed = dict(place_on(own, torch.device("cpu")))
            weights.append({n: first[n] if n in common else placed[n] for n in held})
        return weights
