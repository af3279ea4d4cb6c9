"""load_pipeline: a whole pipeline's images are the unsharded one's, its components as stored."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import shardc
from tests import ranks

np = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")
pytest.importorskip("diffusers")
pytest.importorskip("tokenizers")

from tests import pipelines  # noqa: E402

pytestmark = pytest.mark.slow

SHARDED = {
    "flux2-klein": {"text_encoder", "transformer"},
    "flux1": {"transformer"},
    "qwen-image": {"transformer"},
}


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Each tiny pipeline saved, and what it makes beside it."""
    folder = tmp_path_factory.mktemp("sources")
    for name in pipelines.MAKE:
        np.savez(
            folder / f"{name}.npz",
            *pipelines.generate(pipelines.save(name, folder / name), name),
        )
    return {name: folder / name for name in pipelines.MAKE}


def apart(found: Any, whole: Any) -> float:
    """The largest difference, relative to the largest value."""
    assert np.isfinite(found).all()
    assert found.shape == whole.shape
    return float(np.abs(found - whole).max() / np.abs(whole).max())


def mapped_ranges(under: Path) -> list[tuple[int, int]]:
    """The addresses at which files of a folder are mapped into this process."""
    found = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, *_, last = line.split(maxsplit=5)
        if last.startswith(str(under)) and last.endswith(".safetensors"):
            first, _, end = addresses.partition("-")
            found.append((int(first, 16), int(end, 16)))
    return found


def facts_of(pipeline: Any, path: Path) -> dict[str, Any]:
    """What is to be told of every component."""
    ranges = mapped_ranges(path)
    told: dict[str, Any] = {}
    for name, part in pipeline.components.items():
        if not isinstance(part, torch.nn.Module):
            told[name] = {"class": type(part).__name__, "config": str(getattr(part, "config", ""))}
            continue
        tensors = {**dict(part.named_parameters()), **dict(part.named_buffers())}
        parameters: Any = [p.to_local() if hasattr(p, "to_local") else p for p in part.parameters()]
        told[name] = {
            "class": type(part).__name__,
            "meta": [n for n, t in tensors.items() if t.is_meta],
            "training": part.training,
            "grad": any(p.requires_grad for p in part.parameters()),
            "dtypes": {n: str(p.dtype) for n, p in part.named_parameters()},
            "sharded": hasattr(part, "shardc"),
            "dtensor": getattr(part, "_parallel_config", None) is not None,
            "copied": sum(
                not any(first <= p.data_ptr() < end for first, end in ranges) for p in parameters
            ),
        }
    return told


def generate(rank: int, name: str, path: Path, runtime: Any) -> Any:
    import socket

    import diffusers
    import transformers

    from shardc.loaders import load_pipeline

    loads: list[str] = []

    def no_network(*args: Any, **_: Any) -> Any:
        raise AssertionError(f"network: {args}")

    socket.create_connection = no_network
    socket.getaddrinfo = no_network
    for cls in (diffusers.ModelMixin, transformers.PreTrainedModel):
        plain: Any = cls.from_pretrained

        def loading(*args: Any, _plain: Any = plain, **kwargs: Any) -> Any:
            loads.append(str(args[:1]))
            return _plain(*args, **kwargs)

        cls.from_pretrained = loading  # type: ignore[assignment]
    pipeline = load_pipeline(path, runtime=runtime)
    facts = facts_of(pipeline, path)
    return pipelines.generate(pipeline, name), facts, loads


CASES = [
    ("flux2-klein", 2, "plain"),
    ("flux2-klein", 4, "plain"),
    ("flux2-klein", 2, "dtensor"),
    ("flux2-klein", 4, "dtensor"),
    ("flux1", 2, "plain"),
    ("flux1", 4, "dtensor"),
    ("qwen-image", 4, "plain"),
    ("qwen-image", 2, "dtensor"),
]


@pytest.mark.parametrize(("name", "tp", "runtime"), CASES)
def test_images_are_those_of_the_whole_pipeline(
    sources: dict[str, Path], tmp_path: Path, name: str, tp: int, runtime: Any
) -> None:
    profile: Any = "compact" if runtime == "plain" else "native"
    report = shardc.build(sources[name], tmp_path / "o", tp, profile=profile)
    assert report.files > tp
    with np.load(sources[name].parent / f"{name}.npz") as saved:
        latents, image = saved["arr_0"], saved["arr_1"]
    listed = json.loads((sources[name] / "model_index.json").read_bytes())
    found = ranks.values(ranks.run(generate, tp, name, tmp_path / "o", runtime))
    for (own_latents, own_image), facts, loads in found:
        assert apart(own_latents, latents) < 1e-5
        assert apart(own_image, image) < 1e-5
        assert (own_latents == found[0][0][0]).all()  # bit for bit the same on every rank
        assert loads == []  # nothing is loaded a second time
        assert facts.keys() == {n for n in listed if not n.startswith("_") and n != "is_distilled"}
        modules = {n: f for n, f in facts.items() if "meta" in f}
        assert {n for n, f in modules.items() if f["sharded"]} == SHARDED[name]
        assert {n for n, f in modules.items() if f["dtensor"]} == (
            {"transformer"} if runtime == "dtensor" else set()
        )
        for component, told in modules.items():
            assert told["class"] == listed[component][1]
            assert (told["meta"], told["training"], told["grad"]) == ([], False, False)
            assert told["copied"] == 0, component
            assert set(told["dtypes"].values()) == {"torch.float32"}
    assert [facts for _, facts, _ in found] == [found[0][1]] * tp


