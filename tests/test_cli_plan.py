"""The commands that show, check and convert, as their user meets them."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner

import shardc
from shardc import targets
from shardc.cli import main
from shardc.cli.options import TARGET_NAMES
from shardc.demo import write_flux2
from tests import checkpoints as ck
from tests import cli
from tests.cli import FAST, RULES, SMALL, errors, listing, run, said

flux, built, shards = cli.flux, cli.built, cli.shards  # fixtures
source, rules, here = cli.source, cli.rules, cli.here


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
