"""The readers under fuzz: each takes bytes and says whether they were accepted.

A target raises where the reader did what it never may: raise anything but a ShardcError, take
more than CPU_S seconds, or accept what the judge, code that is not shardc's, takes for something
else.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import safetensors

import shardc
from shardc.checkpoint import open_checkpoint
from shardc.errors import ShardcError
from shardc.header import read_header
from shardc.manifest import parse_manifest
from shardc.planner import Options, plan_component
from shardc.report import shard_set_report
from shardc.shardset import open_shard_set
from shardc.writing import Resources
from tests import checkpoints as ck

CPU_S = 20.0
TENSORS = {
    "m.weight": ck.Data.count("F32", [4, 2]),
    "m.bias": ck.Data.count("F32", [4], 20),
    "k.weight": ck.Data.count("BF16", [2, 3], 30),
    "n.weight": ck.Data.count("U8", [3], 50),
}
RULES = [
    {"match": "m", "style": "colwise"},
    {"match": "k", "style": "colwise", "unit": "head_dim", "repeat": True},
]
CONFIG = {"heads": 4, "head_dim": 1, "widths": [2, 2]}
MANIFEST = ck.manifest_text(RULES, dims={"inner": "heads * head_dim + sum(widths)"})
TP = 2
STEM = "diffusion_pytorch_model"

Target = Callable[[bytes], bool]


@cache
def workplace() -> Path:
    """A folder with what the targets put the bytes into; it goes when the process does."""
    made = tempfile.TemporaryDirectory(prefix="shardc-fuzz-")
    _KEPT.append(made)
    folder = Path(made.name)
    ck.component(folder / "parts", TENSORS, config=CONFIG, files=2)
    pipe = ck.pipeline(folder / "pipe", {"transformer": ck.CLASS, "vae": "Vae"})
    ck.component(pipe / "transformer", TENSORS, config=CONFIG)
    ck.component(pipe / "vae", {"c": TENSORS["n.weight"]}, class_name="Vae")
    source = ck.component(folder / "source", TENSORS, config=CONFIG)
    (folder / "rules.toml").write_text(MANIFEST)
    shardc.build(source, folder / "set", TP, manifest=folder / "rules.toml")
    return folder


_KEPT: list[Any] = []


@contextmanager
def bounded() -> Iterator[None]:
    started = time.process_time()
    yield
    assert time.process_time() - started < CPU_S


def header(data: bytes) -> bool:
    """A safetensors file. The judge: the reference parser."""
    path = workplace() / "x.safetensors"
    path.write_bytes(data)
    with bounded():
        try:
            found = read_header(path)
        except ShardcError:
            return False
    held = safetensors.deserialize(data)
    assert {(t.name, t.dtype, t.shape) for t in found.tensors} == {
        (name, entry["dtype"], tuple(entry["shape"])) for name, entry in held
    }
    whole = {
        t.name: data[found.data_start + t.start : found.data_start + t.stop] for t in found.tensors
    }
    assert whole == {name: bytes(entry["data"]) for name, entry in held}
    return True


def weights_index(data: bytes) -> bool:
    """An index of two sound files. The judge: what the files hold."""
    folder = workplace() / "parts"
    (folder / f"{STEM}.safetensors.index.json").write_bytes(data)
    with bounded():
        try:
            found = open_checkpoint(folder)
        except ShardcError:
            return False
    held = {name: path.name for path in folder.glob("*.safetensors") for name in ck.read(path)}
    assert json.loads(data)["weight_map"] == held
    assert {tensor.name for tensor in found.components[0].tensors} == held.keys()
    return True


def model_index(data: bytes) -> bool:
    """A pipeline's index. The judge: the folders that are there, and json."""
    folder = workplace() / "pipe"
    (folder / "model_index.json").write_bytes(data)
    with bounded():
        try:
            found = open_checkpoint(folder)
        except ShardcError:
            return False
    names = {component.name for component in found.components}
    assert names
    assert names <= {"transformer", "vae"} & json.loads(data).keys()
    return True


def config(data: bytes) -> bool:
    """A config.json that sizes come out of. Nothing to judge but the plan's own bytes."""
    folder = workplace() / "source"
    (folder / "config.json").write_bytes(data)
    with bounded():
        try:
            shardc.plan(folder, TP, manifest=workplace() / "rules.toml")
        except ShardcError:
            return False
    return True


def manifest(data: bytes) -> bool:
    """A manifest, and a plan by it. The judge: tomllib, and that what is planned is all there."""
    with bounded():
        try:
            found = parse_manifest(data.decode(), "x.toml")
        except (ShardcError, UnicodeDecodeError):
            return False
        rules = tomllib.loads(data.decode())["rule"]
        assert [(r.match, r.style) for r in found.rules] == [
            (tuple(r["match"]) if isinstance(r["match"], list) else r["match"], r["style"])
            for r in rules
        ]
        (component,) = open_checkpoint(workplace() / "pipe" / "transformer").components
        try:
            plan = plan_component(component, found, Options(TP))
        except ShardcError:
            return True
    assert {planned.tensor.name for planned in plan.tensors} == TENSORS.keys()
    return True


