"""What is packaged: sdist to wheel, with the runtime and the manifests inside, and nothing else."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

import shardc
from shardc import library

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel made from the sdist, beside it."""
    out = tmp_path_factory.mktemp("dist")
    done = subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(ROOT)],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return out


@pytest.mark.slow
def test_wheel(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        metadata = archive.read(f"shardc-{shardc.__version__}.dist-info/METADATA").decode()
    assert {f"shardc/manifests/{name}.toml" for name in library.bundled()} <= names
    for module in (*ROOT.glob("shardc/*.py"), *ROOT.glob("shardc/cli/*.py")):
        assert module.relative_to(ROOT).as_posix() in names
    for module in ROOT.glob("loaders/*.py"):
        assert f"shardc/loaders/{module.name}" in names
    assert "shardc/py.typed" in names
    tops = {name.split("/")[0] for name in names}
    assert tops == {"shardc", f"shardc-{shardc.__version__}.dist-info"}
    assert any(name.endswith("LICENSE") for name in names)
    base = [line for line in metadata.splitlines() if line.startswith("Requires-Dist")]
    assert not [line for line in base if "torch" in line and "extra ==" not in line]
    assert not [line for line in base if "neuron" in line]


@pytest.mark.slow
def test_sdist(built: Path) -> None:
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"LICENSE", "README.md", "pyproject.toml", "shardc/py.typed"} <= names
    assert any(name.endswith("Flux2Transformer2DModel.toml") for name in names)


def test_version_has_one_home() -> None:
    document = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert document["project"]["dynamic"] == ["version"]
    assert document["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "shardc.__version__"}
