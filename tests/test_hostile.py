"""Hostile input through the command line: the named error, exit status 1, and nothing written.

KINDS is the whole of it, with the kinds that other tests declare taken in. What is odd and sound
all the same is built, and comes back bit for bit.
"""

from __future__ import annotations

import ast
import importlib
import json
import os
import pickle
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import shardc
from shardc.cli import main
from shardc.errors import MAX_PROBLEMS, Problem, ShardcError, ShardSetError
from shardc.header import MAX_DIMS, MAX_NAME_CHARACTERS, read_header
from shardc.reading import MAX_JSON_BYTES
from tests import checkpoints as ck
from tests import test_checkpoint, test_header, test_manifest, test_verifier
from tests.test_header import W, entry

TENSORS = {"m.weight": ck.Data.count("F32", [4, 2]), "n.weight": ck.Data.count("F32", [3], 50)}
RULES = [{"match": "m", "style": "colwise"}]
STEM = "diffusion_pytorch_model"
WEIGHTS, INDEX = f"{STEM}.safetensors", f"{STEM}.safetensors.index.json"
PART, LAST = (f"{STEM}-0000{n}-of-00002.safetensors" for n in (1, 2))
CPU_S = 15.0  # of any one kind; most take milliseconds

Args = list[object]
Kind = tuple[Callable[[Path], Args], tuple[str, ...]]  # what writes it, what the error says


def build(source: Path, *more: object) -> Args:
    rules = source.parent / "rules.toml"
    if not rules.exists():
        ck.manifest(rules, RULES)
    out = source.parent / "out"
    return ["build", source, "--tp", 2, "--manifest", rules, "-o", out, "-q", "--no-fsync", *more]


def component(damage: Callable[[Path], object], files: int = 1) -> Callable[[Path], Args]:
    """A sound component, damaged."""

    def write(folder: Path) -> Args:
        source = ck.component(folder / "s", TENSORS, files=files)
        damage(source)
        return build(source)

    return write


def weights(raw: bytes) -> Callable[[Path], Args]:
    """A component whose weight file is this."""
    return component(lambda s: (s / WEIGHTS).write_bytes(raw))


def header(document: Any, size: int) -> Callable[[Path], Args]:
    return weights(ck.raw_file(document, bytes(size)))


def put(name: str, raw: bytes) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes(raw)


