"""EC2 in virtual time: capacity from a trace, boots, interruption notices and bills."""

from __future__ import annotations

import heapq
import random
from collections.abc import Iterable
from dataclasses import dataclass, field

from etrain_jupyter.plugins.ec2.ledger import TAKEN_BY_EC2, Charge, PriceBook, Row, charge_of
from etrain_jupyter.plugins.planner.simulation.trace import Slot, SpotTrace

NEVER = float("inf")
NOTICE_S = 120.0
"""EC2's notice before it reclaims a spot machine, in seconds."""
TYPE = "machine"
"""The only type of machine in a simulation."""
INTERRUPTED = f"{TAKEN_BY_EC2}Termination"


@dataclass(kw_only=True, eq=False)
class VirtualNode:
    """A machine; times in seconds."""

    id: str
    zone: str
    lifecycle: str
    launched_at: float
    ready_at: float
    """When its worker can train."""
    lost_at: float = NEVER
    """When EC2 reclaims it."""
    notice_at: float = NEVER
    """When EC2 announces the interruption."""
    risk_at: float = NEVER
    """When EC2 recommends replacing it; ``notice_at`` without a recommendation."""
    rank: int | None = None
    """See ``Slot.rank``."""
    ended_at: float | None = None
    reason: str = ""

    @property
    def row(self) -> Row:
        """The machine for the ledger."""
        return Row(
            id=self.id,
            type=TYPE,
            zone=self.zone,
            lifecycle=self.lifecycle,
            launched_at=self.launched_at,
            ended_at=self.ended_at,
            reason=self.reason,
        )


@dataclass
class VirtualMarket:
    """EC2 for one simulated run. Call ``advance`` before anything else at a new time.

    Args:
        trace: Spot capacity, beginning at time 0.
        rng: Source of boot times, refusals, and of the choice of machines.
        boot_s: Shortest and longest boot time, in seconds; times are drawn uniformly.
        shortage: Probability that a request for on-demand machines is refused.
        boots_s: Measured boot times to draw from instead of ``boot_s``, in seconds.
    """

    trace: SpotTrace
    rng: random.Random
    boot_s: tuple[float, float]
    shortage: float = 0.0
    boots_s: tuple[float, ...] = ()
    nodes: dict[str, VirtualNode] = field(default_factory=dict)
    """Running machines, by id."""
    ended: list[VirtualNode] = field(default_factory=list)
    num_launched: int = 0
    version: int = 0
    """Increases when a machine starts or ends."""

    def __post_init__(self) -> None:
        self._next = 0
        self._free: dict[str, list[Slot]] = {zone: [] for zone in self.trace.zones}
        self._losses: list[tuple[float, str]] = []

    def advance(self, now: float) -> None:
        """Advance the market to ``now``: add new capacity, and end machines that EC2 reclaims."""
        slots = self.trace.slots
        while self._next < len(slots) and slots[self._next].since_s <= now:
            slot = slots[self._next]
            self._free[slot.zone].append(slot)
            self._next += 1
        while self._losses and self._losses[0][0] <= now:
            at, id = heapq.heappop(self._losses)
            if id in self.nodes:
                self.end(id, at, reason=INTERRUPTED)

    def capacity(self, now: float) -> int:
        """Return the number of spot machines that could run now, including those in use."""
        in_use = sum(node.lifecycle == "spot" for node in self.nodes.values())
        return in_use + sum(len(self._free_in(zone, now)) for zone in self._free)

    def launch(
        self, lifecycle: str, zones: Iterable[str], count: int, now: float
    ) -> list[VirtualNode]:
        """Launch up to ``count`` machines, each in the zone with the most unused capacity.

        This is how EC2's ``price-capacity-optimized`` strategy chooses among pools of equal price.
        At equal capacity, the first zone is used.
        """
        launched: list[VirtualNode] = []
        if lifecycle == "on-demand":
            if self.shortage and self.rng.random() < self.shortage:
                return []
            zone = next(iter(zones))
            return [self._start(lifecycle, zone, None, now) for _ in range(count)]
        zones = list(zones)
        while zones and len(launched) < count:
            zone = max(zones, key=lambda zone: len(self._free_in(zone, now)))
            free = self._free_in(zone, now)
            if not free:
                break
            slot = free.pop(self._choose(free))
            launched.append(self._start(lifecycle, zone, slot, now))
        return launched

    def end(self, id: str, now: float, *, reason: str = "") -> None:
        """End a machine; its capacity becomes free if EC2 has not reclaimed it."""
        self.version += 1
        node = self.nodes.pop(id)
        node.ended_at, node.reason = now, reason
        self.ended.append(node)
        if node.lifecycle == "spot" and node.lost_at > now:
            slot = Slot(zone=node.zone, since_s=now, until_s=node.lost_at, rank=node.rank)
            self._free[node.zone].append(slot)

    def charges(self, prices: PriceBook, now: float) -> dict[str, Charge]:
        """Return the cost of all machines until ``now``, by lifecycle, as in the pool's ledger."""
        found = {"spot": Charge(), "on-demand": Charge()}
        for node in (*self.ended, *self.nodes.values()):
            found[node.lifecycle] += charge_of(node.row, prices, now)
        return found

    def _free_in(self, zone: str, now: float) -> list[Slot]:
        free = self._free.get(zone, [])
        # EC2 does not launch on capacity that it is about to reclaim.
        free[:] = [slot for slot in free if _warned_at(slot)[1] > now]
        return free

    def _choose(self, free: list[Slot]) -> int:
        """Return the index of the slot of a new machine."""
        ranks = [slot.rank for slot in free if slot.rank is not None]
        if ranks:
            # EC2 interrupts machines only when there are more machines than capacity.
            return next(n for n, slot in enumerate(free) if slot.rank == min(ranks))
        # The trace does not record the machine that EC2 would assign, so draw one.
        return self.rng.randrange(len(free))

    def _start(self, lifecycle: str, zone: str, slot: Slot | None, now: float) -> VirtualNode:
        self.num_launched += 1
        self.version += 1
        boot_s = self.rng.choice(self.boots_s) if self.boots_s else self.rng.uniform(*self.boot_s)
        node = VirtualNode(
            id=f"i-{self.num_launched}",
            zone=zone,
            lifecycle=lifecycle,
            launched_at=now,
            ready_at=now + boot_s,
            lost_at=slot.until_s if slot else NEVER,
            notice_at=_warned_at(slot)[0] if slot else NEVER,
            risk_at=_warned_at(slot)[1] if slot else NEVER,
            rank=slot.rank if slot else None,
        )
        self.nodes[node.id] = node
        if slot:
            heapq.heappush(self._losses, (slot.until_s, node.id))
        return node


def _warned_at(slot: Slot) -> tuple[float, float]:
    """Return when EC2 sends the notice of an interruption, and the recommendation before it."""
    notice_at = slot.until_s - (NOTICE_S if slot.notice_s is None else slot.notice_s)
    return notice_at, notice_at - slot.risk_s
