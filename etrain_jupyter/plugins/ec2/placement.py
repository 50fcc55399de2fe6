"""Choose types and zones for a launch, and the number of machines within the budget.

The choice of zones considers EC2's spot placement scores, which estimate from 1 to 10 whether a
request for spot machines of several types will succeed in a zone now, and the price of traffic.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass

from etrain_jupyter.plugins.ec2.fleet_state import FleetState
from etrain_jupyter.rules.costs import usd_per_1k_samples

UNKNOWN_SCORE = 5
VALUE_MARGIN = 1.15
"""A type is launched if its cost per sample is at most this multiple of the lowest cost."""
LOW = 3
"""Highest score that counts as low; also the highest one that EC2 gives to one or two types."""
CLEARLY_BETTER = 3
"""Smallest difference between two zones' scores that is not just noise."""
WAIT_S = 60.0
"""Time without capacity in a zone after which other zones may be used, in seconds."""
SHORT_WAIT_S = 15.0
"""The same for a zone with a low score, if another zone has a clearly better one."""
USD_PER_GB = 0.02
"""Price of traffic between two zones of a region: 0.01 US dollars per GB out, and 0.01 in."""


@dataclass(frozen=True, kw_only=True)
class Offer:
    """A machine type in a zone, and its prices."""

    type: str
    zone: str
    workers: int = 1
    """Workers per machine, one per GPU."""
    spot_usd: float | None = None
    """US dollars an hour; None if EC2 lists no price, because it does not sell the type there."""
    on_demand_usd: float | None = None
    """None if unknown."""
    score: int = 0
    """EC2's spot placement score, 1 to 10; 0 if unknown."""

    def usd(self, lifecycle: str) -> float | None:
        """Return the price for a lifecycle."""
        return self.spot_usd if lifecycle == "spot" else self.on_demand_usd


def usable(
    offers: Sequence[Offer],
    state: FleetState,
    lifecycle: str,
    now: float,
    *,
    must_know_price: bool,
) -> list[Offer]:
    """Return the offers that are on sale and not known to lack capacity."""
    found = []
    for offer in offers:
        back_off = state.back_offs.get((offer.type, offer.zone, lifecycle))
        if back_off is not None and now < back_off.until:
            continue
        # A pool without spot price history does not exist.
        if offer.usd(lifecycle) is None and (must_know_price or lifecycle == "spot"):
            continue
        found.append(offer)
    return found


def best_zone(offers: Sequence[Offer], candidates: Sequence[Offer], lifecycle: str) -> str:
    """Return the zone with the lowest risk-adjusted price per worker; empty if there is none.

    The price is multiplied by 1 (score 10) to 1.9 (score 1), and by up to 1.5 for the share of the
    zone's types that have just been refused. ``candidates`` is the subset of ``offers`` that may be
    requested.
    """
    rated: list[tuple[float, str]] = []
    for zone in sorted({offer.zone for offer in candidates}):
        here = [offer for offer in candidates if offer.zone == zone]
        num_all = sum(1 for offer in offers if offer.zone == zone)
        price = min((offer.usd(lifecycle) or 0.0) / offer.workers for offer in here)
        # EC2 scores a zone for all types together, so all offers of a zone have the same score.
        score = max(offer.score for offer in here) or UNKNOWN_SCORE
        risk = 1 + (10 - score) / 10
        # `here` excludes the offers that are backing off.
        refused = 1 + 0.5 * (1 - len(here) / max(1, num_all))
        rated.append((price * risk * refused, zone))
    return min(rated)[1] if rated else ""


def best_value(
    candidates: Sequence[Offer],
    lifecycle: str,
    rates: Mapping[str, float],
    present: Container[str],
    room: int,
) -> tuple[list[Offer], int | None]:
    """Return the offers with the lowest price per sample, and a limit on the number of machines.

    Types within ``VALUE_MARGIN`` of the best one count as equivalent, because any of them may lack
    capacity.

    ===========================================  ===============================================
    no type has been measured                    all offers
    a type was neither measured nor launched     one machine of it, the cheapest per worker first
    otherwise                                    the measured types with the lowest cost
    only types that are being measured           these
    ===========================================  ===============================================

    ``rates`` are measured samples per second of one worker, ``present`` the types of running
    machines, and ``room`` is the maximum number of additional workers.
    """
    if not rates:
        return list(candidates), None
    candidates = [one for one in candidates if one.workers <= room] or candidates
    unknown = [one for one in candidates if one.type not in rates and one.type not in present]
    if unknown:
        type = min(unknown, key=lambda one: (one.usd(lifecycle) or 0.0) / one.workers).type
        return [one for one in unknown if one.type == type], 1
    costs = {
        one: usd_per_1k_samples((one.usd(lifecycle) or 0.0) / one.workers, rates[one.type])
        for one in candidates
        if one.type in rates
    }
    if not costs:
        return list(candidates), None
    limit = min(costs.values()) * VALUE_MARGIN
    return [one for one, usd in costs.items() if usd <= limit], None


