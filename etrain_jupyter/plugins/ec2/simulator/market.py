"""The market for machines: capacity and prices, and how a fleet is allocated.

This code has no side effects: times are arguments, and nothing is started here. A *pool* is an
instance type in a zone with a spot capacity and price, which the test sets. On-demand machines have
a price and a capacity by type.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

Lifecycle = Literal["spot", "on-demand"]
NO_CAPACITY = "InsufficientInstanceCapacity"
UNFULFILLABLE = "UnfulfillableCapacity"
PRICE_TOO_LOW = "SpotMaxPriceTooLow"
BEFORE = -1e12
"""Time from which default prices apply: long before any test."""

DEFAULT_ON_DEMAND_USD = {
    "c5.xlarge": 0.17,
    "g4dn.12xlarge": 3.912,
    "g4dn.xlarge": 0.526,
    "g5.xlarge": 1.006,
    "g5.2xlarge": 1.212,
    "g6.xlarge": 0.8048,
    "m5.large": 0.096,
    "m5.xlarge": 0.192,
    "p4d.24xlarge": 21.9576,
    "t3.medium": 0.0416,
    "t3.small": 0.0208,
}
"""Default prices: rounded list prices for Linux in us-east-1. Only the simulation charges them."""
DEFAULT_CAPACITY = 20


class CapacityPool(NamedTuple):
    """An instance type in a zone."""

    instance_type: str
    zone: str


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A pool in a fleet request."""

    pool: CapacityPool
    place: int = 0
    """Index of the override in the request."""
    weight: float = 1.0
    """Units of the target that one machine provides."""
    max_price_usd: float | None = None
    priority: float = 0.0
    """Lower values are preferred by the strategies that use it."""


@dataclass(frozen=True, kw_only=True)
class Demand:
    """The part of a fleet request for one lifecycle."""

    lifecycle: Lifecycle
    target: float
    """Units wanted; may be exceeded by less than one machine."""
    strategy: str = "lowest-price"
    num_pools: int = 1
    """Number of pools for ``lowest-price``."""
    is_single_type: bool = False
    is_single_zone: bool = False
    min_target: float = 0.0
    """With fewer units than this, nothing is launched."""


@dataclass(frozen=True, kw_only=True)
class MarketRefusal:
    """Reason why a pool, or the whole request if ``candidate`` is None, got less than requested."""

    lifecycle: Lifecycle
    code: str
    candidate: Candidate | None = None

    @property
    def message(self) -> str:
        """EC2's message for the code."""
        if self.code == NO_CAPACITY and self.candidate is not None:
            instance_type, zone = self.candidate.pool
            return (
                f"We currently do not have sufficient {instance_type} capacity in the "
                f"Availability Zone you requested ({zone}). Our system will be working on "
                "provisioning additional capacity."
            )
        if self.code == PRICE_TOO_LOW:
            return (
                "Your Spot request price is lower than the minimum required Spot request "
                "fulfillment price."
            )
        return "Unable to fulfill capacity due to your request configuration."


@dataclass(frozen=True, kw_only=True)
class FleetPlan:
    """The allocation of a fleet request: one candidate per machine, and why there are no more."""

    launches: tuple[Candidate, ...] = ()
    refusals: tuple[MarketRefusal, ...] = ()


@dataclass
class _Offer:
    capacity: int = 0
    starts: list[float] = field(default_factory=list)
    prices: list[float] = field(default_factory=list)