def test_what_is_not_a_model_is_as_diffusers_loads_it(
    sources: dict[str, Path], tmp_path: Path
) -> None:
    import diffusers

    from shardc.loaders import load_pipeline

    shardc.build(sources["flux2-klein"], tmp_path / "o", 1)
    own: Any = load_pipeline(tmp_path / "o")
    theirs: Any = diffusers.DiffusionPipeline.from_pretrained(sources["flux2-klein"])
    assert type(own) is type(theirs)
    assert own.scheduler.config == theirs.scheduler.config
    assert own.tokenizer.get_vocab() == theirs.tokenizer.get_vocab()
    assert own.tokenizer.chat_template == theirs.tokenizer.chat_template
    assert own.config.is_distilled == theirs.config.is_distilled
    latents, image = pipelines.generate(own, "flux2-klein")
    with np.load(sources["flux2-klein"].parent / "flux2-klein.npz") as saved:
        assert (latents == saved["arr_0"]).all()
        assert (image == saved["arr_1"]).all()


def test_bfloat16(tmp_path: Path) -> None:
    """No further from the fp32 result of the same weights than twice the whole bf16 pipeline is."""
    whole = pipelines.save("flux2-klein", tmp_path / "src", torch.bfloat16)
    rounded = pipelines.generate(whole, "flux2-klein")[0]
    exact = pipelines.generate(whole.to(torch.float32), "flux2-klein")[0]
    shardc.build(tmp_path / "src", tmp_path / "o", 2)
    for (latents, _), facts, _ in ranks.values(
        ranks.run(generate, 2, "flux2-klein", tmp_path / "o", "plain")
    ):
        for told in facts.values():
            assert set(told.get("dtypes", {"": "torch.bfloat16"}).values()) == {"torch.bfloat16"}
        assert apart(latents, exact) < 2 * apart(rounded, exact)
        assert apart(latents, exact) < 0.15


def encode(rank: int, path: Path, tokens: Any) -> Any:
    from shardc.loaders import load_model

    model: Any = load_model(path)
    with torch.no_grad():
        return model(input_ids=tokens, output_hidden_states=True).hidden_states[-1].numpy()


@pytest.mark.parametrize("tp", [2, 4])
def test_a_sharded_encoder_whose_published_names_are_not_its_modules(
    tmp_path: Path, tp: int
) -> None:
    """Mistral 3, FLUX.2-dev's: the checkpoint says language_model.model, transformers 5 not."""
    from safetensors import safe_open

    whole = pipelines.mistral3()
    whole.save_pretrained(tmp_path / "src")
    with safe_open(tmp_path / "src" / "model.safetensors", "pt") as file:
        assert not set(file.keys()) <= {name for name, _ in whole.named_parameters()}
    tokens = torch.arange(2, 16).view(2, 7)
    with torch.no_grad():
        expected = whole(input_ids=tokens, output_hidden_states=True).hidden_states[-1].numpy()
    shardc.build(tmp_path / "src", tmp_path / "o", tp)
    for out in ranks.values(ranks.run(encode, tp, tmp_path / "o", tokens)):
        assert apart(out, expected) < 1e-5


def offload(rank: int, path: Path, runtime: Any) -> list[str]:
    from shardc.loaders import load_pipeline

    pipeline = load_pipeline(path, runtime=runtime)
    told = []
    for call in ("enable_model_cpu_offload", "enable_sequential_cpu_offload", "save_pretrained"):
        try:
            getattr(pipeline, call)(*([f"{path}-{rank}"] if call == "save_pretrained" else []))
        except Exception as error:
            told.append(str(error))
    return told


def test_pipelines_are_guarded_too(sources: dict[str, Path], tmp_path: Path) -> None:
    """By diffusers itself where it knows that a component is sharded."""
    shardc.build(sources["flux2-klein"], tmp_path / "o", 2, profile="native")
    for runtime, words in (("plain", "one rank's shard"), ("dtensor", "tensor parallelism")):
        for told in ranks.values(ranks.run(offload, 2, tmp_path / "o", runtime)):
            assert len(told) == 3
            assert all(words in text or "one rank's shard" in text for text in told)


def test_dtensor_needs_profile_native(sources: dict[str, Path], tmp_path: Path) -> None:
    shardc.build(sources["flux2-klein"], tmp_path / "o", 2)
    for outcome in ranks.run(offload, 2, tmp_path / "o", "dtensor"):
        assert "needs profile native, the set has compact" in str(outcome.error)
