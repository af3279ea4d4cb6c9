"""docs/models.md: written from proofs and plans, by `python -m tests.zoo --write`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from shardc import library
from tests.zoo.case import Published, cases, published
from tests.zoo.proof import Proof
from tests.zoo.sizes import Sizes

DOCUMENT = Path(__file__).parents[2] / "docs" / "models.md"
HEAD = """# Proven models

Written by `python -m tests.zoo --write`, from what it ran; not by hand.

Every class below was proven, for each option named: a tiny model with all its parameters random was
saved, built, loaded on the ranks named, and its forward compared with the unsharded model's, in
fp32 and in both profiles. The error is the largest difference of any output on any rank, relative
to the largest output where that exceeds 1; 1e-5 is the limit. In bf16 (profile compact) the error
against fp32 was at most 1.5 times that of the unsharded bf16 model. "With zero heads" are degrees
that need `--pad-heads`.

What this does not prove: real weights, speed, and devices other than the CPU.
"""

UNPROVEN = {  # served all the same, with the reason
    "CosmosControlNetModel": "its forward needs torchvision",
    "ZImageControlNetModel": "it runs only with modules of the transformer that it is made for",
}

# The defaults of these are no whole model.
NO_DEFAULTS = {"MinistralModel", "MinistralForCausalLM", "Transformer2DModel"}


def entries() -> list[Published]:
    """The published configurations, and the defaults of each class that has none."""
    found = list(published())
    known = {one.class_name for one in found}
    for case in cases():
        if case.class_name not in known | NO_DEFAULTS:
            known.add(case.class_name)
            found.append(Published("(class defaults)", case.class_name, {}, case.library))
    return found


def render(proofs: Iterable[Proof], sizes: Iterable[Sizes]) -> str:
    """The document's text."""
    by_class: dict[str, list[Proof]] = {}
    for proof in proofs:
        by_class.setdefault(proof.case.class_name, []).append(proof)
    weights: dict[str, list[Sizes]] = {}
    for size in sizes:
        weights.setdefault(size.published.class_name, []).append(size)
    lines = [HEAD]
    for kind, title in (("diffusers", "Diffusion models"), ("transformers", "Encoders")):
        chosen = {n: p for n, p in by_class.items() if p[0].case.library == kind}
        lines += [f"## {title}", "", f"{len(chosen)} classes.", "", *_proof_rows(chosen), ""]
        lines += [*weight_rows({n: w for n, w in weights.items() if n in chosen}), ""]
    lines += ["## Served, but not proven here", ""]
    lines += [*(f"- `{name}`: {reason}." for name, reason in UNPROVEN.items()), ""]
    return "\n".join(lines)


def _proof_rows(by_class: Mapping[str, list[Proof]]) -> list[str]:
    rows = ["| class | options | ranks | error |", "|---|---|---|---|"]
    for name, proofs in sorted(by_class.items()):
        options = ", ".join(p.case.option for p in proofs if p.case.option)
        plain = sorted({n for p in proofs for n, profile in p.errors if profile != "padded"})
        zeros = sorted({n for p in proofs for n, profile in p.errors if profile == "padded"})
        ranks = ", ".join(map(str, plain))
        if zeros:
            ranks += f"; with zero heads {', '.join(map(str, zeros))}"
        worst = max(proof.worst for proof in proofs)
        rows.append(f"| `{name}` | {options} | {ranks} | {worst:.0e} |")
    return rows


def weight_rows(weights: Mapping[str, list[Sizes]]) -> list[str]:
    rows = [
        "Weights, in bf16. GB a rank at tp 8, or at the highest legal degree below it:",
        "",
        "| weights | class | parameters | legal degrees | tp | compact | native |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, sizes in sorted(weights.items()):
        for one in sizes:
            degrees = ", ".join(map(str, one.degrees))
            rows.append(
                f"| {one.published.repo} | `{name}` | {one.parameters / 1e9:.2f}B | {degrees} "
                f"| {one.tp} | {one.rank_bytes['compact'] / 1e9:.2f} "
                f"| {one.rank_bytes['native'] / 1e9:.2f} |"
            )
    return rows


def documented() -> dict[str, float]:
    """What the document says: each class's error."""
    rows = re.findall(r"^\| `(\w+)` \|.*\| (\de-\d\d) \|$", DOCUMENT.read_text(), re.M)
    return {name: float(error) for name, error in rows}


def unserved() -> list[str]:
    """Classes that a bundled manifest serves and no case proves."""
    proven = {case.class_name for case in cases()}
    served = {c for m in library.bundled().values() for c in m.classes}
    return sorted(served - proven - UNPROVEN.keys())
