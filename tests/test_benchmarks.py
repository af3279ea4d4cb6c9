"""Benchmarks run, tiny: what they print is there, times are not judged."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

pytest.importorskip("diffusers.hooks.tensor_parallel", reason="diffusers below 0.42")

from benchmarks import build_ways, document, machine, page_cache, startup, summary, targets
from benchmarks.__main__ import main
from benchmarks.figures import UnavailableError
from benchmarks.harness import Contestant, Match, Result, series
from benchmarks.process import RunError, Sample, run_commands, run_workers
from benchmarks.report import Document, cpu
from benchmarks.shapes import SHAPES, Workplace, rank_files

ROOT = Path(__file__).parents[1]
COLD, TP = True, 2


@pytest.mark.slow
def test_forward() -> None:
    """Every contestant runs, and gives what diffusers' own sharding gives."""
    told = ["--head", "8", "--tokens", "4", "--rounds", "1", "--json"]
    command = [sys.executable, "-m", "benchmarks.forward", *told]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    assert [row["runtime"] for row in rows] == [
        "plain, compact",
        "plain, native",
        "dtensor",
        "diffusers",
    ]
    assert all(0 < row["fastest"] <= row["median"] for row in rows)


# --- each of `python -m benchmarks`, once ---------------------------------------------------------


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Workplace:
    """Where all of them find the tiny checkpoint."""
    made = Workplace(SHAPES["tiny"], tmp_path_factory.mktemp("benchmarks"))
    made.make_source()
    return made


def measure(place: Workplace, command: str, *options: str) -> Document:
    """The document of a tiny run, as it was written and shown."""
    path = place.folder / f"{command}.json"
    words = [command, "--shape", "tiny", "--tp", str(TP), "--folder", str(place.folder)]
    done = CliRunner().invoke(main, [*words, "--json", str(path), *options])
    assert done.exit_code == 0, done.output
    found = Document.read(path)
    for result in found.results:
        assert result.contestant in done.output
        for pair in result.pairs:
            assert all(sample.wall > 0 and sample.peak_bytes > 0 for sample in pair)
    return found


def met(found: Document) -> list[tuple[str, str, str]]:
    return [(r.group, r.reference, r.contestant) for r in found.results]


@pytest.mark.slow
def test_build(place: Workplace) -> None:
    only = ["--only", "shardc", "--only", "slices"]
    found = measure(place, "build", "--rounds", "0", *only)
    assert met(found) == [("tp 2", "cp", "shardc"), ("tp 2", "cp", "slices")]
    assert all(result.samples()[0].phases["work"] > 0 for result in found.results)
    assert list((place.folder / "out").glob("*built*")) == []
    assert found.command == (
        "python -m benchmarks build --shape tiny --tp 2 --rounds 0 --only shardc --only slices"
    )


@pytest.mark.slow
def test_growth(place: Workplace) -> None:
    plot = place.folder / "growth.svg"
    axes = ("--axis", "tensors", "--axis", "latency")
    found = measure(place, "growth", "--rounds", "1", *axes, "--cold", "--plot", str(plot))
    groups = ["tensors: 50", "tensors: 100", "latency: 0 ms", "latency: 20 ms", "latency: 100 ms"]
    assert met(found) == [(group, "cp", "shardc") for group in groups]
    assert all(len(result.pairs) == 1 for result in found.results)
    assert "tensors" in plot.read_text()
    assert plot.stat().st_size < 60_000
    assert not list(place.folder.glob("*-tensors/source"))


@pytest.mark.slow
def test_load(place: Workplace) -> None:
    only = [word for name in ("shardc", "load_file", "floor") for word in ("--only", name)]
    found = measure(place, "load", "--rounds", "0", "--ranks", "1", *only)
    assert met(found) == [
        ("1 rank", "diffusers", "shardc"),
        ("1 rank", "diffusers", "load_file"),
        ("1 rank", "diffusers", "floor"),
        ("1 rank", "load_file", "shardc"),
        ("1 rank", "floor", "shardc"),
    ]
    files = rank_files(place.make_set(TP), TP, 0)
    delivered = {r.contestant: r.samples()[0].delivered_bytes for r in found.results}
    assert delivered["floor"] == sum(path.stat().st_size for path in files)
    assert delivered["shardc"] == delivered["load_file"] == delivered["floor"] - 2 * 4096


