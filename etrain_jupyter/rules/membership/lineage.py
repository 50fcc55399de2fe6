"""Which checkpoints belong to the job: a rank that was given up may still be writing some.

A rank that nobody hears any more is done without, and the others go on from the step that they
stand at. If it lives, cut off, it trains on, and saves what the job never had. Its generation
tells: from the step on at which a later generation began, only that later one counts.
"""

from __future__ import annotations

from collections.abc import Sequence


def is_of_job(*, generation: int, step: int, starts: Sequence[int]) -> bool:
    """Whether what a generation says of its state after ``step`` is a state of the job.

    Args:
        generation: Who says it, counted from 1.
        step: How many steps the state has.
        starts: The step at which each generation began, the first one's first.

    >>> starts = [0, 30, 20]  # the second went on from step 30, the third from a checkpoint of 20
    >>> [is_of_job(generation=1, step=step, starts=starts) for step in (20, 30)]
    [True, False]
    >>> is_of_job(generation=3, step=40, starts=starts)
    True
    """
    return all(step <= start for start in starts[generation:])
