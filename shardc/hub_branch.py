"""A branch of a Hub repo that is written to, and what it holds at one commit."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from shardc import hub
from shardc.errors import Problem, RemoteError
from shardc.location import DEFAULT_REVISION, HubLocation
from shardc.remote import retried

README = "README.md"
MAX_README_BYTES = 10_000_000


@contextmanager
def told(location: HubLocation) -> Iterator[None]:
    """As `hub.translated`, with what an upload raises besides."""
    try:
        with hub.translated(location), _unwrapped(location):
            yield
    except OSError as error:
        if error.errno is not None:  # a file of ours
            raise
        raise RemoteError(Problem(str(location), str(error), "push again")) from error


@contextmanager
def _unwrapped(location: HubLocation) -> Iterator[None]:
    """The error that an upload's "Error while uploading" is about."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error.__cause__, Exception):
            raise error.__cause__ from None
        if "closed" in str(error):  # `translated` knows that one
            raise
        raise RemoteError(Problem(str(location), str(error), "push again")) from error
    except ValueError as error:
        raise RemoteError(Problem(str(location), " ".join(str(error).split()))) from error


@contextmanager
def quiet_library() -> Iterator[None]:
    """Neither bars nor notes of each retry from huggingface-hub: errors are told in the end."""
    from huggingface_hub import utils as _utils

    utils: Any = _utils
    level, hidden = utils.logging.get_verbosity(), utils.are_progress_bars_disabled()
    utils.logging.set_verbosity_error()
    utils.disable_progress_bars()
    try:
        yield
    finally:
        utils.logging.set_verbosity(level)
        if not hidden:
            utils.enable_progress_bars()


def is_same(path: Path, entry: Any) -> bool:
    """Whether a repo's entry is this file, of whose size it is; reads all of it."""
    if entry.lfs:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest() == str(entry.lfs.sha256)
    return git_id(path.read_bytes()) == str(entry.blob_id)


def git_id(data: bytes) -> str:
    """What git knows a file by."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


class Branch:
    """The branch, as it was at the commit that was looked at last; `head` is None before that."""

    def __init__(self, location: HubLocation, token: str | None, *, private: bool) -> None:
        self.location = location
        self.api = hub.client(token)
        self._private = private
        self.head: str | None = None
        self.entries: Mapping[str, Any] = {}

    def open(self, *, create: bool) -> bool:
        """Look at the branch, made where it is missing; whether the repo had to be."""
        from huggingface_hub.errors import (
            GatedRepoError,
            RepositoryNotFoundError,
            RevisionNotFoundError,
        )

        created = False
        repo, revision = self.location.repo, self.location.revision
        try:
            info = self._info(DEFAULT_REVISION)
        except RemoteError as error:
            cause = error.__cause__
            if isinstance(cause, GatedRepoError) or not isinstance(cause, RepositoryNotFoundError):
                raise
            created = True
            if not create:
                return True
            self._ask("creating it", lambda: self._create(repo))
            info = self._info(DEFAULT_REVISION)
        if self._private and not info.private:
            what = "is public already, and --private is for a repo that a push creates"
            raise RemoteError(Problem(str(self.location), what, "make it private in its settings"))
        if revision != DEFAULT_REVISION:
            try:
                info = self._info(revision)
            except RemoteError as error:
                if not isinstance(error.__cause__, RevisionNotFoundError):
                    raise
                if create:
                    self._ask(
                        f"creating branch {revision}",
                        lambda: self.api.create_branch(repo, branch=revision, exist_ok=True),
                    )
                    info = self._info(revision)
        self.look(info.sha)
        return created

    def _create(self, repo: str) -> None:
        self.api.create_repo(repo, private=self._private or None, exist_ok=True)

    def look(self, commit: str) -> None:
        """List the files of a commit."""
        from huggingface_hub.hf_api import RepoFile

        tree = self._ask(
            "listing its files",
            lambda: list(
                self.api.list_repo_tree(self.location.repo, recursive=True, revision=commit)
            ),
        )
        self.head = commit
        self.entries = {entry.path: entry for entry in tree if isinstance(entry, RepoFile)}

    def now(self) -> str:
        """The commit that the branch is at."""
        return str(self._info(self.location.revision).sha)

    def _info(self, revision: str) -> Any:
        return self._ask(
            "asking for its commit",
            lambda: self.api.repo_info(self.location.repo, revision=revision),
        )

    def _ask(self, what: str, action: Any) -> Any:
        def once() -> Any:
            with told(self.location):
                return action()

        return retried(once, str(self.location), what)

    def readme(self) -> str | None:
        """README.md of the commit; None where there is none, "" where that is no text."""
        entry = self.entries.get(README)
        if entry is None:
            return None
        file = hub.HubFile(self.api, self.location.repo, str(self.head), entry)
        if file.size_bytes > MAX_README_BYTES:
            return ""
        try:
            return file.whole().decode("utf-8")
        except UnicodeDecodeError:
            return ""

    def below(self) -> dict[str, Any]:
        """What lies in the location's folder, by its name in there."""
        start = f"{self.location.folder}/"
        return {
            path.removeprefix(start): entry
            for path, entry in self.entries.items()
            if path.startswith(start)
        }
