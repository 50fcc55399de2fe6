"""List the checkpoints in a store, including broken ones."""

from __future__ import annotations

from dataclasses import dataclass

from etrain_jupyter.errors import CheckpointError
from etrain_jupyter.storage.checkpoints.base import CheckpointStore, open_step
from etrain_jupyter.storage.checkpoints.manifest import Manifest


@dataclass(frozen=True, kw_only=True)
class ListedCheckpoint:
    """One step that has a manifest."""

    step: int
    manifest: Manifest | None
    """None if it cannot be read."""
    problem: str
    """The known problem with it; empty if there is none."""
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