class Market:
    """Capacity, prices and usage. Not thread-safe."""

    def __init__(self) -> None:
        self._offers: dict[CapacityPool, _Offer] = {}
        self._on_demand_usd: dict[str, float] = {}
        self._on_demand_capacity: dict[str, int] = {}
        self._taken: dict[str, tuple[CapacityPool, Lifecycle]] = {}

    @classmethod
    def default(cls, zones: Iterable[str]) -> Market:
        """Return a market with capacity for the usual types in some zones."""
        market = cls()
        names = list(zones)
        for instance_type, usd in DEFAULT_ON_DEMAND_USD.items():
            market.set_on_demand(instance_type, price_usd=usd)
            for place, zone in enumerate(names):
                price = round(usd * (0.35 + 0.03 * place), 4)
                pool = CapacityPool(instance_type, zone)
                market.set_pool(pool, at=BEFORE, capacity=DEFAULT_CAPACITY, price_usd=price)
        return market

    def set_pool(
        self,
        pool: CapacityPool,
        *,
        at: float,
        capacity: int | None = None,
        price_usd: float | None = None,
    ) -> None:
        """Set a pool's spot capacity (machines in use included), and its price from ``at`` on."""
        if (capacity or 0) < 0 or (price_usd or 0.0) < 0:
            raise ValueError(f"{capacity=} and {price_usd=} of {pool} must be >= 0")
        offer = self._offers.setdefault(pool, _Offer())
        if capacity is not None:
            offer.capacity = capacity
        if price_usd is not None:
            if offer.starts and at < offer.starts[-1]:
                raise ValueError(f"{pool} already has a price for a later time")
            # The first price also holds for all earlier instants, so that every machine has one.
            offer.starts.append(at if offer.starts else BEFORE)
            offer.prices.append(price_usd)

    def set_on_demand(
        self, instance_type: str, *, price_usd: float | None = None, capacity: int | None = None
    ) -> None:
        """Set a type's on-demand price, and its capacity across all zones."""
        if price_usd is not None:
            self._on_demand_usd[instance_type] = price_usd
        if capacity is not None:
            self._on_demand_capacity[instance_type] = capacity

    def pools(self) -> list[CapacityPool]:
        """Return the pools, sorted."""
        return sorted(self._offers)

    def take(self, instance_id: str, pool: CapacityPool, lifecycle: Lifecycle) -> None:
        """Count a machine as used."""
        self._taken[instance_id] = (pool, lifecycle)

    def release(self, instance_id: str, *, is_lost: bool = False) -> None:
        """Release a machine; ``is_lost`` also gives its spot capacity to another customer."""
        # The machine is unknown if it was already released, or was taken in an earlier market.
        pool, lifecycle = self._taken.pop(instance_id, (None, None))
        if pool is not None and is_lost and lifecycle == "spot" and pool in self._offers:
            self._offers[pool].capacity = max(0, self._offers[pool].capacity - 1)

    def free(self, pool: CapacityPool, lifecycle: Lifecycle) -> int:
        """Return the number of machines that can still be started."""
        if lifecycle == "spot":
            offer = self._offers.get(pool)
            if offer is None or not offer.prices:
                return 0
            return max(0, offer.capacity - self._num_taken(pool, lifecycle))
        if pool.instance_type not in self._on_demand_usd:
            return 0
        capacity = self._on_demand_capacity.get(pool.instance_type, 1_000_000)
        return max(0, capacity - self._num_taken(pool, lifecycle))

    def _num_taken(self, pool: CapacityPool, lifecycle: Lifecycle) -> int:
        # Spot capacity is per type and zone, on-demand capacity per type.
        return sum(
            kind == lifecycle
            and (held == pool if kind == "spot" else held.instance_type == pool.instance_type)
            for held, kind in self._taken.values()
        )

    def on_demand_usd(self, instance_type: str) -> float | None:
        """Return a type's on-demand price per hour."""
        return self._on_demand_usd.get(instance_type)

    def on_demand_types(self) -> list[str]:
        """Return the types with an on-demand price."""
        return sorted(self._on_demand_usd)

    def periods(self, pool: CapacityPool) -> list[tuple[float, float, float]]:
        """Return a pool's prices, oldest first: from, until, price."""
        offer = self._offers.get(pool, _Offer())
        ends = [*offer.starts[1:], float("inf")]
        return list(zip(offer.starts, ends, offer.prices, strict=False))  # it may have no price

    def spot_usd(self, pool: CapacityPool, at: float) -> float | None:
        """Return the price per hour at an instant."""
        offer = self._offers.get(pool)
        if offer is None or not offer.prices:
            return None
        return offer.prices[max(0, bisect_right(offer.starts, at) - 1)]

    def charge_usd(
        self, pool: CapacityPool, lifecycle: Lifecycle, start: float, end: float
    ) -> float:
        """Return the cost of a machine between two instants, at the prices in force."""
        if lifecycle == "on-demand":
            return (end - start) / 3600 * (self.on_demand_usd(pool.instance_type) or 0.0)
        # Charge each price only for its overlap with the machine's run time.
        return sum(
            max(0.0, min(until, end) - max(at, start)) / 3600 * usd
            for at, until, usd in self.periods(pool)
        )

    def score(self, pools: Iterable[CapacityPool], units: int) -> int:
        """Score the likelihood that these pools together meet a target, from 1 to 10."""
        # AWS does not publish its formula. Here, capacity for twice the target gives the full
        # score.
        room = sum(self.free(pool, "spot") for pool in pools)
        return max(1, min(10, round(10 * room / max(1, 2 * units))))

    def plan(self, candidates: Sequence[Candidate], demand: Demand, at: float) -> FleetPlan:
        """Choose machines for a demand, without taking them."""
        # 1. Groups of candidates that may be combined: all, or those of one zone or type.
        # 2. Fill each group greedily, machine by machine, in the order of the strategy.
        # 3. Choose the group with the most units; on a tie, the cheapest.
        # 4. Fewer units than MinTargetCapacity: launch nothing.
        groups = _groups(candidates, demand)
        chosen = [self._fill(group, demand, at) for group in groups]

        def rank(got: Sequence[Candidate]) -> tuple[float, float]:
            usd = sum(self._hourly_usd(candidate, demand, at) for candidate in got)
            return -min(_units(got), demand.target), usd

        best = min(chosen, key=rank, default=[])
        refusals = []
        if _units(best) < demand.target:
            refusals = [self._refusal(candidate, demand, at) for candidate in candidates]
        if _units(best) < demand.min_target:
            best = []
            refusals = [MarketRefusal(lifecycle=demand.lifecycle, code=UNFULFILLABLE), *refusals]
        return FleetPlan(launches=tuple(best), refusals=tuple(refusals))

    def _fill(self, group: Sequence[Candidate], demand: Demand, at: float) -> list[Candidate]:
        got: list[Candidate] = []
        while _units(got) < demand.target:
            room = [
                candidate for candidate in group if self._num_free(candidate, got, demand, at) > 0
            ]
            if not room:
                break
            got.append(min(room, key=self._sort_key(demand, got, at)))
        return got

    def _num_free(
        self, candidate: Candidate, got: Sequence[Candidate], demand: Demand, at: float
    ) -> int:
        if demand.lifecycle == "spot" and self._is_over_max_price(candidate, at):
            return 0
        # The machines in `got` are chosen but not taken yet: `free` still includes them.
        same = sum(
            one.pool == candidate.pool
            if demand.lifecycle == "spot"
            else one.pool.instance_type == candidate.pool.instance_type
            for one in got
        )
        return self.free(candidate.pool, demand.lifecycle) - same

    def _is_over_max_price(self, candidate: Candidate, at: float) -> bool:
        usd = self.spot_usd(candidate.pool, at)
        return (
            usd is not None
            and candidate.max_price_usd is not None
            and (candidate.max_price_usd < usd)
        )

    def _sort_key(
        self, demand: Demand, got: Sequence[Candidate], at: float
    ) -> Callable[[Candidate], tuple[float, ...]]:
        # The sort key of candidates with capacity; the smallest is launched next. The strategies
        # are EC2's, from "Allocation strategies for EC2 Fleet".
        def usd(candidate: Candidate) -> float:
            return self._hourly_usd(candidate, demand, at) / candidate.weight

        def room(candidate: Candidate) -> int:
            return self._num_free(candidate, got, demand, at)

        def used(candidate: Candidate) -> int:
            return sum(one.pool == candidate.pool for one in got)

        def is_new(candidate: Candidate) -> bool:
            # True if the candidate would exceed the number of pools for ``lowest-price``.
            num_used = len({one.pool for one in got})
            return used(candidate) == 0 and num_used >= demand.num_pools

        match demand.strategy:
            case "price-capacity-optimized":
                # Prefer cheap pools with much capacity; capacity beyond eight machines makes no
                # difference.
                return lambda one: (usd(one) / (1 + 0.25 * min(room(one), 8)), one.place)
            case "capacity-optimized":
                return lambda one: (-room(one), usd(one), one.place)
            case "capacity-optimized-prioritized" | "prioritized":
                return lambda one: (one.priority, -room(one), one.place)
            case "diversified":
                return lambda one: (used(one), usd(one), one.place)
            case _:  # lowest-price: the cheapest `num_pools` pools; several are used evenly
                return lambda one: (is_new(one), used(one) * (demand.num_pools > 1), usd(one))

    def _hourly_usd(self, candidate: Candidate, demand: Demand, at: float) -> float:
        if demand.lifecycle == "spot":
            return self.spot_usd(candidate.pool, at) or 0.0
        return self.on_demand_usd(candidate.pool.instance_type) or 0.0

    def _refusal(self, candidate: Candidate, demand: Demand, at: float) -> MarketRefusal:
        is_over_max_price = demand.lifecycle == "spot" and self._is_over_max_price(candidate, at)
        return MarketRefusal(
            lifecycle=demand.lifecycle,
            code=PRICE_TOO_LOW if is_over_max_price else NO_CAPACITY,
            candidate=candidate,
        )


def _units(got: Iterable[Candidate]) -> float:
    return sum(candidate.weight for candidate in got)


def _groups(candidates: Sequence[Candidate], demand: Demand) -> list[list[Candidate]]:
    """Group the candidates that may be combined: by zone, by type, by both, or all together."""
    groups: dict[tuple[str, str], list[Candidate]] = {}
    for candidate in candidates:
        key = (
            candidate.pool.instance_type if demand.is_single_type else "",
            candidate.pool.zone if demand.is_single_zone else "",
        )
        groups.setdefault(key, []).append(candidate)
    return list(groups.values())
