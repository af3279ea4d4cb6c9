"""Sources: which files are the weights, and everything that can be wrong with a folder."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import shardc
from shardc.checkpoint import class_of, open_checkpoint
from shardc.errors import CheckpointError, ManifestError, PlanError, ShardcError
from shardc.weights import variant_of
from tests import checkpoints as ck

TENSORS = {
    "m.weight": ck.Data.count("F32", [4, 2]),
    "m.bias": ck.Data.count("F32", [4], 50),
    "norm.weight": ck.Data.count("BF16", [2], 90),
}
OTHER = {name: ck.Data.count(data.dtype, data.shape, 200) for name, data in TENSORS.items()}
STEM = "diffusion_pytorch_model"
RULES = [{"match": "m", "style": "colwise"}]


def held(source: Path, *, variant: str | None = None) -> dict[str, ck.Data]:
    """What a source holds as a build sees it: built at tp 1 and read back."""
    manifest = ck.manifest(source.parent / f"{source.stem}-rules.toml", RULES)
    out = source.parent / f"{source.stem}-out"
    shardc.build(source, out, 1, manifest=manifest, variant=variant)
    return ck.read_ranks(out, 1)[0]


@pytest.mark.parametrize("stem", [STEM, "model"])
@pytest.mark.parametrize("files", [1, 2, 3])
@pytest.mark.parametrize("variant", [None, "fp16"])
def test_component_folder(stem: str, files: int, variant: str | None, tmp_path: Path) -> None:
    source = ck.component(tmp_path / "s", TENSORS, files=files, stem=stem, variant=variant)
    checkpoint = open_checkpoint(source, variant=variant)
    assert checkpoint.kind == "component"
    (component,) = checkpoint.components
    assert (component.name, component.class_name) == ("", ck.CLASS)
    assert len(component.files) == files
    assert {t.name: (t.dtype, t.shape) for t in component.tensors} == {
        name: (data.dtype, data.shape) for name, data in TENSORS.items()
    }
    assert component.extras == ("config.json",)
    assert held(source, variant=variant) == TENSORS


def test_single_file_with_its_config(tmp_path: Path) -> None:
    source = ck.component(tmp_path / "s", TENSORS, stem="flux-anything")
    with pytest.raises(CheckpointError, match=r"flux-anything\.safetensors has no name that diff"):
        open_checkpoint(source)
    file = source / "flux-anything.safetensors"
    assert open_checkpoint(file).kind == "file"
    manifest = ck.manifest(tmp_path / "rules.toml", RULES)
    shardc.build(file, tmp_path / "out", 2, manifest=manifest)
    assert shardc.verify(tmp_path / "out", file).ok
    shardc.merge(tmp_path / "out", tmp_path / "full")
    assert ck.read_all(tmp_path / "full") == TENSORS
    assert sorted(ck.contents(tmp_path / "full")) == ["config.json", file.name]


def test_transformers_architectures(tmp_path: Path) -> None:
    assert class_of({"architectures": ["A", "B"]}) == "A"
    assert class_of({"_class_name": "C", "architectures": ["A"]}) == "C"
    for config in ({}, {"architectures": []}, {"architectures": [3]}, {"architectures": "A"}):
        assert class_of(config) is None


def test_hub_snapshot(tmp_path: Path) -> None:
    plain = ck.component(tmp_path / "s", TENSORS, files=2)
    snapshot = ck.hub_snapshot(plain, tmp_path / "cache")
    assert (snapshot / "config.json").is_symlink()
    manifest = ck.manifest(tmp_path / "rules.toml", RULES)
    shardc.build(plain, tmp_path / "a", 2, manifest=manifest)
    shardc.build(snapshot, tmp_path / "b", 2, manifest=manifest)
    assert ck.contents(tmp_path / "a") == ck.contents(tmp_path / "b")
    assert not any(path.is_symlink() for path in (tmp_path / "b").rglob("*"))


def write_pipeline(folder: Path, *, variant: str | None = None) -> Path:
    pipe = ck.pipeline(folder, {"transformer": ck.CLASS, "text_encoder": "Encoder", "vae": "Vae"})
    ck.component(pipe / "transformer", TENSORS, files=2, variant=variant)
    ck.component(pipe / "text_encoder", OTHER, class_name="Encoder", stem="model", variant=variant)
    ck.component(pipe / "vae", {"c.weight": ck.Data.count("F16", [3])}, class_name="Vae")
    (pipe / "tokenizer").mkdir()
    (pipe / "tokenizer" / "vocab.json").write_text('{"a": 0}')
    (pipe / "README.md").write_text("words")
    (pipe / ".gitattributes").write_text("hidden")
    return pipe


def test_pipeline(tmp_path: Path) -> None:
    pipe = write_pipeline(tmp_path / "pipe")
    checkpoint = open_checkpoint(pipe)
    assert checkpoint.kind == "pipeline"
    assert [c.name for c in checkpoint.components] == ["transformer", "text_encoder", "vae"]
    assert set(checkpoint.extras) == {
        "README.md",
        "model_index.json",
        "scheduler/scheduler_config.json",
        "tokenizer/vocab.json",
    }
    manifest = ck.manifest(tmp_path / "rules.toml", RULES)
    report = shardc.build(pipe, tmp_path / "out", 2, manifest=manifest)
    assert report.sharded == ("transformer",)
    assert set(report.kept) == {"text_encoder", "vae"}
    assert shardc.verify(tmp_path / "out", pipe).ok
    written, source = ck.contents(tmp_path / "out"), ck.contents(pipe)
    for name in source:
        if name.startswith(("text_encoder/", "vae/", "scheduler/", "tokenizer/")):
            assert written[name] == source[name]
    assert ".gitattributes" not in written
    assert not [name for name in written if name.endswith(".safetensors.index.json")]
    shardc.merge(tmp_path / "out", tmp_path / "full")
    full = ck.contents(tmp_path / "full")
    assert set(full) == set(source) - {".gitattributes"}
    same = {name for name in full if full[name] == source[name]}
    assert {name for name in full if not name.startswith("transformer/")} <= same
    assert ck.read_all(tmp_path / "full" / "transformer") == TENSORS


def test_pipeline_chosen_components(tmp_path: Path) -> None:
    pipe = write_pipeline(tmp_path / "pipe")
    manifest = ck.manifest(tmp_path / "m.toml", RULES, class_name=[ck.CLASS, "Encoder"])
    report = shardc.build(pipe, tmp_path / "both", 2, manifest=manifest)
    assert report.sharded == ("transformer", "text_encoder")
    one = shardc.build(pipe, tmp_path / "one", 2, manifest=manifest, components=["text_encoder"])
    assert one.sharded == ("text_encoder",)
    assert ck.read_all(tmp_path / "one" / "transformer") == TENSORS
    with pytest.raises(PlanError, match="has no component unet, ema; it has transformer, text_enc"):
        shardc.plan(pipe, 2, manifest=manifest, components=["unet", "vae", "ema"])
    with pytest.raises(PlanError, match=r"no manifest is known for class Vae.*manifest derive"):
        shardc.plan(pipe, 2, manifest=manifest, components=["vae"])


def test_pipeline_with_a_component_that_is_not_there(tmp_path: Path) -> None:
    pipe = write_pipeline(tmp_path / "pipe")
    shutil.rmtree(pipe / "vae")
    manifest = ck.manifest(tmp_path / "m.toml", RULES)
    with pytest.raises(PlanError, match=r"vae: model_index\.json lists this component, but there"):
        shardc.build(pipe, tmp_path / "out", 2, manifest=manifest)
    assert not (tmp_path / "out").exists()
    shardc.build(pipe, tmp_path / "out", 2, manifest=manifest, components=["transformer"])
    assert shardc.verify(tmp_path / "out").ok


def test_pipeline_of_unknown_classes(tmp_path: Path) -> None:
    with pytest.raises(PlanError) as caught:
        shardc.build(write_pipeline(tmp_path / "pipe"), tmp_path / "out", 2)
    for name in ("TinyModel", "Encoder", "Vae"):
        assert f"no manifest is known for class {name}" in str(caught.value)


def test_one_component_against_its_folder(tmp_path: Path) -> None:
    """A pipeline's only sharded component can be verified against that component alone."""
    pipe = write_pipeline(tmp_path / "pipe")
    manifest = ck.manifest(tmp_path / "rules.toml", RULES)
    shardc.build(pipe, tmp_path / "out", 2, manifest=manifest)
    assert shardc.verify(tmp_path / "out", pipe / "transformer").ok
    assert not shardc.verify(tmp_path / "out", pipe / "text_encoder").ok


