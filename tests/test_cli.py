"""The command line as its user meets it: exit status, stdout, stderr, terminals, signals."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

import shardc
from shardc.cli import main
from shardc.cli.output import degrees, mebibytes, size
from shardc.demo import write_flux2
from tests import checkpoints as ck
from tests import cli
from tests.cli import FAST, SHARDC, SMALL, errors, listing, process, run, said

flux, built, source, here = cli.flux, cli.built, cli.source, cli.here  # fixtures


# Help, version, completion


def commands(group: click.Group = main, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for name, command in group.commands.items():
        yield (*path, name)
        if isinstance(command, click.Group):
            yield from commands(command, (*path, name))


def test_the_commands() -> None:
    found = set(commands())
    for name in ("build", "plan", "inspect", "verify", "merge", "reshard", "demo"):
        assert (name,) in found
    for name in ("list", "show", "check", "derive"):
        assert ("manifest", name) in found


@pytest.mark.parametrize("path", [(), *commands()], ids=" ".join)
def test_help_has_an_example(path: tuple[str, ...]) -> None:
    for option in ("--help", "-h"):
        result = run(*path, option)
        example = result.stdout.partition("Example:\n")[2]
        assert f"shardc {' '.join(path)}".strip() in example.partition("\n\n")[0]
        assert result.stderr == ""


def test_help_is_light() -> None:
    helps = [[*path, "--help"] for path in [(), *commands()]]
    code = f"""
import contextlib, io, json, sys
from shardc.cli import main
with contextlib.redirect_stdout(io.StringIO()):
    for args in {helps!r}:
        main(args, prog_name="shardc", standalone_mode=False)
print(json.dumps(sorted(sys.modules)))
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    loaded = {name.split(".")[0] for name in json.loads(result.stdout)}
    assert "shardc" in loaded
    heavy = {"numpy", "pydantic", "rich", "torch", "diffusers", "transformers", "huggingface_hub"}
    assert not loaded & heavy


def test_version() -> None:
    assert run("--version").stdout == f"shardc, version {shardc.__version__}\n"


