"""A source's files, opened and read so that nothing under their names can hang or flood us.

JSON is parsed strictly: what two readers might take for two things is refused.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from shardc.errors import CheckpointError, Problem
from shardc.remote import AnyFile, RemoteFile

MAX_JSON_BYTES = 100_000_000  # of config.json, model_index.json and an index of weights
MAX_DEPTH = 64  # of nested JSON: far from where anything recursive would give up


@contextmanager
def regular_file(path: AnyFile) -> Iterator[tuple[BinaryIO, int]]:
    """An open file and its size; CheckpointError for what else a name may lead to.

    To open a pipe would wait for its writer, and a device may have no end.
    """

    if isinstance(path, RemoteFile):
        with path.stream() as file:
            yield file, path.size_bytes
        return

    def opener(name: str, flags: int) -> int:
        return os.open(name, flags | getattr(os, "O_NONBLOCK", 0))

    try:
        with open(path, "rb", opener=opener) as file:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode):
                raise CheckpointError(Problem(str(path), "is not a regular file"))
            yield file, found.st_size
    except IsADirectoryError as error:
        raise CheckpointError(Problem(str(path), "is not a regular file")) from error
    except OSError as error:
        raise CheckpointError(Problem(str(path), f"cannot read it: {error.strerror}")) from error


def read_whole(path: Path, limit: int) -> bytes:
    """A small file's bytes; CheckpointError where it is no regular file, or over `limit` bytes."""
    with regular_file(path) as (file, size):
        if size > limit:
            raise CheckpointError(Problem(str(path), f"has {size} bytes, the limit is {limit}"))
        return file.read(limit)


def read_json(path: Path, limit: int = MAX_JSON_BYTES) -> Any:
    """A JSON file, as `parse_json` reads it; CheckpointError."""
    return parse_json(read_whole(path, limit), str(path))


# What stands under the name of another file, by its first bytes; what to do about it.
_FOREIGN: tuple[tuple[re.Pattern[bytes], str, str], ...] = (
    (re.compile(rb"version "), "a Git LFS pointer, not the file", "run `git lfs pull`"),
    (
        re.compile(rb"\s*<[!?a-zA-Z]"),
        "an HTML or XML page, not the file",
        "download it again: a server said something else",
    ),
    (
        re.compile(rb"PK\x03\x04|\x80[\x02-\x05][^\0]"),
        "a pickle file under another name; shardc never unpickles",
        "where you trust it, load it and write it with safetensors.torch.save_file",
    ),
    (re.compile(rb"GGUF"), "a GGUF file under another name", ""),
    (re.compile(rb"\x89HDF"), "an HDF5 file under another name", ""),
)


def foreign(path: str, first: bytes) -> CheckpointError | None:
    """The error that names what the first 8 bytes of a wrong file are; None where unknown."""
    for magic, what, fix in _FOREIGN:
        if magic.match(first):
            return CheckpointError(Problem(path, what, fix))
    return None


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                raise ValueError(f"duplicate key {name!r:.200}")
            seen.add(name)
    return found


def _constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _integer(text: str) -> int:
    if text == "-0":  # no count to any other reader
        raise ValueError("-0 is no count")
    return int(text)


def parse_json(raw: bytes, where: str) -> Any:
    """Parse JSON strictly; CheckpointError.

    UTF-8 without halves of characters, no duplicate keys, no NaN, at most MAX_DEPTH levels.
    """
    try:
        document = json.loads(
            raw.decode("utf-8"),
            object_pairs_hook=_no_duplicates,
            parse_constant=_constant,
            parse_int=_integer if b"-0" in raw else None,
        )
        if nested_deeper(document, MAX_DEPTH):
            raise RecursionError
        if _ESCAPED_HALF.search(raw):
            json.dumps(document, ensure_ascii=False).encode("utf-8")
    except (ValueError, RecursionError) as error:
        if raw and (known := foreign(where, raw[:8])):
            raise known from error
        reason = str(error)
        if isinstance(error, RecursionError):
            reason = "nested too deeply"
        elif isinstance(error, UnicodeEncodeError):
            reason = "half a character (a lone surrogate) in a string"
        raise CheckpointError(Problem(where, f"not valid JSON: {reason}")) from error
    return document


_ESCAPED_HALF = re.compile(rb"\\u[dD][89a-fA-F]")  # JSON can spell half a surrogate pair


def nested_deeper(document: Any, limit: int) -> bool:
    """Whether dicts and lists nest in more than `limit` levels."""
    level = [document]
    for _ in range(limit + 1):
        level = [
            inner
            for outer in level
            if isinstance(outer, dict | list)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
        if not level:
            return False
    return True