def test_variants(tmp_path: Path) -> None:
    """F08: exactly the chosen set, the plain one beside it unread."""
    source = ck.component(tmp_path / "s", TENSORS, variant="bf16")
    ck.component(source, OTHER, files=2)
    ck.component(source, OTHER, variant="fp16")
    assert held(source, variant="bf16") == TENSORS
    shutil.rmtree(tmp_path / "s-out")
    assert held(source) == OTHER


def test_both_names_of_a_variants_parts() -> None:
    assert variant_of("model.safetensors") is None
    assert variant_of("model-00001-of-00002.safetensors") is None
    assert variant_of("model.fp16.safetensors") == "fp16"
    assert variant_of("model.fp16-00001-of-00002.safetensors") == "fp16"
    assert variant_of("model-00001-of-00002.fp16.safetensors") == "fp16"


def test_old_style_variant_parts(tmp_path: Path) -> None:
    source = ck.component(tmp_path / "s", TENSORS, files=2, variant="fp16")
    index = source / f"{STEM}.safetensors.index.fp16.json"
    document = json.loads(index.read_text())
    for name in sorted(set(document["weight_map"].values())):
        new = name.replace(".fp16", "").replace(".safetensors", ".fp16.safetensors")
        (source / name).rename(source / new)
        document["weight_map"] = {
            k: new if v == name else v for k, v in document["weight_map"].items()
        }
    index.write_text(json.dumps(document))
    assert held(source, variant="fp16") == TENSORS


