"""Which rank is killed when, the same for every system: data, so that it can be read and tested."""

from __future__ import annotations

import random
from dataclasses import dataclass

SHARES = (0.2, 0.4, 0.6, 0.8)
"""Of the steps: about there the kills lie."""


@dataclass(frozen=True, kw_only=True)
class Kill:
    """SIGKILL of one rank."""

    step: int
    """As soon as this many steps are committed."""
    rank: int


def kill_schedule(*, num_steps: int, checkpoint_every: int, world_size: int) -> tuple[Kill, ...]:
    """Spread kills over a run, and over the time between two checkpoints.

    A machine is not taken away just after a checkpoint, nor just before one. The kills lie at 1/5,
    2/5, 3/5 and 4/5 of the checkpoint interval, so that on the average half of it is lost by those
    that go back to one.

    >>> [kill.step for kill in kill_schedule(num_steps=1000, checkpoint_every=50, world_size=4)]
    [210, 420, 630, 840]
    """
    chance = random.Random(0)
    kills = []
    for number, share in enumerate(SHARES, 1):
        begin = round(num_steps * share) // checkpoint_every * checkpoint_every
        within = checkpoint_every * number // (len(SHARES) + 1)
        kills.append(Kill(step=begin + within, rank=chance.randrange(world_size)))
    return tuple(kills)
