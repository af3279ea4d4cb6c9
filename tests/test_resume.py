"""What an interrupted build leaves, who may go on from it, and what must not get in."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardc
from shardc import current, fileio, workspace
from shardc.errors import CheckpointError, OutputError, ShardSetError
from shardc.writing import Resources
from tests import checkpoints as ck

CHANCE = np.random.default_rng(11)
TENSORS = {
    "mask": ck.Data.count("BOOL", [7]),
    **{f"q.{n}.weight": ck.Data.random("F32", [64, 512], CHANCE) for n in range(4)},
    **{f"o.{n}.weight": ck.Data.random("BF16", [512, 256], CHANCE) for n in range(4)},
    "v.weight": ck.Data.random("F32", [1001, 64], CHANCE),
    "norm": ck.Data.random("F32", [256], CHANCE),
}
RULES: list[dict[str, Any]] = [
    {"match": "q.*", "style": "packed_colwise", "blocks": [32, 32], "unit": 8},
    {"match": "o.*", "style": "rowwise"},
    {"match": "v", "style": "vocab_parallel", "pad_to": 16},
]
SLOW = Resources(workers=1, memory_bytes=1, fsync=False)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return ck.component(tmp_path / "source", TENSORS, files=2)


@pytest.fixture
def manifest(tmp_path: Path) -> Path:
    return ck.manifest(tmp_path / "rules.toml", RULES)


def others(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir() if p.name not in ("source", "rules.toml"))


def interrupted(
    source: Path, out: Path, manifest: Path, after: int, error: type[BaseException], **options: Any
) -> BaseException:
    """A build that ends in `error` once `after` source bytes are done."""
    done = 0

    def progress(count: int) -> None:
        nonlocal done
        done += count
        if done >= after:
            raise error

    resources = Resources(workers=1, memory_bytes=1, fsync=False, progress=progress)
    with pytest.raises(error) as caught:
        shardc.build(source, out, 4, manifest=manifest, resources=resources, **options)
    return caught.value


@pytest.fixture
def left(source: Path, manifest: Path, tmp_path: Path) -> Path:
    """The workspace of a build of `out` that was interrupted half way."""
    interrupted(source, tmp_path / "out", manifest, 600_000, KeyboardInterrupt)
    assert others(tmp_path) == [".out.shardc-partial"]
    return tmp_path / ".out.shardc-partial"


def resumed(source: Path, manifest: Path, tmp_path: Path, **options: Any) -> int:
    """Go on with `out`; it must be what an undisturbed build makes. How much was taken over."""
    options = {"resources": SLOW, **options}
    report = shardc.build(source, tmp_path / "out", 4, manifest=manifest, resume=True, **options)
    shardc.build(source, tmp_path / "whole", 4, manifest=manifest)
    assert ck.contents(tmp_path / "out") == ck.contents(tmp_path / "whole")
    assert others(tmp_path) == ["out", "whole"]
    return report.resumed_tensors


# --- going on ------------------------------------------------------------------------------------


def test_an_interrupt_says_how_to_go_on(source: Path, manifest: Path, tmp_path: Path) -> None:
    error = interrupted(source, tmp_path / "out", manifest, 600_000, KeyboardInterrupt)
    partial = tmp_path / ".out.shardc-partial"
    assert str(error) == f"--resume continues what {partial} keeps, --force starts over"
    assert not (tmp_path / "out").exists()
    with pytest.raises(OutputError) as caught:
        shardc.build(source, tmp_path / "out", 4, manifest=manifest)
    assert str(caught.value) == (
        f"{partial}: is left of an unfinished build of {tmp_path / 'out'} "
        "(--resume continues it, --force starts over)"
    )
    assert resumed(source, manifest, tmp_path) > 2


def test_an_interrupt_before_anything_is_done_leaves_nothing(
    source: Path, manifest: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(fileio.Source, "read", interrupt)
    with pytest.raises(KeyboardInterrupt, match="nothing was left behind"):
        shardc.build(source, tmp_path / "out", 4, manifest=manifest)
    assert others(tmp_path) == []


def test_what_is_done_is_not_done_again(
    left: Path, source: Path, manifest: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not one byte of a tensor in the journal is read from the source or written again."""
    past = workspace.read_journal(left / "journal")
    assert past is not None
    done = sum(len(TENSORS[n].raw) for i, n in enumerate(TENSORS) if i in past.tensors[""])
    assert done >= 600_000
    reads: list[int] = []
    read = fileio.Source.read

    def counting(self: fileio.Source, offset: int, into: Any, tensor: str) -> None:
        reads.append(into.nbytes)
        read(self, offset, into, tensor)

    monkeypatch.setattr(fileio.Source, "read", counting)
    progress: list[int] = []
    resources = Resources(workers=2, memory_bytes=1, progress=progress.append)
    shardc.build(
        source, tmp_path / "out", 4, manifest=manifest, resources=resources, resume=True
    )  # fmt: skip
    total = sum(len(data.raw) for data in TENSORS.values())
    assert sum(reads) == total - done
    assert sum(progress) == total


