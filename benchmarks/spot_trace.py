"""A day of a spot market, as data: what each zone has room for, and how machines go.

The numbers are synthetic. Their shape is that of two open records of GPU machines of EC2, counted
by us:

- ``g4dn.xlarge`` in one zone, 12 machines wanted, 2020-11-20 (``doc/data`` of the repository of
  Bamboo, NSDI 2023): in 18.5 hours 16 shortages, in spells with up to four quiet hours between
  them; a shortage takes a tenth to five sixths of the machines, half of them in the median, in one
  to six bulks some minutes apart; after 2 to 53 minutes, 20 in the median, all are there again.
- ``p3.2xlarge`` in us-east-2b, 16 machines asked for every five minutes, from 2023-08-27
  (``availability/16-node`` of skypilot-org/spot-traces): droughts without a single machine of half
  an hour to four and a half hours, about one a day, before a week with hardly any.

Spells are half as frequent here as on that day of Bamboo's, since a benchmark has few machines and
each one that boots costs it a processor. Pure: a seed gives the same day again.
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
"""Between two spells of shortages, on average."""
BETWEEN_S = 15 * MINUTE_S
"""Between two shortages of a spell, on average."""
MEAN_SHORTAGES = 3.0
"""Of a spell."""
LONG_S, SPREAD = 20 * MINUTE_S, 0.9
"""A shortage: its median, and the standard deviation of its logarithm."""
BOUNDS_S = (2 * MINUTE_S, 55 * MINUTE_S)
DROUGHT_SHARE = 0.08
DROUGHT_S = (35 * MINUTE_S, 4.5 * HOUR_S)
TAKEN = (0.1, 0.85)
"""Which share of the machines a shortage takes, evenly between these."""
NUM_BULKS = ((1, 0.5), (2, 0.25), (3, 0.25))
BULKS_APART_S = (1.5 * MINUTE_S, 5 * MINUTE_S)
PRICE_EVERY_S = 6 * HOUR_S
PRICE_STEP = 0.05
"""Spot prices have moved slowly since 2017."""

T = TypeVar("T")
Way = Literal["rebalance", "notice", "silent"]
"""How machines go: recommended to be replaced before their notice, with a notice, or without."""
WAYS: tuple[tuple[Way, float], ...] = (("rebalance", 0.45), ("notice", 0.45), ("silent", 0.1))


@dataclass(frozen=True, kw_only=True)
class Change:
    """What a zone has from an instant on."""

    at_s: float
    """Seconds of the day."""
    zone: str
    capacity: int | None = None
    """Machines, those in use included; who is beyond it is taken. None for as before."""
    way: Way = "notice"
    price_factor: float | None = None
    """Of the price at the beginning of the day; None for as before."""


def make_day(
    *, seed: int, zones: Sequence[str], num_nodes: int, hours: float = 24.0
) -> tuple[Change, ...]:
    """Return a day's changes in order; every zone begins with room for ``num_nodes``.

    Args:
        seed: Which day.
        zones: Each has its own shortages: machines go in bulks within one zone.
        num_nodes: How many machines the cluster has at most.
        hours: Of the day.

    >>> day = make_day(seed=1, zones=["a"], num_nodes=4, hours=24)
    >>> day == make_day(seed=1, zones=["a"], num_nodes=4, hours=24)
    True
    """
    changes = []
    for zone in zones:
        chance = random.Random(f"{seed} {zone}")
        end_s = hours * HOUR_S
        changes += _capacity(chance, zone, num_nodes, end_s)
        changes += _prices(chance, zone, end_s)
    return tuple(sorted(changes, key=lambda change: (change.at_s, change.zone)))


def _capacity(chance: random.Random, zone: str, num_nodes: int, end_s: float) -> list[Change]:
    changes: list[Change] = []
    at = chance.uniform(0.1, 0.6) * QUIET_S
    while at < end_s:
        for _ in range(_geometric(chance, MEAN_SHORTAGES)):
            found, at = _shortage(chance, zone, num_nodes, at)
            changes += found
            at += chance.expovariate(1 / BETWEEN_S)
        at += chance.expovariate(1 / QUIET_S)
    return [change for change in changes if change.at_s < end_s]


def _shortage(
    chance: random.Random, zone: str, num_nodes: int, at: float
) -> tuple[list[Change], float]:
    """Return one shortage, and when it is over."""
    if chance.random() < DROUGHT_SHARE:
        low, high = map(math.log, DROUGHT_S)
        end = at + math.exp(chance.uniform(low, high))
        num_taken, num_bulks = num_nodes, 1
    else:
        long_s = chance.lognormvariate(math.log(LONG_S), SPREAD)
        end = at + min(max(long_s, BOUNDS_S[0]), BOUNDS_S[1])
        num_taken = max(1, round(chance.uniform(*TAKEN) * num_nodes))
        num_bulks = min(num_taken, _one_of(chance, NUM_BULKS))
    changes = []
    for number in range(1, num_bulks + 1):
        left = num_nodes - num_taken * number // num_bulks
        changes.append(Change(at_s=at, zone=zone, capacity=left, way=_one_of(chance, WAYS)))
        at += chance.uniform(*BULKS_APART_S)
    end = max(end, at)
    return [*changes, Change(at_s=end, zone=zone, capacity=num_nodes)], end


def _prices(chance: random.Random, zone: str, end_s: float) -> list[Change]:
    changes, factor, at = [], 1.0, PRICE_EVERY_S
    while at < end_s:
        factor *= 1 + chance.uniform(-PRICE_STEP, PRICE_STEP)
        changes.append(Change(at_s=at, zone=zone, price_factor=factor))
        at += PRICE_EVERY_S
    return changes


def _geometric(chance: random.Random, mean: float) -> int:
    number = 1
    while chance.random() > 1 / mean:
        number += 1
    return number


def _one_of(chance: random.Random, weighted: Sequence[tuple[T, float]]) -> T:
    values, weights = zip(*weighted, strict=True)
    found: T = chance.choices(values, weights)[0]
    return found
