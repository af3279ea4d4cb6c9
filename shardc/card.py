"""The model card of a repo of shard sets: facts to text, and a row for each degree. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from string import Template
from typing import Any

from shardc.errors import printable

BEGIN = "<!-- shardc: degrees -->"
END = "<!-- shardc: end of degrees -->"
COLUMNS = ("tp", "dtype", "profile", "bytes a rank", "folder", "made by", "from")
LICENSE_KEYS = ("license", "license_name", "license_link")
TAGS = ("shardc", "tensor-parallel", "neuron")
CHOICE = "The folder whose degree is the number of ranks is taken. "
_TABLE = re.compile(rf"{re.escape(BEGIN)}\r?\n(?P<rows>.*?){re.escape(END)}", re.S)
_FRONT = re.compile(r"\A---\r?\n.*?^---\s*$", re.S | re.M)


@dataclass(frozen=True, slots=True)
class Degree:
    """A row of the table. `rank_bytes`: what the fullest rank downloads; `folder`: in the repo."""

    tp: int
    dtypes: tuple[str, ...]
    profile: str
    rank_bytes: int
    folder: str
    tool: str
    source: str | None


@dataclass(frozen=True, slots=True)
class BuiltPart:
    """A component as it was built: `manifest` is None where it was kept whole."""

    name: str
    class_name: str
    manifest: str | None


@dataclass(frozen=True, slots=True)
class Facts:
    """What a card says.

    address: what the loader takes to reach the repo, with its revision where that is not main.
    library: of the set as a whole. license: LICENSE_KEYS, as the source's card has them.
    cast: the --dtype that the weights were cast to, None where they were not.
    """

    repo: str
    address: str
    pull_address: str
    library: str
    pipeline: bool
    base_model: str | None
    license: Mapping[str, Any]
    degree: Degree
    parts: Sequence[BuiltPart]
    cast: str | None


def render(facts: Facts) -> str:
    """A new repo's README.md."""
    template = Template(resources.files("shardc").joinpath("card.md").read_text("utf-8"))
    load = "load_pipeline" if facts.pipeline else "load_model"
    variable = "pipe" if facts.pipeline else "model"
    base, name = facts.base_model, license_name(facts.license)
    origin = f"[{base}](https://huggingface.co/{base})" if base else "A full checkpoint"
    return template.substitute(
        metadata=_metadata(facts),
        title=facts.repo.rpartition("/")[2],
        origin=origin,
        tp=facts.degree.tp,
        imports=f"from shardc.loaders import {load}",
        load=f'{variable} = {load}("{facts.address}")',
        choice=CHOICE if facts.address == facts.repo else "",
        address=facts.pull_address,
        table=_table([_row(facts.degree)]),
        built=_built(facts),
        cast=f" (as cast to {facts.cast})" if facts.cast else "",
        license=f"\n\nThe weights' license ({name}) goes with them." if name else "",
    )


def with_degree(text: str, degree: Degree) -> str | None:
    """A card with this degree's row added, or put in the place of its folder's former one.

    None where the card has no table of shardc's: then it is somebody's own, and is left alone.
    """
    found = _TABLE.search(text)
    if found is None:
        return None
    new = _row(degree)
    rows = [_cells(line) for line in found["rows"].splitlines() if line.startswith("|")][2:]
    rows = [row for row in rows if row[4:5] != new[4:5]] + [new]
    rows.sort(key=lambda row: ("".join(row[:1]).zfill(6), "".join(row[4:5]).strip("`")))
    return _tagged(text[: found.start()] + _table(rows) + text[found.end() :], degree.tp)


def license_of(readme: str) -> dict[str, Any]:
    """The license that a card's front matter states, as it is; nothing where that is broken."""
    from huggingface_hub import RepoCard

    try:
        data: dict[str, Any] = vars(RepoCard(readme, ignore_metadata_errors=True).data)
    except Exception:  # of the YAML parser, or of what reads what it found
        return {}
    return {key: data[key] for key in LICENSE_KEYS if _is_text(data.get(key))}


def _is_text(value: Any) -> bool:
    return isinstance(value, str) or (
        isinstance(value, list) and all(isinstance(item, str) for item in value)
    )


def _metadata(facts: Facts) -> str:
    from huggingface_hub import ModelCardData

    data = ModelCardData(
        library_name=facts.library,
        base_model=facts.base_model,
        tags=[*TAGS, f"tp{facts.degree.tp}"],
        **_own_link(facts),
    )
    return data.to_yaml()


def _own_link(facts: Facts) -> dict[str, Any]:
    """The license's fields; a link into the source's repo leads there from here, too."""
    fields = dict(facts.license)
    link = fields.get("license_link")
    if isinstance(link, str) and facts.base_model and not re.match(r"[a-z]+://", link):
        fields["license_link"] = f"https://huggingface.co/{facts.base_model}/blob/main/{link}"
    return fields


def license_name(fields: Mapping[str, Any]) -> str | None:
    """What to call the license that a card states, None where it states none."""
    name = fields.get("license_name") or fields.get("license")
    return printable(", ".join(name) if isinstance(name, list) else name) if name else None


def _built(facts: Facts) -> str:
    degree = facts.degree
    lines = [
        f"By {degree.tool} from {degree.source or 'a local copy'}, profile {degree.profile}:\n"
    ]
    for part in facts.parts:
        name = f"`{part.name}` ({part.class_name})" if part.name else part.class_name
        how = f"cut by manifest {part.manifest}" if part.manifest else "kept whole"
        lines.append(f"- {name}: {how}")
    return "\n".join(lines)


def _row(degree: Degree) -> list[str]:
    return [
        str(degree.tp),
        ", ".join(degree.dtypes),
        degree.profile,
        _size(degree.rank_bytes),
        f"`{degree.folder}`",
        degree.tool,
        degree.source or "",
    ]


def _table(rows: Sequence[Sequence[str]]) -> str:
    lines = [COLUMNS, ["---"] * len(COLUMNS), *rows]
    return "\n".join([BEGIN, *(f"| {' | '.join(map(_cell, line))} |" for line in lines), END])


def _cell(text: str) -> str:
    return re.sub(r"(?<!\\)\|", r"\\|", printable(text))


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip())[1:-1]]


def _tagged(text: str, tp: int) -> str:
    """The card with a tag for the degree after those of other degrees, where it has such."""
    front = _FRONT.match(text)
    if front is None or re.search(rf"^[ \t]*- tp{tp}\s*$", front[0], re.M):
        return text
    others = list(re.finditer(r"^([ \t]*)- tp\d+[ \t]*(\r?\n)", front[0], re.M))
    if not others:
        return text
    last = others[-1]
    return f"{text[: last.end()]}{last[1]}- tp{tp}{last[2]}{text[last.end() :]}"


def _size(count: float) -> str:
    for unit in ("B", "kB", "MB"):
        if abs(count) < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.2f} {unit}"
        count /= 1000
    return f"{count:.2f} GB"
