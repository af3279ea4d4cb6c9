"""Faults that others met with files, memory and the page cache (E02 and group G).

The case's number is in each test's name. Where another answer than the case's is right here:

| case | what happens instead |
|---|---|
| G01 | a view on cpu whose page cannot be read kills, as with any mapping: `reads="direct"` reads |
"""

from __future__ import annotations

import ctypes
import errno
import itertools
import logging
import mmap
import os
import resource
import struct
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash

import shardc
from shardc.errors import CheckpointError, ShardSetError
from shardc.header import read_header
from shardc.shardset import open_shard_set
from tests import checkpoints as ck
from tests import ranks
from tests.tiny import tiny

torch = pytest.importorskip("torch")
pytest.importorskip("diffusers")

from shardc.loaders import load_state_dict, local, mapped, pages, reads, storage  # noqa: E402


@pytest.mark.parametrize("cut", [8, 1, "header"])
def test_e02_a_short_file_is_refused_before_a_read(tmp_path: Path, cut: Any) -> None:
    out = tiny(tmp_path)
    for file in (out / "rank-00001-of-00002.safetensors", out / "replicated.safetensors"):
        whole = file.read_bytes()
        file.write_bytes(whole[:20] if cut == "header" else whole[:-cut])
        with pytest.raises(ShardSetError, match=file.name) as caught:
            load_state_dict(out, 1)
        if cut != "header":
            needed = len(whole) - 4096  # data starts there
            message = f"tensors take {needed} bytes, the file holds {needed - cut}"
            assert message in str(caught.value)
        file.write_bytes(whole)
    source = next((tmp_path / "source").glob("*.safetensors"))
    whole = source.read_bytes()
    source.write_bytes(whole[:20] if cut == "header" else whole[:-cut])
    with pytest.raises(CheckpointError, match=source.name):
        shardc.plan(tmp_path / "source", 2, manifest=tmp_path / "rules.toml")


def held_of(path: Path) -> Any:
    """A rank's tensors, opened and not yet read."""
    return storage.open_rank(path, open_shard_set(path).components[""], 1)