@pytest.mark.slow
def test_startup(place: Workplace) -> None:
    found = measure(place, "startup", "--rounds", "0", "--only", "shardc", "--no-imports")
    assert met(found) == [("1 rank of 2", "diffusers", "shardc")]
    for pair in found.results[0].pairs:
        for sample in pair:
            assert sum(sample.phases.values()) == pytest.approx(sample.wall, rel=0.2)
            assert sample.phases["import model"] > sample.phases["wire"] > 0


@pytest.mark.parametrize("way", build_ways.WAYS)
def test_the_ways_of_today_write_what_a_rank_holds(
    way: str, place: Workplace, tmp_path: Path
) -> None:
    import torch
    from safetensors.torch import load_file

    from shardc.loaders import load_state_dict

    layout = build_ways.layout(place.source, TP)
    build_ways.write(way, layout, tmp_path / "out", sync=True)
    for rank in range(TP):
        wanted = load_state_dict(place.make_set(TP), rank)
        found = load_file(tmp_path / "out" / f"rank-{rank}.safetensors")
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)


# --- the parts ------------------------------------------------------------------------------------


def sample(wall: float, **more: Any) -> Sample:
    own = dict.fromkeys(("user", "system"), wall / 4) | dict.fromkeys(
        ("peak_bytes", "peak_before", "anon_bytes", "anon_before", "read_bytes", "asked_bytes"), 0
    )
    return Sample(wall, **{**own, **more})


def result(group: str, reference: str, contestant: str, *walls: tuple[float, float]) -> Result:
    pairs = tuple((sample(base), sample(own)) for base, own in walls)
    return Result(group, reference, contestant, pairs)


def written(benchmark: str, *results: Result, cold: bool = False, shape: str = "klein-4b") -> Any:
    told = {"shape": shape, "tp": 8, "rounds": 2, "cold": cold}
    return Document(benchmark, told, machine.facts(ROOT, ROOT), results)


def test_pairs_alternate_and_what_cannot_run_is_left_out() -> None:
    ran: list[str] = []

    def contestant(name: str, error: Exception | None = None, optional: bool = False) -> Contestant:
        def run() -> Sample:
            ran.append(name)
            if error is not None:
                raise error
            return sample(len(ran))

        return Contestant(name, run, optional)

    reference, one = contestant("reference"), contestant("one")
    missing = contestant("missing", UnavailableError("not installed"))
    broken = contestant("broken", RunError("it broke"), optional=True)
    matches = [Match(reference, other, "g") for other in (one, missing, broken)]
    results, skipped = series(matches, 2)
    assert ran == ["reference", "one", "missing", "broken", "reference", "one", "one", "reference"]
    assert skipped == {"missing": "not installed", "broken": "it broke"}
    assert [(base.wall, own.wall) for base, own in results[0].pairs] == [(5, 6), (8, 7)]
    with pytest.raises(RunError, match="it broke"):
        series([Match(reference, contestant("broken", RunError("it broke")), "g")], 1)


def test_ratios_are_of_pairs_and_go_by_way_of_a_third() -> None:
    found = written(
        "build",
        result("tp 8", "cp", "shardc", (1, 2), (10, 15), (100, 110)),
        result("tp 8", "cp", "slices", (1, 4), (10, 30)),
    )
    assert found.ratio("tp 8", "cp", "shardc") == 1.5
    assert found.ratio("tp 8", "cp", "shardc", cpu) == 1.5
    assert found.ratio("tp 8", "slices", "shardc") == pytest.approx(1.5 / 3.5)
    assert found.ratio("tp 8", "slices", "full") is None
    assert found.ratio("tp 4", "cp", "shardc") is None


