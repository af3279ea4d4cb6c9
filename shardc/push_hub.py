"""A shard set to the Hub: files first, then one commit that adds and deletes all at once.

Nobody ever sees half a set: until the commit, what was sent is in no revision, and the commit
stands on the very one that was looked at, or fails. By huggingface-hub, as `shardc.hub`.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import shardc
from shardc import card, hub
from shardc.card_facts import facts_of
from shardc.errors import Problem, RemoteError
from shardc.hub_branch import README, Branch, git_id, is_same, quiet_library, told
from shardc.location import HubLocation, LocationError
from shardc.remote import Transient, interruptible, retried
from shardc.shipment import Progress, PushReport, Shipment, ShippedFile, stale_files

BATCH_BYTES = 256_000_000  # small files are sent together, a large one by itself
BATCH_FILES = 250
HASHERS = 4
AGAIN = "push again: what came through is not sent twice"
# A file that a .gitignore of the repo names would silently be left out.
NO_IGNORE = "# a shard set is whole, or none\n"


@dataclass(frozen=True, slots=True)
class HubOptions:
    """What a push to the Hub is told; None leaves it to the repo, the environment or the set."""

    private: bool = False
    token: str | None = None
    base_model: str | None = None
    message: str | None = None


def check(location: HubLocation, options: HubOptions, *, dry_run: bool) -> None:
    """What can be told before anything is read: LocationError, RemoteError."""
    from huggingface_hub import constants, get_token, utils
    from huggingface_hub.errors import HFValidationError

    library: Any = utils
    for repo in (location.repo, options.base_model):
        try:
            if repo is not None:
                library.validate_repo_id(repo)
        except HFValidationError as error:
            raise LocationError(Problem(repo or "", str(error))) from error
    if constants.REGEX_COMMIT_OID.fullmatch(location.revision):
        what = f"{location.revision} is a commit, and stays what it is"
        raise LocationError(Problem(str(location), what, "--revision takes a branch"))
    if not dry_run and not (options.token or get_token() or hub.is_offline()):
        what = "writing to the Hub takes a token, and there is none"
        raise RemoteError(
            Problem(str(location), what, "run `hf auth login`, set HF_TOKEN, or give --token")
        )


def push(
    shipment: Shipment,
    location: HubLocation,
    options: HubOptions,
    progress: Progress,
    *,
    dry_run: bool,
) -> PushReport:
    """Send what the repo lacks and commit it into the location's folder, by default tpN.

    progress: told bytes of files as each is found there already, or is sent. Raises LocationError
    for a tpN folder of another degree, RemoteError, and VerifyError where a file changed since it
    was verified.
    """
    started = time.monotonic()
    own = f"tp{shipment.tp}"
    location = replace(location, folder=location.folder or own)
    if re.fullmatch(r"(.*/)?tp\d+", location.folder) and location.name != own:
        what = f"is the place of another degree, and {shipment.path} is for {shipment.tp} ranks"
        raise LocationError(Problem(str(location), what, f"leave the folder out, for {own}"))
    with quiet_library():
        target = Branch(location, options.token, private=options.private)
        created = target.open(create=not dry_run)
        report = _Push(shipment, target, options, progress, created).run(dry_run)
    return replace(report, seconds=time.monotonic() - started)


class _Push:
    def __init__(
        self,
        shipment: Shipment,
        target: Branch,
        options: HubOptions,
        progress: Progress,
        created: bool,
    ) -> None:
        self._shipment = shipment
        self._target = target
        self._options = options
        self._progress = progress
        self._created = created
        self._where = str(target.location)
        self._folder = target.location.folder

    def run(self, dry_run: bool) -> PushReport:
        self._check_place()
        there = self._target.below()
        names = [file.name for file in self._shipment.files]
        stale = stale_files(there, names, self._where)
        same = self._same(there)
        missing = [file for file in self._shipment.files if file.name not in same]
        facts = facts_of(self._shipment, self._target.location, self._options.base_model)
        text, what = self._card(facts)
        report = PushReport(
            target=self._where,
            tp=self._shipment.tp,
            rank_bytes=self._shipment.rank_bytes,
            parts=self._shipment.parts,
            sent=missing,
            unchanged=[file for file in self._shipment.files if file.name in same],
            deleted=stale,
            created=self._created,
            card=what,
            license=card.license_name(facts.license),
            base_model=facts.base_model,
            commit=self._target.head,
            dry_run=dry_run,
        )
        if dry_run or report.up_to_date:
            return report
        return self._publish(report, text)

    def _check_place(self) -> None:
        """LocationError for a folder that cannot be one: in git's own, or below a file."""
        parts = self._folder.split("/")
        above = {"/".join(parts[:count]) for count in range(1, len(parts) + 1)}
        if files := above & {README, *self._target.entries}:
            what = f"{min(files)!r} is a file of the repo, or becomes one"
        elif any(part.startswith(".") for part in parts):
            what = f"{self._folder!r} is hidden"
        else:
            return
        raise LocationError(Problem(self._where, what, "push to another folder"))

    def _same(self, there: Mapping[str, Any]) -> set[str]:
        """The names of the files that the folder has as they are here; reads them here."""
        alike = [
            file
            for file in self._shipment.files
            if file.name in there and there[file.name].size == file.size_bytes
        ]
        same = set()
        with ThreadPoolExecutor(HASHERS, "shardc-compare") as pool:
            found = pool.map(lambda file: is_same(file.path, there[file.name]), alike)
            for file, equal in zip(alike, found, strict=True):
                if equal:
                    same.add(file.name)
                    self._progress(file.size_bytes)
        return same

    def _publish(self, report: PushReport, text: str | None) -> PushReport:
        from huggingface_hub import CommitOperationAdd, CommitOperationDelete

        adds = [
            CommitOperationAdd(f"{self._folder}/{file.name}", file.path) for file in report.sent
        ]
        self._send(adds, report.sent)
        self._shipment.check()
        operations: list[Any] = [
            *adds,
            *(CommitOperationDelete(f"{self._folder}/{name}") for name in report.deleted),
        ]
        if text is not None:
            operations.append(CommitOperationAdd(README, text.encode()))
        message = self._options.message or f"shardc {shardc.__version__}: {self._folder}"
        commit, url = self._commit(operations, message)
        return replace(report, commit=commit, url=url)

    def _send(self, adds: list[Any], files: Iterable[ShippedFile]) -> None:
        """Send the contents, a batch after another, so that each that came through is kept."""
        api, location = self._target.api, self._target.location

        def send(batch: list[tuple[Any, ShippedFile]], what: str) -> None:
            try:
                with told(location):
                    interruptible(
                        lambda: api.preupload_lfs_files(
                            location.repo,
                            [add for add, _ in batch],
                            revision=location.revision,
                            free_memory=False,
                            gitignore_content=NO_IGNORE,
                        )
                    )
            except Transient as error:
                if isinstance(error.__cause__, RuntimeError):
                    raise
                # Of all else the library has tried each request again, several times.
                raise RemoteError(Problem(self._where, f"{what} failed: {error}", AGAIN)) from error

        for batch in _batches(zip(adds, files, strict=True)):
            what = f"sending {batch[0][1].name}"
            retried(partial(send, batch, what), self._where, what)
            for add, file in batch:
                if getattr(add, "_should_ignore", False):
                    what = f"would leave out {file.name}, which its .gitignore names"
                    raise RemoteError(Problem(self._where, what, "change the .gitignore"))
            self._progress(sum(file.size_bytes for _, file in batch))

    def _commit(self, operations: list[Any], message: str) -> tuple[str, str]:
        """(commit, its page); where the answer was lost, what the branch holds decides."""
        target, location = self._target, self._target.location
        before = target.head

        def once() -> tuple[str, str]:
            from huggingface_hub.errors import HfHubHTTPError

            try:
                with told(location):
                    made = target.api.create_commit(
                        location.repo,
                        operations,
                        commit_message=message,
                        revision=location.revision,
                        parent_commit=before,
                    )
                    return made.oid, made.commit_url
            except (Transient, RemoteError) as error:
                cause = error.__cause__
                moved = isinstance(cause, HfHubHTTPError) and cause.response.status_code == 412
                if not moved and isinstance(error, RemoteError):
                    raise
                if (now := target.now()) == before:
                    raise
                target.look(now)
                if not self._landed(operations):
                    what = f"somebody else committed to {location.revision} meanwhile: {now}"
                    raise RemoteError(Problem(self._where, what, AGAIN)) from error
                return now, f"{target.api.endpoint}/{location.repo}/commit/{now}"

        return retried(once, self._where, "committing")

    def _landed(self, operations: list[Any]) -> bool:
        """Whether the commit that was looked at has all that the operations wanted."""
        from huggingface_hub import CommitOperationAdd

        entries = self._target.entries
        for operation in operations:
            entry = entries.get(operation.path_in_repo)
            if not isinstance(operation, CommitOperationAdd):
                if entry is not None:
                    return False
            elif entry is None or entry.size != operation.upload_info.size:
                return False
            elif entry.lfs:
                if entry.lfs.sha256 != operation.upload_info.sha256.hex():
                    return False
            else:
                with operation.as_file() as file:
                    if git_id(file.read()) != entry.blob_id:
                        return False
        return True

    def _card(self, facts: card.Facts) -> tuple[str | None, str]:
        """(the README.md to commit, if any; what becomes of the one there)."""
        text = self._target.readme()
        if text is None:
            return card.render(facts), "written"
        new = card.with_degree(text, facts.degree)
        if new is None:
            return None, "kept"
        return (None, "unchanged") if new == text else (new, "updated")


def _batches(
    items: Iterable[tuple[Any, ShippedFile]],
) -> Iterator[list[tuple[Any, ShippedFile]]]:
    batch: list[tuple[Any, ShippedFile]] = []
    for item in items:
        batch.append(item)
        if sum(file.size_bytes for _, file in batch) >= BATCH_BYTES or len(batch) == BATCH_FILES:
            yield batch
            batch = []
    if batch:
        yield batch