def link(name: str, target: str | Path) -> Callable[[Path], object]:
    def make(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(target)

    return make


def sized(name: str, size: int) -> Callable[[Path], object]:
    """A file of zeros that takes no room."""
    return lambda folder: ((folder / name).touch(), os.truncate(folder / name, size))


def nested(depth: int) -> str:
    return "[" * depth + "]" * depth


def pipeline(damage: Callable[[Path], object]) -> Callable[[Path], Args]:
    def write(folder: Path) -> Args:
        pipe = ck.pipeline(folder / "s", {"transformer": ck.CLASS})
        ck.component(pipe / "transformer", TENSORS)
        damage(pipe)
        return build(pipe)

    return write


def listed(raw: str) -> Callable[[Path], Args]:
    """A pipeline with one more line in its model_index.json."""
    return pipeline(put("model_index.json", f'{{"transformer": ["a", "b"], {raw}}}'.encode()))


def rules(text: str) -> Callable[[Path], Args]:
    def write(folder: Path) -> Args:
        (folder / "rules.toml").write_text(text)
        return build(ck.component(folder / "s", TENSORS))

    return write


def shards(damage: Callable[[Path], object], *commands: str) -> Callable[[Path], Args]:
    """The set that test_verifier damages, and the command to give it to."""

    def write(folder: Path) -> Args:
        made = ck.manifest(folder / "rules.toml", test_verifier.RULES)
        source = ck.component(folder / "s", test_verifier.TENSORS)
        shardc.build(source, folder / "set", test_verifier.TP, manifest=made)
        damage(folder / "set")
        return [commands[0], folder / "set", *(o.format(folder=folder) for o in commands[1:])]

    return write


VERIFY = ("verify", "-q")
MERGE = ("merge", "-o", "{folder}/out", "-q", "--no-fsync")
RESHARD = ("reshard", "--tp", "2", "-o", "{folder}/out", "-q", "--no-fsync")
LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 3\n"
HTML = b"<!DOCTYPE html><html>Sign in</html>"
TORCH = b"PK\x03\x04\x14\0\x08\x08" + bytes(40)  # as torch.save begins

SAFETENSORS: Mapping[str, Kind] = {
    **{
        name: (header(document, len(data)), (WEIGHTS, message))
        for name, (document, data, message) in test_header.WRONG.items()
    },
    **{
        f"file: {name}": (weights(raw), (WEIGHTS, message))
        for name, (raw, message) in test_header.NO_FILES.items()
    },
    "duplicate tensor, alike": (
        header(b'{"w":%s,"w":%s}' % ((json.dumps(W).encode(),) * 2), 8),
        (WEIGHTS, "duplicate key 'w'"),
    ),
    "duplicate metadata": (
        header(b'{"__metadata__":{},"__metadata__":{}}', 0),
        (WEIGHTS, "duplicate key '__metadata__'"),
    ),
    "duplicate in metadata": (
        header(b'{"__metadata__":{"a":"1","a":"1"}}', 0),
        (WEIGHTS, "duplicate key 'a'"),
    ),
    "duplicate, the last of many": (
        header(b"{" + b"".join(b'"%d":0,' % n for n in range(200_000)) + b'"199999":0}', 0),
        (WEIGHTS, "duplicate key '199999'"),
    ),
    "shape overflows": (
        header({"w": entry("F32", [2**62, 2**62], 0, 8)}, 8),
        (WEIGHTS, "'w': shape [4611686018427387904, 46116860", "overflows, its offsets span 8 by"),
    ),
    "shape overflows beside a zero": (
        header({"w": entry("F32", [2**62, 2**62, 0], 0, 0)}, 0),
        (WEIGHTS, "'w': shape [46116", "overflows, its offsets span 0 bytes"),
    ),
    "a hundred thousand dims": (
        header({"w": entry("F32", [2**62] * 100_000, 0, 8)}, 8),
        (WEIGHTS, f"'w': a shape of 100000 dims, {MAX_DIMS} are taken"),
    ),
    "offsets beyond the file": (
        header({"w": entry("U8", [2**59], 0, 2**59)}, 8),
        (WEIGHTS, f"truncated: its tensors take {2**59} bytes, the file holds 8"),
    ),
    "numbers of many digits": (
        header(b'{"w":{"dtype":"U8","shape":[1%s],"data_offsets":[0,1]}}' % (b"0" * 5000), 1),
        (WEIGHTS, "not valid JSON: Exceeds the limit"),
    ),
    "minus nothing": (
        header(b'{"w":{"dtype":"U8","shape":[-0],"data_offsets":[0,0]}}', 0),
        (WEIGHTS, "-0 is no count"),
    ),
    "deep metadata": (
        header(('{"__metadata__":{"a":' + nested(900) + "}}").encode(), 0),
        (WEIGHTS, "nested too deeply"),
    ),
    "deep shape": (
        header(('{"w":{"dtype":"U8","shape":' + nested(900) + "}}").encode(), 0),
        (WEIGHTS, "nested too deeply"),
    ),
    "metadata of objects": (
        header({"__metadata__": {"q": {"x": "y"}}, "w": W}, 8),
        (WEIGHTS, "__metadata__ must map strings to strings"),
    ),
    "half a character in metadata": (
        header(b'{"__metadata__":{"a":"\\ud800"}}', 0),
        (WEIGHTS, "half a character"),
    ),
    "__metadata__ as a tensor": (
        header({"__metadata__": W}, 8),
        (WEIGHTS, "__metadata__ must map strings to strings"),
    ),
    "__metadata__ in a wrapper": (
        header({"module.__metadata__": W}, 8),
        (WEIGHTS, "'module.__metadata__' is the model's '__metadata__': that is the format's own"),
    ),
    "an escape in a name": (
        header({"a\x1b[2Jb": W}, 8),
        (WEIGHTS, "'a\\x1b[2Jb': a name must be text, free of NUL and other control characters"),
    ),
    "a long name": (
        header({"a" * 5000: W}, 8),
        (WEIGHTS, f"a name of 5000 characters, 1 to {MAX_NAME_CHARACTERS} are taken"),
    ),
    "fifty thousand wrong tensors": (
        header({f"t{n}": 3 for n in range(50_000)}, 0),
        (WEIGHTS, "'t0': must have exactly dtype, shape and data_offsets", "problems more"),
    ),
}

INDEXES: Mapping[str, Kind] = {
    **{
        f"index: {name}": (component(damage, files=2), (message,))
        for name, (damage, message) in test_checkpoint.BROKEN.items()
        if name not in ("twice", "no such tensor", "another file", "unlisted tensor")
    },
    "listed, but in no file": (
        component(test_checkpoint.edit_index(mtp__weight=LAST), files=2),
        (INDEX, f"lists tensor 'mtp.weight' in {LAST}, which lacks it"),
    ),
    "listed in another file": (
        component(test_checkpoint.edit_index(n__weight=PART, x=LAST), files=2),
        (INDEX, f"lists tensor 'n.weight' in {PART}, it is in {LAST}"),
    ),
    "not listed": (
        component(test_checkpoint.edit_index(n__weight=None, x=LAST), files=2),
        (INDEX, f"does not list tensor 'n.weight' of {LAST}"),
    ),
    "in both files": (
        component(lambda s: ck.save(s / LAST, TENSORS), files=2),
        (f"tensor 'm.weight' is in both {PART} and {LAST}",),
    ),
    "index: listed twice": (
        component(put(INDEX, b'{"weight_map":{"m.weight":"a","m.weight":"a"}}'), files=2),
        (INDEX, "duplicate key 'm.weight'"),
    ),
    "index: NUL": (
        component(put(INDEX, b'{"weight_map":{"m.weight":"a\\u0000b.safetensors"}}'), files=2),
        (INDEX, "'a\\x00b.safetensors' leaves the folder"),
    ),
    "index: half a character": (
        component(put(INDEX, b'{"weight_map":{"m.weight":"\\udc80.safetensors"}}'), files=2),
        (INDEX, "half a character"),
    ),
    "index: a name too long for any file": (
        component(test_checkpoint.edit_index(x="y" * 300 + ".safetensors"), files=2),
        ("y.safetensors is missing",),
    ),
    "index: LFS": (component(put(INDEX, LFS), files=2), (INDEX, "a Git LFS pointer")),
    "index: HTML": (component(put(INDEX, HTML), files=2), (INDEX, "an HTML or XML page")),
    "index: empty file": (component(put(INDEX, b""), files=2), (INDEX, "not valid JSON")),
    "index: deep": (
        component(put(INDEX, f'{{"weight_map":{nested(70)}}}'.encode()), files=2),
        (INDEX, "nested too deeply"),
    ),
    "index: too large": (
        component(sized(INDEX, MAX_JSON_BYTES + 1), files=2),
        (INDEX, f"has {MAX_JSON_BYTES + 1} bytes, the limit is {MAX_JSON_BYTES}"),
    ),
    "config: LFS": (component(put("config.json", LFS)), ("config.json", "a Git LFS pointer")),
    "config: HTML": (component(put("config.json", HTML)), ("config.json", "an HTML or XML page")),
    "config: empty": (component(put("config.json", b"")), ("config.json", "not valid JSON")),
    "config: too large": (
        component(sized("config.json", MAX_JSON_BYTES + 1)),
        ("config.json", f"the limit is {MAX_JSON_BYTES}"),
    ),
    "config: a class that a terminal would obey": (
        component(put("config.json", b'{"_class_name":"A\\u001b[2J"}')),
        ("serves TinyModel", "has None"),
    ),
    "weights linked out": (
        component(link(WEIGHTS, "../../elsewhere")),
        (WEIGHTS, "is a link to a missing file"),
    ),
    "weights linked to a device": (
        component(link(WEIGHTS, "/dev/zero")),
        (WEIGHTS, "is a link that leaves the folder, to /dev/zero"),
    ),
    "config linked out": (
        component(link("config.json", "/etc/passwd")),
        ("config.json", "is a link that leaves the folder, to /etc/passwd"),
    ),
    "another file linked out": (
        component(link("README.md", "/etc/hostname")),
        ("README.md", "is a link that leaves the folder, to /etc/hostname"),
    ),
    "a folder linked out": (
        component(link("tokenizer", "/etc")),
        ("tokenizer", "is a link that leaves the folder, to /etc"),
    ),
    "a folder linked within": (
        component(lambda s: ((s / "a").mkdir(), (s / "b").symlink_to("a"))),
        ("b: is a link to a folder, and would be left out",),
    ),
    "a link to itself": (
        component(link("vocab.txt", "vocab.txt")),
        ("vocab.txt", "is a link to a missing file"),
    ),
    "an escape in a file's name": (
        component(put("a\x1b[2J.txt", b"")),
        ("a\\x1b[2J.txt: has control characters in its name",),
    ),
    "pipeline: LFS": (pipeline(put("model_index.json", LFS)), ("a Git LFS pointer",)),
    "pipeline: HTML": (pipeline(put("model_index.json", HTML)), ("an HTML or XML page",)),
    "pipeline: empty": (pipeline(put("model_index.json", b"")), ("model_index.json: not valid",)),
    "pipeline: a list": (pipeline(put("model_index.json", b"[]")), ("is not a JSON object",)),
    "pipeline: traversal": (listed('"../s": ["a", "b"]'), ("'../s' is no plain name",)),
    "pipeline: absolute": (listed('"/etc": ["a", "b"]'), ("component '/etc' is no plain name",)),
    "pipeline: NUL": (listed('"a\\u0000": ["a", "b"]'), ("'a\\x00' is no plain name",)),
    "pipeline: no name": (listed('"": ["a", "b"]'), ("component '' is no plain name",)),
    "pipeline: twice": (listed('"transformer": ["a", "b"]'), ("duplicate key 'transformer'",)),
    "pipeline: a long name": (
        listed(f'"{"v" * 300}": ["a", "b"]'),
        ("model_index.json lists this component, but there is no such folder",),
    ),
    "pipeline: a missing component": (
        listed('"vae": ["a", "b"]'),
        ("vae: model_index.json lists this component, but there is no such folder",),
    ),
    "pipeline: a component linked out": (
        pipeline(
            lambda s: ((s / "transformer").rename(s.parent / "t"), link("transformer", "../t")(s))
        ),
        ("transformer: is a link that leaves the folder, to ",),
    ),
    "pipeline: a scheduler linked out": (
        pipeline(link("scheduler/x.json", "/etc/passwd")),
        ("x.json: is a link that leaves the folder, to /etc/passwd",),
    ),
}

PICKLES: Mapping[str, Kind] = {
    **{
        f"pickle: a folder of {suffix}": (
            component(
                lambda s, suffix=suffix: (s / WEIGHTS).rename(s / f"pytorch_model{suffix}")  # type: ignore[misc]
            ),
            (f"its weights are pickled (pytorch_model{suffix}); shardc never", "save_pretrained"),
        )
        for suffix in (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".BIN")
    },
    **{
        f"pickle: a {suffix} file": (
            lambda folder, suffix=suffix: build(
                (put(f"x{suffix}", TORCH)(folder), folder / f"x{suffix}")[1]
            ),  # type: ignore[misc]
            (f"x{suffix}: not a .safetensors file; shardc never unpickles", "save_pretrained"),
        )
        for suffix in (".bin", ".pt", ".ckpt")
    },
    "pickle: in a pipeline": (
        pipeline(
            lambda s: (s / "transformer" / WEIGHTS).rename(s / "transformer" / "pytorch_model.bin")
        ),
        ("transformer: its weights are pickled (pytorch_model.bin)", "save_pretrained"),
    ),
    "pickle: config": (
        component(put("config.json", pickle.dumps({"a": 1}))),
        ("config.json: a pickle file under another name; shardc never unpickles",),
    ),
}

HEAD, RULE = test_manifest.HEAD, test_manifest.RULE
ALL = "{" + ",".join("abcdefghijklmnop") + "}"


def laughs(depth: int) -> str:
    """Sizes, each the sum of many of the one before."""
    lines = [f'd{n} = "{" + ".join([f"d{n + 1}"] * 20)}"' for n in range(depth)]
    return "[dims]\n" + "\n".join([*lines, f"d{depth} = 0\n"])


MANIFESTS: Mapping[str, Kind] = {
    **{
        f"manifest: {name}": (rules(text), (message.replace("tiny.toml", "rules.toml"),))
        for name, (text, message) in test_manifest.WRONG.items()
    },
    "manifest: a pattern of many": (
        rules(HEAD + RULE.replace('"m"', f'"{".".join([ALL] * 20)}"')),
        (f"{16**20} alternatives, the limit is 256",),
    ),
    "manifest: many patterns of many": (
        rules(HEAD + "".join(RULE.replace('"m"', f'"x{n}.{ALL}{ALL}"') for n in range(5000))),
        ("more than 2000 alternatives of patterns in all",),
    ),
    "manifest: a long pattern": (
        rules(HEAD + RULE.replace('"m"', f'"{"a" * 1001}"')),
        ("rules.toml:4 (rule 1): match 'aaaa", "longer than 1000 characters"),
    ),
    "manifest: a long prefix": (
        rules(HEAD + f'[prefix]\np = ["{"a" * 1001}"]\n' + RULE.replace('"m"', '"$p.m"')),
        ("match '$p.m': longer than 1000 characters",),
    ),
    "manifest: towers of products": (
        rules(HEAD + '[dims]\nq = "' + " * ".join(["99999"] * 20) + '"\n' + RULE),
        ("dims.q", "is too large to be a dim"),
    ),
    "manifest: a number of many digits": (
        rules(HEAD + f"[dims]\nq = 0x{'f' * 3900}\n" + RULE),
        ("rules.toml: 0xffff", "is outside the 64 bits of a TOML integer"),
    ),
    "manifest: a chain of sizes": (rules(HEAD + laughs(40) + RULE), ("sizes made of sizes deep",)),
    "manifest: sizes in a circle": (
        rules(HEAD + '[dims]\na = "b + b"\nb = "a"\n' + RULE),
        ("a -> b -> a is a circle",),
    ),
    "manifest: a long expression": (
        rules(HEAD + f'[dims]\nq = "{"1+" * 200}1"\n' + RULE),
        ("dims.q: longer than 200 characters",),
    ),
    "manifest: a dotted key of many parts": (
        rules(HEAD + "a." * 5000 + "a = 1\n" + RULE),
        ("rules.toml:4: a line of 10005 characters, the limit is 4000",),
    ),
    "manifest: deep tables": (
        rules(HEAD + "a." * 500 + "a = 1\n" + RULE),
        ("rules.toml: tables nested more than 16 deep",),
    ),
    "manifest: deep arrays": (
        rules(HEAD + f"a = {nested(1900)}\n" + RULE),
        ("rules.toml",),
    ),
    "manifest: extends itself": (
        rules('extends = "rules"\n' + RULE),
        ("extends 'rules', which is no bundled manifest",),
    ),
    "manifest: extends a path": (
        rules('extends = "../../etc/passwd"\n' + RULE),
        ("extends '../../etc/passwd', which is no bundled manifest",),
    ),
    "manifest: unknown keys by the thousand": (
        rules(HEAD + "".join(f"k{n} = 1\n" for n in range(5000)) + RULE),
        ("k0: extra inputs are not permitted", f"and {5000 - MAX_PROBLEMS} problems more"),
    ),
    "manifest: not UTF-8": (
        lambda f: ((f / "rules.toml").write_bytes(b"\xff"), build(ck.component(f / "s", TENSORS)))[
            1
        ],
        ("rules.toml: cannot read it",),
    ),
}


def forged(**source: Any) -> Callable[[Path], object]:
    return test_verifier.signed(lambda d: d["source"].update(source))


def origin(name: str) -> Callable[[Path], object]:
    return test_verifier.signed(lambda d: d["source"]["files"][0].update(name=name))


def sharded(name: str, rank: int, **entries: Any) -> Callable[[Path], object]:
    return test_verifier.shard(name, rank, **entries)


RANK0, SHARED = test_verifier.RANK0, test_verifier.SHARED
FORGED: Mapping[str, tuple[Callable[[Path], object], tuple[str, ...]]] = {
    "an origin outside": (origin("../x.safetensors"), ("source.files.0.name: String should",)),
    "an absolute origin": (origin("/tmp/x.safetensors"), ("source.files.0.name: String should",)),
    "an origin that is no weights": (origin("config.json"), ("source.files.0.name: String",)),
    "two origins of a name": (
        test_verifier.signed(lambda d: d["source"]["files"].append(d["source"]["files"][0])),
        (f"source file '{WEIGHTS}' is listed twice",),
    ),
    "an index outside": (forged(index="../x.safetensors.index.json"), ("source.index: String",)),
    "an index that is the config": (forged(index="config.json"), ("source.index: String should",)),
    "a class that a terminal would obey": (
        forged(**{"class": "A\x1b[2J"}),
        ("source.class: String should match",),
    ),
    "padding without end": (
        sharded("v.weight", 3, ranges=[[6, 7], {"zeros": 2**50}]),
        (f"file rank-00003-of-00004.safetensors: its tensors take {2**53 + 88} bytes, it is said",),
    ),
    "padding of more than a number": (
        sharded("v.weight", 3, ranges=[{"zeros": 10**30}]),
        ("tensors.v.weight.shards.3.ranges.0",),
    ),
    "padded without end": (
        test_verifier.signed(lambda d: d["tensors"]["v.weight"]["placement"].update(padded=2**50)),
        (f"'v.weight': padded to {2**50}, the ranks hold 8",),
    ),
    "a shape without end": (
        test_verifier.tensor("norm", shape=[2**50]),
        (f"file {SHARED}: its tensors take {2**52} bytes, it is said to have 4112",),
    ),
    "a cut dim without end": (
        test_verifier.tensor("m.weight", shape=[2**50, 4]),
        (f"tensor 'm.weight': the ranks hold 8 rows of {2**50}",),
    ),
    "a block without end": (
        test_verifier.signed(
            lambda d: d["tensors"]["m.weight"]["placement"]["blocks"][0].update(size=2**50)
        ),
        (f"'m.weight': its blocks take {2**50}, the dim has 8",),
    ),
    "a file without end": (
        test_verifier.signed(lambda d: d["files"][RANK0].update(size=10**30)),
        (f"files.{RANK0}.size",),
    ),
    "an unknown dtype": (test_verifier.tensor("norm", dtype="F33"), ("'norm' is 'F33' of 1 dims",)),
    "a degree without end": (
        test_verifier.signed(lambda d: d.update(tp=10**9)),
        ("tp: Input should be less than or equal to 99999",),
    ),
    "a tensor named __metadata__": (
        test_verifier.signed(lambda d: d["tensors"].update(__metadata__=d["tensors"].pop("norm"))),
        ("tensor '__metadata__': that is the format's own key",),
    ),
    "a newline more": (
        lambda out: (out / ck.INDEX).write_bytes((out / ck.INDEX).read_bytes() + b"\n"),
        ("is damaged: it does not have the digest it states",),
    ),
    "too large": (
        lambda out: os.truncate(out / ck.INDEX, 500_000_001),
        ("has 500000001 bytes, the limit is 500000000",),
    ),
    "deep": (put(ck.INDEX, nested(900).encode()), ("nested too deeply",)),
    "LFS": (put(ck.INDEX, LFS), ("a Git LFS pointer",)),
}


def swap(document: dict[str, Any]) -> None:
    """Exchange the data of two tensors of one dtype and shape."""
    one, other = document["m.weight"], document["k.weight"]
    assert one["shape"] == other["shape"]
    one["data_offsets"], other["data_offsets"] = other["data_offsets"], one["data_offsets"]


HEADER_EDITS: Mapping[str, Callable[[dict[str, Any]], object]] = {
    "two tensors swapped": swap,
    "another format": lambda d: d["__metadata__"].update(format="np"),
}

SHARD_SETS: Mapping[str, Kind] = {
    **{
        f"set: {name}, {how[0]}": (shards(damage, *how), (message,))
        for name, (damage, message) in test_verifier.CLOSED.items()
        for how in (VERIFY, MERGE, RESHARD)
    },
    **{
        f"set: forged, {name}, {how[0]}": (shards(damage, *how), (ck.INDEX, *messages))
        for name, (damage, messages) in FORGED.items()
        for how in (VERIFY, MERGE)
    },
    **{
        f"set: {name}, verify": (shards(damage, *VERIFY), (message,))
        for name, (damage, message) in (test_verifier.DAMAGED | test_verifier.LYING).items()
    },
    **{
        f"set: lying, {name}, verify with the source": (
            shards(damage, *VERIFY, "--source", "{folder}/s"),
            (message,),
        )
        for name, (damage, message) in test_verifier.LYING.items()
    },
    "set: another dtype than the source's": (
        shards(
            lambda s: (
                test_verifier.header(SHARED, lambda d: d["norm"].update(dtype="I32"))(s),
                test_verifier.tensor("norm", dtype="I32")(s),
            ),
            *(*VERIFY, "--source", "{folder}/s"),
        ),
        ("tensor 'norm' is I32, in the source F32",),
    ),
    "set: a tensor of fewer dims": (
        shards(
            test_verifier.header(RANK0, lambda d: d["o.weight"].update(shape=[8])),
            *(*VERIFY, "--source", "{folder}/s"),
        ),
        (RANK0, "the header has ('BF16', (8,)), the index ('BF16', (4, 2))"),
    ),
    "set: deep metadata": (
        shards(test_verifier.metadata(nested(900)), *VERIFY),
        (RANK0, "its metadata lacks the shardc key"),
    ),
    "set: a rank of true": (
        shards(
            test_verifier.header(
                test_verifier.RANK1,
                lambda d: d["__metadata__"].update(
                    shardc=d["__metadata__"]["shardc"].replace('"rank":1', '"rank":true')
                ),
            ),
            *MERGE,
        ),
        (test_verifier.RANK1, "its metadata says rank True, the index says 1"),
    ),
    **{
        f"set: {name} in a header": (
            shards(test_verifier.header(RANK0, edit), *MERGE),
            (RANK0, "its header does not have the digest that the index states"),
        )
        for name, edit in HEADER_EDITS.items()
    },
    "set: a file linked out": (
        shards(link("LICENSE", "/etc/passwd"), *MERGE),
        ("LICENSE", "is a link that leaves the folder, to /etc/passwd"),
    ),
    "set: config is a pipe": (
        shards(lambda s: ((s / "config.json").unlink(), os.mkfifo(s / "config.json")), *VERIFY),
        ("config.json: is not a regular file",),
    ),
    "set: a shard is a pipe": (
        shards(lambda s: ((s / RANK0).unlink(), os.mkfifo(s / RANK0)), *VERIFY),
        (RANK0, "is missing"),
    ),
}

KINDS: dict[str, Kind] = {**SAFETENSORS, **INDEXES, **PICKLES, **MANIFESTS, **SHARD_SETS}


def names_below(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*")}


@pytest.mark.parametrize("kind", KINDS)
def test_refused(kind: str, tmp_path: Path) -> None:
    write, messages = KINDS[kind]
    args = [str(arg) for arg in write(tmp_path)]
    before, started = names_below(tmp_path), time.process_time()
    result = CliRunner().invoke(main, args)
    assert time.process_time() - started < CPU_S
    assert isinstance(result.exception, SystemExit), result.exception
    assert result.exit_code == 1
    assert names_below(tmp_path) == before
    assert not (tmp_path / "out").exists()
    lines = result.stderr.splitlines()
    assert result.stdout == ""
    assert all(line.startswith("error: ") and line.isprintable() for line in lines), lines
    for message in messages:
        assert any(message in line for line in lines), (message, lines)


def test_messages_are_lines() -> None:
    problem = Problem("a\nb", "\x1b[2J\u202e", "\ud800")
    assert str(problem) == "a\\nb: \\x1b[2J\\u202e (\\ud800)"
    assert str(Problem("größe 模型", "\xa0")) == "größe 模型: \xa0"
    many = ShardcError(Problem(str(n), "x") for n in range(MAX_PROBLEMS + 5))
    assert len(many.problems) == MAX_PROBLEMS + 1
    assert str(many.problems[-1]) == "and 5 problems more"


# --- odd, and sound ------------------------------------------------------------------------------

ODD = ["a/b.w", "../../w", "/etc/w", "W", "w", "模型.größe", "a b", "__metadata", "con", "-0"]


def test_odd_names_come_back(tmp_path: Path) -> None:
    """Slashes, parents, names that differ in case only: a tensor's name is no file's."""
    tensors = {name: ck.Data.count("F32", [2, 2], 10 * n) for n, name in enumerate(ODD)}
    tensors["m.weight"] = TENSORS["m.weight"]
    args = build(ck.component(tmp_path / "s", tensors))
    assert CliRunner().invoke(main, [str(arg) for arg in args]).exit_code == 0
    assert {path.name for path in tmp_path.iterdir()} == {"s", "rules.toml", "out"}
    assert shardc.verify(tmp_path / "out", tmp_path / "s").ok
    shardc.merge(tmp_path / "out", tmp_path / "full")
    assert ck.read_all(tmp_path / "full") == tensors


@pytest.mark.parametrize("length", [640, 1152, 0x3C, 0x0A80, 0x2180])
def test_a_length_that_begins_as_another_file_does(length: int, tmp_path: Path) -> None:
    raw = json.dumps({"w": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}).encode()
    (tmp_path / "x.safetensors").write_bytes(ck.raw_file(raw.ljust(length), b"a"))
    assert [t.name for t in read_header(tmp_path / "x.safetensors").tensors] == ["w"]


def test_an_empty_tensor_of_many_rows(tmp_path: Path) -> None:
    """No byte, and more rows than any memory could number."""
    tensors = {**TENSORS, "m.weight": ck.Data("F32", (2**40, 0), b"")}
    args = build(ck.component(tmp_path / "s", tensors))
    assert CliRunner().invoke(main, [str(arg) for arg in args]).exit_code == 0
    assert shardc.verify(tmp_path / "out", tmp_path / "s").ok
    shardc.merge(tmp_path / "out", tmp_path / "full")
    assert ck.read_all(tmp_path / "full") == tensors


def test_a_note_that_is_no_name(tmp_path: Path) -> None:
    """Metadata that maps to a tensor names a twin of it, where it names anything."""
    notes = {
        "": "n.weight",
        "a\x1b": "n.weight",
        "module.__metadata__": "n.weight",
        "t": "n.weight",
    }
    source = ck.component(tmp_path / "s", TENSORS)
    ck.save(source / WEIGHTS, TENSORS, notes)
    assert CliRunner().invoke(main, [str(arg) for arg in build(source)]).exit_code == 0
    assert shardc.verify(tmp_path / "out", source).ok
    assert ck.read_ranks(tmp_path / "out", 2)[0].keys() == {*TENSORS, "t"}


@pytest.mark.parametrize("what", ["pipeline", "component", "file"])
def test_the_hubs_links_are_followed(what: str, tmp_path: Path) -> None:
    pipe = ck.pipeline(tmp_path / "pipe", {"transformer": ck.CLASS})
    ck.component(pipe / "transformer", TENSORS, files=2 if what != "file" else 1)
    snapshot = ck.hub_snapshot(pipe, tmp_path / "cache")
    under = {"pipeline": "", "component": "transformer", "file": f"transformer/{WEIGHTS}"}[what]
    ck.manifest(tmp_path / "rules.toml", RULES)
    shardc.build(snapshot / under, tmp_path / "out", 2, manifest=tmp_path / "rules.toml")
    assert shardc.verify(tmp_path / "out", pipe / under).ok
    blob = next((tmp_path / "cache" / "blobs").iterdir())
    blob.unlink()
    blob.symlink_to("/etc/hostname")  # no blob of the Hub's is a link
    with pytest.raises(ShardcError, match="is a link that leaves the folder"):
        shardc.plan(snapshot, 2, manifest=tmp_path / "rules.toml")


# --- many, and bounded ---------------------------------------------------------------------------

MEASURED = """
import resource, sys, time
from pathlib import Path
from shardc.header import read_header
count = len(read_header(Path(sys.argv[1])).tensors)
print(count, time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


@pytest.mark.slow
def test_a_million_tiny_tensors(tmp_path: Path) -> None:
    """As many as a header may hold: some seconds, and less than 1.5 GB."""
    count = 1_000_000
    rows = (
        f'"t{n}":{{"dtype":"U8","shape":[1],"data_offsets":[{n},{n + 1}]}}' for n in range(count)
    )
    raw = ("{" + ",".join(rows) + "}").encode()
    (tmp_path / "x.safetensors").write_bytes(ck.raw_file(raw, bytes(count)))
    done = subprocess.run(
        [sys.executable, "-c", MEASURED, str(tmp_path / "x.safetensors")],
        capture_output=True,
        text=True,
        check=True,
    )
    found, seconds, peak_kib = map(float, done.stdout.split())
    assert found == count
    assert seconds < 120
    assert peak_kib < 1.5e6


# --- nothing is run, nothing unpickled -----------------------------------------------------------

PACKAGE = Path(shardc.__file__).parent
# docs/security.md says of each why it is harmless, or who runs what it runs.
TRUSTED = {
    ("loaders/local.py", "pickle"),
    ("loaders/group.py", "all_gather_object"),
    ("loaders/prove.py", "runpy"),
    ("derive.py", "runpy"),
    ("derive.py", "__import__"),
}
RUNS = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "runpy", "code", "yaml"}
CALLS = {"eval", "exec", "compile", "__import__"}
LOADS = re.compile(r"(torch|np|numpy)\.load$|.*(gather|broadcast|scatter|recv)_object(_list)?$")


def runs(path: Path) -> set[str]:
    """What a module has that could run what it reads."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names} & RUNS
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            found |= {node.module.split(".")[0]} & RUNS
        elif isinstance(node, ast.Name):
            found |= {node.id} & CALLS
        elif isinstance(node, ast.Attribute) and LOADS.match(ast.unparse(node)):
            found.add(node.attr)
    return found


def test_nothing_runs_what_it_reads() -> None:
    """Python's own `compile` of a regular expression is an attribute, and so none of CALLS."""
    found = set()
    for path in sorted({*PACKAGE.rglob("*.py"), *(PACKAGE / "loaders").glob("*.py")}):
        found |= {(path.relative_to(PACKAGE).as_posix(), what) for what in runs(path)}
    assert found == TRUSTED
    text = (PACKAGE.parent / "docs" / "security.md").read_text()
    for module, what in TRUSTED:
        assert f"`{module}`" in text
        assert f"`{what}`" in text


class Trap:
    """Unpickled, it leaves a trace."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


@pytest.mark.parametrize(
    "name", [WEIGHTS, "config.json", "pytorch_model.bin", "x.ckpt", "model.pt"]
)
def test_a_trap_does_not_spring(name: str, tmp_path: Path) -> None:
    raw = pickle.dumps(Trap(tmp_path / "sprung"))
    source = ck.component(tmp_path / "s", TENSORS)
    (source / WEIGHTS).unlink()
    (source / name).write_bytes(raw)
    for args in (
        build(source),
        build(source / name),
        ["inspect", source],
        ["inspect", source / name],
    ):
        assert CliRunner().invoke(main, [str(arg) for arg in args]).exit_code == 1
    assert not (tmp_path / "sprung").exists()
    pickle.loads(raw)
    assert (tmp_path / "sprung").exists()


# --- any flipped bit -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("small")
    made = ck.manifest(folder / "rules.toml", RULES)
    shardc.build(ck.component(folder / "s", TENSORS), folder / "out", 2, manifest=made)
    return folder / "out"


def flipped(path: Path, at: int) -> None:
    """Flip one bit; which one goes by its place."""
    with path.open("r+b") as file:
        file.seek(at)
        (value,) = file.read(1)
        file.seek(at)
        file.write(bytes([value ^ (1 << at % 8)]))


def places(path: Path) -> list[int]:
    """Every byte, but of a header's padding every 64th."""
    raw = path.read_bytes()
    if path.suffix != ".safetensors":
        return list(range(len(raw)))
    start = 8 + int.from_bytes(raw[:8], "little")
    text = len(raw[:start].rstrip())
    return [*range(text), *range(text, start, 64), start - 1, *range(start, len(raw))]


def test_verify_finds_every_flipped_bit(small: Path) -> None:
    for path in sorted(small.iterdir()):
        for at in places(path):
            flipped(path, at)
            with suppress(ShardSetError):
                assert not shardc.verify(small).ok, (path.name, at)
            flipped(path, at)
    assert shardc.verify(small).ok


def test_the_loader_finds_every_flipped_bit_that_it_relies_on(small: Path) -> None:
    """The index and the headers always, tensors where it is told to; config.json a model's load."""
    pytest.importorskip("torch")
    from shardc.loaders import load_state_dict

    for path in sorted(small.iterdir()):
        if path.name == "config.json" or path.name.startswith("rank-00000"):
            continue
        start = 0
        if path.suffix == ".safetensors":
            start = 8 + int.from_bytes(path.read_bytes()[:8], "little")
        for at in places(path):
            flipped(path, at)
            with pytest.raises(ShardcError):
                load_state_dict(small, 1, verify=0 < start <= at)
            flipped(path, at)
    assert load_state_dict(small, 1, verify=True).keys() == TENSORS.keys()


@pytest.mark.parametrize("name", HEADER_EDITS)
def test_the_loader_finds_another_header(name: str, tmp_path: Path) -> None:
    """Sound by itself, of the right size, and of the tensors that the index lists."""
    pytest.importorskip("torch")
    from shardc.loaders import load_state_dict

    out = Path(str(shards(lambda _: None, "verify")(tmp_path)[1]))
    load_state_dict(out, 0)
    test_verifier.header(RANK0, HEADER_EDITS[name])(out)
    with pytest.raises(ShardSetError, match=f"{RANK0}: its header does not have the digest"):
        load_state_dict(out, 0)
    load_state_dict(out, 1)


# --- docs/security.md ----------------------------------------------------------------------------

SECURITY = (PACKAGE.parent / "docs" / "security.md").read_text()


def test_the_limits_are_those_in_force() -> None:
    rows = re.findall(r"^\| `(shardc\.\w+)\.(MAX_\w+)` \| ([\d,]+) \|", SECURITY, re.M)
    assert len(rows) >= 19
    for module, name, value in rows:
        assert getattr(importlib.import_module(module), name) == int(value.replace(",", "")), name
    told = {(module.removeprefix("shardc."), name) for module, name, _ in rows}
    for module in {module for module, _ in told}:  # and none of theirs is left untold
        source = (PACKAGE / f"{module}.py").read_text()
        assert {(module, name) for name in re.findall(r"^(MAX_\w+) =", source, re.M)} <= told


def test_the_abuse_log_names_tests() -> None:
    log = SECURITY.partition("## Abuse log")[2]
    rows = [line for line in log.splitlines() if re.match(r"\| (?!idea|-)", line)]
    assert len(rows) > 40
    for row in rows:
        tests = re.findall(r"`([^`]+)`", row.split(" | ")[-1])
        assert tests, row
        for test in tests:
            where, _, name = test.partition(": ")
            if where == "kind":
                assert name in KINDS, test
            else:
                assert callable(getattr(importlib.import_module(f"tests.{where}"), name)), test
