"""load_pipeline: a whole pipeline's images are the unsharded one's, its components as stored."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest

import shardc
from tests import ranks

np = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")
pytest.importorskip("diffusers")
pytest.importorskip("tokenizers")

from tests import loads, pipelines  # noqa: E402
from tests.neuronsim import launch  # noqa: E402

pytestmark = pytest.mark.slow

FLUX2_SHARDED = {"text_encoder", "transformer"}  # of the others at least the transformer
DTYPES = {"torch.float32": torch.float32, "torch.bfloat16": torch.bfloat16}
WITHIN = {"torch.float32": 1e-5, "torch.bfloat16": 0.1}
Source = tuple[Path, dict[str, Any]]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Source]:
    """A tiny pipeline saved in a dtype, and what it makes: as it is, and its weights in fp32."""

    @cache
    def make(name: str, dtype: str = "torch.float32") -> Source:
        folder = tmp_path_factory.mktemp(name)
        pipeline = pipelines.save(name, folder, DTYPES[dtype])
        whole = pipelines.generate(pipeline, name)
        exact = whole
        if dtype != "torch.float32":
            exact = pipelines.generate(pipeline.to(torch.float32), name)
        return folder, {"whole": whole, "exact": exact}

    return make


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


def generate(rank: int, name: str, sets: list[tuple[Path, Any]]) -> list[dict[str, Any]]:
    """Load each set with its runtime, run the pipeline, and tell of both."""
    import socket

    import diffusers
    import transformers

    from shardc.loaders import load_pipeline

    again: list[str] = []

    def no_network(*args: Any, **_: Any) -> Any:
        raise AssertionError(f"network: {args}")

    socket.create_connection = no_network
    socket.getaddrinfo = no_network
    for cls in (diffusers.ModelMixin, transformers.PreTrainedModel):
        plain: Any = cls.from_pretrained

        def loading(*args: Any, _plain: Any = plain, **kwargs: Any) -> Any:
            again.append(str(args[:1]))
            return _plain(*args, **kwargs)

        cls.from_pretrained = loading  # type: ignore[assignment]
    told = []
    for path, runtime in sets:
        pipeline, moved = loads.watched(partial(load_pipeline, path, runtime=runtime))
        modules = [m for m in pipeline.components.values() if isinstance(m, torch.nn.Module)]
        told.append(
            {
                "moved": moved,
                "placed": loads.places(*modules),
                "facts": facts_of(pipeline, path),
                "loads": again,
                "made": pipelines.generate(pipeline, name),
            }
        )
    return told


def close(found: Any, made: dict[str, Any], dtype: str) -> None:
    """Latents and image are the whole pipeline's; in bf16 at most twice as far off as its own."""
    for own, whole, exact in zip(found, made["whole"], made["exact"], strict=True):
        assert apart(own, whole) < WITHIN[dtype]
        if dtype == "torch.bfloat16":
            assert apart(own, exact) < 2 * apart(whole, exact)


@pytest.mark.parametrize("runtime", ["plain", "dtensor"])
@pytest.mark.parametrize("device", ["cpu", "neuron"])
@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("name", pipelines.MAKE)
def test_images_are_those_of_the_whole_pipeline(
    source: Callable[..., Source], tmp_path: Path, name: str, tp: int, device: str, runtime: Any
) -> None:
    profile: Any = "compact" if runtime == "plain" else "native"
    for dtype in DTYPES:
        shardc.build(source(name, dtype)[0], tmp_path / dtype, tp, profile=profile)
    sets = [(tmp_path / dtype, runtime) for dtype in DTYPES]
    found = launch.run(device, generate, tp, name, sets)
    for dtype, of_ranks in zip(DTYPES, zip(*found, strict=True), strict=True):
        folder, made = source(name, dtype)
        listed = json.loads((folder / "model_index.json").read_bytes())
        components = {n: is_ for n, is_ in listed.items() if isinstance(is_, list)}
        sharded = {path.parent.name for path in (tmp_path / dtype).glob("*/shardc.index.json")}
        assert sharded >= (FLUX2_SHARDED if name.startswith("flux2") else {"transformer"})
        for rank, told in enumerate(of_ranks):
            close(told["made"], made, dtype)
            for one, other in zip(told["made"], of_ranks[0]["made"], strict=True):
                assert (one == other).all()  # bit for bit the same on every rank
            loads.check(device, rank, told["moved"], told["placed"])
            assert told["loads"] == []  # nothing is loaded a second time
            facts = told["facts"]
            assert facts == of_ranks[0]["facts"]
            assert facts.keys() == components.keys()
            modules = {n: f for n, f in facts.items() if "meta" in f}
            assert {n for n, f in modules.items() if f["sharded"]} == sharded
            assert {n for n, f in modules.items() if f["dtensor"]} == (
                {"transformer"} if runtime == "dtensor" else set()
            )
            for component, fact in modules.items():
                assert fact["class"] == components[component][1]
                assert (fact["meta"], fact["training"], fact["grad"]) == ([], False, False)
                assert device != "cpu" or fact["copied"] == 0, component
                assert set(fact["dtypes"].values()) == {dtype}


