"""The safetensors header: read strictly, written the same every time; safetensors is the judge."""

from __future__ import annotations

import json
import pickle
import random
from pathlib import Path
from typing import Any

import pytest
import safetensors
from hypothesis import given
from hypothesis import strategies as st

from shardc.errors import CheckpointError
from shardc.header import (
    DTYPE_BITS,
    MAX_HEADER_BYTES,
    TensorInfo,
    dump_header,
    lay_out,
    parse_header,
    parse_json,
    read_header,
    tensor_bytes,
)
from tests import checkpoints as ck

W = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


def entry(dtype: str, shape: Any, *offsets: Any) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": list(offsets)}


def written(folder: Path, header: Any, data: bytes) -> Path:
    path = folder / "x.safetensors"
    path.write_bytes(ck.raw_file(header, data))
    return path


@pytest.mark.parametrize("dtype", sorted(DTYPE_BITS))
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (4,), (2, 3, 4), (1, 1, 1, 8)])
def test_every_dtype_reads_as_safetensors_reads_it(
    dtype: str, shape: tuple[int, ...], tmp_path: Path
) -> None:
    if DTYPE_BITS[dtype] < 8 and shape == ():
        return  # half a byte: refused below
    odd = ck.Data.count("BOOL", [3])  # what follows is unaligned
    tensors = {"mask": odd, "w": ck.Data.count(dtype, shape)}
    ck.save(tmp_path / "x.safetensors", tensors, {"format": "pt"})
    header = read_header(tmp_path / "x.safetensors")
    assert ck.read(tmp_path / "x.safetensors") == tensors
    # mask comes first: it starts where an empty tensor would, and is listed before it
    found = {t.name: (t.dtype, t.shape, t.size_bytes) for t in header.tensors}
    assert found == {name: (t.dtype, t.shape, len(t.raw)) for name, t in tensors.items()}
    assert header.metadata == {"format": "pt"}
    assert header.file_bytes == (tmp_path / "x.safetensors").stat().st_size


def test_a_file_of_the_reference_writer(tmp_path: Path) -> None:
    import numpy as np
    from safetensors.numpy import save_file

    arrays = {"b": np.zeros((2, 3), np.float32), "a": np.ones(5, np.int8), "c": np.ones((), "<u8")}
    save_file(arrays, tmp_path / "x.safetensors", metadata={"k": "v", "format": "pt"})
    header = read_header(tmp_path / "x.safetensors")
    assert {t.name: t.shape for t in header.tensors} == {k: v.shape for k, v in arrays.items()}
    assert header.metadata == {"k": "v", "format": "pt"}


@pytest.mark.parametrize("metadata", [None, {}, {"format": "np"}])
@pytest.mark.parametrize("absent", [False, True])
def test_metadata_may_be_absent(
    metadata: dict[str, str] | None, absent: bool, tmp_path: Path
) -> None:
    header = {"w": W} if metadata is None and absent else {"__metadata__": metadata, "w": W}
    assert read_header(written(tmp_path, header, bytes(8))).metadata == (metadata or {})


def test_no_tensors_and_trailing_spaces(tmp_path: Path) -> None:
    assert read_header(written(tmp_path, b"{}   ", b"")).tensors == ()


def test_tensors_come_in_data_order(tmp_path: Path) -> None:
    header = {"b": entry("U8", [2], 1, 3), "a": entry("U8", [1], 0, 1)}
    assert [t.name for t in read_header(written(tmp_path, header, bytes(3))).tensors] == ["a", "b"]


@pytest.mark.parametrize(
    "name", ["a/b", "..", "größe", "模型", "\U0001f642", "a b", "x" * 400, '"quoted"', "__x__"]
)
def test_odd_names_are_legal(name: str, tmp_path: Path) -> None:
    assert read_header(written(tmp_path, {name: W}, bytes(8))).tensors[0].name == name


