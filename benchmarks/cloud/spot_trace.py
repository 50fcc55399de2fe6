"""Synthetic day of a spot market: capacity, interruptions and prices of each zone. Pure.

The days are synthetic and depend only on a random seed. Their statistics follow two public traces
of EC2 GPU machines, counted for this benchmark:

- ``g4dn.xlarge`` in one zone, 12 machines wanted, 2020-11-20 (``doc/data`` in the repository of
  Bamboo, NSDI 2023). In 18.5 hours there were 16 shortages, clustered in spells with up to four
  quiet hours between them. A shortage took a tenth to five sixths of the machines (median: half),
  in one to six bulks some minutes apart. All machines were back after 2 to 53 minutes (median: 20).
- ``p3.2xlarge`` in us-east-2b, 16 machines requested every five minutes, from 2023-08-27
  (``availability/16-node`` of skypilot-org/spot-traces). Droughts without a single machine lasted
  half an hour to four and a half hours and occurred about once a day, before a week with hardly
  any.

Spells are half as frequent here as on Bamboo's day, because a benchmark has few machines and every
boot takes CPU time from the training job.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

HOUR_S = 3600.0
MINUTE_S = 60.0
QUIET_S = 5.0 * HOUR_S
"""Mean time between two spells of shortages."""
BETWEEN_S = 15 * MINUTE_S
"""Mean time between two shortages of a spell."""
MEAN_SHORTAGES = 3.0
"""Mean number of shortages in a spell."""
LONG_S, SPREAD = 20 * MINUTE_S, 0.9
"""Duration of a shortage: its median, and the standard deviation of its logarithm."""
BOUNDS_S = (2 * MINUTE_S, 55 * MINUTE_S)
DROUGHT_SHARE = 0.08
DROUGHT_S = (35 * MINUTE_S, 4.5 * HOUR_S)
TAKEN = (0.1, 0.85)
"""Share of the machines that a shortage takes, uniform between these bounds."""
NUM_BULKS = ((1, 0.5), (2, 0.25), (3, 0.25))
BULKS_APART_S = (1.5 * MINUTE_S, 5 * MINUTE_S)
PRICE_EVERY_S = 6 * HOUR_S
PRICE_STEP = 0.05
"""Maximum relative change of a price; spot prices have changed slowly since 2017."""

T = TypeVar("T")
Way = Literal["rebalance", "notice", "silent"]
"""Kinds of interruption: rebalance recommendation and then a notice, notice only, no warning."""
WAYS: tuple[tuple[Way, float], ...] = (("rebalance", 0.45), ("notice", 0.45), ("silent", 0.1))


@dataclass(frozen=True, kw_only=True)
class Change:
    """Change of a zone's capacity or price, at a point in time."""

    at_s: float
    """Seconds of the day."""
    zone: str
    capacity: int | None = None
    """Machines, including those in use; machines above it are interrupted. None: unchanged."""
    way: Way = "notice"
    price_factor: float | None = None
    """Price relative to the beginning of the day. None: unchanged."""


def make_day(
    *, seed: int, zones: Sequence[str], num_nodes: int, hours: float = 24.0
) -> tuple[Change, ...]:
    """Generate a day's changes in order; every zone starts with capacity for ``num_nodes``.

    Args:
        seed: Random seed of the day.
        zones: Names of the zones; each has its own shortages, since interruptions cluster in zones.
        num_nodes: Maximum number of machines of the cluster.
        hours: Length of the day.

    >>> day = make_day(seed=1, zones=["a"], num_nodes=4, hours=24)
    >>> day == make_day(seed=1, zones=["a"], num_nodes=4, hours=24)
    True
    """
    changes = []
    for zone in zones:
        rng = random.Random(f"{seed} {zone}")
        end_s = hours * HOUR_S
        changes += _capacity(rng, zone, num_nodes, end_s)
        changes += _prices(rng, zone, end_s)
    return tuple(sorted(changes, key=lambda change: (change.at_s, change.zone)))


def _capacity(rng: random.Random, zone: str, num_nodes: int, end_s: float) -> list[Change]:
    changes: list[Change] = []
    at = rng.uniform(0.1, 0.6) * QUIET_S
    while at < end_s:
        for _ in range(_geometric(rng, MEAN_SHORTAGES)):
            found, at = _shortage(rng, zone, num_nodes, at)
            changes += found
            at += rng.expovariate(1 / BETWEEN_S)
        at += rng.expovariate(1 / QUIET_S)
    return [change for change in changes if change.at_s < end_s]


def _shortage(
    rng: random.Random, zone: str, num_nodes: int, at: float
) -> tuple[list[Change], float]:
    """Return the changes of one shortage, and the time at which it ends."""
    if rng.random() < DROUGHT_SHARE:
        low, high = map(math.log, DROUGHT_S)
        end = at + math.exp(rng.uniform(low, high))
        num_taken, num_bulks = num_nodes, 1
    else:
        long_s = rng.lognormvariate(math.log(LONG_S), SPREAD)
        end = at + min(max(long_s, BOUNDS_S[0]), BOUNDS_S[1])
        num_taken = max(1, round(rng.uniform(*TAKEN) * num_nodes))
        num_bulks = min(num_taken, _one_of(rng, NUM_BULKS))
    changes = []
    for number in range(1, num_bulks + 1):
        left = num_nodes - num_taken * number // num_bulks
        changes.append(Change(at_s=at, zone=zone, capacity=left, way=_one_of(rng, WAYS)))
        at += rng.uniform(*BULKS_APART_S)
    end = max(end, at)
    return [*changes, Change(at_s=end, zone=zone, capacity=num_nodes)], end


def _prices(rng: random.Random, zone: str, end_s: float) -> list[Change]:
    changes, factor, at = [], 1.0, PRICE_EVERY_S
    while at < end_s:
        factor *= 1 + rng.uniform(-PRICE_STEP, PRICE_STEP)
        changes.append(Change(at_s=at, zone=zone, price_factor=factor))
        at += PRICE_EVERY_S
    return changes


def _geometric(rng: random.Random, mean: float) -> int:
    number = 1
    while rng.random() > 1 / mean:
        number += 1
    return number


def _one_of(rng: random.Random, weighted: Sequence[tuple[T, float]]) -> T:
    values, weights = zip(*weighted, strict=True)
    found: T = rng.choices(values, weights)[0]
    return found
