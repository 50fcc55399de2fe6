"""What a place for checkpoints must be able to do, and how the newest valid one is found in it."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from etrain_jupyter.errors import CheckpointError
from etrain_jupyter.storage.checkpoints.manifest import (
    Manifest,
    Part,
    check_key,
    step_name,
    step_of_folder,
)

Progress = Callable[[int], None]
"""Is told the bytes of each piece of a part when it is written; from any thread."""


def ignore_progress(num_bytes: int) -> None:
    """Do nothing."""


class CheckpointStore(Protocol):
    """A folder, or a prefix of a bucket, that holds the checkpoints of one job.

    Writing is ``begin``, any number of ``put_part`` (from any process, the folder's key is all they
    need), ``commit``. Whatever is cut short before ``commit`` leaves the older checkpoints as they
    were. All methods raise ``CheckpointError`` and nothing else when the place fails them.

    ``testing.StoreContract`` is the test suite that every store must pass.
    """

    @property
    def is_remote(self) -> bool:
        """Whether each machine has a line of its own to it, so that several write faster."""
        ...

    @property
    def notice(self) -> str:
        """What the last ``prune`` left over and why, for the job's log; empty if it did all."""
        ...

    def begin(self, step: int) -> str:
        """Return the key of a folder for this step's parts that nobody else has ever been given."""
        ...

    def put_part(
        self,
        folder: str,
        name: str,
        data: bytes | memoryview | Path,
        *,
        progress: Progress = ignore_progress,
    ) -> Part:
        """Store one part durably, read it back, and return what the manifest must say of it.

        ``data`` are the bytes, or a local file to copy.
        """
        ...

    def commit(self, manifest: Manifest) -> bool:
        """Write the manifest only if there is none of that step.

        Returns:
            Whether the step's manifest is this one now. Of several writers one is told True; asking
            again with the same manifest tells the same.
        """
        ...

    def list_steps(self) -> list[int]:
        """Return the steps that have a manifest, valid or not, oldest first."""
        ...

    def read_manifest(self, step: int) -> Manifest:
        """Return a step's manifest; raise ``CheckpointError`` if there is none that is whole."""
        ...

    def get_part(self, part: Part) -> Path:
        """Return a local file that has the bytes which ``part`` says; it must not be changed."""
        ...

    def prune(self, keep_steps: Collection[int]) -> list[str]:
        """Remove all other checkpoints, and what crashed writes left before the newest kept one.

        The manifest goes first, then the parts, so that a crash in between leaves no checkpoint
        that looks whole. Parts of steps newer than the newest kept one may still be being written
        and stay.

        Returns:
            The keys removed: manifests and folders of parts.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class OpenCheckpoint:
    """A checkpoint whose parts were all read and verified."""

    manifest: Manifest
    files: dict[str, Path]
    """Local file of each part, by the part's name."""
    skipped: list[str]
    """Newer checkpoints that were refused, and why, newest first."""


def open_newest(
    store: CheckpointStore,
    *,
    job_id: str | None = None,
    check: Callable[[Manifest, dict[str, Path]], None] = lambda manifest, files: None,
) -> OpenCheckpoint:
    """Return the newest checkpoint that verifies; pass over those that do not, and say why.

    Args:
        store: Where to look.
        job_id: If given, checkpoints of other jobs are refused.
        check: Raises ``CheckpointError`` if a whole one, with the local files of its parts, shall
            be passed over too.

    Raises:
        CheckpointError: If there is none, with the reason for each that was refused.
    """
    skipped: list[str] = []
    for step in reversed(store.list_steps()):
        try:
            manifest, files = open_step(store, step, job_id=job_id)
            check(manifest, files)
        except CheckpointError as exc:
            reason = str(exc)
            prefix = f"{step_name(step)}: "
            skipped.append(reason if reason.startswith(prefix) else prefix + reason)
        else:
            return OpenCheckpoint(manifest=manifest, files=files, skipped=skipped)
    if not skipped:
        raise CheckpointError(f"{store} has no checkpoint yet.")
    raise CheckpointError(f"{store} has no checkpoint that verifies. " + "; ".join(skipped) + ".")


def open_step(
    store: CheckpointStore, step: int, *, job_id: str | None = None
) -> tuple[Manifest, dict[str, Path]]:
    """Return one step's manifest and the verified local file of each of its parts.

    Raises:
        CheckpointError: If anything about it is not as its writer left it.
    """
    manifest = store.read_manifest(step)
    if job_id is not None and manifest.job_id != job_id:
        raise CheckpointError(f"it belongs to job {manifest.job_id}, not to {job_id}")
    return manifest, {name: store.get_part(part) for name, part in manifest.parts.items()}


def newest_valid(
    store: CheckpointStore, *, job_id: str | None = None
) -> tuple[Manifest, list[str]]:
    """Return the newest manifest whose parts verify, and what was refused on the way and why."""
    found = open_newest(store, job_id=job_id)
    return found.manifest, found.skipped


def used_folders(
    store: CheckpointStore, steps: Collection[int], names: Collection[str]
) -> set[str]:
    """Return those of the folders ``names`` that the manifests of ``steps`` need."""
    used: set[str] = set()
    for step in steps:
        try:
            parts = store.read_manifest(step).parts.values()
        except CheckpointError:
            # Unreadable now may be readable later: keep whatever could be its data.
            used |= {name for name in names if step_of_folder(name) == step}
        else:
            used |= {check_key(part.key).parts[1] for part in parts}
    return used
