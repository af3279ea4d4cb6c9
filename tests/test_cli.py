"""The command line as its user meets it: exit status, stdout, stderr, and what is on the disk."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest
from click.testing import CliRunner, Result

import shardc
from shardc import targets
from shardc.cli import main
from shardc.cli.building import default_out
from shardc.cli.options import TARGET_NAMES, Size
from shardc.cli.output import degrees, mebibytes, size
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


# Help, version, completion


def commands(group: click.Group = main, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for name, command in group.commands.items():
        yield (*path, name)
        if isinstance(command, click.Group):
            yield from commands(command, (*path, name))


def test_the_commands() -> None:
    found = set(commands())
    for name in ("build", "plan", "inspect", "verify", "merge", "reshard", "demo"):
        assert (name,) in found
    for name in ("list", "show", "check", "derive"):
        assert ("manifest", name) in found


@pytest.mark.parametrize("path", [(), *commands()], ids=" ".join)
def test_help_has_an_example(path: tuple[str, ...]) -> None:
    for option in ("--help", "-h"):
        result = run(*path, option)
        example = result.stdout.partition("Example:\n")[2]
        assert f"shardc {' '.join(path)}".strip() in example.partition("\n\n")[0]
        assert result.stderr == ""


def test_help_is_light() -> None:
    helps = [[*path, "--help"] for path in [(), *commands()]]
    code = f"""
import contextlib, io, json, sys
from shardc.cli import main
with contextlib.redirect_stdout(io.StringIO()):
    for args in {helps!r}:
        main(args, prog_name="shardc", standalone_mode=False)
print(json.dumps(sorted(sys.modules)))
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    loaded = {name.split(".")[0] for name in json.loads(result.stdout)}
    assert "shardc" in loaded
    heavy = {"numpy", "pydantic", "rich", "torch", "diffusers", "transformers", "huggingface_hub"}
    assert not loaded & heavy


def test_version() -> None:
    assert run("--version").stdout == f"shardc, version {shardc.__version__}\n"


