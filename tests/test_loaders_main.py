"""`python -m shardc.loaders`, and the ranks that it and the demo start on this machine."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import shardc
from shardc.demo import CONFIG, write_flux2
from shardc.errors import Problem, ShardSetError
from shardc.loaders import local

if importlib.util.find_spec("diffusers") is None:
    pytest.skip("needs the runtime", allow_module_level=True)


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shards")
    write_flux2(folder / "source", {**CONFIG, "num_layers": 1, "num_single_layers": 1})
    shardc.build(folder / "source", folder / "tp2", 2)
    return folder / "tp2"


def loaders(*args: object, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "shardc.loaders", *(str(arg) for arg in args)],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        timeout=120,
    )


def failed(*args: object) -> list[str]:
    done = loaders(*args)
    assert (done.returncode, done.stdout) == (1, ""), done.stderr
    assert "Traceback" not in done.stderr
    return done.stderr.splitlines()


@pytest.mark.slow
def test_table(shards: Path) -> None:
    done = loaders(shards, "--nproc", 2)
    assert (done.returncode, done.stderr) == (0, "")
    title, *_ = done.stdout.splitlines()
    assert title.strip().startswith(str(shards)[:60])
    for column in ("open s", "build s", "place s", "wire s", "total s", "GB/s", "peak host RSS"):
        assert column in done.stdout
    assert re.findall(r"^ +(\d) +\d", done.stdout, re.M) == ["0", "1"]
    assert "their bytes are read when used" in done.stdout


@pytest.mark.slow
def test_json(shards: Path, tmp_path: Path) -> None:
    done = loaders(shards, "--nproc", 2, "--component", "transformer", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    document = json.loads(done.stdout)
    assert (document["ok"], document["device"]) == (True, "cpu")
    held = sum(file.stat().st_size for file in (shards / "transformer").glob("r*.safetensors"))
    for rank, report in enumerate(document["ranks"]):
        assert (report["rank"], report["tp"], report["component"]) == (rank, 2, "transformer")
        timings = report["timings"]
        phases = [timings[phase] for phase in ("open", "build", "place", "wire")]
        assert min(phases) > 0
        assert 0 < sum(phases) <= report["seconds"] * 1.001
        assert held / 3 < timings["placed_bytes"] < held * 2 / 3
        assert report["host_bytes_peak"] >= report["host_bytes_before"] > 100 << 20
        assert report["start_seconds"] > report["seconds"]  # imports are not part of the load


@pytest.mark.slow
def test_direct_reads_take_memory_of_their_own(shards: Path) -> None:
    done = loaders(shards, "--nproc", 2, "--reads", "direct")
    assert (done.returncode, done.stderr) == (0, "")
    assert "their bytes are read when used" not in done.stdout


@pytest.mark.slow
def test_the_wrong_number_of_ranks_is_said_once(shards: Path) -> None:
    (line,) = failed(shards, "--nproc", 3)
    assert line == (
        f"error: {shards / 'transformer'}: is cut for tp 2, 3 was asked for "
        "(run 2 ranks, or `shardc reshard --tp 3`)"
    )


@pytest.mark.slow
def test_a_missing_file_is_said_once(shards: Path, tmp_path: Path) -> None:
    write_flux2(tmp_path / "source", {**CONFIG, "num_layers": 1, "num_single_layers": 1})
    shardc.build(tmp_path / "source", tmp_path / "o", 2)
    (tmp_path / "o" / "transformer" / "rank-00001-of-00002.safetensors").unlink()
    (line,) = failed(tmp_path / "o", "--nproc", 2)
    assert "rank-00001-of-00002.safetensors: is missing, and rank 1 needs it" in line


@pytest.mark.slow
def test_no_such_set_or_component(shards: Path, tmp_path: Path) -> None:
    assert failed(tmp_path / "none", "--nproc", 1) == [
        f"error: {tmp_path / 'none'}: no such folder"
    ]
    (line,) = failed(shards, "--nproc", 2, "--component", "vae")
    assert "has no sharded component 'vae'; it has 'transformer'" in line


@pytest.mark.slow
def test_a_failure_as_json(shards: Path) -> None:
    done = loaders(shards, "--nproc", 1, "--json")
    assert done.returncode == 1
    (problem,) = json.loads(done.stdout)["problems"]
    assert done.stderr == f"error: {problem}\n"
    assert "is cut for tp 2, 1 was asked for" in problem


@pytest.mark.slow
def test_a_device_that_is_not_there(shards: Path) -> None:
    if importlib.util.find_spec("torch_neuronx") is None:
        (line,) = failed(shards, "--nproc", 2, "--device", "neuron")
        assert line.startswith("error: neuron: native TorchNeuron is not installed")


def test_usage(shards: Path) -> None:
    done = loaders("--help")
    assert done.returncode == 0
    assert "python -m shardc.loaders flux2-tp2 --nproc 2" in done.stdout
    assert loaders(shards).returncode == 2
    assert loaders(shards, "--nproc", 0).returncode == 2


def blocked(code: str, *modules: str) -> subprocess.CompletedProcess[str]:
    """Run code where these modules cannot be found, as where they are not installed."""
    hide = f"import sys; sys.modules.update(dict.fromkeys({modules!r}))\n"
    return subprocess.run([sys.executable, "-c", hide + code], capture_output=True, text=True)


def test_without_torch_it_says_what_to_install() -> None:
    done = blocked(
        "import runpy; sys.argv = ['x', 'set', '--nproc', '2']; "
        "runpy.run_module('shardc.loaders', run_name='__main__')",
        "torch",
    )
    assert done.returncode == 1
    assert done.stderr == "error: torch: not installed (pip install 'shardc[runtime]')\n"
    for name in ("load_model", "load_pipeline", "load_state_dict"):
        done = blocked(f"from shardc.loaders import {name}", "torch")
        assert done.returncode == 1
        last = done.stderr.splitlines()[-1]
        assert last.startswith("ModuleNotFoundError")
        assert "pip install 'shardc[runtime]'" in last


def test_importing_the_package_imports_no_torch() -> None:
    code = "import sys, shardc.loaders, shardc.loaders.check, shardc.loaders.local; "
    code += "assert not {'torch', 'diffusers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


# --- the ranks themselves -------------------------------------------------------------------------


def rank() -> int:
    return int(os.environ["RANK"])


def summed(value: int) -> tuple[int, str]:
    import torch
    import torch.distributed as dist

    total = torch.tensor(value + rank())
    dist.all_reduce(total)
    sys.stdout.write("heard by nobody\n")
    return int(total), str(dist.get_backend())


def killed() -> str:
    if rank() == 1:
        os.write(1, b"last words\n")
        os.kill(os.getpid(), signal.SIGKILL)
    return "done"


def raises() -> None:
    if rank() == 1:
        raise ValueError("odd\nand more")
    time.sleep(600)


def hangs() -> None:
    time.sleep(600)


def children() -> set[str]:
    found: set[str] = set()
    for task in Path("/proc/self/task").iterdir():
        found.update((task / "children").read_text().split())
    return found


@pytest.mark.slow
def test_ranks_meet(capfd: Any) -> None:
    assert local.run(summed, 3, 10) == [(33, "gloo")] * 3
    assert capfd.readouterr() == ("", "")


@pytest.mark.slow
def test_a_rank_that_is_killed() -> None:
    with pytest.raises(ShardSetError) as caught:
        local.run(killed, 2)
    assert [str(p) for p in caught.value.problems] == ["rank 1: died of SIGKILL: last words"]


@pytest.mark.slow
def test_an_error_of_one_rank_ends_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "GRACE_S", 0.5)
    before = children() if sys.platform == "linux" else set()
    with pytest.raises(ShardSetError) as caught:
        local.run(raises, 2)
    assert [str(p) for p in caught.value.problems] == ["rank 1: ValueError: odd"]
    assert sys.platform != "linux" or children() <= before


@pytest.mark.slow
def test_a_rank_that_hangs() -> None:
    started = time.monotonic()
    with pytest.raises(ShardSetError, match="rank 0: has not ended after 1 s"):
        local.run(hangs, 1, timeout_s=1)
    assert time.monotonic() - started < 10


def test_what_several_ranks_say_is_said_once() -> None:
    own = Problem("file", "is missing", "fetch it")
    other = Problem("rank 1", str(own))
    outcomes = [local._Outcome(problems=(other,)), local._Outcome(problems=(own, own))]
    assert local._distinct(outcomes) == [own]
