"""Cost of machines: a pure function of their run times and the prices at those times.

Amounts are not accumulated from tick to tick, so a restarted head computes the same amounts from
the same rows. Spot machines are charged per second at the price in force, for at least a minute. A
machine that EC2 reclaims in its first hour is free. Disks are charged as long as they exist.
"""

from __future__ import annotations

import dataclasses
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

LEAST_S = 60.0
"""EC2's minimum charge in seconds; it applies to disks, too."""
FIRST_HOUR_S = 3600.0
TAKEN_BY_EC2 = "Server.SpotInstance"
"""Prefix of the reason if EC2 reclaimed a machine."""
HOURS_OF_MONTH = 730.0
"""AWS's definition of a month, for disks."""

Point = tuple[float, float]
"""A time in seconds since the epoch, and the price in US dollars an hour from then on."""


@dataclass(frozen=True, kw_only=True)
class PriceBook:
    """Prices over time."""

    spot: Mapping[tuple[str, str], Sequence[Point]] = field(default_factory=dict)
    """By type and zone, oldest first."""
    on_demand: Mapping[str, float] = field(default_factory=dict)
    """US dollars an hour by type."""
    volume_gib_month: float = 0.08
    """US dollars per GiB-month of disk."""

    def spot_at(self, type: str, zone: str, at: float) -> float | None:
        """Return the price in force, or the first known one; None if there is none."""
        points = self.spot.get((type, zone), ())
        if not points:
            return None
        # The last point at or before `at`. If EC2's history starts after the launch, use the first
        # point.
        return points[max(0, bisect_right(points, (at, float("inf"))) - 1)][1]

    def rate(self, type: str, zone: str, lifecycle: str, at: float) -> float | None:
        """Return US dollars an hour; the on-demand rate if the spot price is unknown."""
        if lifecycle == "spot" and (price := self.spot_at(type, zone, at)) is not None:
            return price
        return self.on_demand.get(type)

    def spot_between(self, type: str, zone: str, begin: float, end: float) -> float | None:
        """Return the cost of running from ``begin`` to ``end``: the integral of the price."""
        points = self.spot.get((type, zone), ())
        if not points:
            return None
        # Each price applies from its point to the next. The first price also applies before its
        # point, and the last price applies until the end.
        total = 0.0
        for number, (at, usd) in enumerate(points):
            #   points        p0         p1         p2
            #   price   p0 ---|--- p0 ---|--- p1 ---|--- p2 --->
            #                     begin                  end
            since = begin if number == 0 else max(begin, at)
            until = min(end, points[number + 1][0]) if number + 1 < len(points) else end
            total += max(0.0, until - since) / 3600 * usd
        return total


@dataclass(frozen=True, kw_only=True)
class Row:
    """One machine's lifetime, for billing."""

    id: str
    type: str
    zone: str
    lifecycle: str
    """``spot`` or ``on-demand``."""
    launched_at: float
    """EC2's LaunchTime, in seconds since the epoch."""
    ended_at: float | None = None
    """None while it runs."""
    reason: str = ""
    """EC2's code for why it ended, such as ``Server.SpotInstanceTermination``."""
    volume_gib: float = 0.0
    role: str = "node"

    @property
    def is_waived(self) -> bool:
        """True if EC2 reclaimed it in its first hour."""
        return (
            self.lifecycle == "spot"
            and self.ended_at is not None
            and self.reason.startswith(TAKEN_BY_EC2)
            and self.ended_at - self.launched_at < FIRST_HOUR_S
        )


@dataclass(frozen=True, kw_only=True)
class Charge:
    """Cost of a machine so far, in US dollars."""

    spent: float = 0.0
    """Total cost, including the disk."""
    on_demand: float = 0.0
    """Cost on demand, including the disk."""
    waived: float = 0.0
    """Amount not charged because EC2 reclaimed the machine in its first hour."""
    volume: float = 0.0
    """The disk's share of ``spent``."""
    hours: float = 0.0
    is_known: bool = True
    """True if the price is known; otherwise ``spent`` includes only the disk."""

    @property
    def saved(self) -> float:
        """Savings against on-demand; negative if spot was more expensive."""
        return self.on_demand - self.spent

    def __add__(self, other: Charge) -> Charge:
        return Charge(
            spent=self.spent + other.spent,
            on_demand=self.on_demand + other.on_demand,
            waived=self.waived + other.waived,
            volume=self.volume + other.volume,
            hours=self.hours + other.hours,
            is_known=self.is_known and other.is_known,
        )