def test_build_imports_no_model_library(flux: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-X", "importtime", "-m", "shardc", "build", str(flux), "--tp", "2"]
    result = subprocess.run(
        [*command, "-o", str(tmp_path / "out"), "--no-fsync"],
        capture_output=True,
        text=True,
        check=True,
    )
    lines = result.stderr.splitlines()
    assert all(line.startswith("import time:") for line in lines)
    loaded = {line.rpartition("|")[2].strip().split(".")[0] for line in lines}
    assert "numpy" in loaded
    assert not loaded & {"torch", "diffusers", "transformers", "accelerate", "huggingface_hub"}


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_script(shell: str) -> None:
    result = process(env={**os.environ, "_SHARDC_COMPLETE": f"{shell}_source"})
    assert result.returncode == 0
    assert f"_SHARDC_COMPLETE={shell}_complete" in result.stdout
    assert result.stderr == ""


def completed(words: str) -> list[str]:
    asked = {
        "_SHARDC_COMPLETE": "bash_complete",
        "COMP_WORDS": words,
        "COMP_CWORD": str(len(words.split(" ")) - 1),
    }
    result = process(env={**os.environ, **asked})
    assert result.stderr == ""
    return result.stdout.split()


def test_completion() -> None:
    assert completed("shardc bu") == ["plain,build"]
    assert completed("shardc build x --profile n") == ["plain,native"]
    for words in ("shardc manifest show Flux2", "shardc build x --manifest Flux2"):
        assert completed(words) == ["plain,Flux2Transformer2DModel", "file,Flux2"]


# How commands fail


@pytest.mark.parametrize(
    "args",
    [
        ["nonsense"],
        ["build"],
        ["build", "x"],
        ["build", "x", "--tp", "two"],
        ["build", "x", "--tp", "0"],
        ["plan", "x", "--tp", "-1"],
        ["plan", "x", "--tp", "2", "--target", "trn9"],
        ["plan", "x", "--tp", "2", "--profile", "best"],
        ["build", "x", "--tp", "2", "--dtype", "int8"],
        ["build", "x", "--tp", "2", "--workers", "0"],
        ["build", "x", "--tp", "2", "--memory", "0"],
        ["build", "x", "--tp", "2", "--no-such-option"],
        ["verify", "x", "--rank", "-1"],
        ["merge", "x"],
        ["reshard", "x", "-o", "y"],
        ["manifest", "nonsense"],
        ["manifest", "show"],
        ["build", "x", "--tp", "2", "--max-part-size", "4XB"],
        ["build", "x", "--tp", "2", "--max-part-size", "0"],
        ["build", "x", "--tp", "2", "--max-part-size", "9" * 400 + "GB"],
    ],
    ids=" ".join,
)
def test_usage_errors(args: list[str], here: Path) -> None:
    result = run(*args, status=2)
    assert result.stdout == ""
    assert "Error: " in result.stderr
    assert listing(here) == []


NOTHING = [
    ["plan", "nowhere", "--tp", "2"],
    ["build", "nowhere", "--tp", "2"],
    ["inspect", "nowhere"],
    ["verify", "nowhere"],
    ["merge", "nowhere", "-o", "out"],
    ["reshard", "nowhere", "--tp", "2", "-o", "out"],
    ["manifest", "check", "nowhere"],
]


@pytest.mark.parametrize("args", NOTHING, ids=" ".join)
def test_what_is_not_there(args: list[str], here: Path) -> None:
    (line,) = errors(*args)
    assert "nowhere" in line
    failed = said(*args, status=1)
    assert failed == {"ok": False, "problems": [line.removeprefix("error: ")]}
    assert listing(here) == []


@pytest.mark.parametrize("args", NOTHING[:-1], ids=" ".join)
def test_what_is_of_no_use(args: list[str], here: Path) -> None:
    (here / "nowhere").mkdir()
    (line,) = errors(*args)
    assert line.startswith("error: nowhere: ")
    (here / "nowhere").rmdir()
    (here / "nowhere").write_text("nonsense")
    (line,) = errors(*args)
    assert line.startswith("error: nowhere: ")
    assert listing(here) == ["nowhere"]


def test_show_has_no_json_but_fails_alike() -> None:
    (line,) = errors("manifest", "show", "nowhere")
    assert "neither a bundled manifest nor a file" in line


def test_failure_in_a_process(flux: Path, here: Path) -> None:
    result = process("build", flux, "--tp", 3, "--json")
    assert result.returncode == 1
    document = json.loads(result.stdout)
    assert document["ok"] is False
    assert [f"error: {p}" for p in document["problems"]] == result.stderr.splitlines()
    assert "Traceback" not in result.stderr
    assert listing(here) == []


def test_debug_adds_a_traceback(flux: Path) -> None:
    result = process("plan", flux, "--tp", 3, "--json", "--debug")
    assert result.returncode == 1
    assert result.stderr.startswith("Traceback")
    assert "PlanError" in result.stderr
    problems = json.loads(result.stdout)["problems"]
    assert result.stderr.splitlines()[-len(problems) :] == [f"error: {p}" for p in problems]


def test_debug_checks_a_sound_plan(flux: Path) -> None:
    assert run("plan", flux, "--tp", 2, "--debug").stderr == ""


def test_an_error_of_the_system_is_one_line(flux: Path, here: Path) -> None:
    """Whatever shardc did not foresee has no traceback either."""
    (line,) = errors("build", flux, "--tp", 2, "-o", "n" * 300)
    assert line.endswith(": File name too long")
    (line,) = errors("plan", "n" * 5000, "--tp", 2)
    (line,) = errors("demo", "--keep", flux / "model_index.json" / "x")
    assert "Not a directory" in line
    assert listing(here) == []


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("options", [[], ["--json"]])
def test_stdout_is_full(options: list[str], flux: Path) -> None:
    with open("/dev/full", "w") as full:
        command = [*SHARDC, "plan", str(flux), "--tp", "2", *options]
        result = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert result.returncode == 1
    assert result.stderr == "error: No space left on device\n"


def test_nobody_reads_on(flux: Path) -> None:
    for options in ("", "--json"):
        line = f"'{sys.executable}' -m shardc plan '{flux}' --tp 2 {options} | true"
        result = subprocess.run(["bash", "-c", line], capture_output=True, text=True)
        assert result.stderr == ""


def test_closed_streams(flux: Path, here: Path) -> None:
    line = f"'{sys.executable}' -m shardc build '{flux}' --tp 2 -o out --no-fsync >&- 2>&-"
    assert subprocess.run(["bash", "-c", line]).returncode == 0
    assert listing(here) == ["out"]


# build


def test_build_says_what_it_did(flux: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = run("build", flux, "--tp", 2, "-o", out)
    assert result.stderr == ""
    for word in ("out", "sharded", "files", "written", "seconds", "rate", "peak memory", "GB/s"):
        assert word in result.stdout
    written = sum(len(raw) for raw in ck.contents(out).values())
    assert f"({written} bytes)" in result.stdout


def test_build_json(flux: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    report = said("build", flux, "--tp", 2, "-o", out, "--no-fsync")
    contents = ck.contents(out)
    assert report["out"] == str(out)
    assert report["tp"] == 2
    assert report["files"] == len(contents)
    assert report["written_bytes"] == sum(len(raw) for raw in contents.values())
    read = sum(f.stat().st_size for f in (flux / "transformer").glob("*.safetensors"))
    assert report["source_bytes"] == read
    assert report["sharded"] == ["transformer"]
    assert report["kept"] == {}
    assert report["peak_rss_bytes"] > 0
    assert listing(tmp_path) == ["out"]


def test_quiet_says_nothing(flux: Path, tmp_path: Path) -> None:
    for args in (
        ("build", flux, "--tp", 2, "-o", tmp_path / "out"),
        ("verify", tmp_path / "out"),
        ("merge", tmp_path / "out", "-o", tmp_path / "full"),
        ("reshard", tmp_path / "out", "--tp", 4, "-o", tmp_path / "four"),
    ):
        assert run(*args, "-q").output == ""


@pytest.mark.parametrize("options", [[], ["--json"], ["-q"]])
def test_dry_run_writes_nothing(options: list[str], flux: Path, here: Path) -> None:
    result = run("build", flux, "--tp", 2, "--dry-run", *options)
    assert listing(here) == []
    if options == ["--json"]:
        report = json.loads(result.stdout)
        assert (report["out"], report["dry_run"]) == ("flux-tp2", True)
        added = {"out": 0, "dry_run": 0, "up_to_date": False}
        assert {**report, **added} == {**said("plan", flux, "--tp", 2), **added}
        assert report["up_to_date"] is False
    elif not options:
        assert "Dry run: flux-tp2 was not written." in result.stdout
    else:
        assert result.output == ""


def test_dry_run_checks(flux: Path, here: Path) -> None:
    assert len(errors("build", flux, "--tp", 3, "--dry-run")) > 1


def test_existing_out_is_refused(flux: Path, shards: Path) -> None:
    before = ck.contents(shards)
    (line,) = errors("build", flux, "--tp", 4, "-o", shards)
    assert str(shards) in line
    assert "--force" in line
    assert ck.contents(shards) == before
    run("build", flux, "--tp", 4, "-o", f"{shards}/", "--force", *FAST)
    assert said("inspect", shards)["components"][0]["tp"] == 4
    assert listing(shards.parent) == ["shards"]


@pytest.mark.parametrize("what", ["folder", "checkpoint", "file", "link"])
def test_force_replaces_shard_sets_only(what: str, flux: Path, tmp_path: Path) -> None:
    out = tmp_path / "precious"
    if what == "folder":
        out.mkdir()
        (out / "photo.jpg").write_text("me")
    elif what == "checkpoint":
        shutil.copytree(flux, out)
    elif what == "file":
        out.write_text("me")
    else:
        out.symlink_to(tmp_path / "nowhere")
    before = ck.contents(tmp_path)
    (line,) = errors("build", flux, "--tp", 2, "-o", out, "--force")
    assert line.startswith(f"error: {out}: is not a shard set, and shardc will not replace it")
    assert ck.contents(tmp_path) == before
    assert listing(tmp_path) == ["precious"]


def test_leftover_of_an_unfinished_build(flux: Path, tmp_path: Path) -> None:
    leftover = tmp_path / ".out.shardc-partial"
    leftover.mkdir()
    (leftover / "half").write_text("")
    (line,) = errors("build", flux, "--tp", 2, "-o", tmp_path / "out")
    assert str(leftover) in line
    assert "unfinished" in line
    assert "--force" in line
    assert listing(tmp_path) == [leftover.name]
    run("build", flux, "--tp", 2, "-o", tmp_path / "out", "--force", *FAST)
    assert listing(tmp_path) == ["out"]
    assert "half" not in ck.contents(tmp_path / "out")


def test_up_to_date(flux: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    build = ("build", flux, "--tp", 2, "-o", out)
    run(*build, *FAST)
    before = ck.contents(out)
    assert run(*build).stdout == f"{out}: up to date\n"
    assert run(*build, "-q").output == ""
    report = said(*build)
    assert (report["ok"], report["up_to_date"], report["out"]) == (True, True, str(out))
    assert said(*build, "--dry-run")["up_to_date"] is True
    assert f"Dry run: {out} is up to date." in run(*build, "--dry-run").stdout
    assert ck.contents(out) == before
    assert not said(*build, "--force", "--no-fsync")["up_to_date"]
    assert listing(tmp_path) == ["out"]


def test_default_out(flux: Path, here: Path) -> None:
    run("build", flux, "--tp", 2, *FAST)
    run("build", f"{flux}/transformer/", "--tp", 2, *FAST)
    write_flux2(here / "one", SMALL, files=1)
    file = here / "one" / "transformer" / "diffusion_pytorch_model.safetensors"
    run("build", file, "--tp", 4, *FAST)
    made = ["diffusion_pytorch_model-tp4", "flux-tp2", "one", "transformer-tp2"]
    assert listing(here) == made


def test_default_out_of_a_hub_snapshot(flux: Path, here: Path, tmp_path: Path) -> None:
    snapshot = ck.hub_snapshot(flux, tmp_path / "models--org--FLUX.2-tiny")
    run("build", snapshot, "--tp", 2, *FAST)
    assert listing(here) == ["FLUX.2-tiny-tp2"]
    assert run("verify", "FLUX.2-tiny-tp2", "--source", snapshot, "-q").output == ""


def test_default_out_of_dots(flux: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(flux / "transformer")
    assert default_out(Path(), 2) == Path("transformer-tp2")
    assert default_out(Path(".."), 2) == Path("flux-tp2")
    assert default_out(Path("../scheduler/.."), 8) == Path("flux-tp8")


@pytest.mark.parametrize(
    "name", ["two words", "Größe ünï", "[red]x", "[/blue]", ":smile:", "a'b\"c"]
)
def test_odd_names(name: str, flux: Path, here: Path) -> None:
    (here / "link").symlink_to(os.path.relpath(flux, here))
    out = Path(name, "out")
    plan = run("plan", "link", "--tp", 2).stdout
    assert plan.startswith("link at tp 2")
    assert name in run("build", "link", "--tp", 2, "-o", f"{out}/").stdout
    assert run("verify", out, "--source", "link").stdout.startswith(f"{out}: sound")
    assert run("inspect", out).stdout.startswith(f"{out}: shard set")
    assert listing(here) == sorted(["link", out.parts[0]])


def test_component(here: Path, source: Path, rules: Path) -> None:
    """The chosen component is sharded, the other kept whole; an unknown one is named."""
    ck.pipeline(here / "pipe", {"a": ck.CLASS, "b": ck.CLASS})
    ck.component(here / "pipe" / "a", TENSORS)
    ck.component(here / "pipe" / "b", TENSORS)
    args = ("pipe", "--tp", 2, "--manifest", rules)
    report = said("build", *args, "--component", "a", "-o", "one", "--no-fsync")
    assert report["sharded"] == ["a"]
    assert list(report["kept"]) == ["b"]
    weights = "b/diffusion_pytorch_model.safetensors"
    assert (here / "one" / weights).read_bytes() == (here / "pipe" / weights).read_bytes()
    assert (here / "one" / "a" / ck.INDEX).is_file()
    assert not (here / "one" / "b" / ck.INDEX).exists()
    both = said("build", *args, "--component", "a", "--component", "b", "-o", "two", "--no-fsync")
    assert both["sharded"] == ["a", "b"]
    (line,) = errors("build", *args, "--component", "vae", "-o", "three")
    assert "no component vae" in line
    assert "a, b" in line


def test_component_without_manifest(flux: Path, here: Path) -> None:
    shutil.copytree(flux, here / "pipe")
    ck.component(here / "pipe" / "vae", TENSORS, class_name="AutoencoderKL")
    index = json.loads((flux / "model_index.json").read_text())
    index["vae"] = ["diffusers", "AutoencoderKL"]
    ck.write_json(here / "pipe" / "model_index.json", index)
    plan = said("plan", "pipe", "--tp", 2)
    assert [part["name"] for part in plan["kept"]] == ["vae"]
    assert "vae is kept whole" in run("plan", "pipe", "--tp", 2).stdout
    assert "vae: weights" in run("build", "pipe", "--tp", 2, "-o", "out").stdout
    (line,) = errors("plan", "pipe", "--tp", 2, "--component", "vae")
    assert "AutoencoderKL" in line
    assert "manifest" in line


def test_variant(here: Path, rules: Path) -> None:
    ck.component(here / "src", TENSORS)
    half = {name: ck.Data.count("F16", data.shape) for name, data in TENSORS.items()}
    ck.component(here / "src", half, variant="fp16")
    args = ("build", "src", "--tp", 2, "--manifest", rules, *FAST)
    run(*args, "--variant", "fp16", "-o", "half")
    run(*args, "-o", "full")
    for name, dtype in {"half": "F16", "full": "F32"}.items():
        ranks = ck.read_ranks(here / name, 2)
        assert {t.dtype for rank in ranks for t in rank.values()} == {dtype}
    run("verify", "half", "--source", "src", "--variant", "fp16")
    report = said("inspect", "src", "--variant", "fp16")
    assert list(report["components"][0]["dtypes"]) == ["F16"]
    (line,) = errors(*args, "--variant", "bf16", "-o", "none")
    assert "'bf16'" in line
    assert "fp16" in line.partition("there are")[2]


def test_manifest_file(source: Path, rules: Path, here: Path) -> None:
    (line,) = errors("build", source, "--tp", 2)
    assert "no manifest is known for class TinyModel" in line
    run("build", source, "--tp", 2, "--manifest", rules, *FAST)
    ranks = ck.read_ranks(here / "source-tp2", 2)
    assert np.array_equal(ranks[1]["m.weight"].words, TENSORS["m.weight"].words[4:])
    assert np.array_equal(ranks[1]["o.weight"].words, TENSORS["o.weight"].words[:, 4:])
    assert ranks[0]["norm"] == TENSORS["norm"]


def test_broken_manifest_file_tells_all(source: Path, here: Path) -> None:
    Path("bad.toml").write_text('schema = 1\nlibrary = 3\nclass = "X"\n[[rule]]\nstyle = "up"\n')
    lines = errors("build", source, "--tp", 2, "--manifest", "bad.toml")
    assert len(lines) >= 3
    assert all("bad.toml" in line for line in lines)
    assert listing(here) == ["bad.toml"]


def test_dtype(flux: Path, here: Path) -> None:
    run("build", flux, "--tp", 2, "--dtype", "fp32", "-o", "out", *FAST)
    name = "norm_out.linear.weight"
    found = ck.read_ranks(here / "out" / "transformer", 2)
    whole = np.concatenate([rank[name].words for rank in found])
    wanted = ck.read_all(flux / "transformer")[name].words.astype(np.uint32) << 16
    assert {t.dtype for rank in found for t in rank.values()} == {"F32"}
    assert np.array_equal(whole, wanted)
    assert "equal to" in run("verify", "out", "--source", flux).stdout
    report = said("plan", flux, "--tp", 2, "--dtype", "fp32")
    assert report["components"][0]["cast"] == report["components"][0]["tensors"]
    assert said("plan", flux, "--tp", 2, "--dtype", "bf16")["components"][0]["cast"] == 0


def test_max_part_size(flux: Path, here: Path) -> None:
    run("build", flux, "--tp", 2, "--max-part-size", "300kB", "-o", "out", *FAST)
    files = list((here / "out" / "transformer").glob("rank-00000-of-00002-part-*.safetensors"))
    assert len(files) > 1
    for file in files:
        tensors = ck.read(file)
        assert len(tensors) == 1 or sum(len(t.raw) for t in tensors.values()) <= 300_000
    assert run("verify", "out", "--source", flux, "-q").output == ""


def test_j01_a_tensor_that_no_part_can_hold(flux: Path, here: Path) -> None:
    """Case J01: a limit that was asked for is kept, or the plan says which tensor is too large."""
    tensors = said("plan", flux, "--tp", 2)["components"][0]["largest_replicated"]
    largest = tensors[0]["bytes"]
    for command in ("plan", "build"):
        done = run(command, flux, "--tp", 2, "--max-part-size", str(largest - 1), status=1)
        assert f"takes {largest} bytes" in done.stderr
        assert f"--max-part-size is {largest - 1}" in done.stderr
    assert not list(here.iterdir())


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("4GB", 4 * 10**9),
        ("500MB", 500 * 10**6),
        ("2GiB", 2 * 2**30),
        ("1.5 kB", 1500),
        ("0.1GB", 10**8),
        ("7", 7),
        ("7b", 7),
        ("3k", 3000),
        ("1TiB", 2**40),
        (5, 5),
    ],
)
def test_sizes(text: str | int, wanted: int) -> None:
    assert Size()(text) == wanted


@pytest.mark.parametrize(
    "text", ["", "GB", "-1GB", "4XB", "1iB", "1e9", "nan", "inf", "4 G B", "0", "0.1", "9" * 400]
)
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(click.BadParameter, match=r"size|less than a byte"):
        Size()(text)


def test_workers_and_memory_change_no_byte(flux: Path, here: Path) -> None:
    first, *rest = [
        ck.contents(here / name)
        for name, options in {
            "plain": [],
            "small": ["--workers", 1, "--memory", 1],
            "large": ["--workers", 8, "--memory", 512],
        }.items()
        if run("build", flux, "--tp", 2, "-o", name, *options, *FAST)
    ]
    assert all(other == first for other in rest)


# plan


def data_bytes(file: Path) -> int:
    """The bytes of a file's tensors, from its size and the length of its header."""
    raw = file.read_bytes()
    return len(raw) - 8 - int.from_bytes(raw[:8], "little")


@pytest.mark.parametrize("profile", ["compact", "native"])
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_the_plans_figures(profile: str, tp: int, flux: Path, here: Path) -> None:
    options = (flux, "--tp", tp, "--profile", profile)
    report = said("plan", *options)
    run("build", *options, "-o", "out", *FAST)
    folder = here / "out" / "transformer"
    tensors = ck.read_all(flux / "transformer")
    (part,) = report["components"]
    whole = sum(data_bytes(file) for file in folder.glob("replicated*.safetensors"))
    held = [
        whole + sum(data_bytes(f) for f in folder.glob(f"rank-{rank:05d}-*.safetensors"))
        for rank in range(tp)
    ]
    assert part["rank_bytes"] == held
    assert report["rank_bytes"] == max(held)
    assert part["replicated_bytes"] == whole
    assert part["replicated_share"] == pytest.approx(whole / max(held))
    assert part["profiles"][profile] == max(held)
    assert part["files"] == len(list(folder.glob("*.safetensors")))
    assert part["tensors"] == len(tensors)
    assert part["parameters"] == sum(t.words.size for t in tensors.values())
    assert part["dtypes"] == {
        "BF16": {"tensors": len(tensors), "parameters": part["parameters"]},
    }
    assert part["source_bytes"] == sum(
        file.stat().st_size for file in (flux / "transformer").glob("*.safetensors")
    )
    names = [name for file in folder.glob("replicated*.safetensors") for name in ck.read(file)]
    by_size = sorted(names, key=lambda name: -len(tensors[name].raw))
    sizes = [entry["bytes"] for entry in part["largest_replicated"]]
    assert sizes == [len(tensors[name].raw) for name in by_size[:3]]
    assert {entry["name"] for entry in part["largest_replicated"]} <= set(names)
    indexed = said("inspect", "out")["components"][0]
    assert (indexed["tp"], indexed["profile"]) == (tp, profile)


def test_native_shards_less(flux: Path) -> None:
    part = said("plan", flux, "--tp", 2)["components"][0]
    native = said("plan", flux, "--tp", 2, "--profile", "native")["components"][0]
    assert part["profiles"] == native["profiles"]
    assert part["replicated_bytes"] < native["replicated_bytes"]


def test_legal_degrees(flux: Path) -> None:
    """4 heads: only their divisors. Every degree to 64 is either legal or explained."""
    (part,) = said("plan", flux, "--tp", 2)["components"]
    assert part["legal_degrees"] == [1, 2, 4]
    illegal = [tp for group in part["illegal_degrees"] for tp in group["degrees"]]
    assert sorted([1, 2, 4, *illegal]) == list(range(1, 65))
    assert all(group["why"] for group in part["illegal_degrees"])
    for tp in (1, 2, 3, 4, 5, 6, 8, 16, 64):
        run("plan", flux, "--tp", tp, status=0 if tp in (1, 2, 4) else 1)


def test_an_illegal_degree(flux: Path, here: Path) -> None:
    """Names the tensor, both numbers and the degrees that would do; every rule at once."""
    lines = errors("build", flux, "--tp", 8)
    assert all("at tp 8" in line for line in lines[:-1])
    fused = "single_transformer_blocks.0.attn.to_qkv_mlp_proj.weight BF16 [1152, 128]"
    (line,) = [line for line in lines if fused in line]
    assert "4 units of 32 % 8 != 0" in line
    assert "Flux2Transformer2DModel.toml:" in line
    assert lines[-1] == "error: transformer: legal degrees are 1, 2, 4"
    assert len(lines) > 3
    assert listing(here) == []


@pytest.mark.parametrize("tp", [1025, 10**30])
def test_a_huge_degree(tp: int, flux: Path) -> None:
    assert str(tp) in errors("plan", flux, "--tp", tp)[0]


def test_plan_shows(flux: Path) -> None:
    shown = run("plan", flux, "--tp", 2).stdout
    for text in ("tp 2", "compact", "Flux2Transformer2DModel", "legal degrees", "1, 2, 4", "BF16"):
        assert text in shown


def test_plan_reads_no_weight(rules: Path, here: Path) -> None:
    """A hole of 8 TB is planned at once: no byte of it is read."""
    write_hole(here / "big", "F32", [2**21, 2**20])
    report = said("plan", "big", "--tp", 2, "--manifest", rules)
    assert report["rank_bytes"] == 4 * (2**41 + 2**21) // 2


def write_hole(folder: Path, dtype: str, shape: list[int]) -> None:
    """A component whose one weight takes no room on the disk."""
    item = ck.BITS[dtype] // 8
    stop = shape[0] * shape[1] * item
    header = {
        "m.weight": {"dtype": dtype, "shape": shape, "data_offsets": [0, stop]},
        "o.weight": {
            "dtype": dtype,
            "shape": [1, shape[0]],
            "data_offsets": [stop, stop + item * shape[0]],
        },
    }
    ck.component(folder, {})
    file = folder / "diffusion_pytorch_model.safetensors"
    file.write_bytes(ck.raw_file(header, b""))
    try:
        os.truncate(file, file.stat().st_size + stop + item * shape[0])
    except OSError:
        pytest.skip("the filesystem takes no file of that size")


def test_target_names() -> None:
    assert set(TARGET_NAMES) == set(targets.TARGETS)


def test_target_tells_all_at_once(rules: Path, here: Path) -> None:
    """A degree that it lacks, more bytes than it holds, a dtype that it does not know."""
    write_hole(here / "big", "F64", [6 * 2**20, 1024])
    args = ("plan", "big", "--tp", 3, "--manifest", rules)
    run(*args)
    dry = ("build", *args[1:], "--dry-run", "--target", "trn1")
    lines = errors(*dry)
    assert len(lines) == 4
    assert "trn1: tp 3 is not among" in lines[0]
    held = 8 * (6 * 2**20 * 1024 + 6 * 2**20) // 3
    assert f"take {held} bytes" in lines[1]
    assert "m.weight: F64" in lines[2]
    assert "o.weight: F64" in lines[3]
    cast = errors(*dry, "--dtype", "bf16")
    assert len(cast) == 1
    shown = CliRunner().invoke(main, [*map(str, args), "--target", "trn1"])
    assert shown.exit_code == 1  # plan shows what it has, and then what stands against it
    assert "big at tp 3" in shown.stdout
    assert shown.stderr.splitlines() == lines


def test_target_forbids_a_build(flux: Path, here: Path) -> None:
    (line,) = errors("build", flux, "--tp", 4, "--target", "trn1")
    assert "1, 2, 8, 16, 32" in line
    assert listing(here) == []
    run("build", flux, "--tp", 4, "--target", "inf2", *FAST)


# inspect, verify


def test_inspect_a_checkpoint(flux: Path) -> None:
    report = said("inspect", flux)
    assert (report["what"], report["kind"]) == ("checkpoint", "pipeline")
    (part,) = report["components"]
    assert part["name"] == "transformer"
    assert part["class"] == "Flux2Transformer2DModel"
    assert part["files"] == 2
    assert part["tensors"] == len(ck.read_all(flux / "transformer"))
    shown = run("inspect", flux).stdout
    assert "checkpoint" in shown
    assert "bundled" in shown


def test_inspect_a_shard_set(built: Path) -> None:
    report = said("inspect", built)
    assert report["what"] == "shard set"
    (part,) = report["components"]
    assert (part["tp"], part["profile"], part["dtype"]) == (2, "compact", "keep")
    assert part["tool"] == f"shardc {shardc.__version__}"
    files = {file.name: file.stat().st_size for file in built.glob("*/*.safetensors")}
    assert part["bytes"] == sum(files.values())
    assert part["rank_bytes"] == [
        sum(n for name, n in files.items() if name.startswith((f"rank-0000{rank}", "replicated")))
        for rank in range(2)
    ]
    assert "shard set" in run("inspect", built).stdout


def test_inspect_one_shard(built: Path) -> None:
    (line,) = errors("inspect", built / "transformer" / "rank-00000-of-00002.safetensors")
    assert "one rank's shard" in line


def test_a_component_that_is_not_there(flux: Path, tmp_path: Path) -> None:
    source = shutil.copytree(flux, tmp_path / "source")
    index = json.loads((source / "model_index.json").read_text())
    ck.write_json(source / "model_index.json", {**index, "vae": ["diffusers", "AutoencoderKL"]})
    (line,) = errors("plan", source, "--tp", 2)
    assert "model_index.json" in line
    assert "--component" in line
    run("plan", source, "--tp", 2, "--component", "transformer")
    assert said("inspect", source)["missing"] == ["vae"]
    assert "Component vae is listed, but has no folder." in run("inspect", source).stdout


@pytest.mark.parametrize("text", ["{", "[]", "null", "\\x00", "[" * 100_000])
@pytest.mark.parametrize("name", ["model_index.json", "transformer/config.json"])
def test_broken_json(name: str, text: str, flux: Path, tmp_path: Path) -> None:
    source = shutil.copytree(flux, tmp_path / "source")
    (source / name).write_text(text)
    for args in (("plan", source, "--tp", 2), ("build", source, "--tp", 2), ("inspect", source)):
        (line,) = errors(*args)
        assert name in line
    assert listing(tmp_path) == ["source"]


def test_config_of_another_kind(flux: Path, here: Path) -> None:
    source = shutil.copytree(flux, here / "source")
    config = source / "transformer" / "config.json"
    ck.write_json(config, {"_class_name": "Flux2Transformer2DModel"})
    lines = errors("build", source, "--tp", 2)
    assert any("config.json has no 'num_attention_heads'" in line for line in lines)
    config.unlink()
    assert "no config.json there names the model class" in errors("build", source, "--tp", 2)[0]
    assert "config.json" in errors("plan", next(config.parent.glob("*.safetensors")), "--tp", 2)[0]
    assert listing(here) == ["source"]


def test_a_shard_set_is_no_source(built: Path, here: Path) -> None:
    for command in ("plan", "build"):
        (line,) = errors(command, built, "--tp", 4)
        assert "is a shard set" in line
        assert "reshard" in line
    assert listing(here) == []


def test_a_checkpoint_is_no_shard_set(flux: Path, here: Path) -> None:
    for args in (
        ("verify", flux),
        ("merge", flux, "-o", "out"),
        ("reshard", flux, "--tp", 2, "-o", "out"),
    ):
        (line,) = errors(*args)
        assert "not a shard set" in line
        assert "shardc build" in line
    assert listing(here) == []


def test_verify(flux: Path, built: Path) -> None:
    files = len(list(built.glob("*/*.safetensors")))
    result = run("verify", built)
    assert result.stdout.startswith(f"{built}: sound: ")
    assert result.stderr == ""
    report = said("verify", built)
    assert report["ok"] is True
    assert report["problems"] == []
    assert report["files"] == files
    assert f"equal to {flux}" in run("verify", built, "--source", flux).stdout
    against = said("verify", built, "--source", flux)
    assert against["ok"]
    assert against["source"] == str(flux)
    assert against["checked_bytes"] > report["checked_bytes"]


def flip(file: Path) -> None:
    raw = bytearray(file.read_bytes())
    raw[-1] ^= 1
    file.write_bytes(raw)


def test_verify_damage(shards: Path) -> None:
    file = shards / "transformer" / "rank-00001-of-00002.safetensors"
    flip(file)
    lines = errors("verify", shards)
    assert all(file.name in line for line in lines)
    last = ck.names(file)[-1]
    assert any(last in line for line in lines)
    report = said("verify", shards, status=1)
    assert report["ok"] is False
    assert [f"error: {problem}" for problem in report["problems"]] == lines


def test_verify_one_rank(shards: Path) -> None:
    flip(shards / "transformer" / "rank-00001-of-00002.safetensors")
    assert said("verify", shards, "--rank", 0)["files"] == 2
    assert errors("verify", shards, "--rank", 1)
    (line,) = errors("verify", shards, "--rank", 2)
    assert "rank 2" in line
    assert "tp 2" in line


def test_verify_one_rank_without_the_others(shards: Path, flux: Path) -> None:
    (shards / "transformer" / "rank-00001-of-00002.safetensors").unlink()
    run("verify", shards, "--rank", 0, "--source", flux)
    (line,) = errors("verify", shards)
    assert "rank-00001-of-00002.safetensors: is missing" in line


def test_verify_a_wrong_source(built: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    write_flux2(other, SMALL, seed=1)
    lines = errors("verify", built, "--source", other)
    assert any("single_transformer_blocks.0" in line for line in lines)
    (line,) = errors("verify", built, "--source", built)
    assert "is a shard set" in line


# merge, reshard


def test_merge(flux: Path, built: Path, here: Path) -> None:
    report = said("merge", built, "-o", "full", "--no-fsync")
    assert report["files"] == len(ck.contents(flux))
    assert ck.contents(here / "full") == ck.contents(flux)
    (line,) = errors("merge", built, "-o", "full")
    assert "exists already" in line
    assert listing(here) == ["full"]


def test_reshard(flux: Path, built: Path, here: Path) -> None:
    report = said("reshard", built, "--tp", 4, "-o", "four", "--no-fsync")
    assert report["tp"] == 4
    run("build", flux, "--tp", 4, "-o", "direct", *FAST)
    assert ck.contents(here / "four") == ck.contents(here / "direct")
    lines = errors("reshard", built, "--tp", 3, "-o", "three")
    assert any("at tp 3" in line for line in lines)
    assert listing(here) == ["direct", "four"]


@pytest.mark.parametrize("args", [["merge"], ["reshard", "--tp", "4"]], ids=lambda args: args[0])
def test_damage_is_not_passed_on(args: list[str], shards: Path, here: Path) -> None:
    flip(shards / "transformer" / "rank-00001-of-00002.safetensors")
    assert errors(*args, shards, "-o", "out")
    assert listing(here) == []


# manifest


def test_manifest_list() -> None:
    found = {entry["name"]: entry for entry in said("manifest", "list")}
    assert "Flux2Transformer2DModel" in found
    assert found["Flux2Transformer2DModel"]["classes"] == ["Flux2Transformer2DModel"]
    shown = run("manifest", "list").stdout
    assert all(name in shown for name in found)


def test_manifest_show(rules: Path) -> None:
    folder = Path(__file__).parents[1] / "manifests"
    for entry in said("manifest", "list"):
        text = (folder / f"{entry['name']}.toml").read_text()
        assert run("manifest", "show", entry["name"]).stdout == text
    assert run("manifest", "show", rules).stdout == rules.read_text()


def test_manifest_check(flux: Path, source: Path, rules: Path) -> None:
    assert said("manifest", "check", rules) == {"ok": True, "name": "rules.toml", "rules": 2}
    assert "2 rules, no problem in itself" in run("manifest", "check", rules).stdout
    report = said("manifest", "check", rules, source)
    assert report["components"][0]["tensors"] == 3
    assert report["components"][0]["legal_degrees"] == [1, 2, 4, 8]
    shown = run("manifest", "check", "Flux2Transformer2DModel", flux).stdout
    assert "legal degrees to 64: 1, 2, 4\n" in shown
    assert "optional rule unused: time_guidance_embed.guidance_embedder" in shown


def test_manifest_check_finds(source: Path, tmp_path: Path) -> None:
    wrong = ck.manifest(tmp_path / "wrong.toml", [*RULES, {"match": "gone", "style": "colwise"}])
    lines = errors("manifest", "check", wrong, source)
    assert any("gone matches no tensor" in line for line in lines)
    failed = said("manifest", "check", wrong, source, status=1)
    assert failed["ok"] is False


@pytest.mark.slow
def test_manifest_derive(flux: Path, here: Path) -> None:
    """What it writes is checked, and cuts as diffusers' own plan does: as profile native."""
    pytest.importorskip("diffusers")
    config = flux / "transformer" / "config.json"
    args = ("manifest", "derive", "Flux2Transformer2DModel", "--config", config)
    text = run(*args).stdout
    assert text.startswith("# Derived from Flux2Transformer2DModel")
    result = run(*args, "-o", "derived.toml")
    assert result.stdout == ""
    assert "unproven" in result.stderr
    assert Path("derived.toml").read_text() == text
    run("manifest", "check", "derived.toml", flux)
    run("build", flux, "--tp", 2, "--manifest", "derived.toml", "-o", "derived", *FAST)
    run("build", flux, "--tp", 2, "--profile", "native", "-o", "native", *FAST)
    for file in (here / "native" / "transformer").glob("*.safetensors"):
        assert ck.read(file) == ck.read(here / "derived" / "transformer" / file.name)
    (line,) = errors("manifest", "derive", "NoSuchModel")
    assert "NoSuchModel" in line
    (line,) = errors("manifest", "derive", "Flux2Transformer2DModel", "--config", "gone.json")
    assert "gone.json" in line
    (line,) = errors(*args, "-o", "gone/derived.toml")
    assert "gone/derived.toml" in line


# Progress, terminals, Ctrl-C


def test_pipes_see_no_progress(flux: Path, here: Path) -> None:
    for args in (
        ("build", flux, "--tp", 2, "-o", "out", "--no-fsync"),
        ("verify", "out", "--source", flux),
        ("merge", "out", "-o", "full", "--no-fsync"),
        ("reshard", "out", "--tp", 4, "-o", "four", "--no-fsync"),
    ):
        result = process(*args)
        assert result.returncode == 0
        assert result.stderr == ""
        assert "\x1b" not in result.stdout


def on_terminal(*args: object, columns: int = 100, stdout: bool = False) -> tuple[int, str, str]:
    """Exit status, what was written to a terminal as stderr (or both), and to stdout's pipe."""
    main_end, end = pty.openpty()
    env = {**os.environ, "TERM": "xterm", "COLUMNS": str(columns), "LINES": "24"}
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "CI"):
        env.pop(name, None)
    command = [*SHARDC, *(str(arg) for arg in args)]
    child = subprocess.Popen(
        command, stdout=end if stdout else subprocess.PIPE, stderr=end, env=env
    )
    os.close(end)
    shown = b""
    with contextlib.suppress(OSError):  # EIO: the other end is closed
        while chunk := os.read(main_end, 65536):
            shown += chunk
    os.close(main_end)
    piped, _ = child.communicate(timeout=60)
    return child.returncode, shown.decode(), (piped or b"").decode()


def test_terminals_see_progress(flux: Path, here: Path) -> None:
    code, shown, piped = on_terminal("build", flux, "--tp", 2, "-o", "out", "--no-fsync")
    assert code == 0
    assert "build" in shown
    assert "MB" in shown
    assert "peak memory" in piped
    code, shown, _ = on_terminal("verify", "out")
    assert code == 0
    assert "verify" in shown
    code, shown, piped = on_terminal("merge", "out", "-o", "full", "--json")
    assert (code, shown) == (0, "")
    assert json.loads(piped)["out"] == "full"
    assert on_terminal("reshard", "out", "--tp", 4, "-o", "four", "-q") == (0, "", "")


@pytest.mark.parametrize("columns", [1, 20, 300])
def test_any_width(columns: int, flux: Path) -> None:
    code, shown, _ = on_terminal("plan", flux, "--tp", 2, columns=columns, stdout=True)
    assert code == 0
    assert "Traceback" not in shown


@pytest.fixture
def large(here: Path) -> Iterator[Path]:
    """200 MB to build from, for as long as the test takes."""
    config = {**SMALL, "num_attention_heads": 10, "attention_head_dim": 128}
    write_flux2(here / "source", config)
    total = sum(f.stat().st_size for f in here.rglob("*.safetensors"))
    assert total > 150e6
    yield here / "source"
    shutil.rmtree(here / "source")


@pytest.mark.parametrize(
    ("sent", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["ctrl-c", "sigterm"]
)
@pytest.mark.parametrize("early", [True, False])
def test_interrupt(early: bool, sent: signal.Signals, status: int, large: Path, here: Path) -> None:
    """In the middle of 200 MB: it ends soon, and says what is left and how to go on."""
    args = ["build", "source", "--tp", "2", "-o", "out", "--workers", "1", "--memory", "1"]
    child = subprocess.Popen(
        [*SHARDC, *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        # the tests may run in the background, where it is ignored
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    partial = here / ".out.shardc-partial"
    seen = partial / "set" if early else partial / "journal"
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        if seen.exists() and (early or seen.read_bytes().count(b"\n") > 3):
            break
        time.sleep(0.001)
    before = time.monotonic()
    child.send_signal(sent)
    stdout, stderr = child.communicate(timeout=30)
    assert child.returncode == status
    assert time.monotonic() - before < 5
    assert stdout == b""
    (line,) = stderr.decode().splitlines()
    kept = f"interrupted: --resume continues what {partial.name} keeps, --force starts over"
    if early and line == "interrupted: nothing was left behind":
        assert listing(here) == ["source"]
        return
    assert line == kept
    assert listing(here) == [partial.name, "source"]
    (line,) = errors(*args)
    assert line.startswith(
        f"error: {partial.name}: is left of an unfinished build of out (--resume"
    )
    result = run(*args, "--resume", "--no-fsync")
    assert "tensors were written already" in result.stdout
    run("build", "source", "--tp", 2, "-o", "whole", *FAST)
    assert ck.contents(here / "out") == ck.contents(here / "whole")
    assert listing(here) == ["out", "source", "whole"]


def test_resume_of_another_build(flux: Path, here: Path) -> None:
    """One clear error, as text and as JSON; nothing is lost."""
    leave(flux, here / "out")
    (line,) = errors("build", flux, "--tp", 4, "-o", "out", "--resume")
    assert "is left of another build: tp was 2, is now 4 (--force starts over)" in line
    (problem,) = said("build", flux, "--tp", 4, "-o", "out", "--resume", status=1)["problems"]
    assert problem in line
    (line,) = errors("build", flux, "--tp", 4, "-o", "out", "--resume", "--dry-run")
    assert "tp was 2" in line
    report = said("build", flux, "--tp", 2, "-o", "out", "--resume", "--no-fsync")
    assert report["resumed_tensors"] > 0


def leave(source: Path, out: Path) -> None:
    """An unfinished build at tp 2, left by a kill once most of it was written."""
    code = (
        "import os, signal, sys, shardc\n"
        "from shardc import builder\n"
        "builder.write_file = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)\n"
        "shardc.build(sys.argv[1], sys.argv[2], 2)\n"
    )
    command = [sys.executable, "-c", code, str(source), str(out)]
    assert subprocess.run(command, check=False).returncode == -signal.SIGKILL
    assert not out.exists()


def test_conversions_resume(built: Path, here: Path) -> None:
    for args in (["merge"], ["reshard", "--tp", "4"]):
        run(*args, built, "-o", args[0], "--resume", *FAST)
    assert listing(here) == ["merge", "reshard"]


# Words for people


def test_words() -> None:
    assert [size(n) for n in (0, 999, 1000, 7_750_000_000, 5e15)] == [
        "0 B",
        "999 B",
        "1.00 kB",
        "7.75 GB",
        "5000.00 TB",
    ]
    assert mebibytes(56 * 2**20) == "56 MiB"
    assert degrees([]) == ""
    assert degrees([1, 2, 4]) == "1, 2, 4"
    assert degrees([3, 5, 6, 7, 9]) == "3, 5-7, 9"


# Faults that were found by trying to break it


def test_force_spares_a_folder_of_shard_sets(flux: Path, tmp_path: Path) -> None:
    models = tmp_path / "models"
    run("build", flux / "transformer", "--tp", 2, "-o", models / "transformer-tp2", *FAST)
    shutil.copytree(flux, models / "flux")
    before = ck.contents(models)
    result = CliRunner().invoke(main, f"build {flux} --tp 4 -o {models} --force -q".split())
    assert ck.contents(models) == before
    assert result.exit_code == 1


def test_a_checkpoint_with_a_shard_set_inside(flux: Path, tmp_path: Path) -> None:
    source = shutil.copytree(flux, tmp_path / "flux")
    run("build", source / "transformer", "--tp", 2, "-o", source / "transformer-tp2", *FAST)
    result = CliRunner().invoke(main, ["inspect", str(source), "--json"])
    assert json.loads(result.stdout)["what"] == "checkpoint"


def test_out_inside_src(flux: Path, tmp_path: Path) -> None:
    """Refused, or at least no part of what is built next."""
    source = shutil.copytree(flux, tmp_path / "flux")
    CliRunner().invoke(main, f"build {source} --tp 2 -o {source / 'in'} -q".split())
    run("build", source, "--tp", 2, "-o", tmp_path / "out", *FAST)
    assert not [name for name in ck.contents(tmp_path / "out") if name.startswith("in/")]


def test_force_on_a_link(flux: Path, shards: Path, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to("shards")
    run("build", flux, "--tp", 4, "-o", link, "--force", *FAST)
    assert listing(tmp_path) == ["link", "shards"]


def test_a_manifest_that_serves_no_component(flux: Path) -> None:
    for args in (
        ("plan", flux, "--tp", 2, "--manifest", "FluxTransformer2DModel"),
        ("manifest", "check", "FluxTransformer2DModel", flux),
    ):
        (line,) = errors(*args)
        assert "FluxTransformer2DModel" in line


def test_verify_misses_a_whole_component(flux: Path, tmp_path: Path) -> None:
    source = shutil.copytree(flux, tmp_path / "pipe")
    ck.component(source / "vae", TENSORS, class_name="AutoencoderKL")
    index = json.loads((flux / "model_index.json").read_text())
    index["vae"] = ["diffusers", "AutoencoderKL"]
    ck.write_json(source / "model_index.json", index)
    run("build", source, "--tp", 2, "-o", tmp_path / "out", *FAST)
    shutil.rmtree(tmp_path / "out" / "vae")
    assert any("vae" in line for line in errors("verify", tmp_path / "out", "--source", source))


@pytest.mark.slow
def test_derive_from_a_broken_config(here: Path) -> None:
    pytest.importorskip("diffusers")
    Path("broken.json").write_text("{")
    (line,) = errors("manifest", "derive", "Flux2Transformer2DModel", "--config", "broken.json")
    assert "broken.json" in line
