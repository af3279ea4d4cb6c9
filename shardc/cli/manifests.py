"""`shardc manifest list|show|check|derive`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from shardc.cli.options import PATH, ManifestName, json_option, variant_option
from shardc.cli.output import console, reporting, say_json, table

if TYPE_CHECKING:
    from shardc.manifest import Manifest


@click.group()
def manifest() -> None:
    """Bundled rules; lint one against a checkpoint; derive one from a class's own TP plan.

    \b
    Example:
      shardc manifest list
      shardc manifest check my-model.toml path/to/transformer
    """


@manifest.command("list")
@json_option
@reporting
def list_(as_json: bool) -> None:
    """The bundled manifests and the classes they serve.

    \b
    Example:
      shardc manifest list
    """
    from shardc import library

    found = library.bundled()
    if as_json:
        say_json(
            [
                {
                    "name": name,
                    "library": m.library,
                    "classes": list(m.classes),
                    "rules": len(m.rules),
                    "digest": m.digest,
                }
                for name, m in found.items()
            ]
        )
        return
    shown = table("name", "library", ">rules", "serves also")
    shown.columns[0].no_wrap = True
    for name, m in found.items():
        others = "\n".join(c for c in m.classes if c != name)
        shown.add_row(name, m.library, str(len(m.rules)), others)
    console().print(shown)


@manifest.command()
@click.argument("name", type=ManifestName())
@reporting
def show(name: str) -> None:
    """Print a manifest: a bundled one by name or class, or a file.

    \b
    Example:
      shardc manifest show Flux2Transformer2DModel
    """
    from shardc import library

    click.echo(library.text_of(name), nl=False)


@manifest.command()
@click.argument("name", type=ManifestName())
@click.argument("src", type=PATH, required=False)
@click.option(
    "--prove",
    "case",
    type=PATH,
    metavar="CASE.py",
    help="Shard and run this tiny configuration, and compare it with the unsharded model.",
)
@click.option("--tp", type=int, default=2, show_default=True, help="Ranks to prove it on.")
@variant_option
@json_option
@reporting
def check(
    name: str,
    src: Path | None,
    case: Path | None,
    tp: int,
    variant: str | None,
    as_json: bool,
) -> None:
    """Check manifest NAME by itself and, where SRC is given, against that checkpoint.

    \b
    Example:
      shardc manifest check my-model.toml
      shardc manifest check my-model.toml path/to/transformer
      shardc manifest check my-model.toml --prove case.py
    """
    from shardc import api, library

    found = library.load(name)
    report: dict[str, Any] = {"ok": True, "name": found.name, "rules": len(found.rules)}
    if src is not None:
        from shardc.report import plan_report

        # At degree 1 every rule that fits at all fits: what remains is the rules' own doing.
        planned = plan_report(api.plan(src, 1, manifest=name, variant=variant))
        report["components"] = [
            part for part in planned["components"] if part["manifest"] == found.name
        ]
    if case is not None:
        from shardc.loaders.prove import prove

        proofs = prove(name, case, tp)
        report["proofs"] = [proof.to_json() for proof in proofs]
        report["ok"] = all(proof.ok for proof in proofs)
    if as_json:
        say_json(report)
    else:
        show_check(found, report)
    if not report["ok"]:
        sys.exit(1)


def show_check(found: Manifest, report: dict[str, Any]) -> None:
    """What a check of a manifest found, a line each."""
    click.echo(f"{found.name}: {len(found.rules)} rules, no problem in itself")
    for part in report.get("components", ()):
        legal = ", ".join(map(str, part["legal_degrees"]))
        click.echo(f"{part['class']}: {part['tensors']} tensors, legal degrees to 64: {legal}")
        for text in part["unused_optional"]:
            click.echo(f"optional rule unused: {text}")
    for proof in report.get("proofs", ()):
        click.echo(
            f"{proof['class_name']}, profile {proof['profile']}, {proof['tp']} ranks: "
            f"{'proven' if proof['ok'] else 'WRONG'}, error {proof['error']:.1e}"
        )


@manifest.command()
@click.argument("target", metavar="CLASS")
@click.option("--config", type=PATH, help="config.json to build the class from, not its defaults.")
@click.option("-o", "--out", type=PATH, help="Write the file instead of stdout.")
@reporting
def derive(target: str, config: Path | None, out: Path | None) -> None:
    """Write a manifest from CLASS's own TP plan, else from its modules' names.

    Needs diffusers or transformers. What it writes is a proposal: prove it (manifest check), then
    pass it with --manifest.

    \b
    Example:
      shardc manifest derive FluxTransformer2DModel
      shardc manifest derive Qwen3ForCausalLM --config text_encoder/config.json -o qwen3.toml
    """
    from shardc.derive import derive as derive_text

    text = derive_text(target, config)
    if out is None:
        click.echo(text, nl=False)
    else:
        out.write_text(text, encoding="utf-8")
        click.echo(f"{out} written: unproven until you have checked it", err=True)
