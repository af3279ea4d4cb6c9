"""The model card: it renders, its front matter is what the Hub reads, its table grows."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard

import shardc
from shardc.card import BEGIN, END, BuiltPart, Degree, Facts, license_of, render, with_degree
from shardc.card_facts import facts_of
from shardc.location import HubLocation
from shardc.shipment import open_shipment
from tests import checkpoints as ck
from tests.tiny import tiny

DEGREE = Degree(8, ("BF16", "F32"), "compact", 1_940_000_000, "tp8", "shardc 0.1.0", None)
FACTS = Facts(
    repo="me/klein",
    address="me/klein",
    pull_address="me/klein/tp8",
    library="diffusers",
    pipeline=True,
    base_model="black-forest-labs/FLUX.2-klein-4B",
    license={"license": "other", "license_name": "some-nc", "license_link": "LICENSE.md"},
    degree=DEGREE,
    parts=[
        BuiltPart("transformer", "Flux2Transformer2DModel", "flux2"),
        BuiltPart("vae", "AutoencoderKLFlux2", None),
    ],
    cast=None,
)


def front(text: str) -> dict[str, Any]:
    data: dict[str, Any] = ModelCard(text).data.to_dict()
    return data


def rows(text: str) -> list[list[str]]:
    table = text.split(BEGIN)[1].split(END)[0]
    lines = [line for line in table.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_front_matter() -> None:
    assert front(render(FACTS)) == {
        "library_name": "diffusers",
        "base_model": "black-forest-labs/FLUX.2-klein-4B",
        "license": "other",
        "license_name": "some-nc",
        "license_link": "https://huggingface.co/black-forest-labs/FLUX.2-klein-4B/blob/main/LICENSE.md",
        "tags": ["shardc", "tensor-parallel", "neuron", "tp8"],
    }


def test_what_is_not_known_is_left_out() -> None:
    data = front(render(replace(FACTS, base_model=None, license={})))
    assert sorted(data) == ["library_name", "tags"]
    data = front(render(replace(FACTS, base_model=None)))
    assert data["license_link"] == "LICENSE.md"


@pytest.mark.parametrize("pipeline", [True, False])
def test_body(pipeline: bool) -> None:
    text = render(replace(FACTS, pipeline=pipeline))
    assert "$" not in text
    assert not re.search(r"\n\n\n", text)
    assert "cannot load it" in text
    assert "torchrun --nproc-per-node 8 app.py" in text
    assert "shardc pull me/klein/tp8 --rank 0" in text
    assert "license (some-nc)" in text
    assert "- `transformer` (Flux2Transformer2DModel): cut by manifest flux2" in text
    assert "- `vae` (AutoencoderKLFlux2): kept whole" in text
    assert rows(text) == [
        ["8", "BF16, F32", "compact", "1.94 GB", "`tp8`", "shardc 0.1.0", ""],
    ]
    script = re.findall(r"```python\n(.*?)```", text, re.S)[0]
    ast.parse(script)
    load = "load_pipeline" if pipeline else "load_model"
    assert f'= {load}("me/klein")' in script


def test_the_calls_in_it_exist() -> None:
    pytest.importorskip("torch")
    from shardc import loaders

    assert callable(loaders.load_pipeline)
    assert callable(loaders.load_model)


def test_another_degree_is_a_row_more() -> None:
    text = render(FACTS)
    four = replace(DEGREE, tp=4, folder="tp4", rank_bytes=3_880_000_000)
    grown = with_degree(text, four)
    assert grown is not None
    assert [(row[0], row[3]) for row in rows(grown)] == [("4", "3.88 GB"), ("8", "1.94 GB")]
    assert front(grown)["tags"] == ["shardc", "tensor-parallel", "neuron", "tp8", "tp4"]
    assert with_degree(grown, four) == grown
    # All that somebody wrote around the table stays.
    mine = grown.replace("## Degrees", "## Our degrees\n\n$5, and | a | row |")
    again = with_degree(mine, replace(four, profile="native", source="hf://a/b@0123"))
    assert again is not None
    assert again.split(BEGIN)[0] == mine.split(BEGIN)[0]
    assert again.split(END)[1] == mine.split(END)[1]
    assert [row[2] for row in rows(again)] == ["native", "compact"]
    assert rows(again)[0][6] == "hf://a/b@0123"


def test_line_ends_of_another_editor() -> None:
    text = render(FACTS)
    new = with_degree(text.replace("\n", "\r\n"), replace(FACTS.degree, tp=64, folder="tp64"))
    assert new is not None
    assert "`tp64`" in new
    assert new.count("| `tp") == text.count("| `tp") + 1


def test_a_license_that_a_terminal_would_obey() -> None:
    facts = replace(FACTS, license={"license": "other", "license_name": "\x1b[31mred\nline"})
    assert "license (\\x1b[31mred\\nline) goes" in render(facts)


def test_two_folders_of_one_degree_are_two_rows() -> None:
    text = with_degree(render(FACTS), replace(DEGREE, folder="tp8-native", profile="native"))
    assert text is not None
    assert [row[4] for row in rows(text)] == ["`tp8`", "`tp8-native`"]


@pytest.mark.parametrize("text", ["", "# Mine\n", f"# Mine\n{BEGIN}\nno end\n"])
def test_somebodys_own_card_is_none_of_ours(text: str) -> None:
    assert with_degree(text, DEGREE) is None


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text.replace("\n- tp8\n", "\n"),
        lambda text: text.replace("- tp8\n", "- tp8\n- tp4\n"),
        lambda text: text.partition("---\n\n")[2],
    ],
    ids=["tags-removed", "tag-there", "no-front-matter"],
)
def test_tags_that_are_not_to_be_added(change: Callable[[str], str]) -> None:
    text = change(render(FACTS))
    grown = with_degree(text, replace(DEGREE, tp=4, folder="tp4"))
    assert grown is not None
    assert grown.split(BEGIN)[0] == text.split(BEGIN)[0]


@pytest.mark.parametrize(
    ("readme", "found"),
    [
        ("---\nlicense: mit\n---\n# x\n", {"license": "mit"}),
        ("---\nlicense: [mit, apache-2.0]\n---\n", {"license": ["mit", "apache-2.0"]}),
        ("---\nlicense: 5\nlicense_name: a\n---\n", {"license_name": "a"}),
        ("---\na: &a [b, c]\nlicense: [*a, *a]\nlicense_name: {d: e}\n---\n", {}),
        ("# no front matter\n", {}),
        ("---\n- a list\n---\n", {}),
        ("---\nlicense: [broken\n---\n", {}),
        ("---\nlicense: !!python/object/apply:os.abort []\n---\n", {}),
    ],
)
def test_license_of(readme: str, found: dict[str, Any]) -> None:
    assert license_of(readme) == found


def test_facts_of_a_set(tmp_path: Path) -> None:
    shipment = open_shipment(tiny(tmp_path))
    facts = facts_of(shipment, HubLocation("me/model", folder="tp2"), None)
    assert (facts.library, facts.pipeline, facts.base_model) == ("diffusers", False, None)
    assert facts.degree == Degree(
        2, ("F32",), "compact", shipment.rank_bytes[0], "tp2", f"shardc {shardc.__version__}", None
    )
    assert facts.parts == [BuiltPart("", ck.CLASS, "rules.toml")]
    assert (facts.address, facts.pull_address) == ("me/model", "me/model/tp2")
    named = facts_of(shipment, HubLocation("me/model", "dev", "here"), "org/base")
    assert (named.address, named.pull_address) == ("hf://me/model@dev/here",) * 2
    assert named.base_model == "org/base"
    front(render(named))
