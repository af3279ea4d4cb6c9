"""`shardc demo` on the real thing: its steps, its load, its pictures, and what it leaves behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import shardc
from shardc import demo, library
from shardc.cli import main
from shardc.cli.picture import RANKS, by_blocks, draw_rows, naive
from shardc.errors import VerifyError
from tests import checkpoints as ck

STEPS = ["make", "plan", "build", "verify", "merge", "compare", "load", "compare"]
SKIPPED = f"load: skipped, {demo.INSTALL}\n"


@pytest.fixture
def no_runtime(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where diffusers is not installed: it cannot be found."""
    monkeypatch.setitem(sys.modules, "diffusers", None)


def run(*args: object) -> Any:
    result = CliRunner().invoke(main, ["demo", *(str(arg) for arg in args)])
    assert result.exit_code == 0, result.output
    return result


@pytest.mark.slow
def test_the_demo_loads_compares_and_leaves_nothing(tmp_path: Path) -> None:
    pytest.importorskip("diffusers")
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
    assert time.monotonic() - started < 120
    assert result.stderr == ""
    words = [line.split()[0] for line in result.stdout.splitlines() if line.strip()]
    assert [word for word in words if word in STEPS] == STEPS
    assert "ranks agree bit" in result.stdout
    assert list(work.iterdir()) == []
    assert list(temporary.iterdir()) == []


@pytest.mark.slow
def test_json_of_a_load(tmp_path: Path) -> None:
    pytest.importorskip("diffusers")
    result = run("--json", "--keep", tmp_path / "kept")
    assert result.stderr == ""
    report = json.loads(result.stdout)
    assert [step["name"] for step in report["steps"]][-2:] == [
        "load on 2 ranks",
        "compare with the unsharded model",
    ]
    load = report["load"]
    assert load["skipped"] is None
    assert 0 < load["relative_error"] <= load["limit"] == 1e-5
    assert [rank["rank"] for rank in load["ranks"]] == [0, 1]
    for rank in load["ranks"]:
        assert rank["timings"]["placed_bytes"] > 1e6
        assert 0 < rank["seconds"] < rank["start_seconds"] + 60
        assert rank["host_bytes_peak"] >= rank["host_bytes_before"] > 0
    assert (tmp_path / "kept" / "rows.png").read_bytes().startswith(b"\x89PNG")
    assert report["image"] == str(tmp_path / "kept" / "rows.png")


@pytest.mark.slow
def test_a_wrong_cut_is_seen(tmp_path: Path) -> None:
    """The comparison has teeth: the fused weight cut as one block is not the same model."""
    pytest.importorskip("diffusers")
    text = library.load("Flux2Transformer2DModel").text
    wrong = text.replace(
        'blocks = ["inner", "inner", "inner", "mlp", "mlp"]\nunit = ["head", "head", "head", 1, 1]',
        'blocks = ["inner * 3 + mlp * 2"]',
    )
    assert wrong != text
    (tmp_path / "wrong.toml").write_text(wrong)
    demo.write_flux2(tmp_path / "checkpoint", dtype="fp32")
    shardc.build(tmp_path / "checkpoint", tmp_path / "o", 2, manifest=tmp_path / "wrong.toml")
    loading = demo._Loading(tmp_path / "checkpoint", tmp_path / "o")
    loading.run()
    with pytest.raises(VerifyError, match="differs from the unsharded one's by"):
        loading.compare()


def test_relative_error() -> None:
    whole = np.linspace(-2, 2, 64, dtype=np.float32)
    near = whole + np.float32(1e-5)
    assert demo.relative_error(whole, [near, near]) == pytest.approx(5e-6, rel=0.1)
    with pytest.raises(VerifyError, match=r"unsharded one's by 5\.0e-05"):
        demo.relative_error(whole, [whole + np.float32(1e-4)])
    with pytest.raises(VerifyError, match="of rank 1 is not bit for bit that of rank 0"):
        demo.relative_error(whole, [whole, near])
    with pytest.raises(VerifyError, match=r"rank 0 gave \[32\], not \[64\]"):
        demo.relative_error(whole, [whole[:32]])
    with pytest.raises(VerifyError, match="by nan"):
        demo.relative_error(whole, [whole * np.float32(np.nan)])
    for useless in (whole * np.float32(np.inf), np.full(64, 3, np.float32)):
        with pytest.raises(VerifyError, match="not finite, or nearly constant"):
            demo.relative_error(useless, [useless])


