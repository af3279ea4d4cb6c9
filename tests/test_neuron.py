"""Loading onto a simulated neuron device: straight onto the core, right, and refused clearly."""

from __future__ import annotations

import mmap
import shutil
import signal
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import shardc
from shardc.loaders import devices, load_state_dict, pages
from shardc.loaders.devices import DeviceError
from shardc.loaders.pages import ReadAhead, Span
from tests import checkpoints as ck
from tests import loads
from tests.neuronsim.launch import launch, results, run

pytest.importorskip("diffusers")
pytest.importorskip("transformers")

from tests import models
from tests.test_loader import NAMES

RANKS = "tests.neuron_ranks"


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Each tiny model saved, and its own output beside it."""
    folder = tmp_path_factory.mktemp("sources")
    for name in NAMES:
        model = models.save(name, folder / name)
        torch.save(loads.forward(model, models.inputs(name)), folder / f"{name}.pt")
    return {name: folder / name for name in NAMES}


@pytest.fixture(scope="module")
def flux2_set(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("set")
    models.save("flux2", folder / "source")
    shardc.build(folder / "source", folder / "out", 2)
    return str(folder / "out")


# --- the device itself ---------------------------------------------------------------------------


@pytest.mark.slow
def test_the_host_cannot_touch_device_memory() -> None:
    [end] = launch(RANKS, "touch_memory", distributed=False)
    assert end.status == -signal.SIGSEGV


@pytest.mark.slow
def test_every_copy_is_counted() -> None:
    [counted] = results(launch(RANKS, "copies", distributed=False))
    none = dict.fromkeys(("h2d", "staged", "cast", "bounce", "d2h"), 0)
    assert counted == {
        "plain": none | {"h2d": 256},
        "strided": none | {"h2d": 256, "staged": 256},
        "cast": none | {"h2d": 256, "cast": 256},
        "asynchronous": none | {"h2d": 256, "bounce": 256},
        "back": none | {"d2h": 256},
        "computed": none,
        "convolved": none,
    }


# --- models --------------------------------------------------------------------------------------


def forward(rank: int, sets: dict[str, Path]) -> dict[str, Any]:
    """Load each set with a mesh, tell of that, and run it."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    from shardc.loaders import load_model

    mesh = init_device_mesh("neuron", (dist.get_world_size(),), mesh_dim_names=("tp",))
    told = {}
    for name, path in sets.items():
        model, moved = loads.watched(partial(load_model, path, mesh=mesh))
        held = loads.held(model)
        made = held.keys() - model.state_dict().keys()  # buffers that no checkpoint has
        told[name] = {
            "moved": moved,
            "placed": loads.places(model),
            "made": sum(held[key].nbytes for key in made),
            "training": model.training,
            "out": loads.forward(model, models.inputs(name)).numpy(),
        }
    return told


@pytest.mark.slow
@pytest.mark.parametrize("tp", [2, 4])
def test_models_straight_onto_the_cores(tp: int, sources: dict[str, Path], tmp_path: Path) -> None:
    for name, source in sources.items():
        shardc.build(source, tmp_path / name, tp)
    sets = {name: tmp_path / name for name in sources}
    for rank, told in enumerate(run("neuron", forward, tp, sets)):
        for name, facts in told.items():
            loads.check("neuron", rank, facts["moved"], facts["placed"])
            mine = load_state_dict(sets[name], rank).values()
            rank_bytes = sum(tensor.nbytes for tensor in mine)
            assert facts["placed"]["bytes"] == rank_bytes + facts["made"]
            whole = torch.load(sources[name].parent / f"{name}.pt")
            error = (torch.from_numpy(facts["out"]) - whole).abs().max() / whole.abs().max()
            assert error <= 1e-5, name
            assert not facts["training"]


