"""`shardc build` as its user meets it, and what it leaves on the disk."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import click
import numpy as np
import pytest
from click.testing import CliRunner

from shardc.cli import main
from shardc.cli.building import default_out
from shardc.cli.options import Size
from shardc.demo import write_flux2
from tests import checkpoints as ck
from tests import cli
from tests.cli import FAST, SMALL, TENSORS, errors, listing, run, said

flux, built, shards = cli.flux, cli.built, cli.shards  # fixtures
source, rules, here = cli.source, cli.rules, cli.here


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
