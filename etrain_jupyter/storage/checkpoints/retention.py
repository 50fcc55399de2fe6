"""Choose the checkpoints to keep and the folders to delete: pure rules."""

from __future__ import annotations

from collections.abc import Collection

from etrain_jupyter.storage.checkpoints.manifest import step_of_folder


def choose_steps_to_keep(
    steps: Collection[int], *, keep: int, protected: Collection[int] = ()
) -> set[int]:
    """Return the newest ``keep`` of ``steps``, and the protected ones.

    Args:
        steps: Steps that have a manifest, in any order.
        keep: Number of newest steps to keep, at least 1: the newest is never deleted.
        protected: Steps to keep regardless of age, for example the best one.

    >>> sorted(choose_steps_to_keep([100, 200, 300, 400], keep=2, protected=[100]))
    [100, 300, 400]
    """
    return set(sorted(steps)[-max(1, keep) :]) | (set(steps) & set(protected))


def choose_folders_to_remove(
    names: Collection[str],
    *,
    kept: Collection[int],
    dropped: Collection[int],
    used: Collection[str],
) -> list[str]:
    """Return the folders of parts that no kept manifest refers to, and that no writer may be using.

    Args:
        names: Existing folders; names in another format are ignored.
        kept: Steps whose manifests are kept. A writer may still be writing parts of newer steps.
        dropped: Steps whose manifests were deleted.
        used: Folders that the kept manifests refer to.

    >>> choose_folders_to_remove(
    ...     ["step_00000100", "step_00000200", "step_00000200.1", "step_00000300", "notes"],
    ...     kept=[200], dropped=[100], used=["step_00000200.1"],
    ... )
    ['step_00000100']
    """
    # step of the folder    its manifest    decision
    # dropped               deleted         remove
    # < newest kept         none            remove: its writer crashed, was evicted or lost a race
    # = newest kept         another folder  keep: the writer that lost the race may still be writing
    # > newest kept         none            keep: it is probably being written
    newest = max(kept, default=0)
    chosen = []
    for name in sorted(names):
        step = step_of_folder(name)
        if step is None or name in used:
            continue
        if step in dropped or step < newest:
            chosen.append(name)
    return chosen