@pytest.mark.slow
def test_the_host_holds_no_shard(tmp_path: Path) -> None:
    """260 MB a rank, one tensor larger than the bound itself."""
    tensors = {
        f"blocks.{i}.weight": ck.Data.count("F32", [rows, 4096])
        for i, rows in enumerate([10240, *[2560] * 8])
    }
    tensors["norm.weight"] = ck.Data.count("F32", [4096])
    source = ck.component(tmp_path / "source", tensors)
    rules = ck.manifest(tmp_path / "rules.toml", [{"match": "blocks.*", "style": "colwise"}])
    shardc.build(str(source), str(tmp_path / "out"), 2, manifest=str(rules))
    for reads in ("mapped", "direct"):
        arguments = {"out": str(tmp_path / "out"), "rank": 1, "tp": 2, "reads": reads}
        [load] = results(launch(RANKS, "state_dict", arguments=arguments, distributed=False))
        assert load["devices"] == ["neuron:0"]
        assert load["bytes"] > 250 * 10**6
        assert load["peak_bytes"] <= loads.HOST_LIMIT_BYTES
        assert load["counters"]["h2d"] == load["bytes"]
        assert load["counters"]["staged"] == load["counters"]["bounce"] == 0
        assert load["differ"] == []
    shutil.rmtree(tmp_path)


# --- refusals ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_out_of_memory_on_every_rank(flux2_set: str) -> None:
    small = {"NEURONSIM_HBM_BYTES": str(128 << 10)}
    ranks = results(launch(RANKS, "full", world=2, arguments={"out": flux2_set}, environment=small))
    for rank, (known, found_out) in enumerate(ranks):
        assert f"neuron:{rank}: has 131072 bytes free, this rank's tensors take" in known
        assert f"neuron:{rank}: cannot hold" in found_out
        assert "tensor '" in found_out
        for error in (known, found_out):
            assert "build for a higher tp" in error


@pytest.mark.slow
@pytest.mark.parametrize("touch", [False, True])
def test_the_process_group_comes_first(touch: bool, flux2_set: str) -> None:
    ranks = results(
        launch(RANKS, "no_group", world=2, arguments={"out": flux2_set, "touch": touch})
    )
    for error in (error for errors in ranks for error in errors):
        assert "the process group must come first" in error
        assert "init_process_group('neuron')" in error
        assert ("the device was touched before it" in error) == touch


@pytest.mark.slow
def test_a_group_that_came_too_late(flux2_set: str) -> None:
    for late, refused in results(
        launch(RANKS, "wrong_group", world=2, arguments={"out": flux2_set})
    ):
        assert "should not be initialized before" in late
        assert "the process group's backend is" in refused
        assert "it cannot reduce neuron tensors" in refused


