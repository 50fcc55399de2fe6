"""Interface of checkpoint stores, search for the newest valid checkpoint, and retention rules."""

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
"""Receives the number of bytes of each piece that is written; called from any thread."""


def ignore_progress(num_bytes: int) -> None:
    """Do nothing."""


# Each call, its result in the store, and the view of readers if the writer crashes after it:
#
#   begin(1200)        checkpoints/step_00001200/              an empty folder; no checkpoint
#   put_part ...       .../model.safetensors, verified         parts without a manifest; none
#   commit             manifests/step_00001200.json            the checkpoint, complete
#   prune([...])       first the manifest is deleted           parts without a manifest; none
#                      then the parts                          nothing
#
# At no point does a manifest refer to a part that is missing.
class CheckpointStore(Protocol):
    """A folder, or a prefix of a bucket, with the checkpoints of one job.

    To write a checkpoint, call ``begin``, then ``put_part`` for each part (in any process that has
    the folder's key), and then ``commit``. A write that is interrupted before ``commit`` leaves
    older checkpoints unchanged. If the store fails, all methods raise ``CheckpointError`` and
    nothing else.

    ``testing.StoreContract`` is the test suite that every store must pass.
    """

    @property
    def is_remote(self) -> bool:
        """True if several machines write faster than one, because each has its own connection."""
        ...

    @property
    def notice(self) -> str:
        """Report on keys that the last ``prune`` could not delete; empty if there are none."""
        ...

    def begin(self, step: int) -> str:
        """Create a folder for this step's parts, unique among all writers; return its key."""
        ...

    def put_part(
        self,
        folder: str,
        name: str,
        data: bytes | memoryview | Path,
        *,
        progress: Progress = ignore_progress,
    ) -> Part:
        """Store one part durably, read it back, and return its entry for the manifest.

        ``data`` is the bytes, or a local file to copy.
        """
        ...

    def commit(self, manifest: Manifest) -> bool:
        """Write the manifest if the step has none.

        Returns:
            True if this manifest is now the step's manifest. Of several writers, only one gets
            True. If that writer repeats the call with the same manifest, it gets True again.
        """
        ...

    def list_steps(self) -> list[int]:
        """Return the steps that have a manifest, valid or not, oldest first."""
        ...

    def read_manifest(self, step: int) -> Manifest:
        """Return a step's manifest; raise ``CheckpointError`` if it is missing or corrupt."""
        ...

    def get_part(self, part: Part) -> Path:
        """Return a local file with the verified bytes of ``part``; it must not be modified."""
        ...

    def read_block(self, part: Part, number: int) -> bytes:
        """Return the verified bytes of one block, without reading the rest of ``part``.

        Safe to call from several threads.
        """
        ...

    def prune(self, keep_steps: Collection[int]) -> list[str]:
        """Delete all other checkpoints, and leftovers of crashed writers up to the newest kept one.

        The manifest is deleted first, then the parts, so that a crash in between leaves no
        checkpoint that looks complete. Parts of steps after the newest kept one stay, because a
        writer may still be writing them.

        Returns:
            The deleted keys: manifests and folders of parts.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class OpenCheckpoint:
    """A checkpoint whose parts have been read and verified."""

    manifest: Manifest
    files: dict[str, Path]
    """Local file of each part that was read, by the part's name."""
    skipped: list[str]
    """Newer checkpoints that were skipped, with reasons, newest first."""


def open_newest(
    store: CheckpointStore,
    *,
    job_id: str | None = None,
    choose: Callable[[Manifest], Collection[str]] = lambda manifest: manifest.parts,
    check: Callable[[Manifest, dict[str, Path]], None] = lambda manifest, files: None,
) -> OpenCheckpoint:
    """Return the newest valid checkpoint, and why newer ones were skipped.

    Args:
        store: The store to search.
        job_id: If given, skip checkpoints of other jobs.
        choose: Returns the names of the parts to read and verify; raises ``CheckpointError`` to
            skip the checkpoint.
        check: Called with a verified checkpoint and the local files of its parts; raises
            ``CheckpointError`` to skip it.

    Raises:
        CheckpointError: If no checkpoint is valid; the message gives the reason for each.
    """
    skipped: list[str] = []
    for step in reversed(store.list_steps()):
        try:
            manifest, files = open_step(store, step, job_id=job_id, choose=choose)
            check(manifest, files)
        except CheckpointError as exc:
            reason = str(exc)
            prefix = f"{step_name(step)}: "
            skipped.append(reason if reason.startswith(prefix) else prefix + reason)
        else:
            return OpenCheckpoint(manifest=manifest, files=files, skipped=skipped)
    if not skipped:
        raise CheckpointError(f"{store} has no checkpoint yet.")
    raise CheckpointError(
        f"{store} has no valid checkpoint. {'; '.join(skipped)}. Make the store readable again, or "
        "run the cell without --resume, which starts a new job at step 0."
    )


