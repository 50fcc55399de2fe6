"""Choose the evaluations whose exhibits are removed when a job has too many."""

from __future__ import annotations

from collections.abc import Mapping

MAX_JOB_BYTES = 100_000_000
"""Maximum size of a job's exhibits."""
MAX_EVALUATIONS = 200
"""Maximum number of evaluations with exhibits: more than a slider can distinguish."""


def choose_removed(
    sizes: Mapping[int, int],
    *,
    max_bytes: int = MAX_JOB_BYTES,
    max_evaluations: int = MAX_EVALUATIONS,
) -> list[int]:
    """Return the steps whose exhibits to remove: the oldest, but never the first or the newest.

    The first evaluation is kept for comparison with the newest.

    Args:
        sizes: Size of an evaluation's exhibits in bytes, by step.
        max_bytes: Maximum size of those that remain.
        max_evaluations: Maximum number of steps that remain.

    >>> choose_removed({10: 5, 20: 5, 30: 5, 40: 5}, max_bytes=12, max_evaluations=9)
    [20, 30]
    """
    total, count = sum(sizes.values()), len(sizes)
    removed = []
    for step in sorted(sizes)[1:-1]:
        if total <= max_bytes and count <= max_evaluations:
            break
        removed.append(step)
        total -= sizes[step]
        count -= 1
    return removed
