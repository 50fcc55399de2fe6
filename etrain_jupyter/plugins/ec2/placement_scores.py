"""Use EC2's spot placement scores: how soon to leave a zone, and how to raise a low score.

A score of 1 to 10 estimates whether a request for spot machines of several types will succeed in a
zone now. EC2 gives low scores to fewer than three types.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

LOW = 3
"""Highest score that counts as low; also the highest one that EC2 gives to one or two types."""
CLEARLY_BETTER = 3
"""Difference between two zones' scores that is not just noise."""
ENOUGH_TYPES = 3
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


def raise_score(
    *, num_types: int, own: Mapping[str, int], others: Mapping[str, int], similar: Sequence[str]
) -> str:
    """Return how to raise a pool's best score; empty if that is not low.

    Args:
        num_types: Number of machine types of the pool.
        own: Scores of the zones in which the pool has subnets.
        others: Scores of the region's other zones.
        similar: Types that the pool could use as well, if known.

    >>> raise_score(num_types=3, own={"us-east-1a": 2}, others={"us-east-1b": 9}, similar=())
    'Add a subnet in us-east-1b (score 9)'
    """
    best = max(own.values(), default=0)
    if best > LOW:
        return ""
    advice = []
    if num_types < ENOUGH_TYPES or similar:
        few = ", since EC2 gives low scores to fewer than 3" if num_types < ENOUGH_TYPES else ""
        named = f", for example {', '.join(similar)}" if similar else ""
        advice.append(f"add types to capacity.types{few}{named}")
    better = {zone: score for zone, score in others.items() if score >= best + CLEARLY_BETTER}
    if better:
        zone = max(better, key=lambda one: better[one])
        advice.append(f"add a subnet in {zone} (score {better[zone]})")
    text = "; or ".join(advice) or "add types, or lower workers.max"
    return text[0].upper() + text[1:]