@pytest.mark.usefixtures("no_runtime")
def test_without_the_runtime_it_says_so() -> None:
    result = run()
    assert result.stderr == SKIPPED
    rows = [line.split() for line in result.stdout.splitlines() if line.strip()]
    assert [row[0] for row in rows if row[0] in STEPS] == STEPS
    assert sum("skipped," in row for row in rows) == 2


@pytest.mark.usefixtures("no_runtime")
def test_json() -> None:
    result = run("--json")
    assert result.stderr == SKIPPED
    report = json.loads(result.stdout)
    assert [step["name"].split()[0] for step in report["steps"]] == STEPS
    assert all(step["result"] and step["seconds"] >= 0 for step in report["steps"])
    assert [line["block"] for line in report["picture"]] == ["Q", "K", "V", "gate", "up"]
    assert report["folder"] is None
    assert report["image"] is None
    assert report["load"] == {
        "skipped": f"diffusers not installed: {demo.INSTALL}",
        "ranks": [],
        "relative_error": None,
        "limit": 1e-5,
    }


@pytest.mark.usefixtures("no_runtime")
def test_keep(tmp_path: Path) -> None:
    pytest.importorskip("PIL")
    folder = tmp_path / "new" / "kept"
    said = run("--keep", folder).stdout.replace("\n", "")
    assert f"All of it is in {folder}." in said
    assert f"A picture of the rows is in {folder}/rows.png." in said
    assert sorted(path.name for path in folder.iterdir()) == [
        "checkpoint",
        "merged",
        "rows.png",
        "shards-tp2",
    ]
    source, merged = ck.contents(folder / "checkpoint"), ck.contents(folder / "merged")
    assert source == merged
    assert len(list((folder / "checkpoint" / "transformer").glob("*.safetensors"))) == 2
    again = CliRunner().invoke(main, ["demo", "--keep", str(folder)])
    assert again.exit_code == 1
    assert again.stderr.startswith(f"error: {folder}: exists already")
    assert ck.contents(folder / "checkpoint") == source


@pytest.mark.usefixtures("no_runtime")
def test_without_pillow_there_is_no_image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    said = run("--keep", tmp_path / "kept").stdout
    assert "There is no picture: Pillow is not installed." in said
    assert not (tmp_path / "kept" / "rows.png").exists()


@pytest.mark.usefixtures("no_runtime")
def test_the_picture_is_what_lies_in_the_shards(tmp_path: Path) -> None:
    report = demo.run(tmp_path)
    full = ck.read_all(tmp_path / "checkpoint" / "transformer")[demo.FUSED].words
    ranks = ck.read_ranks(tmp_path / "shards-tp2" / "transformer", 2)
    pieces = by_blocks(report.picture)
    for rank, tensors in enumerate(ranks):
        rows = [full[piece.start : piece.stop] for piece in pieces if piece.rank == rank]
        assert len(rows) == 5
        assert np.array_equal(tensors[demo.FUSED].words, np.concatenate(rows))
    assert [(block.start, block.stop) for block in report.picture] == [
        (0, 256),
        (256, 512),
        (512, 768),
        (768, 1536),
        (1536, 2304),
    ]


PICTURE = (
    demo.Picture("Q", 0, 4, ((0, 0, 2), (1, 2, 4))),
    demo.Picture("gate", 4, 12, ((0, 4, 8), (1, 8, 12))),
)


def test_drawing() -> None:
    assert demo.draw(PICTURE, columns=12) == [
        "    Q rows     0 to 4     0011",
        " gate rows     4 to 12    00001111",
    ]


def test_the_image_shows_both_cuts(tmp_path: Path) -> None:
    """Of each bar the two ranks' colours cover the shares that they hold."""
    image = pytest.importorskip("PIL.Image")
    assert [(p.block, p.rank, p.start, p.stop) for p in naive(PICTURE, 2)] == [
        ("Q", 0, 0, 4),
        ("gate", 0, 4, 6),
        ("gate", 1, 6, 12),
    ]
    assert draw_rows(PICTURE, "w", tmp_path / "rows.png")
    pixels = np.asarray(image.open(tmp_path / "rows.png").convert("RGB"))
    colours = [tuple(bytes.fromhex(fill[1:])) for fill, _ in RANKS]
    found = set()
    for row in pixels:
        holders = [
            str(colours.index(pixel))
            for i, pixel in enumerate(map(tuple, row))
            if pixel in colours and (i == 0 or pixel != tuple(row[i - 1]))
        ]
        found.add("".join(holders))
    assert "0101" in found  # by blocks: Q of rank 0, of rank 1, gate of rank 0, of rank 1
    assert "001" in found  # naively: Q and a part of gate, then the rest


@pytest.mark.usefixtures("no_runtime")
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