def test_g01_a_file_cut_while_it_is_read_is_an_error_with_path_and_offset(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(bytes(1 << 20))
    with reads.FileReader(path, direct=True) as file:
        os.truncate(path, 1 << 19)
        with pytest.raises(ShardSetError, match=r"x: ends at byte 524288, 1048576 are needed"):
            list(file.pieces(0, 1 << 20))


@pytest.mark.parametrize("way", ["mapped", "direct"])
def test_g01_a_file_cut_between_its_opening_and_its_reading(tmp_path: Path, way: Any) -> None:
    out = tiny(tmp_path)
    held = held_of(out)
    file = out / "rank-00001-of-00002.safetensors"
    size = file.stat().st_size
    os.truncate(file, 4096)
    says = f"has 4096 bytes, {size} when" if way == "mapped" else f"ends at byte 4096, {size} are"
    with pytest.raises(ShardSetError, match=f"{file.name}: {says}"):
        list(storage.place_on(held, torch.device("cpu"), way))


def test_g01_a_file_cut_while_a_tensor_is_copied(tmp_path: Path) -> None:
    """Found before the next slice of it is touched."""
    out = tiny(tmp_path)
    file, info = held_of(out)["m.weight"]
    with pages.ReadAhead([]) as ahead:
        done = storage._given_back(file, file.span(info), ahead)
        done(0, 16)
        os.truncate(file.path, 4096)
        with pytest.raises(ShardSetError, match="has 4096 bytes"):
            done(16, 32)


def test_g01_a_read_that_the_kernel_fails(tmp_path: Path) -> None:
    """Nothing is mapped at address 0, so that this file's first page cannot be read."""
    memory = Path("/proc/self/mem")
    if not memory.exists():
        pytest.skip("no /proc")
    with (
        reads.FileReader(memory, direct=True) as file,
        pytest.raises(ShardSetError, match=r"mem: reading 10 bytes at byte 0 failed: Input/output"),
    ):
        list(file.pieces(0, 10))


def test_g01_network_mounts_are_read_not_mapped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fault there may kill. The page cache still serves what it holds."""
    file, _ = held_of(tiny(tmp_path))["m.weight"]
    file.path.read_bytes()  # now it is cached
    device = tmp_path.stat().st_dev
    mount = f"36 35 {os.major(device)}:{os.minor(device)} / /mnt rw shared:1 - "
    for kind, way in (("ext4", "cached"), ("nfs4", "buffered"), ("fuse.sshfs", "buffered")):
        (tmp_path / "mounts").write_text(f"22 1 0:999 / / rw - btrfs x rw\n{mount}{kind} x rw\n")
        monkeypatch.setattr(reads, "MOUNTS", tmp_path / "mounts")
        assert reads.choose("auto", file.memory, file.path, shared=False) == way
    assert reads.choose("mapped", file.memory, file.path, shared=False) == "mapped"


def touch_what_was_cut(path: Path) -> None:
    weight = load_state_dict(path, 1)["m.weight"]
    os.truncate(path / "rank-00001-of-00002.safetensors", 4096)
    weight.sum()


@pytest.mark.slow
def test_g01_a_rank_that_dies_of_it_is_named(tmp_path: Path) -> None:
    with pytest.raises(ShardSetError, match="rank 0: died of SIGBUS"):
        local.run(touch_what_was_cut, 1, tiny(tmp_path))


PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 38, 22, 2
MMAP = {"x86_64": 9, "aarch64": 222}


def forbid_mapping(error: int) -> None:
    """Have the kernel fail what maps a file as a shard is mapped, from here on in this process."""
    load, equal, give, allow = 0x20, 0x15, 0x06, 0x7FFF0000  # linux/filter.h, linux/seccomp.h
    program = [
        (load, 0, 0, 0),  # the call's number
        (equal, 0, 3, MMAP[os.uname().machine]),
        (load, 0, 0, 16 + 3 * 8),  # its flags
        (equal, 0, 1, mapped.MAP_FLAGS),
        (give, 0, 0, 0x00050000 | error),
        (give, 0, 0, allow),
    ]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in program))
    filters = struct.pack("HxxxxxxP", len(program), ctypes.addressof(code))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
    assert libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, filters, 0, 0) == 0, ctypes.get_errno()


class Warnings(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []
        logging.getLogger("shardc.loaders").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def load_unmapped(rank: int, path: Path, error: int) -> Any:
    forbid_mapping(error)
    warnings = Warnings()
    found = {way: load_state_dict(path, rank, verify=True, reads=way) for way in ("auto", "direct")}
    raw = [{name: t.numpy().tobytes() for name, t in held.items()} for held in found.values()]
    return raw, warnings.texts


@pytest.mark.slow
@pytest.mark.skipif(
    sys.platform != "linux" or os.uname().machine not in MMAP, reason="the filter is Linux's"
)
@pytest.mark.parametrize("error", [errno.ENODEV, errno.ENOMEM])
def test_g02_g03_a_file_that_cannot_be_mapped_is_read(tmp_path: Path, error: int) -> None:
    """As on mounts without mmap, and where the address space is limited: by the kernel itself."""
    out = tiny(tmp_path)
    for rank, (raw, warnings) in enumerate(ranks.values(ranks.run(load_unmapped, 2, out, error))):
        expected = {name: data.raw for name, data in ck.read_ranks(out, 2)[rank].items()}
        assert raw == [expected, expected]
        assert len(warnings) == 4  # each of two files, opened twice
        assert all(f"cannot be mapped ({os.strerror(error)}): it is read" in w for w in warnings)


def refusal(call: Callable[[], object]) -> int | None:
    """The error number with which the system refuses a call."""
    try:
        call()
    except OSError as error:
        return error.errno
    return None


def test_g02_a_filesystem_without_direct_reads(tmp_path: Path) -> None:
    """sysfs has none: to open one of its files with O_DIRECT is EINVAL."""
    path = Path("/sys/kernel/btf/vmlinux")
    if not path.exists():
        pytest.skip("this kernel has no BTF")
    assert refusal(lambda: os.close(os.open(path, os.O_RDONLY | os.O_DIRECT))) == errno.EINVAL
    with reads.FileReader(path, direct=True) as file:
        found = b"".join(piece.numpy().tobytes() for _, piece in file.pieces(100, 200_000))
    assert found == path.read_bytes()[100:200_000]


def test_g02_a_filesystem_that_wants_another_alignment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unaligned reads past the page cache are EINVAL: they go on through it."""
    path = tmp_path / "x"
    path.write_bytes(os.urandom(3 * reads.STAGE_BYTES))
    monkeypatch.setattr(reads, "ALIGNMENT", 1)
    with reads.FileReader(path, direct=True) as file:
        if refusal(lambda: os.pread(file._fd, 10, 7)) != errno.EINVAL:
            pytest.skip("this filesystem takes any alignment")
        pieces = [piece.numpy().tobytes() for _, piece in file.pieces(7, 3 * reads.STAGE_BYTES)]
    assert b"".join(pieces) == path.read_bytes()[7:]


LARGE, SMALL = 32 << 20, 40


def sparse(path: Path, count: int) -> None:
    """A file of `count` tensors of 32 MiB, each with its number in its last byte, and holes."""
    header = {
        f"t{n}": {"dtype": "U8", "shape": [LARGE], "data_offsets": [n * LARGE, (n + 1) * LARGE]}
        for n in range(count)
    }
    raw = ck.raw_file(header, b"")
    with path.open("wb") as file:
        file.write(raw)
        for n in range(count):
            file.seek(len(raw) + (n + 1) * LARGE - 1)
            file.write(bytes([n % 256]))


def opened(path: Path) -> Any:
    header = read_header(path)
    file = storage.MappedFile.open(path, header)
    return file, {info.name: (file, info) for info in header.tensors}


def status_bytes(*keys: str) -> int:
    """Figures of this process's memory, added up."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return sum(int(line.split()[1]) << 10 for line in lines if line.split(":")[0] in keys)


def load_in_little_space(rank: int, path: Path) -> Any:
    space = status_bytes("VmSize") + 16 * LARGE
    resource.setrlimit(resource.RLIMIT_AS, (space, space))
    warnings = Warnings()
    file, held = opened(path)
    before = status_bytes("VmRSS")
    last = [int(tensor[-1]) for _, tensor in storage.place_on(held, torch.device("cpu"))]
    grown = status_bytes("VmHWM") - before
    try:
        kept = dict(storage.place_on(held, torch.device("cpu")))
    except ShardSetError as error:
        return file.memory, last, grown, warnings.texts, str(error)
    return f"{len(kept)} tensors fit"


@pytest.mark.slow
def test_g03_a_file_larger_than_the_address_space(tmp_path: Path) -> None:
    """Read tensor by tensor, two of them in memory at most; what does not fit is named."""
    sparse(tmp_path / "x.safetensors", SMALL)
    ((memory, last, grown, warnings, error),) = ranks.values(
        ranks.run(load_in_little_space, 1, tmp_path / "x.safetensors")
    )
    assert memory is None
    assert last == list(range(SMALL))
    assert grown < 3 * LARGE
    assert len(warnings) == 1
    assert "Cannot allocate memory" in warnings[0]
    assert f"there is no memory for its {LARGE} bytes" in error
    assert "x.safetensors" in error
    assert "ulimit -v" in error


def test_g03_a_file_larger_than_the_memory_is_mapped_all_the_same(tmp_path: Path) -> None:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    count = 2 * total // LARGE
    if Path("/proc/sys/vm/overcommit_memory").read_text().strip() == "2":
        pytest.skip("this machine promises no more memory than it has")
    try:
        sparse(tmp_path / "x.safetensors", count)
    except OSError as error:
        pytest.skip(f"no such sparse file here: {error}")
    file, held = opened(tmp_path / "x.safetensors")
    assert file.memory is not None
    assert int(file.view(held[f"t{count - 1}"][1])[-1]) == (count - 1) % 256


def maps(rank: int, path: Path) -> Any:
    held = load_state_dict(path, rank)
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {Path(line.split()[-1]).name for line in lines if str(path) in line}, len(held)


@pytest.mark.slow
def test_g05_a_rank_opens_its_own_files_only(tmp_path: Path) -> None:
    out = tiny(tmp_path, 4)
    for rank, (files, count) in enumerate(ranks.values(ranks.run(maps, 4, out))):
        assert files == {f"rank-{rank:05d}-of-00004.safetensors", "replicated.safetensors"}
        assert count == 2


SHARDED, REPLICATED = 64 << 20, 16 << 20


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """64 MiB that 8 ranks share out, and 16 MiB that all of them hold."""
    folder = tmp_path_factory.mktemp("large")
    tensors = {f"m.{n}.weight": (SHARDED // 16, 1024) for n in range(16)}
    tensors |= {f"n.{n}.weight": (REPLICATED // 4, 1024) for n in range(4)}
    chance = np.random.default_rng(0)
    data = {
        name: ck.Data.random("BF16", (size // 2 // width, width), chance)
        for name, (size, width) in tensors.items()
    }
    rules = ck.manifest(folder / "r.toml", [{"match": "m.*", "style": "colwise"}])
    shardc.build(ck.component(folder / "s", data), folder / "o", 8, manifest=rules)
    return folder / "o"


def not_cached(folder: Path) -> bool:
    """Have the page cache forget a folder's shards, and say whether it did."""
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as memory:
                if reads.resident_share(memory) != 0:
                    return False
    return True


def read_bytes() -> tuple[int, int]:
    """What this process has read by calls, and from a disk, whether by calls or by faults."""
    lines = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(lines["rchar"]), int(lines["read_bytes"])


def load_measured(rank: int, path: Path, way: Any) -> Any:
    torch.distributed.barrier()
    anonymous, resident, (called, fetched) = (
        status_bytes("RssAnon"),
        status_bytes("VmRSS"),
        read_bytes(),
    )
    held = load_state_dict(path, rank, reads=way)
    digest = xxhash.xxh3_128()
    for name in sorted(held):
        digest.update(held[name].view(torch.uint8).numpy().data)
    return {
        "anonymous": status_bytes("RssAnon") - anonymous,
        "resident": status_bytes("VmRSS") - resident,
        "called": read_bytes()[0] - called,
        "fetched": read_bytes()[1] - fetched,
        "digest": digest.hexdigest(),
    }


@pytest.mark.slow
@pytest.mark.parametrize("way", ["mapped", "direct"])
def test_g05_g07_eight_ranks_read_each_byte_once(large: Path, way: Any) -> None:
    """A rank takes the memory of its own part, and all of them together read the set once."""
    cold = not_cached(large)
    told = ranks.values(ranks.run(load_measured, 8, large, way))
    part = SHARDED // 8 + REPLICATED
    buffers = (reads.READERS + 1) * (reads.STAGE_BYTES + 2 * reads.ALIGNMENT)
    some = 6 << 20  # what Python, the index and a thread's heap take
    for rank, own in enumerate(told):
        state = xxhash.xxh3_128()
        for _, data in sorted(ck.read_ranks(large, 8)[rank].items()):
            state.update(data.raw)
        assert own["digest"] == state.hexdigest()
        assert own["resident"] <= part + buffers + some
        if way == "mapped":
            assert own["anonymous"] <= some
            assert own["called"] <= 1 << 20
        else:
            assert own["called"] <= part + (1 << 20)
    if not cold:
        pytest.skip("this filesystem keeps its pages (tmpfs does)")
    size = sum(path.stat().st_size for path in large.glob("*.safetensors"))
    assert sum(own["fetched"] for own in told) <= size * 1.1


def test_g06_reads_are_large_and_in_the_files_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two hundred tensors of three dtypes, in no order, are a few reads."""
    chance = np.random.default_rng(0)
    dtypes = ["BF16", "F32", "U8"]
    tensors = {
        f"m.{n * 7 % 200}.weight": ck.Data.random(dtypes[n % 3], [64, 512 + n], chance)
        for n in range(200)
    }
    source = ck.component(tmp_path / "s", tensors)
    rules = ck.manifest(tmp_path / "r.toml", [{"match": "m.*", "style": "colwise"}])
    shardc.build(source, tmp_path / "o", 2, manifest=rules)
    asked: list[tuple[int, int]] = []
    preadv = os.preadv

    def counted(fd: int, buffers: Any, offset: int) -> int:
        asked.append((offset, count := preadv(fd, buffers, offset)))
        return count

    monkeypatch.setattr(os, "preadv", counted)
    held = load_state_dict(tmp_path / "o", 1, reads="direct")
    monkeypatch.undo()
    expected = ck.read_ranks(tmp_path / "o", 2)[1]
    assert list(held) == list(tensors)
    assert all(t.view(torch.uint8).numpy().tobytes() == expected[n].raw for n, t in held.items())
    size = sum(len(data.raw) for data in expected.values())
    assert size > 2 * reads.STAGE_BYTES
    assert len(asked) <= -(-size // reads.STAGE_BYTES) + 1
    ordered = sorted(asked)
    assert all(count >= 1 << 20 for _, count in ordered[:-1])
    assert all(a + count >= b for (a, count), (b, _) in itertools.pairwise(ordered))
    assert all(abs(ordered.index(one) - at) < reads.READERS for at, one in enumerate(asked))


class Asked:
    """A span that only tells what was asked of it."""

    size_bytes = 1 << 30

    def __init__(self) -> None:
        self.bytes = 0
        self.threads: set[str] = set()

    def read_ahead(self, first: int, last: int) -> None:
        self.bytes += last - first
        self.threads.add(threading.current_thread().name)

    def drop(self, first: int, last: int) -> None:
        pass


def test_g07_what_is_read_ahead_is_bounded(tmp_path: Path) -> None:
    """One thread a rank, however many tensors, and a window of bytes before the slow consumer."""
    spans: list[Any] = [Asked() for _ in range(8)]
    used = 0
    with pages.ReadAhead(spans) as ahead:
        for _ in range(20):
            threading.Event().wait(0.005)
            asked = sum(span.bytes for span in spans)
            assert asked - used <= pages.AHEAD_BYTES + pages.SLICE_BYTES
            ahead.used(16 << 20)
            used += 16 << 20
    assert sum(span.bytes for span in spans) > pages.SLICE_BYTES
    assert len(set.union(*(span.threads for span in spans))) == 1
