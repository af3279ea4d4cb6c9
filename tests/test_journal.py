"""The journal: what it takes down it tells again, and nothing that is torn or damaged."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from shardc.errors import OutputError
from shardc.execute import Digests
from shardc.journal import Journal, read_journal

FACTS = {"tp": 4, "dtype": "keep", "source": None}
DONE = {n: Digests(f"{n:032x}", (f"{n + 1:032x}", f"{n + 2:032x}")) for n in range(6)}


def written(path: Path) -> Path:
    """A journal of three records on tensors and one on a file."""
    journal = Journal(path, FACTS, replaces=True, past=None)
    assert not journal.vouches
    journal.add_tensors("transformer", {0: DONE[0], 1: DONE[1]})
    assert journal.vouches
    journal.add_tensors("", {2: DONE[2]})
    journal.add_file("tokenizer/größe.json", "f" * 32)
    journal.add_tensors("transformer", {3: DONE[3]})
    journal.close()
    return path


def test_it_tells_what_it_took_down(tmp_path: Path) -> None:
    past = read_journal(written(tmp_path / "journal"))
    assert past is not None
    assert (past.facts, past.replaces, past.vouches) == (FACTS, True, True)
    assert past.tensors == {"transformer": {n: DONE[n] for n in (0, 1, 3)}, "": {2: DONE[2]}}
    assert past.files == {"tokenizer/größe.json": "f" * 32}


def test_any_torn_tail_costs_its_record_alone(tmp_path: Path) -> None:
    whole = written(tmp_path / "whole").read_bytes()
    path = tmp_path / "journal"
    ends = [n + 1 for n, byte in enumerate(whole) if byte == ord("\n")]
    for size in range(len(whole) + 1):
        path.write_bytes(whole[:size])
        past = read_journal(path)
        complete = sum(end <= size for end in ends)
        if not complete:
            assert past is None
            continue
        assert past is not None
        records = sum(map(len, past.tensors.values())) + len(past.files)
        assert records == [0, 2, 3, 4, 5][complete - 1]
        # and what is appended behind the tear is told
        journal = Journal(path, FACTS, replaces=True, past=past)
        journal.add_tensors("more", {5: DONE[5]})
        journal.close()
        again = read_journal(path)
        assert again is not None
        assert again.tensors["more"] == {5: DONE[5]}
        assert {**again.tensors, "more": 0} == {**past.tensors, "more": 0}


def test_any_flipped_byte_costs_its_record_alone(tmp_path: Path) -> None:
    whole = written(tmp_path / "whole").read_bytes()
    path = tmp_path / "journal"
    sound = read_journal(tmp_path / "whole")
    assert sound is not None
    first = whole.index(b"\n")
    for at in range(len(whole)):
        raw = bytearray(whole)
        raw[at] ^= 0x04
        path.write_bytes(raw)
        past = read_journal(path)
        if at <= first:
            assert past is None or past.facts == FACTS
            continue
        assert past is not None
        for component, held in past.tensors.items():
            assert held.items() <= sound.tensors[component].items()
        assert past.files.items() <= sound.files.items()
        lost = sum(map(len, sound.tensors.values())) - sum(map(len, past.tensors.values()))
        assert lost <= 3  # a newline that is gone joins two records


def test_a_later_record_counts(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal", FACTS, replaces=False, past=None)
    journal.add_tensors("", {0: DONE[0]})
    journal.add_tensors("", {0: DONE[1]})
    journal.close()
    past = read_journal(tmp_path / "journal")
    assert past is not None
    assert past.tensors == {"": {0: DONE[1]}}


@pytest.mark.parametrize("raw", [b"", b"\n", b"half", b"\x00" * 100, b"0123456789abcdef {}\n"])
def test_what_is_no_journal(raw: bytes, tmp_path: Path) -> None:
    (tmp_path / "journal").write_bytes(raw)
    assert read_journal(tmp_path / "journal") is None
    assert read_journal(tmp_path / "absent") is None
    assert read_journal(tmp_path) is None


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("years of work")
    (tmp_path / "journal").symlink_to("precious")
    with pytest.raises(OutputError, match="journal: cannot write it: Too many levels"):
        Journal(tmp_path / "journal", FACTS, replaces=False, past=None)
    assert (tmp_path / "precious").read_text() == "years of work"


def test_a_full_disk_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    journal = Journal(tmp_path / "journal", FACTS, replaces=False, past=None)
    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OutputError, match=r"journal: cannot write it: No space .*, \d+ are free"):
        journal.add_file("x", "0" * 32)
