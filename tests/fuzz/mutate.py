"""Damage to sound inputs: to their bytes, and to what they say."""

from __future__ import annotations

import copy
import json
import random
import re
import tomllib
from collections.abc import Callable
from typing import Any

import tomli_w

# What breaks readers: edges of numbers, paths, what formats reserve, other types, depth.
NUMBERS: tuple[Any, ...] = (
    *(-1, 0, 1, 2, 3, 4, 8, 255, 2**31, 2**53, 2**59, 2**62, 2**63, 2**64, 10**30),
    *(True, False, 1.5, -0.0, 1e308),
)
STRINGS = (
    *("", "..", "../x.safetensors", "/tmp/x.safetensors", "a\0b", "\x1b[2J", "\ud800", "y" * 5000),
    *(
        "__metadata__",
        "module.__metadata__",
        "F4",
        "U8",
        "F32",
        "I32",
        "BF16",
        "1.0",
        "2.0",
        "0" * 32,
    ),
    *("replicate", "shard", "packed_shard", "per_head", "config.json", "replicated.safetensors"),
    *("rank-00000-of-00002.safetensors", "a * b", "inner // 0", "local(heads)", "sum(widths)"),
    *("$p.m", "*", "{a,b}.*", "m", "n"),
)
OTHERS: tuple[Any, ...] = (
    *(None, [], {}, [0, 0], [0, 8], [8, 0], [2**62] * 3, [2**62, 2**62, 0], [1] * 70, [[0, 2]]),
    *({"zeros": 2**50}, {"zeros": 1}, json.loads("[" * 80 + "]" * 80)),
)
TOKENS = (
    b"{",
    b"}",
    b"[",
    b"]",
    b",",
    b":",
    b'"',
    b"\\u0000",
    b"-0",
    b"1e9",
    b"\0",
    b"\xff",
    b"null",
)

Random = random.Random


def _bytes(raw: bytes, chance: Random) -> bytes:
    """A few edits of bytes."""
    data = bytearray(raw)
    for _ in range(chance.randint(1, 4)):
        at = chance.randrange(len(data) + 1)
        stop = min(len(data), at + chance.choice([1, 2, 8, 64, 4096]))
        edit = chance.randrange(7)
        if edit == 0 and at < len(data):
            data[at] ^= 1 << chance.randrange(8)
        elif edit == 1 and at < len(data):
            data[at] = chance.randrange(256)
        elif edit == 2:
            del data[at:stop]
        elif edit == 3:
            data[at:at] = data[at:stop]
        elif edit == 4:
            data[at:at] = chance.choice(TOKENS)
        elif edit == 5:
            data[at:stop] = chance.choice(TOKENS)
        else:
            data = data[:at]
    return bytes(data)


def _place(document: Any, chance: Random) -> Any:
    """A dict or list somewhere in the document: what is near its root is as likely as the rest."""
    at = document
    while inner := [v for v in (at.values() if isinstance(at, dict) else at) if _holds(v)]:
        if chance.random() < 0.3:
            break
        at = chance.choice(inner)
    return at


def _holds(value: Any) -> bool:
    return isinstance(value, dict | list)


def _value(now: Any, chance: Random) -> Any:
    """Something in the place of `now`: mostly of its type, as others are soon refused."""
    if isinstance(now, int) and not isinstance(now, bool) and chance.random() < 0.3:
        return now + chance.choice([-8, -1, 1, 8, 4096])
    alike = NUMBERS if isinstance(now, int | float) else STRINGS if isinstance(now, str) else OTHERS
    any_type = chance.choice([NUMBERS, STRINGS, OTHERS])
    return copy.deepcopy(chance.choice(alike if chance.random() < 0.7 else any_type))