def open_step(
    store: CheckpointStore,
    step: int,
    *,
    job_id: str | None = None,
    choose: Callable[[Manifest], Collection[str]] = lambda manifest: manifest.parts,
) -> tuple[Manifest, dict[str, Path]]:
    """Return one step's manifest and the verified local files of the chosen parts.

    Raises:
        CheckpointError: If anything is missing or corrupt, or belongs to another job.
    """
    manifest = store.read_manifest(step)
    if job_id is not None and manifest.job_id != job_id:
        raise CheckpointError(f"it belongs to job {manifest.job_id}, not to {job_id}")
    return manifest, {name: store.get_part(manifest.parts[name]) for name in choose(manifest)}


def newest_valid(
    store: CheckpointStore, *, job_id: str | None = None
) -> tuple[Manifest, list[str]]:
    """Return the newest manifest with valid parts, and the skipped checkpoints with reasons."""
    found = open_newest(store, job_id=job_id)
    return found.manifest, found.skipped


def used_folders(
    store: CheckpointStore, steps: Collection[int], names: Collection[str]
) -> set[str]:
    """Return the folders among ``names`` that the manifests of ``steps`` refer to."""
    used: set[str] = set()
    for step in steps:
        try:
            parts = store.read_manifest(step).parts.values()
        except CheckpointError:
            # A network error may be the cause, so the manifest may be readable later. Keep all
            # folders that may contain its data.
            used |= {name for name in names if step_of_folder(name) == step}
        else:
            # One manifest may use two folders: if a rank is late with its part, rank 0 writes that
            # part to a new folder, because the late rank may still be writing the old key.
            used |= {check_key(part.key).parts[1] for part in parts}
    return used


@dataclass(frozen=True, kw_only=True)
class ListedCheckpoint:
    """One step that has a manifest."""

    step: int
    manifest: Manifest | None
    """None if the manifest cannot be read."""
    problem: str
    """The known problem with the checkpoint; empty if there is none."""
    is_verified: bool
    """True if all parts were read and match the size and SHA-256 in the manifest."""


def list_checkpoints(
    store: CheckpointStore, *, job_id: str, verify: bool = False
) -> list[ListedCheckpoint]:
    """Return all checkpoints that have a manifest, newest first.

    Args:
        store: The store to list.
        job_id: Report checkpoints of other jobs as a problem.
        verify: Also read and verify all parts.

    Raises:
        CheckpointError: If the store cannot be listed.
    """
    listed = [_check_step(store, step, job_id, verify) for step in reversed(store.list_steps())]
    if any(row.problem for row in listed):
        # The running job may have pruned a checkpoint between the listing and the read. A manifest
        # that no longer exists is not broken.
        remaining = set(store.list_steps())
        listed = [row for row in listed if not row.problem or row.step in remaining]
    return listed


def _check_step(store: CheckpointStore, step: int, job_id: str, verify: bool) -> ListedCheckpoint:
    manifest, problem = None, ""
    try:
        manifest = store.read_manifest(step)
        if manifest.job_id != job_id:
            raise CheckpointError(f"it belongs to job {manifest.job_id}, not to {job_id}")
        if verify:
            open_step(store, step)
    except CheckpointError as exc:
        problem = str(exc)
    return ListedCheckpoint(
        step=step, manifest=manifest, problem=problem, is_verified=verify and not problem
    )


def choose_steps_to_keep(
    steps: Collection[int], *, keep: int, protected: Collection[int] = ()
) -> set[int]:
    """Return the newest ``keep`` of ``steps``, and the protected ones.

    Args:
        steps: Steps that have a manifest, in any order.
        keep: Number of newest steps to keep; at least 1, so the newest is never deleted.
        protected: Steps to keep regardless of age, for example the best one.

    >>> sorted(choose_steps_to_keep([100, 200, 300, 400], keep=2, protected=[100]))
    [100, 300, 400]
    """
    return set(sorted(steps)[-max(1, keep) :]) | (set(steps) & set(protected))


def choose_folders(
    store: CheckpointStore,
    names: Collection[str],
    *,
    kept: Collection[int],
    dropped: Collection[int],
) -> tuple[set[str], list[str]]:
    """Find the folders of parts that no kept manifest refers to, and that no writer may be using.

    Args:
        store: The store, whose manifests are read.
        names: Existing folders; names in another format are ignored.
        kept: Steps whose manifests are kept. A writer may still be writing parts of newer steps.
        dropped: Steps whose manifests were deleted.

    Returns:
        The folders that the kept manifests refer to, and those to remove.
    """
    used = used_folders(store, kept, names)
    # step of the folder    its manifest    decision
    # dropped               deleted         remove
    # < newest kept         none            remove: its writer crashed, was evicted or lost a race
    # = newest kept         another folder  keep: the writer that lost the race may still be writing
    # > newest kept         none            keep: it is probably being written
    newest = max(kept, default=0)
    unused = []
    for name in sorted(set(names) - used):
        folder_step = step_of_folder(name)
        if folder_step is not None and (folder_step in dropped or folder_step < newest):
            unused.append(name)
    return used, unused
