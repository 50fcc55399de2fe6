"""Inputs and outputs of the fleet's rules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from etrain_jupyter.plugins.ec2.fleet_state import FleetState, LaunchRequest
from etrain_jupyter.plugins.ec2.ledger import HOURS_OF_MONTH
from etrain_jupyter.plugins.ec2.placement import Offer
from etrain_jupyter.plugins.ec2.spec import AwsSpotSpec

STOP_S = 30.0
"""Time to stop machines after they have drained, in seconds."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """A machine that EC2 lists as pending or running."""

    id: str
    type: str
    zone: str
    lifecycle: str
    workers: int
    launched_at: float
    is_ready: bool = False
    """Its workers have connected."""
    is_leaving: bool = False
    """It has been released and no longer counts."""
    is_at_risk: bool = False
    """EC2 has announced an interruption: a replacement may exceed ``max_workers``."""
    is_busy: bool = False
    """A job uses it."""


@dataclass(frozen=True, kw_only=True)
class Rules:
    """The limits in the spec."""

    cluster_id: str
    max_workers: int
    is_single_zone: bool = True
    on_shortage: str = "migrate"
    on_demand_base: int = 0
    on_demand_after_s: float = 120.0
    most_on_demand: int = 0
    policy: str = "spot"
    """``deadline``: the number of on-demand workers follows from the jobs' progress."""
    max_hourly: float | None = None
    max_total: float | None = None
    reserve_s: float = 120.0
    """Launches stop, and machines begin to drain, this long before ``max_total`` is spent."""
    boot_s: float = 900.0
    linger_s: float = 120.0
    max_boot_failures: int = 3
    volume_gib: float = 0.0
    volume_gib_month: float = 0.08

    @classmethod
    def of(cls, spec: AwsSpotSpec, cluster_id: str) -> Rules:
        """Return the limits of a spec."""
        capacity = spec.capacity
        return cls(
            cluster_id=cluster_id,
            max_workers=spec.workers.max,
            is_single_zone=capacity.placement == "single-az",
            on_shortage=capacity.on_shortage,
            on_demand_base=capacity.on_demand.base,
            on_demand_after_s=capacity.on_demand.after,
            most_on_demand=capacity.most_on_demand(spec.workers.max),
            policy=capacity.policy,
            max_hourly=spec.budget.max_hourly,
            max_total=spec.budget.max_total,
            # The jobs' drain time, plus a few ticks until all machines are seen to have terminated.
            reserve_s=spec.interruption.drain + min(STOP_S, 6 * spec.tick),
            boot_s=spec.lifetime.boot,
            linger_s=spec.lifetime.linger,
            max_boot_failures=spec.lifetime.max_boot_failures,
            volume_gib=spec.volume.gib,
        )

    @property
    def disk_usd(self) -> float:
        """Cost of one machine's disk, in US dollars an hour."""
        return self.volume_gib * self.volume_gib_month / HOURS_OF_MONTH


@dataclass(frozen=True, kw_only=True)
class View:
    """The current fleet."""

    now: float
    wanted: int
    """Number of workers wanted."""
    machines: tuple[Machine, ...] = ()
    offers: tuple[Offer, ...] = ()
    spent_usd: float = 0.0
    rate_usd: float = 0.0
    """Cost of the whole cluster, in US dollars an hour."""
    spares: int = 0
    """Number of workers to keep in addition to ``wanted``, within ``max_workers``."""
    gradient_bytes: float = 0.0
    """Bytes of the gradients of the job with the most traffic; 0 if unknown."""
    steps_per_s: float = 0.0
    """Steps per second of that job."""
    type_rates: Mapping[str, float] = field(default_factory=dict)
    """Measured samples per second of one worker, by machine type, of a job whose workers may have
    unequal speeds; empty for all other jobs."""
    on_demand: int | None = None
    """Number of on-demand workers for the jobs' deadlines; None unless ``Rules.policy`` is
    ``deadline``."""


@dataclass(frozen=True, kw_only=True)
class FleetWarning:
    """A rate-limited warning for the jobs' logs."""

    key: str
    """Identifies the condition: the same key is rate-limited even if figures in the text change."""
    text: str


@dataclass(frozen=True, kw_only=True)
class Decision:
    """Actions to take, and the next state."""

    state: FleetState
    launches: tuple[LaunchRequest, ...] = ()
    releases: tuple[tuple[str, str], ...] = ()
    """Machines to terminate once no job uses them, with reasons."""
    terminations: tuple[tuple[str, str], ...] = ()
    """Machines to terminate immediately, with reasons."""
    lookups: tuple[str, ...] = ()
    """Machines to query by id: EC2 should have listed them by now."""
    warnings: tuple[FleetWarning, ...] = ()


