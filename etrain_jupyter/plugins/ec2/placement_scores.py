"""Use EC2's spot placement scores: how soon to leave a zone.

A score of 1 to 10 estimates whether a request for spot machines of several types will succeed in a
zone now. EC2 gives low scores to fewer than three types.
"""

from __future__ import annotations

LOW = 3
"""Highest score that counts as low; also the highest one that EC2 gives to one or two types."""
CLEARLY_BETTER = 3
"""Difference between two zones' scores that is not just noise."""
WAIT_S = 60.0
"""Time without capacity in a zone after which other zones may be used, in seconds."""
SHORT_WAIT_S = 15.0
"""The same for a zone with a low score, if another zone has a clearly better one."""


def zone_wait_s(*, score: int, best_elsewhere: int) -> float:
    """Return the time without capacity in a zone after which other zones may be used.

    Many refusals end within a minute, and machines in another zone cost traffic. Waiting is
    pointless if EC2 itself expects no capacity here, but elsewhere.

    Args:
        score: Score of the zone; 0 if unknown.
        best_elsewhere: Best score of the other zones; 0 if unknown.

    >>> zone_wait_s(score=1, best_elsewhere=9), zone_wait_s(score=0, best_elsewhere=9)
    (15.0, 60.0)
    """
    is_hopeless = 0 < score <= LOW and best_elsewhere >= score + CLEARLY_BETTER
    return SHORT_WAIT_S if is_hopeless else WAIT_S