def test_pipeline_variant_falls_back_like_diffusers(tmp_path: Path) -> None:
    """The VAE has no fp16 files here: it is taken as it is, as diffusers does."""
    pipe = write_pipeline(tmp_path / "pipe", variant="fp16")
    checkpoint = open_checkpoint(pipe, variant="fp16")
    names = {c.name: c.files[0].name for c in checkpoint.components}
    assert names["vae"] == f"{STEM}.safetensors"
    assert names["text_encoder"] == "model.fp16.safetensors"
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(pipe)
    assert len(caught.value.problems) == 2
    assert "only variants are here: fp16 (choose with --variant)" in str(caught.value)
    with pytest.raises(CheckpointError, match="no weights of variant 'bf16'; there are: "):
        open_checkpoint(pipe, variant="bf16")


def test_total_size_is_not_believed(tmp_path: Path) -> None:
    """F07: the index's metadata may be stale, of another type, or missing."""
    for number, metadata in enumerate([{"total_size": 96}, {"total_size": "64"}, {}, None]):
        source = ck.component(tmp_path / f"s{number}", TENSORS, files=2)
        index = source / f"{STEM}.safetensors.index.json"
        document = json.loads(index.read_text())
        del document["metadata"]
        if metadata is not None:
            document["metadata"] = metadata
        index.write_text(json.dumps(document))
        assert held(source) == TENSORS


Damage = Callable[[Path], object]


def edit_index(**changes: str | None) -> Damage:
    def edit(folder: Path) -> None:
        path = folder / f"{STEM}.safetensors.index.json"
        document = json.loads(path.read_text())
        for name, value in changes.items():
            if value is None:
                del document["weight_map"][name.replace("__", ".")]
            else:
                document["weight_map"][name.replace("__", ".")] = value
        path.write_text(json.dumps(document))

    return edit


def put(name: str, raw: bytes) -> Damage:
    return lambda folder: (folder / name).write_bytes(raw)


PART = f"{STEM}-00001-of-00002.safetensors"
LAST = f"{STEM}-00002-of-00002.safetensors"
INDEX = f"{STEM}.safetensors.index.json"
ANOTHER = ck.raw_file(ck.header_of(OTHER), b"".join(t.raw for t in OTHER.values()))
RANKED = ck.raw_file(
    {"__metadata__": {"DCP_SHARDING_INFO": "{}"}, **ck.header_of({"m.weight": OTHER["m.weight"]})},
    OTHER["m.weight"].raw,
)

