"""What the documents show is what happens: commands run, examples hold, tables match the code."""

from __future__ import annotations

import inspect
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import shardc
from shardc.cli import main
from shardc.demo import write_flux2
from shardc.errors import ShardcError
from shardc.index import Index, TensorEntry
from shardc.manifest import Rule, Style
from tests.checkpoints import Data, component
from tests.servers.hub import Hub
from tests.servers.s3 import S3

ROOT = Path(__file__).parents[1]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(document: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", document.read_text(), re.M | re.S)


def commands(document: Path) -> list[str]:
    shown = "".join(blocks(document, "console"))
    return [line.removeprefix("$ ") for line in shown.splitlines() if line.startswith("$ ")]


@pytest.fixture
def elsewhere(tmp_path: Path) -> Iterator[dict[str, str]]:
    """A Hub that has a tiny FLUX.2 under a well-known name, and S3 with an empty bucket."""
    pytest.importorskip("obstore")
    source = tmp_path / "elsewhere" / "source"
    write_flux2(source, dtype="fp32")
    with Hub(tmp_path / "elsewhere" / "hub") as hub, S3() as s3:
        hub.upload("black-forest-labs/FLUX.2-klein-4B", source)
        s3.create_bucket("bucket")
        homes = {name: str(tmp_path / "elsewhere" / name) for name in ("HF_HOME", "SHARDC_CACHE")}
        yield {**hub.environ, **s3.environ, **homes, "HF_TOKEN": hub.token}


@pytest.mark.slow
@pytest.mark.parametrize("document", [d for d in DOCUMENTS if commands(d)], ids=lambda d: d.name)
def test_every_command_shown_runs(
    document: Path, tmp_path: Path, elsewhere: dict[str, str]
) -> None:
    programs = tmp_path / "programs"
    programs.mkdir()
    (programs / "python").write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} "$@"\n')
    (programs / "python").chmod(0o755)
    path = os.pathsep.join([str(programs), str(Path(sys.executable).parent), os.environ["PATH"]])
    for block in blocks(document, "py"):
        if name := re.match(r"# (\w+\.py)\b", block):
            (tmp_path / name[1]).write_text(block)
    for command in commands(document):
        done = subprocess.run(
            command,
            shell=True,
            cwd=tmp_path,
            env={**os.environ, **elsewhere, "PATH": path},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, f"{command}: {done.stderr}"
    for block in blocks(document, "python"):
        subprocess.run([sys.executable, "-c", block], cwd=tmp_path, check=True)


def test_every_command_has_its_place_in_the_readme() -> None:
    shown = {command.split()[1] for command in commands(ROOT / "README.md")}
    assert set(main.commands) <= shown


def test_links_lead_somewhere() -> None:
    for document in DOCUMENTS:
        for link in re.findall(r"\]\(([^)#]+)\)", document.read_text()):
            if not link.startswith("http"):
                assert (document.parent / link).exists(), f"{document.name}: {link}"


def test_manifest_document_names_every_key_and_style() -> None:
    text = (ROOT / "docs" / "manifest.md").read_text()
    for field in Rule.model_fields:
        assert f"| `{field}` |" in text
    for style in Style.__args__:  # type: ignore[attr-defined]
        assert f"| `{style}` |" in text


def test_format_document_names_every_key_of_the_index() -> None:
    text = (ROOT / "docs" / "format.md").read_text()
    for field in (*Index.model_fields, *TensorEntry.model_fields):
        assert f"`{field}`" in text


def test_loading_document_has_every_argument_and_refusal() -> None:
    pytest.importorskip("torch")
    from shardc.loaders import (
        load_model,
        load_pipeline,
        load_rank_weights,
        load_state_dict,
        refusals,
    )

    text = (ROOT / "docs" / "loading.md").read_text()
    for function in (load_model, load_pipeline, load_rank_weights, load_state_dict):
        shown = re.search(rf"^\| `{function.__name__}\((.*)\)` \|", text, re.M)
        assert shown is not None
        names = re.findall(r"(\w+)(?:=[^,]*)?(?:, |$)", shown[1].replace("*, ", ""))
        assert names == list(inspect.signature(function).parameters)
    for name in refusals.FORBIDDEN:
        assert f"`{name}`" in text


def test_cold_start_document_has_every_phase() -> None:
    pytest.importorskip("torch")
    from shardc.loaders.model import Timings

    text = (ROOT / "docs" / "cold-start.md").read_text()
    for phase in Timings.__dataclass_fields__:
        assert phase == "placed_bytes" or f"| {phase} |" in text


def rows(text: str) -> list[int]:
    found: list[int] = []
    for part in text.split(","):
        first, _, last = part.strip().partition("-")
        found += range(int(first), int(last or first) + 1)
    return found


def test_the_worked_example_holds(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "manifest.md").read_text().split("## A worked example")[1]
    src = component(
        tmp_path / "src",
        {"blocks.0.attn.qkv.weight": Data.count("F32", (64, 2))},
        config={"heads": 4, "kv_heads": 2, "head_dim": 8},
    )
    toml = re.findall(r"```toml\n(.*?)```", text, re.S)[0]
    rules = tmp_path / "m.toml"
    rules.write_text(f'schema = 1\nlibrary = "diffusers"\nclass = "TinyModel"\n{toml}')
    table = re.findall(r"^\| (\d+) \| ([\d, -]*)\| (.*) \|$", text, re.M)
    assert [tp for tp, _, _ in table] == ["2", "4", "3", "8"]
    for tp, held, says in table:
        if held.strip():
            planned = shardc.plan(src, int(tp), manifest=rules).components[0].tensors[0]
            mine = [row for piece in planned.pieces[0] for row in range(piece.start, piece.stop)]
            assert mine == rows(held)
        else:
            reason = says.removeprefix("refused: ").split(" (")[0]
            with pytest.raises(ShardcError, match=re.escape(reason)):
                shardc.plan(src, int(tp), manifest=rules)