def test_nothing_to_go_on_from(source: Path, manifest: Path, tmp_path: Path) -> None:
    assert resumed(source, manifest, tmp_path) == 0


@pytest.mark.parametrize("workers", [1, 3])
def test_interrupted_again_and_again(
    workers: int, source: Path, manifest: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    total = sum(len(data.raw) for data in TENSORS.values())
    for after in range(100_000, total, 150_000):
        interrupted(source, out, manifest, after, KeyboardInterrupt, resume=True)
    resources = Resources(workers=workers)
    assert resumed(source, manifest, tmp_path, resources=resources) > 4


def test_force_starts_over(left: Path, source: Path, manifest: Path, tmp_path: Path) -> None:
    report = shardc.build(source, tmp_path / "out", 4, manifest=manifest, force=True)
    assert report.resumed_tensors == 0
    assert others(tmp_path) == ["out"]
    assert shardc.verify(tmp_path / "out", source).ok


def test_a_rebuild_that_was_interrupted_may_still_replace(
    source: Path, manifest: Path, tmp_path: Path
) -> None:
    """--force was given once; OUT stays whole until the new set is."""
    out = tmp_path / "out"
    shardc.build(source, out, 2, manifest=manifest)
    before = ck.contents(out)
    interrupted(source, out, manifest, 600_000, KeyboardInterrupt, force=True)
    assert ck.contents(out) == before
    assert resumed(source, manifest, tmp_path) > 0


def test_but_not_what_came_there_since(
    left: Path, source: Path, manifest: Path, tmp_path: Path
) -> None:
    shardc.build(source, tmp_path / "two", 2, manifest=manifest)
    (tmp_path / "two").rename(tmp_path / "out")
    with pytest.raises(OutputError, match=r"out: exists already \(--force replaces it"):
        shardc.build(source, tmp_path / "out", 4, manifest=manifest, resume=True)
    assert resumed(source, manifest, tmp_path, force=True) > 0


def test_an_error_keeps_what_is_done_and_says_so(
    source: Path, manifest: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = fileio.Source.read
    count = 0

    def failing(self: fileio.Source, *arguments: Any) -> None:
        nonlocal count
        count += 1
        if count == 12:
            with Unreadable(self):
                read(self, *arguments)
        read(self, *arguments)

    monkeypatch.setattr(fileio.Source, "read", failing)
    with pytest.raises(CheckpointError) as caught:
        shardc.build(source, tmp_path / "out", 4, manifest=manifest, resources=SLOW)
    assert "failed: Is a directory (--resume continues what " in str(caught.value)
    monkeypatch.undo()
    assert resumed(source, manifest, tmp_path) > 0


class Unreadable:
    """A source whose descriptor is a folder's for a while: the kernel refuses to read it."""

    def __init__(self, source: fileio.Source) -> None:
        self._source = source

    def __enter__(self) -> None:
        self._fd, self._source._fd = self._source._fd, os.open("/", os.O_RDONLY)

    def __exit__(self, *_: object) -> None:
        os.close(self._source._fd)
        self._source._fd = self._fd


def test_a_component_kept_whole_and_a_large_file(
    tmp_path: Path, manifest: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copied files are journalled, too; a hard link is only made again."""
    pipe = ck.pipeline(tmp_path / "source", {"transformer": ck.CLASS, "vae": "Vae"})
    ck.component(pipe / "transformer", TENSORS)
    ck.component(pipe / "vae", {"c.weight": ck.Data.count("F16", [5000])}, class_name="Vae")
    (pipe / "tokenizer.json").write_bytes(b"words" * 1000)
    monkeypatch.setattr(workspace, "JOURNALLED_BYTES", 1000)
    monkeypatch.setattr(workspace, "share_file", lambda *_, **__: None)  # another filesystem
    interrupted(pipe, tmp_path / "out", manifest, 600_000, KeyboardInterrupt)
    partial = tmp_path / ".out.shardc-partial"
    past = workspace.read_journal(partial / "journal")
    assert past is not None
    weights = "vae/diffusion_pytorch_model.safetensors"
    assert past.files.keys() == {"tokenizer.json", weights}
    with (partial / "set" / "tokenizer.json").open("r+b") as file:
        file.write(b"W")
    copied: list[str] = []
    copy = workspace.copy_file

    def counting(source: Path, target: Path, **options: Any) -> str:
        copied.append(target.name)
        return copy(source, target, **options)

    monkeypatch.setattr(workspace, "copy_file", counting)
    shardc.build(pipe, tmp_path / "out", 4, manifest=manifest, resources=SLOW, resume=True)
    assert "tokenizer.json" in copied
    assert Path(weights).name not in copied
    assert ck.contents(tmp_path / "out" / "vae") == ck.contents(pipe / "vae")
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == b"words" * 1000
    assert shardc.verify(tmp_path / "out", pipe).ok


def test_a_link_to_the_source_is_never_written_through(tmp_path: Path, manifest: Path) -> None:
    """What a killed build left of a kept component are the source's own bytes."""
    pipe = ck.pipeline(tmp_path / "source", {"transformer": ck.CLASS, "vae": "Vae"})
    ck.component(pipe / "transformer", TENSORS)
    ck.component(pipe / "vae", {"c.weight": ck.Data.count("F16", [500])}, class_name="Vae")
    before = ck.contents(pipe)
    interrupted(pipe, tmp_path / "out", manifest, 600_000, KeyboardInterrupt)
    shardc.build(pipe, tmp_path / "out", 4, manifest=manifest, resume=True)
    assert ck.contents(pipe) == before


# --- what must not get into the result -----------------------------------------------------------


def every_file(left: Path) -> list[Path]:
    return sorted((left / "set").glob("*.safetensors"))


def flip(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 0x10]))


@pytest.mark.parametrize("share", [0.0, 0.001, 0.3, 0.7, 0.999])
def test_a_flipped_byte(
    share: float, left: Path, source: Path, manifest: Path, tmp_path: Path
) -> None:
    """In the header, in what is done, in what is not, and in padding that nobody writes."""
    for path in every_file(left):
        flip(path, int(path.stat().st_size * share))
    resumed(source, manifest, tmp_path)


def test_all_that_is_not_vouched_for_is_garbage(
    left: Path, source: Path, manifest: Path, tmp_path: Path
) -> None:
    for path in every_file(left):
        path.write_bytes(CHANCE.bytes(path.stat().st_size))
    assert resumed(source, manifest, tmp_path) == 0


@pytest.mark.parametrize("size", [0, 1, 5000, "more", "gone"])
def test_a_file_of_another_size(
    size: Any, left: Path, source: Path, manifest: Path, tmp_path: Path
) -> None:
    """As a crash of the machine leaves them: the journal is there, the bytes are not."""
    for path in every_file(left):
        if size == "gone":
            path.unlink()
        else:
            os.truncate(path, path.stat().st_size + 99 if size == "more" else size)
    resumed(source, manifest, tmp_path)


def test_a_link_in_the_place_of_a_shard(
    left: Path, source: Path, manifest: Path, tmp_path: Path
) -> None:
    path = every_file(left)[0]
    path.unlink()
    (tmp_path / "source" / "precious").write_text("years of work")
    shutil.copytree(source, tmp_path / "kept")
    path.symlink_to(tmp_path / "kept" / "precious")
    (source / "precious").unlink()
    with pytest.raises(OutputError, match="Too many levels of symbolic links"):
        shardc.build(source, tmp_path / "out", 4, manifest=manifest, resume=True)
    assert (tmp_path / "kept" / "precious").read_text() == "years of work"


def test_a_journal_without_its_tail(
    left: Path, source: Path, manifest: Path, tmp_path: Path
) -> None:
    raw = (left / "journal").read_bytes()
    (left / "journal").write_bytes(raw[: len(raw) * 2 // 3])
    assert resumed(source, manifest, tmp_path) > 0


@pytest.mark.parametrize("damage", [b"", b"x"])
def test_a_journal_without_its_head(
    damage: bytes, left: Path, source: Path, manifest: Path, tmp_path: Path
) -> None:
    (left / "journal").write_bytes(damage + (left / "journal").read_bytes() if damage else b"")
    with pytest.raises(OutputError, match=r"journal is missing or damaged.*\(--force starts over"):
        shardc.build(source, tmp_path / "out", 4, manifest=manifest, resume=True)
    assert others(tmp_path) == [".out.shardc-partial"]


# --- another build -------------------------------------------------------------------------------

OTHER: dict[str, tuple[dict[str, Any], str]] = {
    "tp": ({"tp": 2}, "tp was 4, is now 2"),
    "dtype": ({"dtype": "bf16"}, "dtype was keep, is now bf16"),
    "part": ({"max_part_bytes": 99}, "max part size was 4000000000, is now 99"),
    "heads": ({"pad_heads": True}, "pad heads was False, is now True"),
}


@pytest.mark.parametrize("case", OTHER)
def test_other_options(case: str, left: Path, source: Path, manifest: Path, tmp_path: Path) -> None:
    options, told = OTHER[case]
    with pytest.raises(OutputError) as caught:
        shardc.build(
            source, tmp_path / "out", **{"tp": 4, "manifest": manifest, **options}, resume=True
        )
    assert str(caught.value) == f"{left}: is left of another build: {told} (--force starts over)"
    assert resumed(source, manifest, tmp_path) > 0  # and it is still there to go on from


def test_another_manifest(left: Path, source: Path, manifest: Path, tmp_path: Path) -> None:
    ck.manifest(manifest, RULES[:-1])
    with pytest.raises(OutputError, match=r"is left of another build: plan of \. was \w+, is now"):
        shardc.build(source, tmp_path / "out", 4, manifest=manifest, resume=True)


@pytest.mark.parametrize("what", ["bytes", "inode", "config"])
def test_another_source(
    what: str, left: Path, source: Path, manifest: Path, tmp_path: Path
) -> None:
    path = source / "config.json" if what == "config" else next(source.glob("*.safetensors"))
    if what == "inode":
        shutil.copy2(path, tmp_path / "source" / "copy")
        (tmp_path / "source" / "copy").rename(path)
    else:
        path.write_bytes(path.read_bytes())
        os.utime(path, ns=(1, 1))
    with pytest.raises(OutputError) as caught:
        shardc.build(source, tmp_path / "out", 4, manifest=manifest, resume=True)
    assert f"is left of another build: source file {path.name} was size_bytes " in str(caught.value)
    assert str(caught.value).endswith("(--force starts over)")


def test_a_source_that_changed_leaves_nothing_to_go_on_from(
    source: Path, manifest: Path, tmp_path: Path
) -> None:
    """What was done of it is of no use to anybody."""
    done = 0

    def touch(count: int) -> None:
        nonlocal done
        done += count
        if done > 600_000:
            os.utime(source / "config.json", ns=(1, 1))

    resources = Resources(workers=1, memory_bytes=1, progress=touch)
    with pytest.raises(CheckpointError, match=r"config\.json: changed during the build"):
        shardc.build(source, tmp_path / "out", 4, manifest=manifest, resources=resources)
    assert others(tmp_path) == []


# --- merge and reshard ---------------------------------------------------------------------------


def conversions(out: Path, tmp_path: Path) -> dict[str, Callable[..., Any]]:
    return {
        "merge": lambda where, **options: shardc.merge(out, tmp_path / where, **options),
        "reshard": lambda where, **options: shardc.reshard(out, tmp_path / where, 2, **options),
    }


@pytest.mark.parametrize("what", ["merge", "reshard"])
def test_conversions_go_on_too(what: str, source: Path, manifest: Path, tmp_path: Path) -> None:
    shardc.build(source, tmp_path / "four", 4, manifest=manifest)
    convert = conversions(tmp_path / "four", tmp_path)[what]
    done = 0

    def progress(count: int) -> None:
        nonlocal done
        done += count
        if done > 600_000:
            raise KeyboardInterrupt

    resources = Resources(workers=1, memory_bytes=1, progress=progress)
    with pytest.raises(KeyboardInterrupt, match="--resume continues what "):
        convert("out", resources=resources)
    with pytest.raises(OutputError, match="is left of an unfinished build"):
        convert("out")
    # neither a build nor the other conversion takes it for its own
    with pytest.raises(OutputError, match="is left of another build"):
        shardc.build(source, tmp_path / "out", 2, manifest=manifest, resume=True)
    assert convert("out", resume=True).resumed_tensors > 2
    convert("whole")
    assert ck.contents(tmp_path / "out") == ck.contents(tmp_path / "whole")
    assert others(tmp_path) == ["four", "out", "whole"]


@pytest.mark.parametrize("what", ["merge", "reshard"])
def test_damaged_shards_leave_nothing(
    what: str, source: Path, manifest: Path, tmp_path: Path
) -> None:
    shardc.build(source, tmp_path / "four", 4, manifest=manifest)
    flip(tmp_path / "four" / "rank-00003-of-00004.safetensors", 9000)
    with pytest.raises(ShardSetError, match="its shards are not what was built"):
        conversions(tmp_path / "four", tmp_path)[what]("out")
    assert others(tmp_path) == ["four"]


# --- two at once ---------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"force": True}, {"resume": True}], ids=str)
def test_two_builds_into_one_out(
    options: dict[str, Any], source: Path, manifest: Path, tmp_path: Path
) -> None:
    """The second is refused at once, whatever it is told, and the first does not notice."""
    out = tmp_path / "out"
    errors: list[str] = []
    once = threading.Event()

    def second(_: int) -> None:
        if not once.is_set():
            once.set()
            with pytest.raises(OutputError) as caught:
                shardc.build(source, out, 4, manifest=manifest, **options)
            errors.append(str(caught.value))

    resources = Resources(workers=1, memory_bytes=1, progress=second)
    shardc.build(source, out, 4, manifest=manifest, resources=resources)
    told = "is being built by another process (wait for it, or choose another -o)"
    assert errors == [f"{out}: {told}"]
    assert shardc.verify(out, source).ok
    assert others(tmp_path) == ["out"]


HOLDER = """
import os, signal, sys
from pathlib import Path
from shardc.workspace import workspace

with workspace(Path(sys.argv[1]), {}, force=False, resume=False, fsync=False, at_rest=bool):
    print("held", flush=True)
    signal.pause()
"""


def test_the_lock_of_a_killed_build_holds_nobody(
    source: Path, manifest: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    command = [sys.executable, "-c", HOLDER, str(out)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(OutputError, match="is being built by another process"):
            shardc.build(source, out, 4, manifest=manifest)
        holder.kill()
    assert others(tmp_path) == [".out.shardc-lock", ".out.shardc-partial"]
    shardc.build(source, out, 4, manifest=manifest)  # it had written nothing yet
    assert others(tmp_path) == ["out"]


# --- up to date ----------------------------------------------------------------------------------


def test_up_to_date(source: Path, manifest: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    first = shardc.build(source, out, 4, manifest=manifest, dtype="bf16")
    before = {path: path.stat() for path in out.iterdir()}
    again = shardc.build(source, out, 4, manifest=manifest, dtype="bf16")
    assert (first.up_to_date, again.up_to_date) == (False, True)
    assert (again.written_bytes, again.files) == (0, first.files)
    assert {path: path.stat().st_mtime_ns for path in out.iterdir()} == {
        path: status.st_mtime_ns for path, status in before.items()
    }
    assert others(tmp_path) == ["out"]
    forced = shardc.build(source, out, 4, manifest=manifest, dtype="bf16", force=True)
    assert not forced.up_to_date
    for options in ({"tp": 2}, {"dtype": "keep"}, {"max_part_bytes": 9}, {"pad_heads": True}):
        with pytest.raises(OutputError, match="exists already"):
            shardc.build(
                source, out, **{"tp": 4, "manifest": manifest, "dtype": "bf16", **options}
            )  # fmt: skip


def retrained(source: Path, out: Path, manifest: Path) -> None:
    """Other weights under the same names and shapes: a fine-tune has the same headers and sizes."""
    (file, *_) = sorted(source.glob("*.safetensors"))
    changed = {
        name: ck.Data(data.dtype, data.shape, bytes(b ^ 1 for b in data.raw))
        if name.startswith("q.1")
        else data
        for name, data in ck.read(file).items()
    }
    ordered = {name: changed[name] for name in ck.names(file)}
    status = file.stat()
    ck.save(file, ordered, {"format": "pt"})
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))


def drop(name: str) -> Callable[[Path, Path, Path], None]:
    return lambda source, out, manifest: (out / name).unlink()


def cut(name: str) -> Callable[[Path, Path, Path], None]:
    return lambda source, out, manifest: os.truncate(out / name, 5000)


def edit(name: str) -> Callable[[Path, Path, Path], None]:
    def change(source: Path, out: Path, manifest: Path) -> None:
        (source / name).write_text((source / name).read_text().replace(ck.CLASS, ck.CLASS + " "))

    return change


STALE: dict[str, Callable[[Path, Path, Path], Any]] = {
    "other weights": retrained,
    "a file is missing": drop("rank-00002-of-00004.safetensors"),
    "a file is cut": cut("rank-00002-of-00004.safetensors"),
    "config.json is missing": drop("config.json"),
    "the index is damaged": lambda s, out, m: flip(out / ck.INDEX, 300),
    "a shard's header": lambda s, out, m: flip(out / "rank-00000-of-00004.safetensors", 30),
    "a shard's data": lambda s, out, m: flip(out / "rank-00000-of-00004.safetensors", 4100),
    "another file beside": lambda s, out, m: (out / "more.json").write_text("{}"),
    "another file in the source": lambda s, out, m: (s / "more.json").write_text("{}"),
    "another manifest": lambda s, out, m: ck.manifest(m, RULES, note="x") and None,
    "config.json changed": lambda s, out, m: ck.write_json(
        s / "config.json", {"_class_name": ck.CLASS, "x": 1}
    ),
}


@pytest.mark.parametrize("case", STALE)
def test_not_up_to_date(case: str, source: Path, manifest: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    shardc.build(source, out, 4, manifest=manifest)
    if case == "another manifest":
        manifest.write_text(manifest.read_text() + "\n# a word\n")
    else:
        STALE[case](source, out, manifest)
    planned = shardc.plan(source, 4, manifest=manifest)
    assert not current.is_current(planned, out)
    with pytest.raises(OutputError, match="exists already"):
        shardc.build(source, out, 4, manifest=manifest)


def test_a_scheduler_that_changed_in_place(tmp_path: Path, manifest: Path) -> None:
    pipe = ck.pipeline(tmp_path / "source", {"transformer": ck.CLASS, "vae": "Vae"})
    ck.component(pipe / "transformer", TENSORS)
    vae = ck.component(pipe / "vae", {"c.weight": ck.Data.count("F16", [500])}, class_name="Vae")
    out = tmp_path / "out"
    shardc.build(pipe, out, 4, manifest=manifest)
    assert shardc.build(pipe, out, 4, manifest=manifest).up_to_date
    scheduler = pipe / "scheduler" / "scheduler_config.json"
    text = scheduler.read_text()
    scheduler.write_text(text.replace("Tiny", "Tidy"))
    with pytest.raises(OutputError, match="exists already"):
        shardc.build(pipe, out, 4, manifest=manifest)
    scheduler.write_text(text)
    kept = vae / "diffusion_pytorch_model.safetensors"
    raw = kept.read_bytes()
    kept.unlink()  # the set's is a link to it
    kept.write_bytes(raw[:-1] + b"?")
    with pytest.raises(OutputError, match="exists already"):
        shardc.build(pipe, out, 4, manifest=manifest)


def test_what_was_left_of_an_up_to_date_set_is_swept(
    source: Path, manifest: Path, tmp_path: Path
) -> None:
    """Of the same build; what is left of another one may be wanted yet."""
    out = tmp_path / "out"
    shardc.build(source, out, 4, manifest=manifest)
    interrupted(source, out, manifest, 600_000, KeyboardInterrupt, force=True)
    assert shardc.build(source, out, 4, manifest=manifest).up_to_date
    assert others(tmp_path) == ["out"]
    interrupted(source, out, manifest, 600_000, KeyboardInterrupt, force=True, dtype="fp16")
    assert shardc.build(source, out, 4, manifest=manifest).up_to_date
    assert others(tmp_path) == [".out.shardc-partial", "out"]


def test_reshard_knows_it_too(source: Path, manifest: Path, tmp_path: Path) -> None:
    shardc.build(source, tmp_path / "four", 4, manifest=manifest)
    shardc.build(source, tmp_path / "two", 2, manifest=manifest)
    assert shardc.reshard(tmp_path / "four", tmp_path / "two", 2).up_to_date


# --- room ----------------------------------------------------------------------------------------


def test_room_counts_what_is_held(
    left: Path, source: Path, manifest: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the unfinished build has of the disk is there to go on with, or to be freed."""
    needed = sum(path.stat().st_size for path in every_file(left))
    if workspace.allocated_bytes(left) < needed:
        pytest.skip("this filesystem does not reserve")

    class Usage:
        free = 50_000

    monkeypatch.setattr("shutil.disk_usage", lambda _: Usage)
    assert resumed_only(source, manifest, tmp_path) > 0


def resumed_only(source: Path, manifest: Path, tmp_path: Path) -> int:
    return shardc.build(source, tmp_path / "out", 4, manifest=manifest, resume=True).resumed_tensors


def test_room_counts_what_is_copied(
    source: Path, manifest: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (source / "notes.txt").write_bytes(bytes(500_000))
    planned = shardc.plan(source, 4, manifest=manifest)
    shards = sum(file.size_bytes for part in planned.components for file in part.files)

    class Usage:
        free = shards + 500_000

    monkeypatch.setattr("shutil.disk_usage", lambda _: Usage)
    with pytest.raises(OutputError, match=rf"out: needs \d+ bytes, {shards + 500_000} are free"):
        shardc.build(source, tmp_path / "out", 4, manifest=manifest)
    assert others(tmp_path) == []