BROKEN: dict[str, tuple[Damage, str]] = {
    "missing file": (lambda s: (s / LAST).unlink(), f"{LAST} is missing, but {INDEX} lists it"),
    "dangling link": (
        lambda s: ((s / LAST).unlink(), (s / LAST).symlink_to("../blobs/gone")),
        f"{LAST} is a link to a missing file, but {INDEX} lists it",
    ),
    "empty file": (put(LAST, b""), f"{LAST}: the file is empty"),
    "no such tensor": (
        edit_index(mtp__weight=LAST),
        f"{INDEX}: lists tensor 'mtp.weight' in {LAST}, which lacks it",
    ),
    "another file": (
        edit_index(m__bias=PART),
        f"{INDEX}: lists tensor 'm.bias' in {PART}, it is in {LAST}",
    ),
    "unlisted tensor": (
        edit_index(norm__weight=None),
        f"{INDEX}: does not list tensor 'norm.weight' of {LAST}",
    ),
    "escape": (edit_index(x="../x.safetensors"), f"{INDEX}: '../x.safetensors' leaves the folder"),
    "absolute": (edit_index(x="/x.safetensors"), f"{INDEX}: '/x.safetensors' leaves the folder"),
    "backslash": (edit_index(x="a\\x.safetensors"), "leaves the folder"),
    "not safetensors": (
        edit_index(x="config.json"),
        f"{INDEX}: 'config.json' is not a safetensors file",
    ),
    "stray": (
        put("consolidated.safetensors", ANOTHER),
        f"consolidated.safetensors is a stray weight file: {INDEX} does not account for it",
    ),
    "stray single": (
        put(f"{STEM}.safetensors", ANOTHER),
        f"{STEM}.safetensors is a stray weight file",
    ),
    "no JSON": (put(INDEX, b"{"), f"{INDEX}: not valid JSON"),
    "dangling index": (
        lambda s: ((s / INDEX).unlink(), (s / INDEX).symlink_to("../blobs/gone")),
        f"{INDEX}: cannot read it: No such file or directory",
    ),
    "no map": (put(INDEX, b'{"weight_map": {"a": 1}}'), f"{INDEX}: has no weight_map of tensor"),
    "a list": (put(INDEX, b"[]"), f"{INDEX}: has no weight_map of tensor"),
    "empty map": (put(INDEX, b'{"weight_map": {}}'), f"{INDEX}: its weight_map is empty"),
    "no index": (lambda s: (s / INDEX).unlink(), f"{PART} is one part of several, but there is no"),
    "twice": (
        lambda s: ck.save(s / LAST, {**ck.read(s / LAST), "m.weight": OTHER["m.weight"]}),
        f"tensor 'm.weight' is in both {PART} and {LAST}",
    ),
    "a rank": (put("w-TP-000.safetensors", ANOTHER), "w-TP-000.safetensors is one rank of a"),
    "an own rank": (
        put("rank-00000-of-00002.safetensors", ANOTHER),
        "rank-00000-of-00002.safetensors is one",
    ),
    "a rank by metadata": (put(LAST, RANKED), f"{LAST}: its metadata says that it is one rank's"),
    "config": (put("config.json", b"[]"), "config.json: is not a JSON object"),
    "config JSON": (put("config.json", b"{'a': 1}"), "config.json: not valid JSON"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_folders(case: str, tmp_path: Path) -> None:
    damage, message = BROKEN[case]
    source = ck.component(tmp_path / "s", TENSORS, files=2)
    damage(source)
    manifest = ck.manifest(tmp_path / "rules.toml", RULES)
    with pytest.raises(CheckpointError) as caught:
        shardc.build(source, tmp_path / "out", 2, manifest=manifest)
    assert message in str(caught.value)
    assert str(source) in str(caught.value)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["rules.toml", "s"]


def test_every_problem_of_a_folder_at_once(tmp_path: Path) -> None:
    source = ck.component(tmp_path / "s", TENSORS, files=3)
    (source / f"{STEM}-00001-of-00003.safetensors").unlink()
    edit_index(x="../y.safetensors")(source)
    put("extra.safetensors", ANOTHER)(source)
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(source)
    assert len(caught.value.problems) == 3


def test_every_problem_of_a_pipeline_at_once(tmp_path: Path) -> None:
    pipe = write_pipeline(tmp_path / "pipe")
    (pipe / "transformer" / PART).unlink()
    (pipe / "text_encoder" / "model.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(pipe)
    text = str(caught.value)
    assert f"{PART} is missing" in text
    assert "the file is empty" in text


def raw_folder(**files: bytes) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        (folder / "s").mkdir()
        for name, raw in files.items():
            (folder / "s" / name.replace("__", ".")).write_bytes(raw)
        return folder / "s"

    return write


def lone_file(name: str, raw: bytes) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        (folder / name).write_bytes(raw)
        return folder / name

    return write


def bad_pipeline(**entries: object) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        (folder / "pipe").mkdir()
        (folder / "pipe" / "model_index.json").write_text(json.dumps(entries))
        return folder / "pipe"

    return write


NO_SOURCES: dict[str, tuple[Callable[[Path], Path], str]] = {
    "nothing": (lambda f: f / "gone", "gone: no such file or folder"),
    "empty folder": (raw_folder(), "holds neither model_index.json nor safetensors weights"),
    "pickles": (
        raw_folder(config__json=b"{}", pytorch_model__bin=b"x"),
        "its weights are pickled (pytorch_model.bin); shardc never unpickles",
    ),
    "a pickle": (lone_file("x.ckpt", b"x"), "x.ckpt: not a .safetensors file"),
    "a rank's file": (
        lone_file("x.safetensors", RANKED),
        "its metadata says that it is one rank's",
    ),
    "no config": (
        lone_file("x.safetensors", ANOTHER),
        "there is no config.json beside the weights",
    ),
    "pipeline list": (bad_pipeline(), "no component holds safetensors weights"),
    "escaping component": (
        bad_pipeline(**{"../x": ["diffusers", "A"]}),
        "model_index.json: component '../x' is no plain name: it leaves the folder, or could",
    ),
}


@pytest.mark.parametrize("case", NO_SOURCES)
def test_no_sources(case: str, tmp_path: Path) -> None:
    write, message = NO_SOURCES[case]
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(write(tmp_path))
    assert message in str(caught.value)


def test_model_index_is_no_object(tmp_path: Path) -> None:
    (tmp_path / "model_index.json").write_text("[]")
    with pytest.raises(CheckpointError, match=r"model_index\.json: is not a JSON object"):
        open_checkpoint(tmp_path)


def test_training_leftovers_are_no_weights(tmp_path: Path) -> None:
    source = ck.component(tmp_path / "s", TENSORS)
    (source / "training_args.bin").write_bytes(b"pickle")
    (source / "optimizer.pt").write_bytes(b"pickle")
    assert held(source) == TENSORS
    assert not (tmp_path / "s-out" / "training_args.bin").exists()


def test_a_shard_set_is_no_source(tmp_path: Path) -> None:
    source = ck.component(tmp_path / "s", TENSORS)
    manifest = ck.manifest(tmp_path / "rules.toml", RULES)
    shardc.build(source, tmp_path / "out", 2, manifest=manifest)
    with pytest.raises(CheckpointError, match=r"is a shard set, not a full checkpoint .*reshard"):
        shardc.build(tmp_path / "out", tmp_path / "again", 2, manifest=manifest)
    with pytest.raises(CheckpointError, match="its metadata says that it is one rank's shard"):
        open_checkpoint(tmp_path / "out" / "rank-00000-of-00002.safetensors")


def test_no_manifest_for_the_class(tmp_path: Path) -> None:
    source = ck.component(tmp_path / "s", TENSORS)
    with pytest.raises(
        (ManifestError, PlanError), match="no manifest is known for class TinyModel"
    ):
        shardc.build(source, tmp_path / "out", 2)
    manifest = ck.manifest(tmp_path / "rules.toml", RULES, class_name="Other")
    with pytest.raises(PlanError, match=r"rules\.toml: serves Other; .* has TinyModel"):
        shardc.build(source, tmp_path / "out", 2, manifest=manifest)


def test_order_of_the_directory_does_not_matter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_pipeline(tmp_path / "pipe")
    manifest = ck.manifest(tmp_path / "rules.toml", RULES)
    shardc.build(source, tmp_path / "a", 2, manifest=manifest)
    listed, globbed = Path.iterdir, Path.rglob
    monkeypatch.setattr(Path, "iterdir", lambda self: iter(sorted(listed(self), reverse=True)))
    monkeypatch.setattr(
        Path, "rglob", lambda self, pattern: iter(sorted(globbed(self, pattern), reverse=True))
    )
    shardc.build(source, tmp_path / "b", 2, manifest=manifest)
    monkeypatch.undo()
    assert ck.contents(tmp_path / "a") == ck.contents(tmp_path / "b")


def test_errors_are_shardc_errors() -> None:
    assert issubclass(CheckpointError, ShardcError)
    assert str(ShardcError("plain")) == "plain"
