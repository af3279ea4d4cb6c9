"""The fleet on paper: its arithmetic, and docs/scale.md, whose tables and claims are its output."""

from __future__ import annotations

import json
import math
import re
import xml.dom.minidom
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.fleet import inputs, tables, times
from benchmarks.fleet.__main__ import DOCUMENT, draw, main
from benchmarks.fleet.inputs import BOTH, INPUTS, MODELS, Model, Part, Values, Way
from benchmarks.fleet.times import Host, Store, last_done

TOLD = inputs.values()
TEXT = DOCUMENT.read_text()
MACHINES = st.sampled_from(("small", "large"))
RANKS = st.integers(1, 64)
FLEETS = st.integers(1, 100_000)
INPUT_VALUES = st.fixed_dictionaries(
    {name: st.floats(one.low, one.high) for name, one in INPUTS.items()}
).map(lambda found: inputs.values(**found))


def seconds(told: Values, model: str, way: Way, store: str, machine: str, **of: Any) -> float:
    place, host = times.stores(told)[store], times.host_named(machine, told)
    return times.ready(MODELS[model], way, place, host, told, **of).total


def gain(model: str, store: str, machine: str, **of: int) -> float:
    full, own = tables.both(TOLD, model, store, machine, **of)
    return full / own


# The arithmetic


def one_by_one(starts: list[float], size: float, cap: float, ceiling: float) -> float:
    """When the last of the transfers ends: each followed alone, event by event."""
    left = dict.fromkeys(range(len(starts)), size)
    now = 0.0
    while left:
        active = [i for i in left if starts[i] <= now]
        rate = min(cap, ceiling / len(active)) if active else 0.0
        events = [starts[i] - now for i in left if starts[i] > now]
        events += [left[i] / rate for i in active]
        step = min(events)
        for i in active:
            left[i] -= rate * step
            if left[i] <= size * 1e-9:
                del left[i]
        now += step
    return now


@given(
    st.lists(st.tuples(st.integers(0, 20), st.integers(1, 5)), min_size=1, max_size=5),
    st.integers(1, 50),
    st.integers(1, 20),
    st.integers(1, 40),
)
def test_transfers_share_a_ceiling_fairly(
    waves: list[tuple[int, int]], size: int, cap: int, ceiling: int
) -> None:
    waves.sort()
    done = last_done(waves, size, cap, ceiling)
    starts = [float(start) for start, n in waves for _ in range(n)]
    assert done == pytest.approx(one_by_one(starts, size, cap, ceiling), rel=1e-6)
    assert done >= max(waves[-1][0] + size / cap, len(starts) * size / ceiling) * (1 - 1e-9)


@settings(max_examples=200)
@given(
    INPUT_VALUES, st.sampled_from(list(MODELS)), st.sampled_from(list(times.stores(TOLD))),
    st.sampled_from(("full", "build", "own")), MACHINES, RANKS, FLEETS, st.integers(1, 1_000),
)  # fmt: skip
def test_more_hosts_are_never_faster(
    told: Values, model: str, store: str, way: Way, machine: str, ranks: int, hosts: int, more: int
) -> None:
    fewer = seconds(told, model, way, store, machine, ranks=ranks, hosts=hosts)
    assert seconds(told, model, way, store, machine, ranks=ranks, hosts=hosts + more) >= (
        fewer * (1 - 1e-9)
    )


@settings(max_examples=200)
@given(
    INPUT_VALUES, st.sampled_from(list(MODELS)), st.sampled_from(list(times.stores(TOLD))),
    MACHINES, RANKS, FLEETS, st.booleans(),
)  # fmt: skip
def test_own_files_are_never_slower_where_they_are_no_more(
    told: Values, name: str, store: str, machine: str, ranks: int, hosts: int, shared: bool
) -> None:
    """Under the same bandwidth, and without a quota of requests."""
    model, distinct = MODELS[name], min(ranks, MODELS[name].tp)
    pulled = [model.pulled_bytes(way, distinct) for way in BOTH]
    read = [model.read_bytes(way, distinct, told["slice_reads"]) for way in BOTH]
    if store == "Hub":
        store = "Hub, no quota"
    if pulled[1] <= pulled[0] and read[1] <= read[0]:
        full, own = tables.both(told, name, store, machine, ranks=ranks, hosts=hosts, shared=shared)
        assert own <= full * (1 + 1e-9)


@pytest.mark.parametrize("way", BOTH)
@pytest.mark.parametrize("store", ["Hub, no quota", "S3", "EFS"])
def test_many_hosts_take_what_the_ceiling_gives(store: str, way: Way) -> None:
    hosts, model = 10_000_000, MODELS["klein-4B"]
    size: float = model.pulled_bytes(way, 1)
    if store == "EFS":
        size = model.read_bytes(way, 1, TOLD["slice_reads"])
    each = seconds(TOLD, "klein-4B", way, store, "small", hosts=hosts) / hosts
    assert each == pytest.approx(size / times.stores(TOLD)[store].ceiling, rel=1e-3)