def peaks(rank: int, tiny: Path, large: Path) -> list[tuple[int, int]]:
    """Bytes of a large pipeline's tensors, and how far the host's memory grew for them."""
    from shardc.loaders import load_pipeline

    told = []
    for runtime in ("plain", "dtensor"):
        load_pipeline(tiny, runtime=runtime)  # what the libraries take is no part of it
        pipeline, peak = loads.grown(partial(load_pipeline, large, runtime=runtime))
        placed = loads.places(pipeline.transformer, pipeline.text_encoder, pipeline.vae)
        told.append((placed["bytes"], peak))
        del pipeline
    return told


def test_the_host_holds_no_pipeline(source: Callable[..., Source], tmp_path: Path) -> None:
    """The transformer's shard alone is larger than the bound, and so is the VAE, which is whole."""
    pipelines.flux2_klein(heads=48, channels=384).save_pretrained(tmp_path / "src")
    shardc.build(source("flux2-klein")[0], tmp_path / "tiny", 2, profile="native")
    shardc.build(tmp_path / "src", tmp_path / "large", 2, profile="native")
    for told in launch.run("neuron", peaks, 2, tmp_path / "tiny", tmp_path / "large"):
        for placed, peak in told:
            assert placed > 3 * loads.HOST_LIMIT_BYTES
            assert peak <= loads.HOST_LIMIT_BYTES
    shutil.rmtree(tmp_path)


def test_what_is_not_a_model_is_as_diffusers_loads_it(
    source: Callable[..., Source], tmp_path: Path
) -> None:
    import diffusers

    from shardc.loaders import load_pipeline

    folder, made = source("flux2-klein")
    shardc.build(folder, tmp_path / "o", 1)
    own: Any = load_pipeline(tmp_path / "o")
    theirs: Any = diffusers.DiffusionPipeline.from_pretrained(folder)
    assert type(own) is type(theirs)
    assert own.scheduler.config == theirs.scheduler.config
    assert own.tokenizer.get_vocab() == theirs.tokenizer.get_vocab()
    assert own.tokenizer.chat_template == theirs.tokenizer.chat_template
    assert own.config.is_distilled == theirs.config.is_distilled
    for found, whole in zip(pipelines.generate(own, "flux2-klein"), made["whole"], strict=True):
        assert (found == whole).all()


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


def test_pipelines_are_guarded_too(source: Callable[..., Source], tmp_path: Path) -> None:
    """By diffusers itself where it knows that a component is sharded."""
    shardc.build(source("flux2-klein")[0], tmp_path / "o", 2, profile="native")
    for runtime, words in (("plain", "one rank's shard"), ("dtensor", "tensor parallelism")):
        for told in ranks.values(ranks.run(offload, 2, tmp_path / "o", runtime)):
            assert len(told) == 3
            assert all(words in text or "one rank's shard" in text for text in told)


def test_dtensor_needs_profile_native(source: Callable[..., Source], tmp_path: Path) -> None:
    shardc.build(source("flux2-klein")[0], tmp_path / "o", 2)
    for outcome in ranks.run(offload, 2, tmp_path / "o", "dtensor"):
        assert "needs profile native, the set has compact" in str(outcome.error)
