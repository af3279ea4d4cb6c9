"""What tests of the command line share: its sources, and ways to run it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from shardc.cli import main
from shardc.demo import CONFIG, write_flux2
from tests import checkpoints as ck

SMALL = {**CONFIG, "num_attention_heads": 4, "num_layers": 1, "num_single_layers": 1}
RULES = [{"match": "m", "style": "colwise"}, {"match": "o", "style": "rowwise"}]
TENSORS = {
    "m.weight": ck.Data.count("F32", [8, 4]),
    "o.weight": ck.Data.count("F32", [4, 8], 400),
    "norm": ck.Data.count("F32", [4], 500),
}
FAST = ("--no-fsync", "-q")
SHARDC = (sys.executable, "-m", "shardc")


def run(*args: object, status: int = 0) -> Result:
    """Run a command; it must end with `status`, and never in an exception."""
    result = CliRunner().invoke(main, [str(arg) for arg in args], prog_name="shardc")
    if not isinstance(result.exception, SystemExit | None):
        raise result.exception
    assert result.exit_code == status, result.output
    return result


def said(*args: object, status: int = 0) -> Any:
    """The one JSON document that a command with --json writes to stdout."""
    return json.loads(run(*args, "--json", status=status).stdout)


def errors(*args: object, status: int = 1) -> list[str]:
    """What a failing command says: every line an error, on stderr, and stdout empty."""
    result = run(*args, status=status)
    assert result.stdout == ""
    lines = result.stderr.splitlines()
    assert lines
    assert all(line.startswith("error: ") for line in lines), lines
    return lines


def process(*args: object, **options: Any) -> subprocess.CompletedProcess[str]:
    command = [*SHARDC, *(str(arg) for arg in args)]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=60, check=False, **options
    )


@pytest.fixture(scope="module")
def flux(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny FLUX.2 pipeline. Not to be changed."""
    folder = tmp_path_factory.mktemp("source") / "flux"
    write_flux2(folder, SMALL)
    return folder


@pytest.fixture(scope="module")
def built(flux: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """It at tp 2. Not to be changed."""
    out = tmp_path_factory.mktemp("built") / "shards"
    run("build", flux, "--tp", 2, "-o", out, *FAST)
    return out


@pytest.fixture
def shards(built: Path, tmp_path: Path) -> Path:
    """A copy of it, to damage."""
    return Path(shutil.copytree(built, tmp_path / "shards"))


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return ck.component(tmp_path / "source", TENSORS)


@pytest.fixture
def rules(tmp_path: Path) -> Path:
    return ck.manifest(tmp_path / "rules.toml", RULES)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working folder."""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def listing(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())