def test_many_hosts_take_what_the_quota_gives() -> None:
    """Here the quota binds: a start costs more of its window than of the egress."""
    hosts, model, told = 100_000, MODELS["klein-4B"], inputs.values(hub_ceiling=125)
    each = seconds(told, "klein-4B", "own", "Hub", "small", hosts=hosts) / hosts
    a_window = told["hub_quota"] // model.resolves("own", 1, told)
    assert each == pytest.approx(told["hub_window"] / a_window, rel=0.01)


@pytest.mark.parametrize("store", ["gp3", "gp3 from a snapshot", "NVMe"])
def test_disks_of_their_own_know_no_fleet(store: str) -> None:
    one, many = (seconds(TOLD, "klein-9B", "full", store, "large", hosts=n) for n in (1, 10_000))
    assert one == many


def test_one_host_by_hand() -> None:
    """10 bytes over two ranks, 2 of them replicated, and 2 kept whole, in round numbers."""
    model = Model("m", 2, (Part("a", 10, 6, 2), Part("kept", 2)))
    assert [model.pulled_bytes("own", n) for n in (1, 2)] == [8, 12]
    assert [model.read_bytes("full", n, 0.5) for n in (1, 2)] == [7, 12]
    told = {**TOLD, "copy": 4, "slicing": 4, "host_copy": 100, "device": 100, "build": 3}
    told["slice_reads"] = 0.5
    host = Host(nic=4, internet=1, write=2, read=8, cache_bytes=11)
    place = Store(ceiling=6, host=3, pulled=True)
    full = times.ready(model, "full", place, host, told)
    assert (full.pull, full.build, full.load) == (12 / 2, 0, 8 / 1)  # placing 8 at 4 / 4
    own = times.ready(model, "own", place, host, told)
    assert (own.pull, own.build, own.load) == (8 / 2, 0, 8 / 4)
    built = times.ready(model, "build", place, host, told, hosts=6)
    assert (built.pull, built.build, built.load) == (12 / 1, 12 / 2, 8 / 4)
    far = Store(ceiling=6, host=3, pulled=True, internet=True)
    assert times.ready(model, "own", far, host, told).pull == 8 / 1
    crowd = times.ready(model, "own", place, host, told, ranks=50)  # 25 copies of the model
    assert (crowd.pull, crowd.load) == (12 / 2, 8 / (100 / 50))
    slow = Host(nic=4, internet=1, write=2, read=0.5, cache_bytes=11)
    assert times.ready(model, "full", place, slow, told).load == 7 / 0.5  # 12 do not stay cached
    assert times.ready(model, "own", place, slow, told).load == 8 / 4


def test_ranks_of_a_host_share_its_page_cache() -> None:
    every = {"ranks": 8}
    for store in ("gp3", "NVMe"):
        four = seconds(TOLD, "klein-4B", "full", store, "large", ranks=32)
        assert four == seconds(TOLD, "klein-4B", "full", store, "large", **every)
    alone = seconds(TOLD, "klein-4B", "full", "gp3", "large", ranks=8, shared=False)
    model = MODELS["klein-4B"]
    each = model.read_bytes("full", 1, TOLD["slice_reads"])
    assert alone == pytest.approx(8 * each / TOLD["gp3"])
    assert gain("klein-4B", "gp3", "large", **every) == pytest.approx(1, abs=0.01)
    assert gain("klein-4B", "gp3", "large", warm=True, **every) == pytest.approx(TOLD["slicing"])


# The inputs


def test_every_input_has_its_range_and_source() -> None:
    for name, one in INPUTS.items():
        assert one.low <= one.value <= one.high, name
        assert one.kind == "assumed" or re.search(r"\b20\d\d\b", one.source), name


def parts() -> list[Part]:
    return [part for model in MODELS.values() if model.tp == 8 for part in model.parts]


def test_sizes_are_those_of_the_models_document() -> None:
    text = (DOCUMENT.parent / "models.md").read_text()
    found = 0
    for part in parts():
        at_tp_8 = rf"^\| {part.name} \| .*? \| ([\d.]+)B \| .* \| 8 \| ([\d.]+) \|"
        row = re.search(at_tp_8, text, re.M)
        assert bool(row) == bool(part.rank_bytes and not part.padded), part.name
        if row:
            found += 1
            assert part.rank_bytes / 1e9 == pytest.approx(float(row[2]), abs=0.006)
            assert part.full_bytes / 1e9 >= 2 * float(row[1]) - 0.01
    assert found == 7