def test_build_imports_no_model_library(flux: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-X", "importtime", "-m", "shardc", "build", str(flux), "--tp", "2"]
    result = subprocess.run(
        [*command, "-o", str(tmp_path / "out"), "--no-fsync"],
        capture_output=True,
        text=True,
        check=True,
    )
    lines = result.stderr.splitlines()
    assert all(line.startswith("import time:") for line in lines)
    loaded = {line.rpartition("|")[2].strip().split(".")[0] for line in lines}
    assert "numpy" in loaded
    assert not loaded & {"torch", "diffusers", "transformers", "accelerate", "huggingface_hub"}


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_script(shell: str) -> None:
    result = process(env={**os.environ, "_SHARDC_COMPLETE": f"{shell}_source"})
    assert result.returncode == 0
    assert f"_SHARDC_COMPLETE={shell}_complete" in result.stdout
    assert result.stderr == ""


def completed(words: str) -> list[str]:
    asked = {
        "_SHARDC_COMPLETE": "bash_complete",
        "COMP_WORDS": words,
        "COMP_CWORD": str(len(words.split(" ")) - 1),
    }
    result = process(env={**os.environ, **asked})
    assert result.stderr == ""
    return result.stdout.split()


def test_completion() -> None:
    assert completed("shardc bu") == ["plain,build"]
    assert completed("shardc build x --profile n") == ["plain,native"]
    for words in ("shardc manifest show Flux2", "shardc build x --manifest Flux2"):
        assert completed(words) == ["plain,Flux2Transformer2DModel", "file,Flux2"]


# How commands fail


@pytest.mark.parametrize(
    "args",
    [
        ["nonsense"],
        ["build"],
        ["build", "x"],
        ["build", "x", "--tp", "two"],
        ["build", "x", "--tp", "0"],
        ["plan", "x", "--tp", "-1"],
        ["plan", "x", "--tp", "2", "--target", "trn9"],
        ["plan", "x", "--tp", "2", "--profile", "best"],
        ["build", "x", "--tp", "2", "--dtype", "int8"],
        ["build", "x", "--tp", "2", "--workers", "0"],
        ["build", "x", "--tp", "2", "--memory", "0"],
        ["build", "x", "--tp", "2", "--no-such-option"],
        ["verify", "x", "--rank", "-1"],
        ["merge", "x"],
        ["reshard", "x", "-o", "y"],
        ["manifest", "nonsense"],
        ["manifest", "show"],
        ["build", "x", "--tp", "2", "--max-part-size", "4XB"],
        ["build", "x", "--tp", "2", "--max-part-size", "0"],
        ["build", "x", "--tp", "2", "--max-part-size", "9" * 400 + "GB"],
    ],
    ids=" ".join,
)
def test_usage_errors(args: list[str], here: Path) -> None:
    result = run(*args, status=2)
    assert result.stdout == ""
    assert "Error: " in result.stderr
    assert listing(here) == []


NOTHING = [
    ["plan", "nowhere", "--tp", "2"],
    ["build", "nowhere", "--tp", "2"],
    ["inspect", "nowhere"],
    ["verify", "nowhere"],
    ["merge", "nowhere", "-o", "out"],
    ["reshard", "nowhere", "--tp", "2", "-o", "out"],
    ["manifest", "check", "nowhere"],
]


@pytest.mark.parametrize("args", NOTHING, ids=" ".join)
def test_what_is_not_there(args: list[str], here: Path) -> None:
    (line,) = errors(*args)
    assert "nowhere" in line
    failed = said(*args, status=1)
    assert failed == {"ok": False, "problems": [line.removeprefix("error: ")]}
    assert listing(here) == []


@pytest.mark.parametrize("args", NOTHING[:-1], ids=" ".join)
def test_what_is_of_no_use(args: list[str], here: Path) -> None:
    (here / "nowhere").mkdir()
    (line,) = errors(*args)
    assert line.startswith("error: nowhere: ")
    (here / "nowhere").rmdir()
    (here / "nowhere").write_text("nonsense")
    (line,) = errors(*args)
    assert line.startswith("error: nowhere: ")
    assert listing(here) == ["nowhere"]


def test_show_has_no_json_but_fails_alike() -> None:
    (line,) = errors("manifest", "show", "nowhere")
    assert "neither a bundled manifest nor a file" in line


def test_failure_in_a_process(flux: Path, here: Path) -> None:
    result = process("build", flux, "--tp", 3, "--json")
    assert result.returncode == 1
    document = json.loads(result.stdout)
    assert document["ok"] is False
    assert [f"error: {p}" for p in document["problems"]] == result.stderr.splitlines()
    assert "Traceback" not in result.stderr
    assert listing(here) == []


def test_debug_adds_a_traceback(flux: Path) -> None:
    result = process("plan", flux, "--tp", 3, "--json", "--debug")
    assert result.returncode == 1
    assert result.stderr.startswith("Traceback")
    assert "PlanError" in result.stderr
    problems = json.loads(result.stdout)["problems"]
    assert result.stderr.splitlines()[-len(problems) :] == [f"error: {p}" for p in problems]


def test_debug_checks_a_sound_plan(flux: Path) -> None:
    assert run("plan", flux, "--tp", 2, "--debug").stderr == ""


def test_an_error_of_the_system_is_one_line(flux: Path, here: Path) -> None:
    """Whatever shardc did not foresee has no traceback either."""
    (line,) = errors("build", flux, "--tp", 2, "-o", "n" * 300)
    assert line.endswith(": File name too long")
    (line,) = errors("plan", "n" * 5000, "--tp", 2)
    (line,) = errors("demo", "--keep", flux / "model_index.json" / "x")
    assert "Not a directory" in line
    assert listing(here) == []


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("options", [[], ["--json"]])
def test_stdout_is_full(options: list[str], flux: Path) -> None:
    with open("/dev/full", "w") as full:
        command = [*SHARDC, "plan", str(flux), "--tp", "2", *options]
        result = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert result.returncode == 1
    assert result.stderr == "error: No space left on device\n"


def test_nobody_reads_on(flux: Path) -> None:
    for options in ("", "--json"):
        line = f"'{sys.executable}' -m shardc plan '{flux}' --tp 2 {options} | true"
        result = subprocess.run(["bash", "-c", line], capture_output=True, text=True)
        assert result.stderr == ""


def test_closed_streams(flux: Path, here: Path) -> None:
    line = f"'{sys.executable}' -m shardc build '{flux}' --tp 2 -o out --no-fsync >&- 2>&-"
    assert subprocess.run(["bash", "-c", line]).returncode == 0
    assert listing(here) == ["out"]


# Progress, terminals, Ctrl-C


def test_pipes_see_no_progress(flux: Path, here: Path) -> None:
    for args in (
        ("build", flux, "--tp", 2, "-o", "out", "--no-fsync"),
        ("verify", "out", "--source", flux),
        ("merge", "out", "-o", "full", "--no-fsync"),
        ("reshard", "out", "--tp", 4, "-o", "four", "--no-fsync"),
    ):
        result = process(*args)
        assert result.returncode == 0
        assert result.stderr == ""
        assert "\x1b" not in result.stdout


def on_terminal(*args: object, columns: int = 100, stdout: bool = False) -> tuple[int, str, str]:
    """Exit status, what was written to a terminal as stderr (or both), and to stdout's pipe."""
    main_end, end = pty.openpty()
    env = {**os.environ, "TERM": "xterm", "COLUMNS": str(columns), "LINES": "24"}
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "CI"):
        env.pop(name, None)
    command = [*SHARDC, *(str(arg) for arg in args)]
    child = subprocess.Popen(
        command, stdout=end if stdout else subprocess.PIPE, stderr=end, env=env
    )
    os.close(end)
    shown = b""
    with contextlib.suppress(OSError):  # EIO: the other end is closed
        while chunk := os.read(main_end, 65536):
            shown += chunk
    os.close(main_end)
    piped, _ = child.communicate(timeout=60)
    return child.returncode, shown.decode(), (piped or b"").decode()


