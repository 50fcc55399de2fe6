"""What the rules of the fleet look at, and what they answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from etrain_jupyter.pools.ec2.fleet_state import FleetState, LaunchRequest
from etrain_jupyter.pools.ec2.ledger import HOURS_OF_MONTH
from etrain_jupyter.pools.ec2.placement import Offer
from etrain_jupyter.pools.ec2.spec import AwsSpotSpec

STOP_S = 30.0
"""To stop machines takes so long, besides the time for draining them."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """One that EC2 lists as pending or running."""

    id: str
    type: str
    zone: str
    lifecycle: str
    workers: int
    launched_at: float
    is_ready: bool = False
    """Whether its workers have said hello."""
    is_leaving: bool = False
    """Whether it has been released, so that it counts no more."""
    is_at_risk: bool = False
    """Whether EC2 is about to take it, so that another one may come besides."""
    is_busy: bool = False
    """Whether a job uses it."""


@dataclass(frozen=True, kw_only=True)
class Rules:
    """What of the spec decides about machines."""

    cluster_id: str
    max_workers: int
    is_single_zone: bool = True
    on_shortage: str = "migrate"
    on_demand_base: int = 0
    on_demand_after_s: float = 120.0
    most_on_demand: int = 0
    max_hourly: float | None = None
    max_total: float | None = None
    reserve_s: float = 120.0
    """How long before ``max_total`` is spent the cluster begins to stop."""
    boot_s: float = 900.0
    linger_s: float = 120.0
    max_boot_failures: int = 3
    volume_gib: float = 0.0
    volume_gib_month: float = 0.08

    @classmethod
    def of(cls, spec: AwsSpotSpec, cluster_id: str) -> Rules:
        """Return what a spec says."""
        capacity = spec.capacity
        return cls(
            cluster_id=cluster_id,
            max_workers=spec.workers.max,
            is_single_zone=capacity.placement == "single-az",
            on_shortage=capacity.on_shortage,
            on_demand_base=capacity.on_demand.base,
            on_demand_after_s=capacity.on_demand.after,
            most_on_demand=capacity.on_demand.most,
            max_hourly=spec.budget.max_hourly,
            max_total=spec.budget.max_total,
            reserve_s=spec.interruption.drain + min(STOP_S, 6 * spec.tick),
            boot_s=spec.lifetime.boot,
            linger_s=spec.lifetime.linger,
            max_boot_failures=spec.lifetime.max_boot_failures,
            volume_gib=spec.volume.gib,
        )

    @property
    def disk_usd(self) -> float:
        """US dollars an hour of one machine's disk."""
        return self.volume_gib * self.volume_gib_month / HOURS_OF_MONTH


@dataclass(frozen=True, kw_only=True)
class View:
    """What is there now."""

    now: float
    wanted: int
    """Workers."""
    machines: tuple[Machine, ...] = ()
    offers: tuple[Offer, ...] = ()
    spent_usd: float = 0.0
    rate_usd: float = 0.0
    """An hour, of the machines that are listed and of everything else of the cluster."""


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What is to be done."""

    memory: FleetState
    launches: tuple[LaunchRequest, ...] = ()
    releases: tuple[tuple[str, str], ...] = ()
    """Machines to be ended once their jobs have left them, and why."""
    terminations: tuple[tuple[str, str], ...] = ()
    """Machines to be ended at once, and why."""
    lookups: tuple[str, ...] = ()
    """Machines to ask EC2 for one by one: it should have listed them long ago."""
    warnings: tuple[tuple[str, str], ...] = ()
    """Kind and text of each. One kind is not repeated often, however its figures change."""


@dataclass
class Count:
    """Workers here and coming, while decisions are made."""

    staying: list[Machine]
    """Machines that are here and are not about to leave."""
    coming: list[tuple[str, str, int]] = field(default_factory=list)
    """Zone, lifecycle and workers of what is not listed yet."""
    coming_usd: float = 0.0
    num_unanswered: int = 0
    """Of the workers that are coming: those that nobody knows whether EC2 has granted."""

    @property
    def num(self) -> int:
        """All of them."""
        return sum(m.workers for m in self.staying) + sum(n for _, _, n in self.coming)

    @property
    def num_sure(self) -> int:
        """Without those of requests that nobody has answered."""
        return self.num - self.num_unanswered

    @property
    def num_at_risk(self) -> int:
        """Those that EC2 is about to take."""
        return sum(m.workers for m in self.staying if m.is_at_risk)

    @property
    def num_on_demand(self) -> int:
        """Those at the full price."""
        here = sum(m.workers for m in self.staying if m.lifecycle == "on-demand")
        return here + sum(n for _, life, n in self.coming if life == "on-demand")

    @property
    def main_zone(self) -> str:
        """Where most of them are."""
        num: dict[str, int] = {}
        for machine in self.staying:
            num[machine.zone] = num.get(machine.zone, 0) + machine.workers
        for zone, _, workers in self.coming:
            num[zone] = num.get(zone, 0) + workers
        return max(sorted(num), key=lambda zone: num[zone])

    @property
    def zones(self) -> set[str]:
        """Where they are."""
        return {m.zone for m in self.staying} | {zone for zone, _, _ in self.coming if zone}


def count_workers(memory: FleetState, view: View, gone: set[str]) -> Count:
    """Count who stays and who is coming.

    Args:
        memory: What is coming.
        view: Who is here.
        gone: Machines that are about to be ended.
    """
    count = Count(staying=[m for m in view.machines if not m.is_leaving and m.id not in gone])
    prices = {
        (offer.type, offer.zone, lifecycle): offer.usd(lifecycle) or 0.0
        for offer in view.offers
        for lifecycle in ("spot", "on-demand")
    }
    for ack in memory.acks:
        count.coming.append((ack.zone, ack.lifecycle, ack.workers))
        count.coming_usd += prices.get((ack.type, ack.zone, ack.lifecycle), 0.0)
    for request, _ in memory.unanswered:
        zones = {zone for _, zone in request.overrides}
        zone = zones.pop() if len(zones) == 1 else ""
        count.coming.append((zone, request.lifecycle, request.num_workers))
        dearest = max((prices.get(key, 0.0) for key in request.keys), default=0.0)
        count.coming_usd += dearest * request.num_nodes
        count.num_unanswered += request.num_workers
    return count


def dearest_usd(offers: Sequence[Offer], rules: Rules) -> float:
    """Return the most that one worker can cost an hour, on demand too where that may come."""
    lives = ("spot", "on-demand") if rules.most_on_demand else ("spot",)
    prices = [(offer.usd(life), offer.workers) for offer in offers for life in lives]
    return max((usd / workers for usd, workers in prices if usd is not None), default=0.0)
