"""Decide which checkpoints belong to the job; an evicted rank may still write some.

A rank that stops sending heartbeats is evicted, and the others continue from their current step. If
it still runs behind a network partition, it keeps training and saves states that the job never
had. Its generation number identifies them: after the step at which a later generation began, only
the later generation counts.

::

    step            0         20         30         40
    generation 1    |---------------------|..........     steps after 30 are not the job's
    generation 2                          |----|
    generation 3              |---------------------      began from a checkpoint of step 20
"""

from __future__ import annotations

from collections.abc import Sequence


def is_of_job(*, generation: int, step: int, starts: Sequence[int]) -> bool:
    """Return whether a generation's state after ``step`` belongs to the job's history.

    Args:
        generation: The generation that produced the state, counted from 1.
        step: Number of committed steps in the state.
        starts: The step at which each generation began, in order.

    >>> starts = [0, 30, 20]  # the third began from a checkpoint
    >>> [is_of_job(generation=1, step=step, starts=starts) for step in (20, 30)]
    [True, False]
    >>> is_of_job(generation=3, step=40, starts=starts)
    True
    """
    # ``starts[generation]`` belongs to the next generation, because generations count from 1. Check
    # all later generations, because the third may begin at an earlier step than the second.
    return all(step <= start for start in starts[generation:])