@dataclass(kw_only=True)
class Count:
    """Workers that are running or being launched."""

    staying: list[Machine]
    """Running machines that are not about to leave."""
    coming: list[tuple[str, str, int]] = field(default_factory=list)
    """Zone, lifecycle and number of workers of launches that EC2 does not list yet."""
    coming_usd: float = 0.0
    num_unanswered: int = 0
    """Workers of requests that EC2 has not answered; included in ``coming``."""
    unanswered_by_lifecycle: dict[str, int] = field(default_factory=dict)

    def without(self, ids: set[str]) -> Count:
        """Return the count without the given machines."""
        return replace(self, staying=[m for m in self.staying if m.id not in ids])

    @property
    def num(self) -> int:
        """Number of workers."""
        return sum(m.workers for m in self.staying) + sum(n for _, _, n in self.coming)

    @property
    def num_sure(self) -> int:
        """Number of workers, not counting unanswered requests."""
        return self.num - self.num_unanswered

    @property
    def num_at_risk(self) -> int:
        """Number of workers on machines with an announced interruption."""
        return sum(m.workers for m in self.staying if m.is_at_risk)

    @property
    def num_on_demand(self) -> int:
        """Number of workers on demand."""
        # Unlike `num_sure`, count unanswered requests: the on-demand limit must never be exceeded.
        here = sum(m.workers for m in self.staying if m.lifecycle == "on-demand")
        return here + sum(n for _, life, n in self.coming if life == "on-demand")

    def only(self, lifecycle: str) -> Count:
        """Return the count of the workers with a lifecycle."""
        coming = [one for one in self.coming if one[1] == lifecycle]
        return replace(
            self,
            staying=[m for m in self.staying if m.lifecycle == lifecycle],
            coming=coming,
            num_unanswered=self.unanswered_by_lifecycle.get(lifecycle, 0),
        )

    @property
    def main_zone(self) -> str:
        """Zone with the most workers."""
        num: dict[str, int] = {}
        for machine in self.staying:
            num[machine.zone] = num.get(machine.zone, 0) + machine.workers
        for zone, _, workers in self.coming:
            num[zone] = num.get(zone, 0) + workers
        # Sorted, so that a tie does not move the workers back and forth.
        return max(sorted(num), key=lambda zone: num[zone])

    @property
    def zones(self) -> set[str]:
        """Zones with workers."""
        return {m.zone for m in self.staying} | {zone for zone, _, _ in self.coming if zone}


def count_workers(state: FleetState, view: View, gone: set[str]) -> Count:
    """Count the workers that stay and those being launched, without the machines in ``gone``."""
    count = Count(staying=[m for m in view.machines if not m.is_leaving and m.id not in gone])
    prices = {
        (offer.type, offer.zone, lifecycle): offer.usd(lifecycle) or 0.0
        for offer in view.offers
        for lifecycle in ("spot", "on-demand")
    }
    # Also count machines that EC2 has acknowledged but does not list yet.
    for ack in state.acks:
        count.coming.append((ack.zone, ack.lifecycle, ack.workers))
        count.coming_usd += prices.get((ack.type, ack.zone, ack.lifecycle), 0.0)
    for request, _ in state.unanswered:
        # With several zones, the actual one is unknown until EC2 answers, so no zone counts as
        # used.
        zones = {zone for _, zone in request.overrides}
        zone = zones.pop() if len(zones) == 1 else ""
        count.coming.append((zone, request.lifecycle, request.num_workers))
        # EC2 may fill the request from any of its pools, so the budget reserves the highest price.
        highest = max((prices.get(key, 0.0) for key in request.keys), default=0.0)
        count.coming_usd += highest * request.num_nodes
        count.num_unanswered += request.num_workers
        known = count.unanswered_by_lifecycle.get(request.lifecycle, 0)
        count.unanswered_by_lifecycle[request.lifecycle] = known + request.num_workers
    return count


def highest_usd(offers: Sequence[Offer], rules: Rules) -> float:
    """Return the maximum hourly cost of a worker in US dollars, including on-demand if allowed."""
    # On-demand prices affect the worst case only if the pool may launch on-demand machines.
    lives = ("spot", "on-demand") if rules.most_on_demand else ("spot",)
    prices = [(offer.usd(life), offer.workers) for offer in offers for life in lives]
    return max((usd / workers for usd, workers in prices if usd is not None), default=0.0)