WRONG: dict[str, tuple[Any, bytes, str]] = {
    "not an object": (b"[1]", b"", "the header is not a JSON object"),
    "two documents": (b'{},"__metadata__":{}', b"", "not valid JSON: Extra data"),
    "not UTF-8": (b'{"\xff": 1}', b"", "not valid JSON: 'utf-8' codec"),
    "nan": (b'{"a": NaN}', b"", "not valid JSON: NaN is not JSON"),
    "infinity": (b'{"a": -Infinity}', b"", "not valid JSON: -Infinity is not JSON"),
    "duplicate": (b'{"a": 1, "a": 1}', b"", "not valid JSON: duplicate key 'a'"),
    "deep": (b"[" * 100_000, b"", "not valid JSON: nested too deeply"),
    "metadata": ({"__metadata__": {"v": 0}, "w": W}, bytes(8), "__metadata__ must map strings"),
    "metadata list": ({"__metadata__": [], "w": W}, bytes(8), "__metadata__ must map strings"),
    "no name": ({"": W}, bytes(8), "tensor '': a name of 0 characters, 1 to 4096 are taken"),
    "NUL": ({"a\0b": W}, bytes(8), "tensor 'a\\x00b': a name must be text, free of NUL"),
    "half a character": ({"\ud800": W}, bytes(8), "half a character"),
    "extra key": ({"w": {**W, "x": 1}}, bytes(8), "'w': must have exactly dtype, shape and data"),
    "missing key": ({"w": {"dtype": "F32"}}, bytes(8), "'w': must have exactly dtype, shape and"),
    "no object": ({"w": 3}, b"", "'w': must have exactly dtype"),
    "dtype": ({"w": entry("F33", [2], 0, 8)}, bytes(8), "'w': unknown dtype 'F33'"),
    "dtype list": ({"w": entry([], [2], 0, 8)}, bytes(8), "'w': unknown dtype []"),  # type: ignore[arg-type]
    "shape": ({"w": entry("F32", 2, 0, 8)}, bytes(8), "'w': shape 2 is not a list of counts"),
    "negative": ({"w": entry("F32", [-2], 0, 8)}, bytes(8), "shape [-2] is not a list of counts"),
    "bool": ({"w": entry("U8", [True], 0, 1)}, bytes(1), "shape [True] is not a list of counts"),
    "float": ({"w": entry("U8", [1.0], 0, 1)}, bytes(1), "shape [1.0] is not a list of counts"),
    "huge": ({"w": entry("U8", [2**63], 0, 1)}, bytes(1), "is not a list of counts"),
    "offsets": ({"w": entry("F32", [2], 0, 8, 9)}, bytes(8), "[0, 8, 9] are not two counts"),
    "offset": ({"w": entry("F32", [2], 0, "8")}, bytes(8), "[0, '8'] are not two counts"),
    "half a byte": ({"w": entry("F4", [3], 0, 1)}, bytes(1), "[3] of F4 does not fill whole"),
    "span": (
        {"w": entry("F32", [2], 0, 7)},
        bytes(7),
        "'w': F32 of shape [2] takes 8 bytes, its offsets span 7",
    ),
    "reversed": ({"w": entry("U8", [8], 8, 0)}, bytes(8), "takes 8 bytes, its offsets span -8"),
    "gap": (
        {"a": W, "b": entry("F32", [2], 16, 24)},
        bytes(24),
        "tensor 'b': a gap, it starts at byte 16 where 8 was expected",
    ),
    "leading gap": ({"a": entry("F32", [2], 4, 12)}, bytes(12), "'a': a gap, it starts at byte 4"),
    "overlap": (
        {"a": W, "b": entry("F32", [2], 4, 12)},
        bytes(12),
        "tensor 'b': an overlap, it starts at byte 4 where 8 was expected",
    ),
    "alias": ({"a": W, "b": W}, bytes(8), "tensor 'b': an overlap, it starts at byte 0"),
    "truncated": ({"w": W}, bytes(5), "truncated: its tensors take 8 bytes, the file holds 5"),
    "cut by one": ({"w": W}, bytes(7), "truncated: its tensors take 8 bytes, the file holds 7"),
    "trailing": (
        {"w": W},
        bytes(11),
        "trailing bytes: its tensors take 8 bytes, the file holds 11",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_files_are_refused(case: str, tmp_path: Path) -> None:
    header, data, message = WRONG[case]
    path = written(tmp_path, header, data)
    with pytest.raises(CheckpointError) as caught:
        read_header(path)
    assert message in str(caught.value)
    assert str(path) in str(caught.value)


NO_FILES: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "the file is empty"),
    "short": (b"1234567", "not a safetensors file: only 7 bytes long"),
    "lfs": (
        b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 3\n",
        "a Git LFS pointer, not the file (run `git lfs pull`)",
    ),
    "html": (b"<!DOCTYPE html>\n<html></html>", "an HTML or XML page, not the file (download it"),
    "zip": (
        b"PK\x03\x04\x14\0\x08\x08" + bytes(20),
        "a pickle file under another name; shardc never",
    ),
    **{
        f"pickle {number}": (
            pickle.dumps({"w": [1.0] * 9}, number),
            "a pickle file under another name; shardc never unpickles (where you trust it, load it",
        )
        for number in (2, 3, 4, 5)
    },
    "gguf": (b"GGUF\x03\0\0\0" + bytes(20), "a GGUF file under another name"),
    "hdf5": (b"\x89HDF\r\n\x1a\n" + bytes(20), "an HDF5 file under another name"),
    "huge header": (
        (10**8 + 1).to_bytes(8, "little") + bytes(9),
        "it claims a header of 100000001 bytes, the limit is 100000000",
    ),
    "cut header": (
        (100).to_bytes(8, "little") + b"{}",
        "truncated: header of 100 bytes in a file of 10 bytes",
    ),
}


