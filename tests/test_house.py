"""The house rules: imports point up the list only, and the build path stays light."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests import checkpoints as ck

PACKAGE = Path(__file__).parents[1] / "shardc"
# A module may import those before it. New modules join where they belong.
HOUSE = (
    "errors",
    "location",
    "region",
    "folders",
    "remote",
    "hub",
    "s3",
    "mirror",
    "reading",
    "header",
    "synthetic",
    "layout",
    "expression",
    "pattern",
    "document",
    "manifest",
    "placing",
    "library",
    "weights",
    "checkpoint",
    "source",
    "index",
    "shardset",
    "kept",
    "compare",
    "verifier",
    "resolve",
    "planner",
    "check",
    "targets",
    "report",
    "schedule",
    "fileio",
    "shipment",
    "hub_branch",
    "card",
    "card_facts",
    "push_hub",
    "push_s3",
    "push",
    "cache",
    "fetch",
    "find",
    "needs",
    "hub_cache",
    "pull",
    "execute",
    "journal",
    "files",
    "workspace",
    "current",
    "writing",
    "builder",
    "convert",
    "naming",
    "derive",
    "api",
    "demo",
)
HEAVY = ("torch", "diffusers", "transformers", "huggingface_hub", "accelerate", "rich", "click")
# Each imports these inside its functions: who asks for nothing remote does not pay for them.
MAY_IMPORT = {
    "derive": {"torch", "diffusers", "transformers", "accelerate"},
    **{n: {"huggingface_hub"} for n in ("hub", "hub_branch", "hub_cache", "card", "push_hub")},
}


def modules() -> list[Path]:
    return sorted(
        path for path in PACKAGE.glob("*.py") if path.stem not in ("__init__", "__main__")
    )


def imported(path: Path) -> set[str]:
    """Every module that a file imports, wherever in it, as shardc.x or by its top name."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}:{node.lineno} imports relatively"
            assert node.module is not None
            found.add(node.module)
            if node.module == "shardc":
                found |= {f"shardc.{alias.name}" for alias in node.names}
    return found


def house_imports(path: Path) -> set[str]:
    """The names of the package's own modules that a file imports."""
    parts = [name.split(".") for name in imported(path)]
    own = {p[1] for p in parts if p[0] == "shardc" and len(p) > 1}
    return own - {"__version__"}


def test_every_module_has_its_place() -> None:
    assert sorted(path.stem for path in modules()) == sorted(HOUSE)


@pytest.mark.parametrize("path", modules(), ids=lambda path: path.stem)
def test_imports_point_up(path: Path) -> None:
    above = set(HOUSE[: HOUSE.index(path.stem)])
    assert house_imports(path) <= above | {"manifests"}


@pytest.mark.parametrize("name", ["verifier", "compare"])
def test_verify_is_independent(name: str) -> None:
    """Not even by way of another module does it reach what it checks."""
    reached: set[str] = set()
    todo = [name]
    while todo:
        for other in house_imports(PACKAGE / f"{todo.pop()}.py") - reached:
            reached.add(other)
            todo.append(other)
    assert not reached & {"planner", "schedule", "execute", "resolve", "builder"}
    assert "layout" not in house_imports(PACKAGE / f"{name}.py")


def test_nothing_imports_the_command_line() -> None:
    for path in [*modules(), PACKAGE / "__init__.py", *(PACKAGE / "loaders").glob("*.py")]:
        assert "cli" not in house_imports(path), path.name


@pytest.mark.parametrize("path", modules(), ids=lambda path: path.stem)
def test_no_heavy_imports(path: Path) -> None:
    heavy = {name.split(".")[0] for name in imported(path)} & set(HEAVY)
    assert heavy <= MAY_IMPORT.get(path.stem, set())


def test_modules_can_be_read_at_one_sitting() -> None:
    long = {path.name: n for path in modules() if (n := len(path.read_text().splitlines())) > 380}
    assert not long


def loaded_after(code: str) -> set[str]:
    """The top modules that a fresh interpreter has loaded after `code`."""
    tail = "\nimport json, sys; print(json.dumps(sorted({m.split('.')[0] for m in sys.modules})))"
    result = subprocess.run(
        [sys.executable, "-c", code + tail], capture_output=True, text=True, check=True
    )
    return set(json.loads(result.stdout.splitlines()[-1]))


def test_import_is_light() -> None:
    loaded = loaded_after("import shardc; shardc.__version__")
    assert not loaded & {*HEAVY, "numpy", "pydantic"}


def test_build_and_verify_load_no_model_library(tmp_path: Path) -> None:
    source = ck.component(tmp_path / "source", {"m.weight": ck.Data.count("BF16", [4, 2])})
    manifest = ck.manifest(tmp_path / "rules.toml", [{"match": "m", "style": "colwise"}])
    out = tmp_path / "out"
    loaded = loaded_after(
        "import shardc\n"
        f"shardc.build({str(source)!r}, {str(out)!r}, 2, manifest={str(manifest)!r})\n"
        f"assert shardc.verify({str(out)!r}, {str(source)!r}).ok\n"
        f"shardc.merge({str(out)!r}, {str(tmp_path / 'full')!r})\n"
        f"shardc.reshard({str(out)!r}, {str(tmp_path / 'one')!r}, 1)\n"
    )
    assert (out / ck.INDEX).is_file()
    assert "numpy" in loaded
    assert not loaded & set(HEAVY)
