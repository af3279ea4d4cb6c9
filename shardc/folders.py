"""What really lies in a source's folder: its files, and no link that leads out of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Set
from pathlib import Path

from shardc.errors import CheckpointError, Problem, printable


def files_below(
    path: Path, root: Path, *, skip: Set[str] = frozenset()
) -> tuple[list[str], list[Problem]]:
    """The names of all files below `path`, hidden ones excluded, and what stands against them.

    root: what no link may leave: `path`, or a folder that holds it. skip: folders to leave out.
    """
    found: list[str] = []
    problems: list[Problem] = []
    for entry in sorted(path.rglob("*")):
        relative = entry.relative_to(path)
        if relative.parts[0] in skip or any(part.startswith(".") for part in relative.parts):
            continue
        if entry.name != printable(entry.name):
            problems.append(Problem(str(entry), "has control characters in its name"))
        elif entry.is_symlink() and (problem := link_problem(entry, root)) is not None:
            problems.append(problem)
        elif entry.is_symlink() and entry.is_dir():
            what = "is a link to a folder, and would be left out"
            problems.append(Problem(str(entry), what, "put the folder itself there"))
        elif entry.is_file():
            found.append(relative.as_posix())
    return found, problems


def check_links(links: Iterable[Path], root: Path) -> None:
    """CheckpointError where one of these is a link that leads out of `root`."""
    problems = [
        problem for link in links if link.is_symlink() if (problem := link_problem(link, root))
    ]
    if problems:
        raise CheckpointError(problems)


def link_problem(link: Path, root: Path) -> Problem | None:
    """What stands against following a link that is found below `root`; None where nothing does.

    One that leads elsewhere would have private files read, carried over and shipped. The Hub's
    cache is no elsewhere: its snapshots hold links to the blobs beside them.
    """
    try:
        target = link.resolve(strict=True)
    except (OSError, RuntimeError):  # a circle is the latter before Python 3.13
        return Problem(str(link), "is a link to a missing file", "download it again")
    if any(target.is_relative_to(home) for home in _homes(root.resolve())):
        return None
    what = f"is a link that leaves the folder, to {target}"
    return Problem(str(link), what, "put the file itself there")


def _homes(root: Path) -> Iterator[Path]:
    yield root
    for folder in (root, *root.parents):
        if folder.parent.name == "snapshots":
            yield folder.parent.parent / "blobs"
