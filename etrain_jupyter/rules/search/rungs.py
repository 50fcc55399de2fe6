"""Rungs of a trial, in samples, and the worst case of a whole search."""

from __future__ import annotations

from collections.abc import Sequence

MAX_RUNGS = 5
"""Maximum number of rungs below the end of a trial, as in Determined's searcher."""


def place_rungs(*, num_samples: int, divisor: int, min_samples: int) -> tuple[int, ...]:
    """Return the sample counts at which trials are compared, lowest first.

    The end of a trial counts as the last rung and is not included: a trial that reaches it is
    complete. All rungs are at or above ``min_samples``, the samples at the first evaluation.

    Args:
        num_samples: Samples of a whole trial.
        divisor: Ratio between two rungs, and the inverse of the share that continues.
        min_samples: Samples until the first evaluation.

    >>> place_rungs(num_samples=64_000, divisor=4, min_samples=3_000)
    (4000, 16000)
    """
    rungs: list[int] = []
    least = num_samples // divisor
    while least >= max(1, min_samples) and len(rungs) < MAX_RUNGS:
        rungs.append(least)
        least //= divisor
    if not rungs:
        return ()
    # Optuna's pruner multiplies the lowest rung, so that its rungs are these.
    lowest = rungs[-1]
    return tuple(lowest * divisor**number for number in range(len(rungs)))


def rung_of(samples: int, rungs: Sequence[int]) -> int:
    """Return how many rungs a trial has reached."""
    return sum(samples >= rung for rung in rungs)