@pytest.mark.parametrize("case", NO_FILES)
def test_other_files_are_named_for_what_they_are(case: str, tmp_path: Path) -> None:
    raw, message = NO_FILES[case]
    path = tmp_path / "x.safetensors"
    path.write_bytes(raw)
    with pytest.raises(CheckpointError) as caught:
        read_header(path)
    assert message in str(caught.value)
    assert str(path) in str(caught.value)


def test_unreadable(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot read it: No such file"):
        read_header(tmp_path / "none.safetensors")
    with pytest.raises(CheckpointError, match="is not a regular file"):
        read_header(tmp_path)


def test_all_problems_at_once(tmp_path: Path) -> None:
    header = {
        "__metadata__": {"a": 1},
        "u": entry("F33", [2], 0, 8),
        "v": entry("F32", [2], 0, 9),
        "w": 3,
    }
    with pytest.raises(CheckpointError) as caught:
        read_header(written(tmp_path, header, bytes(8)))
    assert len(caught.value.problems) == 4
    assert str(caught.value).startswith("4 problems:\n  - ")


def test_what_safetensors_refuses_is_refused() -> None:
    """Random damage to a header: whatever shardc takes, the reference takes, with one meaning."""
    chance = random.Random(5)
    tensors = {"a": ck.Data.count("U8", [3]), "b": ck.Data.count("F32", [2, 2])}
    good = json.dumps(ck.header_of(tensors, {"format": "pt"})).encode()
    data = b"".join(t.raw for t in tensors.values())
    taken = 0
    for _ in range(3000):
        raw = bytearray(good)
        for _ in range(chance.randint(1, 2)):
            raw[chance.randrange(len(raw))] = chance.choice(b'0123456789,:{}[]"abF ')
        try:
            header = parse_header(bytes(raw), file_bytes=8 + len(raw) + len(data), where="x")
        except CheckpointError:
            continue
        taken += 1
        found = safetensors.deserialize(ck.raw_file(bytes(raw), data))
        assert {(t.name, t.dtype, t.shape) for t in header.tensors} == {
            (name, e["dtype"], tuple(e["shape"])) for name, e in found
        }
    assert taken > 50


SHAPES = st.lists(st.integers(0, 5), max_size=4).map(tuple)


@given(
    st.lists(st.tuples(st.sampled_from(sorted(DTYPE_BITS)), SHAPES), max_size=6),
    st.sampled_from([8, 64, 4096]),
)
def test_written_headers_read_back(rows: list[tuple[str, tuple[int, ...]]], alignment: int) -> None:
    rows = [row for row in rows if tensor_bytes(*row) is not None]
    placed = lay_out((f"t{n}/é", dtype, shape) for n, (dtype, shape) in enumerate(rows))
    raw = dump_header(placed, {"format": "pt", "shardc": '{"a":1}'}, alignment=alignment)
    size = placed[-1].stop if placed else 0
    assert len(raw) % alignment == 0
    header = parse_header(raw[8:], file_bytes=len(raw) + size, where="x")
    assert (header.tensors, header.data_start) == (placed, len(raw))
    assert header.metadata == {"format": "pt", "shardc": '{"a":1}'}
    found = safetensors.deserialize(raw + bytes(size))
    assert {name for name, _ in found} == {t.name for t in placed}


def test_written_headers_keep_their_order() -> None:
    placed = lay_out([("z", "U8", (1,)), ("a", "U8", (2,))])
    raw = dump_header(placed, {"b": "1", "a": "2"}, alignment=8)
    text = raw[8:].decode()
    assert list(json.loads(text)) == ["__metadata__", "z", "a"]
    assert text.rstrip(" ").endswith("}")
    assert list(json.loads(text)["__metadata__"]) == ["b", "a"]


def test_lay_out_refuses_parts_of_bytes() -> None:
    with pytest.raises(ValueError, match=r"w: F4 \(3,\) does not fill whole bytes"):
        lay_out([("w", "F4", (3,))])


def test_parse_json() -> None:
    assert parse_json(b'{"a": [1, 2.5, null]}', "x") == {"a": [1, 2.5, None]}
    with pytest.raises(CheckpointError, match="x: not valid JSON"):
        parse_json(b"", "x")


def test_constants() -> None:
    assert MAX_HEADER_BYTES == 100_000_000
    assert TensorInfo("w", "F32", (2,), 8, 16).size_bytes == 8