def test_targets_are_judged_at_the_shape_that_they_are_for() -> None:
    warm = result("tp 8", "cp", "shardc", (1, 1.05))
    slow = result("1 rank", "diffusers", "shardc", (3, 1), (4, 1))
    floors = [result("1 rank", name, "shardc", (1, w)) for name, w in
              (("floor", 1.1), ("floor, direct", 1.2))]  # fmt: skip
    series = [
        written("build", warm),
        written("build", replace(warm, pairs=((sample(1), sample(9)),)), shape="small"),
        written("load", slow, *floors, cold=COLD),
    ]
    lines = {line.split(" | ")[0].strip("| "): line for line in targets.table(series)}
    assert "at most 1.1 |  | 1.05 | met |" in lines["build, warm: time over cp"]
    assert "not measured" in lines["build, cold and synced: time over cp + sync"]
    assert "at least 6 | 9 | 3.5 | missed |" in lines["load, one rank, cold: times as fast"]
    assert "| 1.2 | missed |" in lines["load, one rank, cold: time over the floor"]


def test_the_page_has_what_was_stored() -> None:
    series = document.read(document.stored())
    text = document.PAGE.read_text()
    assert document.replaced(text, document.render(series)) == text
    text = summary.README.read_text()
    table = summary.render([one for _, one in series])
    assert document.replaced(text, table, summary.BEGIN, summary.END) == text


def test_a_page_names_every_contestant_and_links_its_plot() -> None:
    results = [result("1 rank", "diffusers", "shardc", (4.0, 1.0), (5.0, 1.0))]
    found = document.render([("load-warm", written("load", *results))])
    assert "| shardc | 1.000 | 4.50 (4.00 to 5.00) |" in found
    assert "- shardc: the rank's shard" in found
    assert "(images/bench-load-warm.svg)" in found


def test_published_facts_do_not_tell_where() -> None:
    told = json.dumps(written("build").to_json())
    for secret in (socket.gethostname(), str(ROOT), os.path.expanduser("~") + "/"):
        assert secret not in told


def test_the_page_cache_is_dropped_and_filled(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(os.urandom(1 << 20))
    try:
        page_cache.drop([path])
    except page_cache.PageCacheError as error:
        pytest.skip(f"this filesystem keeps its pages: {error}")
    assert page_cache.resident_share(path) < 0.01
    page_cache.warm([path])
    assert page_cache.resident_share(path) == 1


def test_a_command_is_measured_and_its_failure_told(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(3_000_000))
    found = run_commands([["cp", str(path), str(tmp_path / "one")], ["sleep", "0.05"]])
    assert found.wall > 0.05
    assert found.asked_bytes >= 3_000_000
    with pytest.raises(RunError, match=r"ended with 1: .*No such file"):
        run_commands([["cp", str(tmp_path / "absent"), str(tmp_path / "two")]])


def test_a_worker_that_fails_ends_the_others() -> None:
    """One cannot begin; the other would wait for a word that never comes."""
    good = {"way": "floor", "files": [], "device": "meta", "check": False}
    with pytest.raises(RunError, match="KeyError: 'absent'"):
        run_workers("benchmarks.load_ways", [{**good, "way": "absent"}, good], before_go=list)


def test_what_imports_take_is_summed_by_package() -> None:
    lines = [
        ("100", "torch"),
        ("50", "torch.nn"),
        ("40", "torch._dynamo.config"),
        ("30", "re"),
        ("20", "shardc.index"),
    ]
    printed = "".join(f"import time: {own:>9} |       999 |   {name}\n" for own, name in lines)
    assert startup.summary(
        "import time: self [us] | cumulative | imported package\n" + printed
    ) == {
        "torch": 0.0002,
        "torch._dynamo": 0.0,
        "the standard library": 0.0,
        "shardc": 0.0,
    }
