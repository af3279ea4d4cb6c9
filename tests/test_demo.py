"""`shardc demo` on the real thing: its steps, its picture, and what it leaves behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from shardc import demo
from shardc.cli import main
from shardc.errors import VerifyError
from tests import checkpoints as ck

STEPS = ["make", "plan", "build", "verify", "merge", "compare"]


def shardc(*args: object) -> str:
    result = CliRunner().invoke(main, ["demo", *(str(arg) for arg in args)])
    assert result.exit_code == 0, result.output
    assert result.stderr == ""
    return result.stdout


def test_the_demo_leaves_nothing(tmp_path: Path) -> None:
    work, temporary = tmp_path / "work", tmp_path / "temporary"
    work.mkdir()
    temporary.mkdir()
    started = time.monotonic()
    result = subprocess.run(
        [sys.executable, "-m", "shardc", "demo"],
        capture_output=True,
        text=True,
        check=True,
        cwd=work,
        env={**os.environ, "TMPDIR": str(temporary)},
    )
    assert time.monotonic() - started < 60
    assert result.stderr == ""
    words = [line.split()[0] for line in result.stdout.splitlines() if line.strip()]
    assert [word for word in words if word in STEPS] == STEPS
    assert list(work.iterdir()) == []
    assert list(temporary.iterdir()) == []


def test_json(tmp_path: Path) -> None:
    report = json.loads(shardc("--json"))
    assert [step["name"].split()[0] for step in report["steps"]] == STEPS
    assert all(step["result"] and step["seconds"] >= 0 for step in report["steps"])
    assert [line["block"] for line in report["picture"]] == ["Q", "K", "V", "gate", "up"]
    assert report["folder"] is None


def test_keep(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "kept"
    assert f"All of it is in {folder}." in shardc("--keep", folder).replace("\n", "")
    assert sorted(path.name for path in folder.iterdir()) == ["checkpoint", "merged", "shards-tp2"]
    source, merged = ck.contents(folder / "checkpoint"), ck.contents(folder / "merged")
    assert source == merged
    assert len(list((folder / "checkpoint" / "transformer").glob("*.safetensors"))) == 2
    again = CliRunner().invoke(main, ["demo", "--keep", str(folder)])
    assert again.exit_code == 1
    assert again.stderr.startswith(f"error: {folder}: exists already")
    assert ck.contents(folder / "checkpoint") == source


def test_the_picture_is_what_lies_in_the_shards(tmp_path: Path) -> None:
    report = demo.run(tmp_path)
    full = ck.read_all(tmp_path / "checkpoint" / "transformer")[demo.FUSED].words
    ranks = ck.read_ranks(tmp_path / "shards-tp2" / "transformer", 2)
    for rank, tensors in enumerate(ranks):
        rows = [
            full[start:stop]
            for block in report.picture
            for holder, start, stop in block.ranks
            if holder == rank
        ]
        assert len(rows) == 5
        assert np.array_equal(tensors[demo.FUSED].words, np.concatenate(rows))
    assert [(block.start, block.stop) for block in report.picture] == [
        (0, 256),
        (256, 512),
        (512, 768),
        (768, 1536),
        (1536, 2304),
    ]


def test_drawing() -> None:
    picture = (
        demo.Picture("Q", 0, 4, ((0, 0, 2), (1, 2, 4))),
        demo.Picture("gate", 4, 12, ((0, 4, 8), (1, 8, 12))),
    )
    assert demo.draw(picture, columns=12) == [
        "    Q rows     0 to 4     0011",
        " gate rows     4 to 12    00001111",
    ]


def test_a_difference_is_an_error(tmp_path: Path) -> None:
    """Had the merge changed a byte, the demo would fail."""
    demo.run(tmp_path)
    file = tmp_path / "merged" / "model_index.json"
    file.write_text(file.read_text() + " ")
    with pytest.raises(VerifyError, match=r"model_index\.json"):
        demo._compare(tmp_path / "checkpoint", tmp_path / "merged")
    file.unlink()
    with pytest.raises(VerifyError, match=r"model_index\.json"):
        demo._compare(tmp_path / "checkpoint", tmp_path / "merged")


def test_the_same_checkpoint_for_the_same_seed(tmp_path: Path) -> None:
    demo.write_flux2(tmp_path / "a")
    demo.write_flux2(tmp_path / "b")
    demo.write_flux2(tmp_path / "c", seed=1)
    a, b, c = (ck.contents(tmp_path / name) for name in "abc")
    assert a == b
    assert a.keys() == c.keys()
    assert a != c
