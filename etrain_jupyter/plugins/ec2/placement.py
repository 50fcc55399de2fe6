"""Choose types and zones for a launch, and the number of machines within the budget."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass

from etrain_jupyter.plugins.ec2.fleet_state import FleetState
from etrain_jupyter.rules.policy.type_rates import usd_per_1k_samples

UNKNOWN_SCORE = 5
VALUE_MARGIN = 1.15
"""Types whose cost per sample is at most this multiple of the lowest one are launched."""


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

    Types within ``VALUE_MARGIN`` of the best one are equivalent: each of them may lack capacity.

    ===========================================  ===============================================
    no type has been measured                    all offers
    a type was neither measured nor launched     one machine of it, the cheapest per worker first
    otherwise                                    the measured types with the lowest cost
    only types that are being measured           these
    ===========================================  ===============================================

    Args:
        candidates: Offers that may be requested.
        lifecycle: ``spot`` or ``on-demand``.
        rates: Measured samples per second of one worker, by type.
        present: Types of running machines.
        room: Maximum number of additional workers.
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