@pytest.mark.slow
def test_another_ranks_core() -> None:
    ranks = results(launch(RANKS, "other_core", world=2))
    for rank, (own, refused) in enumerate(ranks):
        assert own == f"neuron:{rank}"
        assert f"core {1 - rank} is not this process's, which is {rank}" in refused


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("neuron", "torch-neuronx 2.13 or later from AWS's package index"),
        ("neuron:1", "torch_neuronx does not give torch.neuron"),
        ("xla", "torch_xla is not installed"),
        ("cuda", "this torch sees no CUDA device"),
        ("tpu", "is none of cpu, cuda, neuron, xla"),
    ],
)
def test_missing_stacks(name: str, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for module in ("torch_neuronx", "torch_xla", "torch_xla.core.xla_model"):
        monkeypatch.setitem(sys.modules, module, None)  # as where it is not installed
    with pytest.raises(DeviceError, match=reason):
        devices.resolve(name)


# --- on the host ---------------------------------------------------------------------------------


def test_cpu_keeps_the_view() -> None:
    view = torch.arange(4)
    here = devices.resolve()
    assert here == torch.device("cpu")
    assert devices.put(view, here) is view
    assert devices.free_bytes(here) is None
    devices.sync(here)


class NoStream:
    """A CUDA stream or event where there is none: everything happens at once."""

    def __init__(self, *_: Any) -> None:
        self.waits = 0

    def synchronize(self) -> None:
        self.waits += 1

    wait_stream = record = lambda self, _: None


def test_the_pinned_ring_moves_every_slice(monkeypatch: pytest.MonkeyPatch) -> None:
    """The order of copies only: streams and pinned memory need a CUDA device."""
    monkeypatch.setattr(torch.cuda, "Stream", NoStream)
    monkeypatch.setattr(torch.cuda, "Event", NoStream)
    monkeypatch.setattr(torch.cuda, "current_stream", NoStream)
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    monkeypatch.setattr(devices, "_pinned", lambda n: torch.empty(n, dtype=torch.uint8))
    monkeypatch.setattr(devices, "SLICE_BYTES", 64)
    monkeypatch.setattr(devices, "SMALL_BYTES", 16)
    way = devices._Cuda(torch.device("cpu"))
    for view in (torch.arange(100).view(4, 25), torch.arange(2), torch.tensor(3.0)):
        told: list[tuple[int, int]] = []
        placed = way.put(view, lambda first, last, told=told: told.append((first, last)))
        assert placed.data_ptr() != view.data_ptr()
        assert torch.equal(placed, view)
        assert [first for first, _ in told] == [0, *(last for _, last in told[:-1])]
        assert told[-1][1] == view.nbytes
        assert all(last - first <= 64 for first, last in told)
    assert [event.waits for event in way._sent] == [7, 6]  # 13 slices, in turn


def test_xla_by_its_own_means(monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[str] = []
    api = SimpleNamespace(
        xla_device=lambda: torch.device("meta"),
        mark_step=lambda: steps.append("mark"),
        wait_device_ops=lambda: steps.append("wait"),
    )
    monkeypatch.setitem(sys.modules, "torch_xla.core.xla_model", api)
    monkeypatch.setattr(devices, "import_module", sys.modules.__getitem__)
    monkeypatch.setattr(devices, "XLA_BYTES", 100)
    device = devices.resolve("xla")
    assert device.type == "meta"  # what the API gave
    way = devices._Xla(device)
    assert way.put(torch.ones(20)).device == device
    assert steps == []
    way.put(torch.ones(20))
    assert steps == ["mark", "wait"]


@pytest.fixture
def memory(tmp_path: Path) -> mmap.mmap:
    path = tmp_path / "file"
    path.write_bytes(bytes(range(256)) * 1024)
    with path.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)


def test_dropped_pages_are_read_again(memory: mmap.mmap) -> None:
    span = Span(memory, 5000, 200_000)
    before = memory[:]
    span.read_ahead(0, span.size_bytes)
    span.drop(1, span.size_bytes - 1)
    span.drop(3, 3)
    assert memory[:] == before


def _until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


class Recorder(Span):
    """Notes what is asked of it."""

    asked: list[tuple[int, int]]

    def read_ahead(self, first: int, last: int) -> None:
        self.asked.append((self.start + first, self.start + last))


def test_read_ahead_keeps_its_distance(memory: mmap.mmap, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "SLICE_BYTES", 1000)
    monkeypatch.setattr(Recorder, "asked", [], raising=False)
    spans = [Recorder(memory, 0, 2500), None, Recorder(memory, 4000, 5000)]
    with ReadAhead(spans, window_bytes=1500) as ahead:
        _until(lambda: len(Recorder.asked) == 2)
        assert Recorder.asked == [(0, 1000), (1000, 2000)]
        ahead.used(1000)
        _until(lambda: len(Recorder.asked) == 3)
        assert Recorder.asked[2:] == [(2000, 2500)]
        ahead.used(2000)
        _until(lambda: len(Recorder.asked) == 4)
    assert Recorder.asked[3:] == [(4000, 5000)]


def test_read_ahead_ends_early(memory: mmap.mmap) -> None:
    with ReadAhead([Span(memory, 0, 5000), Span(memory, 5000, 9000)], window_bytes=1):
        pass  # an error in the middle of a load: the thread must not stay


@pytest.mark.parametrize(
    ("processors", "ranks", "threads"),
    [(8, "4", 2), (8, "5", 1), (8, "8", 1), (1, "", 1), (2, "", 2), (4, "many", 2), (4, "0", 2)],
)
def test_threads_do_not_take_other_ranks_processors(
    processors: int, ranks: str, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: processors)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
    assert devices.put_threads() == threads