def edited(document: Any, chance: Random) -> Any:
    """The document with a few of its values changed, moved, copied or gone."""
    document = copy.deepcopy(document)
    if not _holds(document):
        return _value(None, chance)
    for _ in range(chance.choice([1, 1, 1, 2, 4])):
        one = _place(document, chance)
        keys = list(one) if isinstance(one, dict) else list(range(len(one)))
        edit = chance.randrange(8)
        if not keys or edit == 0:
            value = chance.choice([_value(None, chance), copy.deepcopy(_place(document, chance))])
            if isinstance(one, dict):
                one[chance.choice(STRINGS)] = value
            else:
                one.append(value)
            continue
        key, other = chance.choice(keys), chance.choice(keys)
        if edit == 1:
            del one[key]
        elif edit == 2:
            one[key], one[other] = one[other], one[key]
        elif edit == 3 and isinstance(one, dict):  # the same under another name
            one[chance.choice(STRINGS)] = one.pop(key)
        else:
            one[key] = _value(one[key], chance)
    return document


def _json(raw: bytes, chance: Random) -> bytes:
    return json.dumps(edited(json.loads(raw), chance)).encode()


def _reworded(raw: bytes, chance: Random) -> bytes:
    """A header that may well be sound still, or mean two things: where readers could differ."""
    document = json.loads(raw)
    names = [name for name in document if name != "__metadata__"] or ["w"]
    name, edit = chance.choice(names), chance.randrange(5)
    if edit == 0 and name in document:
        document[chance.choice(STRINGS)] = document.pop(name)
    elif edit == 1:
        document["__metadata__"] = {chance.choice(STRINGS): chance.choice(STRINGS)}
    elif edit == 2 and name in document:
        shape = document[name]["shape"]
        at = chance.randrange(len(shape) + 1)
        shape[at:at] = chance.choice([[1], [1], [0], [2**32], [2**62, 2**62]])
    text = json.dumps(document)
    if edit == 3:  # a number, spelled otherwise
        numbers = list(re.finditer(r"\b\d+(?=[,\]])", text))
        if numbers:
            number = chance.choice(numbers)
            odd = chance.choice(["-{}", "{}.0", "{}e0", "0{}", "+{}", " {} ", "{}.", '"{}"'])
            spelled = odd.format(number[0])
            text = text[: number.start()] + spelled + text[number.end() :]
    elif edit == 4:  # a key twice
        again = edited(document.get(name), chance)
        text = f"{{{json.dumps(name)}: {json.dumps(again)}, " + text[1:]
    return text.encode()


def _file(raw: bytes, chance: Random) -> bytes:
    """A safetensors file whose header says something else, or whose data is of another size."""
    stop = 8 + int.from_bytes(raw[:8], "little")
    text = chance.choice([_json, _reworded])(raw[8:stop], chance)
    text = text.ljust(stop - 8) if chance.random() < 0.5 else text
    data = raw[stop:]
    if chance.random() < 0.1:
        data = data[: chance.randrange(len(data) + 1)] + bytes(chance.randrange(9))
    return len(text).to_bytes(8, "little") + text + data


def _toml(raw: bytes, chance: Random) -> bytes:
    return tomli_w.dumps(edited(tomllib.loads(raw.decode()), chance)).encode()


def _member(raw: bytes, chance: Random) -> bytes:
    """A set's file behind the byte that names it."""
    inner = _json if raw[1:2] == b"{" else _file
    return raw[:1] + inner(raw[1:], chance)


STRUCTURES: dict[str, Callable[[bytes, Random], bytes]] = {
    "header": _file,
    "manifest": _toml,
    "loader": _member,
}


def mutated(target: str, raw: bytes, chance: Random) -> bytes:
    """A sound input of a target, damaged one way or the other."""
    if chance.random() < 0.4:
        if target == "loader":
            return raw[:1] + _bytes(raw[1:], chance)
        return _bytes(raw, chance)
    try:
        return STRUCTURES.get(target, _json)(raw, chance)
    except (TypeError, ValueError, AttributeError, RecursionError):  # no TOML or no JSON
        return _bytes(raw, chance)
