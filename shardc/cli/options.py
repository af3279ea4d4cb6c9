"""Options that several commands share, and the types of their values."""

from __future__ import annotations

import re
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.shell_completion import CompletionItem

if TYPE_CHECKING:
    from shardc.writing import Resources

F = TypeVar("F", bound=Callable[..., Any])


class _Local(click.Path):
    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        if "://" in str(value):
            self.fail(f"{value!r} is an address: this takes a path on this machine", param, ctx)
        return super().convert(value, param, ctx)


PATH = _Local(path_type=Path)
TARGET_NAMES = ("trn1", "inf2", "trn2", "trn3")


class Size(click.ParamType[int]):
    """Bytes, as 500MB (powers of 1000) or 2GiB (powers of 1024)."""

    name = "size"

    def convert(self, value: Any, param: Any, ctx: Any) -> int:
        if isinstance(value, int):
            return value
        match = re.fullmatch(
            r"(\d{1,18}(?:\.\d{1,18})?)\s*([kmgt]?)(i?)b?", str(value).strip(), re.I
        )
        if match is None or (match[3] and not match[2]):
            self.fail(f"{value!r} is not a size like 4GB, 500MB or 2GiB", param, ctx)
        base = 1024 if match[3] else 1000
        count = int(Fraction(match[1]) * base ** " kmgt".index(match[2].lower() or " "))
        if count < 1:
            self.fail(f"{value!r} is less than a byte", param, ctx)
        return count


class ManifestName(click.ParamType[str]):
    """A bundled manifest's name, or a file."""

    name = "name|file"

    def shell_complete(self, ctx: Any, param: Any, incomplete: str) -> list[CompletionItem]:
        from shardc import library

        names = [CompletionItem(n) for n in library.bundled() if n.startswith(incomplete)]
        return [*names, CompletionItem(incomplete, type="file")]


class Source(click.ParamType[str]):
    """A path, or the address of something remote."""

    name = "src"

    def shell_complete(self, ctx: Any, param: Any, incomplete: str) -> list[CompletionItem]:
        return [CompletionItem(incomplete, type="file")]


def stacked(*options: Callable[[F], F]) -> Callable[[F], F]:
    """Several click options as one decorator, shown in this order."""

    def decorate(function: F) -> F:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


json_option = click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout.")
quiet_option = click.option("-q", "--quiet", is_flag=True, help="No progress, no tables.")
debug_option = click.option(
    "--debug", is_flag=True, help="Check the plan's invariants; show tracebacks."
)
variant_option = click.option(
    "--variant", metavar="NAME", help="Weights of a variant, such as fp16."
)
revision_option = click.option(
    "--revision", metavar="REV", help="A Hub repo's branch, tag or commit.  [default: main]"
)
token_option = click.option(
    "--token", metavar="T", help="For the Hub.  [default: HF_TOKEN, or that of `hf auth login`]"
)
force_option = click.option("--force", is_flag=True, help="Replace what exists.")
resume_option = click.option(
    "--resume", is_flag=True, help="Go on from what an interrupted run left."
)
out_option = click.option(
    "-o", "--out", type=PATH, required=True, metavar="DIR", help="The folder to make."
)

planning_options = stacked(
    click.option(
        "--tp", type=click.IntRange(min=1), required=True, metavar="N", help="The degree."
    ),
    click.option(
        "--manifest", type=ManifestName(), help="Rules to cut by, if not the bundled ones."
    ),
    click.option(
        "--component",
        "components",
        multiple=True,
        metavar="C",
        help="Shard only this component (repeatable); the others stay whole.",
    ),
    variant_option,
    revision_option,
    token_option,
    click.option(
        "--dtype",
        type=click.Choice(["bf16", "fp16", "fp32", "keep"]),
        default="keep",
        show_default=True,
        help="Cast floating-point tensors on the way.",
    ),
    click.option(
        "--max-part-size",
        "max_part_bytes",
        type=Size(),
        metavar="SIZE",
        help="Cut larger shard files into parts, and refuse a tensor that is larger.  "
        "[default: 4GB, and a larger tensor is a part of its own]",
    ),
    click.option(
        "--profile",
        type=click.Choice(["compact", "native"]),
        default="compact",
        show_default=True,
        help="compact: least bytes a rank; native: what diffusers itself shards.",
    ),
    click.option(
        "--pad-heads",
        is_flag=True,
        help="Add zero heads and columns where the degree does not divide them.",
    ),
    click.option(
        "--target", type=click.Choice(TARGET_NAMES), help="Check against a Neuron device."
    ),
)

resource_options = stacked(
    click.option("--no-fsync", is_flag=True, help="Do not wait until the disk has it."),
    click.option("--workers", type=click.IntRange(1, 64), metavar="N", help="Threads."),
    click.option(
        "--memory",
        type=click.IntRange(min=1),
        metavar="MIB",
        help="Bound on buffers.  [default: 64; of a remote source 96]",
    ),
)


def resources(
    no_fsync: bool, workers: int | None, memory: int | None, progress: Callable[[int], None]
) -> Resources:
    """The resource options as what the builder takes."""
    from shardc.writing import Resources

    memory_bytes = None if memory is None else memory * 2**20
    return Resources(workers, memory_bytes, not no_fsync, progress)