def best_size(
    candidates: Sequence[Offer], lifecycle: str, missing: int, room: int
) -> tuple[list[Offer], int]:
    """Return offers of one size, and the number of machines to launch.

    All machines in a request have the same number of workers, so EC2 cannot launch more than
    requested. ``room`` is the maximum number of additional workers, including ``missing``.
    """
    best: tuple[float, int, int] | None = None
    for size in sorted({offer.workers for offer in candidates}):
        # Round down: the remainder is requested with a smaller size, if there is one, in the next
        # tick.
        count = missing // size
        if count == 0 and size <= room:
            count = 1  # more than wanted, because nothing smaller is available
        if count:
            same = [offer for offer in candidates if offer.workers == size]
            price = min(offer.usd(lifecycle) or 0.0 for offer in same) / size
            # Price per wanted worker: the spare ones are charged as well.
            spare = max(0, count * size - missing)
            rated = (price * (missing + spare) / missing, size, count)
            best = min(best, rated) if best else rated
    if best is None:
        return [], 0
    return [offer for offer in candidates if offer.workers == best[1]], best[2]


def within_budget(
    candidates: Sequence[Offer],
    lifecycle: str,
    count: int,
    room_usd: float | None,
    *,
    disk_usd: float = 0.0,
) -> tuple[list[Offer], int]:
    """Return the offers and the number of machines that ``room_usd`` pays for in the worst case.

    EC2 may fill a request from the most expensive offer alone. Expensive offers are left out if
    that allows more machines. ``room_usd`` is in US dollars an hour; None if there is no budget.
    """
    if room_usd is None:
        return list(candidates), count
    best: tuple[list[Offer], int] = ([], 0)
    # Choose the price limit that allows the most machines. Among limits that allow the same number,
    # choose the highest: it keeps the most pools, and each pool may lack capacity.
    for limit in sorted({offer.usd(lifecycle) or 0.0 for offer in candidates}):
        each = limit + disk_usd
        fit = count if each <= 0 else min(count, int(room_usd / each + 1e-9))
        if fit > 0 and fit >= best[1]:
            best = [one for one in candidates if (one.usd(lifecycle) or 0.0) <= limit], fit
    return best


def zone_wait_s(*, score: int, best_elsewhere: int) -> float:
    """Return the time without capacity in a zone after which other zones may be used.

    Many refusals end within a minute, and machines in another zone cost traffic. Waiting is
    pointless if EC2 itself expects no capacity here, but elsewhere.

    Scores are 0 if unknown.

    >>> zone_wait_s(score=1, best_elsewhere=9), zone_wait_s(score=0, best_elsewhere=9)
    (15.0, 60.0)
    """
    is_hopeless = 0 < score <= LOW and best_elsewhere >= score + CLEARLY_BETTER
    return SHORT_WAIT_S if is_hopeless else WAIT_S


def traffic_usd_per_h(
    *, gradient_bytes: float, steps_per_s: float, workers: int, zones: int
) -> float:
    """Return the hourly price of the exchange of gradients between zones.

    In a ring, each rank sends ``2 (w - 1) / w`` times the gradients to its neighbor in each step.
    If the ranks of each zone are neighbors, one link per zone leads to another zone.

    >>> round(traffic_usd_per_h(gradient_bytes=1e6, steps_per_s=1.0, workers=4, zones=2), 3)
    0.216
    """
    if zones < 2 or workers < 2:
        return 0.0
    sent = 2 * (workers - 1) / workers * gradient_bytes * zones
    return sent * steps_per_s * 3600 / 1e9 * USD_PER_GB


def pays_to_spread(
    *,
    traffic_usd: float,
    state_bytes: float,
    changes_per_h: float,
    num_more: int,
    spot_usd: float,
    on_demand_usd: float,
) -> bool:
    """Return True if spot workers in another zone cost less than workers on demand.

    The alternatives are to wait without these workers, or to pay the on-demand price. The job can
    always buy a worker at that price, so a worker is assumed to be worth at most that much.

    All prices are per hour. ``traffic_usd`` is the price of all traffic; see ``traffic_usd_per_h``.
    The other prices are for one of the ``num_more`` workers in the other zone. Every hour,
    ``changes_per_h`` workers receive the state.

    >>> terms = dict(state_bytes=3e8, changes_per_h=2.0, spot_usd=0.28, on_demand_usd=0.80)
    >>> pays_to_spread(traffic_usd=0.2, num_more=2, **terms)
    True
    >>> pays_to_spread(traffic_usd=8.0, num_more=2, **terms)
    False
    """
    if num_more < 1:
        return False
    state_usd = state_bytes / 1e9 * USD_PER_GB * changes_per_h
    return spot_usd + (traffic_usd + state_usd) / num_more <= on_demand_usd