def shardc_index(data: bytes) -> bool:
    """A set's index, digest and all. The judge: it is the original, byte for byte."""
    out = workplace() / "set"
    original = (out / ck.INDEX).read_bytes()
    (out / ck.INDEX).write_bytes(data)
    try:
        with bounded():
            try:
                report = shardc.verify(out)
            except ShardcError:
                return False
        assert not report.ok or data == original
        return report.ok
    finally:
        (out / ck.INDEX).write_bytes(original)


def forged_index(data: bytes) -> bool:
    """A set's index whose digest is made to fit. The judge: the tensors that went in.

    Nobody can tell a careful forgery without the source; with it, verify must, and then a merge
    gives back what went in. Whatever the index says, a merge writes nothing outside its folder.
    """
    out = workplace() / "set"
    original = (out / ck.INDEX).read_bytes()
    if (document := _json_object(data)) is None:
        return False
    try:
        ck.write_index(out, document)
        before = set(workplace().rglob("*"))
        with bounded():
            try:
                shard_set_report(open_shard_set(out))
                shardc.merge(
                    out, workplace() / "full", resources=Resources(fsync=False), force=True
                )
                merged = True
            except ShardcError:
                merged = False
            assert {
                p for p in before ^ set(workplace().rglob("*")) if "full" not in p.parts
            } == set()
            try:
                sound = shardc.verify(out, workplace() / "pipe" / "transformer").ok
            except ShardcError:
                return False
        if sound and merged:
            assert ck.read_all(workplace() / "full") == TENSORS
        return sound
    finally:
        shutil.rmtree(workplace() / "full", ignore_errors=True)
        (out / ck.INDEX).write_bytes(original)


def _json_object(data: bytes) -> dict[str, Any] | None:
    """What can be written as an index again."""
    try:
        document = json.loads(data)
        json.dumps(document, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        return None
    return document if isinstance(document, dict) else None


@cache
def expected() -> tuple[dict[str, ck.Data], ...]:
    return tuple(ck.read_ranks(workplace() / "set", TP))


def loader(data: bytes) -> bool:
    """A file of a set, which the first byte names, with what the loader then makes of each rank.

    The judge: what the ranks held. Of a forged index (the last name) there is none.
    """
    from shardc.loaders import load_state_dict

    out = workplace() / "set"
    wanted = expected()
    names = [*sorted(path.name for path in out.glob("*.safetensors")), ck.INDEX, ck.INDEX]
    number = (data[0] if data else 0) % len(names)
    forged = number == len(names) - 1
    path = out / names[number]
    original = path.read_bytes()
    taken = 0
    if forged and (document := _json_object(data[1:])) is None:
        return False
    try:
        path.write_bytes(data[1:])
        if forged:
            ck.write_index(out, document)
        for rank in range(TP):
            with bounded():
                try:
                    held = load_state_dict(out, rank, verify=True)
                except ShardcError:
                    continue
            taken += 1
            found = {name: tensor.flatten().view(torch_bytes()) for name, tensor in held.items()}
            raw = {name: tensor.numpy().tobytes() for name, tensor in found.items()}
            assert forged or raw == {name: tensor.raw for name, tensor in wanted[rank].items()}
    finally:
        path.write_bytes(original)
    return taken > 0


def torch_bytes() -> Any:
    import torch

    return torch.uint8


TARGETS: dict[str, Target] = {
    target.__name__: target
    for target in (
        header,
        weights_index,
        model_index,
        config,
        manifest,
        shardc_index,
        forged_index,
        loader,
    )
}


@cache
def seeds(name: str) -> tuple[bytes, ...]:
    """Sound inputs of a target, made here: what mutations begin with."""
    folder = workplace()
    if name == "header":
        files = [
            ck.raw_file(
                ck.header_of(TENSORS, {"format": "pt"}), b"".join(t.raw for t in TENSORS.values())
            ),
            ck.raw_file(
                {"__metadata__": None, "e": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}},
                b"",
            ),
            ck.raw_file(b"{}   ", b""),
            (folder / "set" / "rank-00000-of-00002.safetensors").read_bytes(),
        ]
        return tuple(files)
    if name == "manifest":
        other = ck.manifest_text(
            [
                {"match": ["$p.m", "k"], "style": "packed_colwise", "blocks": ["inner", 2]},
                {"match": "n", "style": "replicate", "optional": True},
            ],
            dims={"inner": "2"},
            prefix={"p": ["", "model"]},
        )
        return (MANIFEST.encode(), other.encode())
    if name == "loader":
        files = sorted((folder / "set").glob("*.safetensors")) + [folder / "set" / ck.INDEX] * 2
        return tuple(bytes([number]) + path.read_bytes() for number, path in enumerate(files))
    path = {
        "weights_index": folder / "parts" / f"{STEM}.safetensors.index.json",
        "model_index": folder / "pipe" / "model_index.json",
        "config": folder / "source" / "config.json",
        "shardc_index": folder / "set" / ck.INDEX,
        "forged_index": folder / "set" / ck.INDEX,
    }[name]
    return (path.read_bytes(),)