def charge_of(row: Row, prices: PriceBook, now: float) -> Charge:
    """Return the cost of a machine from its launch to its end, or to ``now``.

    >>> book = PriceBook(spot={("g5.xlarge", "a"): [(0.0, 0.36)]}, on_demand={"g5.xlarge": 1.0})
    >>> row = Row(id="i-1", type="g5.xlarge", zone="a", lifecycle="spot", launched_at=0.0)
    >>> charge = charge_of(row, book, 1800.0)
    >>> charge.spent, charge.saved
    (0.18, 0.32)
    """
    begin = row.launched_at
    end = max(begin, now if row.ended_at is None else row.ended_at)
    # A running machine is charged for its run time, and a machine that has ended for at least a
    # minute. `committed` sets ended_at to now, so it counts the minimum for running machines, too.
    charged_end = end if row.ended_at is None else max(end, begin + LEAST_S)
    full = prices.on_demand.get(row.type)
    on_demand = None if full is None else (charged_end - begin) / 3600 * full
    machine = on_demand
    if row.lifecycle == "spot":
        spot = prices.spot_between(row.type, row.zone, begin, charged_end)
        machine = spot if spot is not None else on_demand
    # EC2 still charges for the disk of a machine that it reclaims.
    disk = row.volume_gib * prices.volume_gib_month / HOURS_OF_MONTH * (charged_end - begin) / 3600
    waived = (machine or 0.0) if row.is_waived else 0.0
    spent = (machine or 0.0) - waived + disk
    return Charge(
        spent=spent,
        # If the on-demand rate is unknown, report no savings.
        on_demand=(on_demand if on_demand is not None else (machine or 0.0)) + disk,
        waived=waived,
        volume=disk,
        hours=(end - begin) / 3600,
        is_known=machine is not None,
    )


@dataclass(frozen=True, kw_only=True)
class Ledger:
    """All machines in a cluster's history."""

    rows: Mapping[str, Row] = field(default_factory=dict)
    """By instance id, oldest first."""

    def with_rows(self, seen: Iterable[Row]) -> Ledger:
        """Add or update machines; a known end time is kept."""
        rows = dict(self.rows)
        for row in seen:
            known = rows.get(row.id)
            #   known row         new row         result
            #   ended             running         known: a late listing does not revive a machine
            #   ended, reason     ended           known: the first end time counts
            #   ended, no reason  ended           known, with the new reason
            #   otherwise         any             new
            if known is not None and known.ended_at is not None:
                if row.ended_at is None or known.reason:
                    continue
                row = dataclasses.replace(known, reason=row.reason)
            rows[row.id] = row
        return Ledger(rows=rows)

    def charges(self, prices: PriceBook, now: float) -> dict[str, Charge]:
        """Return the cost of each machine."""
        return {row.id: charge_of(row, prices, now) for row in self.rows.values()}

    def total(self, prices: PriceBook, now: float) -> Charge:
        """Return the total cost."""
        return sum(self.charges(prices, now).values(), Charge())

    def committed(self, prices: PriceBook, now: float) -> float:
        """Return the US dollars owed if all machines were terminated now, with minimum charges.

        The budget uses this instead of ``total``, which lacks the minimum charges still due for new
        machines.
        """
        rows = [
            row if row.ended_at is not None else dataclasses.replace(row, ended_at=now)
            for row in self.rows.values()
        ]
        return sum(charge_of(row, prices, now).spent for row in rows)

    def rate(self, prices: PriceBook, now: float) -> float:
        """Return the hourly cost of running machines in US dollars, including disks."""
        living = [row for row in self.rows.values() if row.ended_at is None]
        # An unknown price counts as zero; with a budget, such types are never launched.
        machines = [prices.rate(row.type, row.zone, row.lifecycle, now) or 0.0 for row in living]
        disks = sum(row.volume_gib for row in living)
        return sum(machines) + disks * prices.volume_gib_month / HOURS_OF_MONTH

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {"rows": [dataclasses.asdict(row) for row in self.rows.values()]}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Parse the JSON form; unknown keys are ignored."""
        known = {one.name for one in dataclasses.fields(Row)}
        rows = [Row(**{k: v for k, v in row.items() if k in known}) for row in data["rows"]]
        return cls(rows={row.id: row for row in rows})
