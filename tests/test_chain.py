"""All of it, one command after another: a checkpoint elsewhere, until its ranks are loaded."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from shardc.demo import write_flux2
from tests import checkpoints as ck
from tests.servers.hub import Hub
from tests.servers.s3 import S3

torch = pytest.importorskip("torch")
pytest.importorskip("diffusers")

from shardc.loaders import load_state_dict  # noqa: E402

pytestmark = pytest.mark.slow
TP = 2


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """Where a checkpoint is, where its set will be, and how a command gets to both."""

    source: str
    shards: str
    environ: Mapping[str, str]


def on_the_hub(folder: Path, source: Path, stack: ExitStack) -> Elsewhere:
    hub = stack.enter_context(Hub(folder / "hub"))
    hub.upload("org/model", source)
    environ = {**hub.environ, "HF_HOME": str(folder / "hf"), "HF_TOKEN": "hf_chain"}
    return Elsewhere("org/model", "me/sharded", environ)


def on_s3(folder: Path, source: Path, stack: ExitStack) -> Elsewhere:
    pytest.importorskip("moto.server")
    s3 = stack.enter_context(S3())
    s3.create_bucket("bucket")
    s3.upload("bucket", "model", source)
    environ = {**s3.environ, "SHARDC_CACHE": str(folder / "cache")}
    return Elsewhere("s3://bucket/model", "s3://bucket/sharded", environ)


@pytest.fixture(params=[on_the_hub, on_s3])
def elsewhere(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Elsewhere]:
    open_one: Callable[[Path, Path, ExitStack], Elsewhere] = request.param
    write_flux2(tmp_path / "source")
    with ExitStack() as stack:
        yield open_one(tmp_path, tmp_path / "source", stack)


def test_from_a_checkpoint_elsewhere_to_loaded_ranks(elsewhere: Elsewhere, tmp_path: Path) -> None:
    def run(module: str, *words: str | int | Path) -> Any:
        command = [sys.executable, "-m", module, *map(str, words), "--json"]
        environ = {**os.environ, **elsewhere.environ}
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    built = tmp_path / "built"
    run("shardc", "build", elsewhere.source, "--tp", TP, "-o", built)
    run("shardc", "verify", built, "--source", elsewhere.source)
    run("shardc", "push", built, elsewhere.shards)
    for rank in range(TP):
        host = tmp_path / f"host-{rank}"
        run("shardc", "pull", elsewhere.shards, "--rank", rank, "-o", host)
        assert not list(host.rglob(f"rank-{1 - rank:05d}-*"))
        loaded, wanted = (load_state_dict(path, rank) for path in (host, built))
        assert list(loaded) == list(wanted)
        assert all(torch.equal(loaded[name], wanted[name]) for name in wanted)
    report = run("shardc.loaders", elsewhere.shards, "--nproc", TP)
    assert len(report["ranks"]) == TP
    run("shardc", "pull", elsewhere.shards, "-o", tmp_path / "whole")
    run("shardc", "merge", tmp_path / "whole", "-o", tmp_path / "merged")
    merged, source = (tmp_path / name / "transformer" for name in ("merged", "source"))
    assert ck.read_all(merged) == ck.read_all(source)
