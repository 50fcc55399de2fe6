"""Spot capacity over time, as recorded: the machines of each zone, and their prices.

A trace is circular, so that a run may start at any time: after its end, the trace repeats.
A machine that runs at the end continues as one that runs at the start, if there is one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from etrain_jupyter.plugins.ec2.ledger import Point


@dataclass(frozen=True, kw_only=True)
class Slot:
    """Capacity for one machine in a zone, for some time."""

    zone: str
    since_s: float
    until_s: float
    """When EC2 reclaims the machine, in seconds."""
    notice_s: float | None = None
    """Seconds from the interruption notice until ``until_s``; None for EC2's two minutes, 0 if the
    machine is lost without a notice."""
    risk_s: float = 0.0
    """Seconds from the rebalance recommendation to the notice; 0 without a recommendation, which no
    public trace records."""
    rank: int | None = None
    """If the trace records capacity, a slot ends before those of lower ranks. None if the trace
    records interruptions, which affect any machine."""


@dataclass(frozen=True, kw_only=True)
class SpotTrace:
    """A recorded spot market; times in seconds since its start."""

    name: str
    length_s: float
    slots: tuple[Slot, ...]
    """In order of ``since_s``."""
    prices: Mapping[str, tuple[Point, ...]] = field(default_factory=dict)
    """US dollars an hour by zone, from each time on; empty if the trace has none."""
    all_zones: tuple[str, ...] = ()
    """Zones, including those that have no machine at any time of a window."""

    @cached_property
    def zones(self) -> tuple[str, ...]:
        """The zones of the trace."""
        return tuple(sorted({*self.all_zones, *(slot.zone for slot in self.slots)}))

    @property
    def max_capacity(self) -> int:
        """The largest number of machines available at the same time."""
        # At equal times, machines that end free their capacity first: -1 sorts before 1.
        ends = [(slot.until_s, -1) for slot in self.slots]
        changes = sorted([(slot.since_s, 1) for slot in self.slots] + ends)
        most = now = 0
        for _, change in changes:
            now += change
            most = max(most, now)
        return most

    @property
    def mean_capacity(self) -> float:
        """The mean number of machines available."""
        return sum(slot.until_s - slot.since_s for slot in self.slots) / self.length_s

    @property
    def losses_per_node_hour(self) -> float:
        """Machines that EC2 reclaimed before the end of the trace, per machine hour."""
        num_lost = sum(slot.until_s < self.length_s for slot in self.slots)
        hours = self.mean_capacity * self.length_s / 3600
        return num_lost / hours if hours else 0.0

    def scaled(self, factor: int) -> SpotTrace:
        """Return the trace with each machine counted ``factor`` times."""
        slots = tuple(slot for slot in self.slots for _ in range(factor))
        return replace(self, slots=slots)

    def from_time(self, start_s: float, duration_s: float) -> SpotTrace:
        """Return ``duration_s`` of the trace, beginning at ``start_s``; it repeats if necessary.

        >>> slots = [Slot(zone="a", since_s=a, until_s=b) for a, b in ((0.0, 4.0), (6.0, 10.0))]
        >>> trace = SpotTrace(name="t", length_s=10.0, slots=tuple(slots))
        >>> [(slot.since_s, slot.until_s) for slot in trace.from_time(5.0, 12.0).slots]
        [(0.0, 9.0), (11.0, 12.0)]
        """
        #   recorded      |--s0--|      |---s1---|
        #   repeated      |--s0--|      |---s1-------s0--|      |---s1-------s0--|
        #   result              start ->|---s1-------s0--|   ...   |<- end
        found = []
        for slot in self._repeated(start_s + duration_s):
            since, until = slot.since_s - start_s, min(slot.until_s - start_s, duration_s)
            if until > max(0.0, since):
                found.append(replace(slot, since_s=max(0.0, since), until_s=until))
        found.sort(key=lambda slot: (slot.since_s, slot.zone, slot.until_s))
        return replace(
            self,
            length_s=duration_s,
            slots=tuple(found),
            all_zones=self.zones,
            prices={zone: self._prices(zone, start_s, duration_s) for zone in self.prices},
        )

    def _repeated(self, end_s: float) -> Iterator[Slot]:
        following = self._continuations()
        continued = set(following.values())
        for lap in range(math.ceil(end_s / self.length_s)):
            for number, slot in enumerate(self.slots):
                # This slot continues one of the previous lap, and was yielded as part of that slot.
                if lap and number in continued:
                    continue
                last, until = number, lap * self.length_s + slot.until_s
                at_lap = lap
                while last in following and until < end_s:
                    last, at_lap = following[last], at_lap + 1
                    until = at_lap * self.length_s + self.slots[last].until_s
                yield replace(slot, since_s=lap * self.length_s + slot.since_s, until_s=until)

    def _continuations(self) -> dict[int, int]:
        """Return which slot at the start continues which slot at the end, by their indices."""
        pairs: dict[int, int] = {}
        for zone in self.zones:
            here = [(number, slot) for number, slot in enumerate(self.slots) if slot.zone == zone]
            here.sort(key=lambda one: one[1].rank or 0)
            at_end = [number for number, slot in here if slot.until_s >= self.length_s]
            at_start = [number for number, slot in here if slot.since_s <= 0.0]
            pairs |= dict(zip(at_end, at_start, strict=False))
        return pairs

    def _prices(self, zone: str, start_s: float, duration_s: float) -> tuple[Point, ...]:
        laps = range(math.ceil((start_s + duration_s) / self.length_s))
        points = [
            (lap * self.length_s + at - start_s, usd)
            for lap in laps
            for at, usd in self.prices[zone]
        ]
        # Keep the price in force at the start.
        first = max((n for n, (at, _) in enumerate(points) if at <= 0.0), default=0)
        return tuple((max(0.0, at), usd) for at, usd in points[first:] if at < duration_s)
