"""A TP plan proposed from the names of a module tree, for a class that has none of its own.

The names are those that attention and feed-forward layers go by in diffusers and transformers.
A Linear that fuses several of them is left out: its layout cannot be told from its name.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

QUERIES = ("to_q", "q_proj", "to_query", "query")
ATTENTION_IN = (
    *QUERIES,
    *("to_k", "to_v", "add_q_proj", "add_k_proj", "add_v_proj", "k_proj", "v_proj"),
    *("to_key", "to_value", "key", "value"),
)
ATTENTION_OUT = ("to_out.0", "to_out", "to_add_out", "o_proj", "out_proj", "out_layer")
ATTENTION_NORMS = ("norm_q", "norm_k", "norm_added_q", "norm_added_k", "q_norm", "k_norm")
FEED_FORWARDS = (  # inputs, output
    (("net.0.proj",), "net.2"),
    (("w1", "w3"), "w2"),
    (("gate_proj", "up_proj"), "down_proj"),
    (("wi_0", "wi_1"), "wo"),
    (("wi",), "wo"),
    (("fc1",), "fc2"),
    (("linear_in",), "linear_out"),
    (("linear_1", "linear_3"), "linear_2"),
)
# What embeds timesteps and prompts looks alike, but is small, and its output is used whole.
EMBEDDERS = re.compile(r"embed|time|text_proj|caption|projector|guidance|pooler")


def plan(model: Any) -> dict[str, str]:
    """Styles by pattern: `*` where a name has a number."""
    modules = dict(model.named_modules())
    found: dict[str, str] = {}
    for name in modules:
        for child, style in (*_attention(modules, name), *_feed_forward(modules, name)):
            found[generalised(f"{name}.{child}" if name else child)] = style
    return found


def fused(model: Any) -> list[str]:
    """Patterns of the Linears that by their names fuse several: someone must declare these."""
    names = (generalised(name) for name, module in model.named_modules() if _is_matrix(module))
    return sorted({n for n in names if re.search(r"qkv|kv(_proj)?$|gate_up", n.split(".")[-1])})


def generalised(name: str) -> str:
    """A name as a pattern: numbers of blocks are `*`, those inside a layer stay."""
    fixed = re.sub(r"\.(\d+)(?=\.)", ".*", name)
    return re.sub(r"net\.\*\.proj$", "net.0.proj", fixed)


def _is_matrix(module: Any) -> bool:
    return type(module).__name__ == "Linear"


def _attention(modules: dict[str, Any], name: str) -> Iterator[tuple[str, str]]:
    def child(key: str) -> Any:
        return modules.get(f"{name}.{key}" if name else key)

    ins = [key for key in ATTENTION_IN if _is_matrix(child(key))]
    outs = [key for key in ATTENTION_OUT if _is_matrix(child(key))]
    query = next((key for key in QUERIES if key in ins), None)
    if query is None or not outs:
        return
    width = child(query).weight.shape[0]
    for key in ins:
        yield key, "colwise"
    for key in outs:
        yield key, "rowwise"
    for key in ATTENTION_NORMS:
        weight = getattr(child(key), "weight", None)
        if weight is not None and tuple(weight.shape) == (width,):  # over all heads
            yield key, "sharded_norm"


def _feed_forward(modules: dict[str, Any], name: str) -> Iterator[tuple[str, str]]:
    if EMBEDDERS.search(name):
        return
    for ins, out in FEED_FORWARDS:
        parts: list[Any] = [modules.get(f"{name}.{key}") for key in (*ins, out)]
        if not all(_is_matrix(part) for part in parts):
            continue
        width = parts[-1].weight.shape[1]
        sizes = {part.weight.shape[0] for part in parts[:-1]}
        if sizes == {width}:
            style = "colwise"
        elif sizes == {2 * width} and len(ins) == 1:  # [gate | up]
            style = "packed_colwise"
        else:
            continue
        yield from ((key, style) for key in ins)
        yield out, "rowwise"
        return