@pytest.mark.slow
@pytest.mark.parametrize("name", ["klein-4B", "Qwen2.5-VL"])
def test_sizes_are_those_of_a_plan(name: str, tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    import shardc
    from tests.zoo.case import published
    from tests.zoo.sizes import write_sparse

    part = next(part for part in parts() if name in part.name)
    kinds = ("Flux2Transformer2DModel", "Qwen2_5_VLForConditionalGeneration")
    one = next(p for p in published() if p.repo == part.name and p.class_name in kinds)
    write_sparse(one, tmp_path)
    [weights] = tmp_path.glob("*.safetensors")
    plan = shardc.plan(tmp_path, 8, pad_heads=part.padded).components[0]
    assert part.full_bytes == weights.stat().st_size
    assert part.rank_bytes == max(plan.rank_bytes())
    assert part.replicated_bytes == plan.replicated_bytes()


# The document


def test_tables_are_what_the_code_gives() -> None:
    made = tables.tables(TOLD)
    assert re.findall(r"<!-- fleet: ([\w-]+) -->", TEXT) == list(made)
    assert tables.with_tables(TEXT, made) == TEXT, "run python -m benchmarks.fleet --write"


def test_claims_hold() -> None:
    """What the prose of docs/scale.md says in numbers or without."""
    assert len(re.findall(r"7\.4 to 7\.7 times|27 times less|70 to 140 hosts", TEXT)) == 3
    ratios = {m.name: m.full_bytes / m.pulled_bytes("own", 1) for m in MODELS.values()}
    assert round(ratios.pop("klein-9B tp 32")) == 27
    assert (round(min(ratios.values()), 1), round(max(ratios.values()), 1)) == (7.4, 7.7)
    for name in ratios:
        for hosts in (1, 1_000, 10_000):
            assert 7 < gain(name, "S3", "small", hosts=hosts) < 10
        assert gain(name, "S3", "large", hosts=1_000, ranks=8) == pytest.approx(1, abs=0.02)
    # Whole sets that outgrow the checkpoint.
    whole = {m.name for m in MODELS.values() if m.pulled_bytes("own", m.tp) > m.full_bytes * 1.001}
    assert whole == {"Qwen-Image", "klein-9B tp 32"}
    # The Hub's quota: no gain, and a loss for whole sets.
    klein = MODELS["klein-4B"]
    asked = [klein.resolves("own", 8, TOLD), *(klein.resolves(w, 1, TOLD) for w in ("own", "full"))]
    windows = [TOLD["hub_quota"] // resolves for resolves in asked]
    assert 69 <= windows[0] < windows[1] < windows[2] < 140
    assert gain("klein-4B", "Hub", "small", hosts=1_000) < 1
    assert gain("klein-4B", "Hub", "large", hosts=1_000, ranks=8) < 0.6
    # The build: 16 s, and about a minute.
    assert round(klein.full_bytes / TOLD["build"]) == 16
    assert round(MODELS["Qwen-Image"].full_bytes / TOLD["build"]) == 58


def test_ceilings_begin_at_tens_of_hosts() -> None:
    rows = tables.store_table(TOLD).records()
    assert [10 < row["shared from hosts"] < 60 for row in rows] == [True, True, True, False]


def test_plots_are_the_same_each_time(tmp_path: Path) -> None:
    matplotlib = pytest.importorskip("matplotlib")
    for folder in (tmp_path / "a", tmp_path / "b"):
        draw(TOLD, folder)
    for new in sorted((tmp_path / "a").iterdir()):
        assert new.read_bytes() == (tmp_path / "b" / new.name).read_bytes()
        kept = DOCUMENT.parent / "images" / new.name
        assert f"](images/{new.name})" in TEXT
        assert kept.stat().st_size < 60_000
        xml.dom.minidom.parse(str(kept))
        if f"Matplotlib v{matplotlib.__version__}," in kept.read_text():
            assert kept.read_bytes() == new.read_bytes(), "run with --plot docs/images"


# The command


def test_command_prints_every_table() -> None:
    result = CliRunner().invoke(main, ["--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert list(found) == list(tables.tables(TOLD))
    assert found["one-rank"][0]["way"] == "full"
    assert tables.tables(TOLD)["spread"].markdown() in CliRunner().invoke(main).stdout


def test_command_changes_inputs() -> None:
    result = CliRunner().invoke(main, ["--json", "--set", "gp3=125"])
    row = next(r for r in json.loads(result.stdout)["one-rank"] if r["store"] == "gp3")
    as_given = next(r for r in tables.tables(TOLD)["one-rank"].records() if r["store"] == "gp3")
    assert row["1"] == pytest.approx(8 * as_given["1"])


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["--set", "gp4=1"], "'gp4' is none of hub_host"),
        (["--set", "gp3"], "write NAME=NUMBER"),
        (["--set", "gp3=0"], "above 0"),
        (["--set", "gp3=nan"], "above 0"),
        (["--write", "--set", "gp3=125"], "leave out --set"),
    ],
)
def test_command_refuses(given: list[str], says: str) -> None:
    result = CliRunner().invoke(main, given)
    assert result.exit_code == 2
    assert says in result.stderr


@pytest.mark.parametrize(
    ("number", "text"),
    [(0.0, "0"), (0.0123, "0.0123"), (1.0, "1.00"), (9.999, "10.0"), (66.04, "66.0"),
     (359.4, "359"), (26_449.0, "26,400"), (math.inf, "none"), (1_000, "1,000"), ("S3", "S3")],
)  # fmt: skip
def test_numbers_have_three_digits(number: object, text: str) -> None:
    assert tables.shown(number) == text