def test_terminals_see_progress(flux: Path, here: Path) -> None:
    code, shown, piped = on_terminal("build", flux, "--tp", 2, "-o", "out", "--no-fsync")
    assert code == 0
    assert "build" in shown
    assert "MB" in shown
    assert "peak memory" in piped
    code, shown, _ = on_terminal("verify", "out")
    assert code == 0
    assert "verify" in shown
    code, shown, piped = on_terminal("merge", "out", "-o", "full", "--json")
    assert (code, shown) == (0, "")
    assert json.loads(piped)["out"] == "full"
    assert on_terminal("reshard", "out", "--tp", 4, "-o", "four", "-q") == (0, "", "")


@pytest.mark.parametrize("columns", [1, 20, 300])
def test_any_width(columns: int, flux: Path) -> None:
    code, shown, _ = on_terminal("plan", flux, "--tp", 2, columns=columns, stdout=True)
    assert code == 0
    assert "Traceback" not in shown


@pytest.fixture
def large(here: Path) -> Iterator[Path]:
    """200 MB to build from, for as long as the test takes."""
    config = {**SMALL, "num_attention_heads": 10, "attention_head_dim": 128}
    write_flux2(here / "source", config)
    total = sum(f.stat().st_size for f in here.rglob("*.safetensors"))
    assert total > 150e6
    yield here / "source"
    shutil.rmtree(here / "source")


@pytest.mark.parametrize(
    ("sent", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["ctrl-c", "sigterm"]
)
@pytest.mark.parametrize("early", [True, False])
def test_interrupt(early: bool, sent: signal.Signals, status: int, large: Path, here: Path) -> None:
    """In the middle of 200 MB: it ends soon, and says what is left and how to go on."""
    args = ["build", "source", "--tp", "2", "-o", "out", "--workers", "1", "--memory", "1"]
    child = subprocess.Popen(
        [*SHARDC, *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        # the tests may run in the background, where it is ignored
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    partial = here / ".out.shardc-partial"
    seen = partial / "set" if early else partial / "journal"
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        if seen.exists() and (early or seen.read_bytes().count(b"\n") > 3):
            break
        time.sleep(0.001)
    before = time.monotonic()
    child.send_signal(sent)
    stdout, stderr = child.communicate(timeout=30)
    assert child.returncode == status
    assert time.monotonic() - before < 5
    assert stdout == b""
    (line,) = stderr.decode().splitlines()
    kept = f"interrupted: --resume continues what {partial.name} keeps, --force starts over"
    if early and line == "interrupted: nothing was left behind":
        assert listing(here) == ["source"]
        return
    assert line == kept
    assert listing(here) == [partial.name, "source"]
    (line,) = errors(*args)
    assert line.startswith(
        f"error: {partial.name}: is left of an unfinished build of out (--resume"
    )
    result = run(*args, "--resume", "--no-fsync")
    assert "tensors were written already" in result.stdout
    run("build", "source", "--tp", 2, "-o", "whole", *FAST)
    assert ck.contents(here / "out") == ck.contents(here / "whole")
    assert listing(here) == ["out", "source", "whole"]


def test_resume_of_another_build(flux: Path, here: Path) -> None:
    """One clear error, as text and as JSON; nothing is lost."""
    leave(flux, here / "out")
    (line,) = errors("build", flux, "--tp", 4, "-o", "out", "--resume")
    assert "is left of another build: tp was 2, is now 4 (--force starts over)" in line
    (problem,) = said("build", flux, "--tp", 4, "-o", "out", "--resume", status=1)["problems"]
    assert problem in line
    (line,) = errors("build", flux, "--tp", 4, "-o", "out", "--resume", "--dry-run")
    assert "tp was 2" in line
    report = said("build", flux, "--tp", 2, "-o", "out", "--resume", "--no-fsync")
    assert report["resumed_tensors"] > 0


def leave(source: Path, out: Path) -> None:
    """An unfinished build at tp 2, left by a kill once most of it was written."""
    code = (
        "import os, signal, sys, shardc\n"
        "from shardc import builder\n"
        "builder.write_file = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)\n"
        "shardc.build(sys.argv[1], sys.argv[2], 2)\n"
    )
    command = [sys.executable, "-c", code, str(source), str(out)]
    assert subprocess.run(command, check=False).returncode == -signal.SIGKILL
    assert not out.exists()


def test_conversions_resume(built: Path, here: Path) -> None:
    for args in (["merge"], ["reshard", "--tp", "4"]):
        run(*args, built, "-o", args[0], "--resume", *FAST)
    assert listing(here) == ["merge", "reshard"]


# Words for people


def test_words() -> None:
    assert [size(n) for n in (0, 999, 1000, 7_750_000_000, 5e15)] == [
        "0 B",
        "999 B",
        "1.00 kB",
        "7.75 GB",
        "5000.00 TB",
    ]
    assert mebibytes(56 * 2**20) == "56 MiB"
    assert degrees([]) == ""
    assert degrees([1, 2, 4]) == "1, 2, 4"
    assert degrees([3, 5, 6, 7, 9]) == "3, 5-7, 9"
