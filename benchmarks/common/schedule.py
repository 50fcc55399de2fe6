"""Kill schedule of ``churn``: the ranks to kill and the steps to kill them at, for every system."""

from __future__ import annotations

import random
from dataclasses import dataclass

SHARES = (0.2, 0.4, 0.6, 0.8)
"""Approximate positions of the kills, as shares of all steps."""


@dataclass(frozen=True, kw_only=True)
class Kill:
    """One SIGKILL of a rank."""

    step: int
    """Kill as soon as this step is committed."""
    rank: int


def kill_schedule(*, num_steps: int, checkpoint_every: int, world_size: int) -> tuple[Kill, ...]:
    """Spread kills over a run and over the checkpoint interval.

    Real preemptions are not aligned with checkpoints. The kills occur at 1/5, 2/5, 3/5 and 4/5 of
    the checkpoint interval, so a system that restarts from a checkpoint loses half an interval on
    average.

    >>> [kill.step for kill in kill_schedule(num_steps=1000, checkpoint_every=50, world_size=4)]
    [210, 420, 630, 840]
    """
    rng = random.Random(0)
    kills = []
    for number, share in enumerate(SHARES, 1):
        begin = round(num_steps * share) // checkpoint_every * checkpoint_every
        within = checkpoint_every * number // (len(SHARES) + 1)
        kills.append(Kill(step=begin + within, rank=rng.randrange(world_size)))
    return tuple(kills)
