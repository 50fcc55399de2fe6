"""Which types and zones a launch may use, and how many machines the budget lets in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from etrain_jupyter.pools.ec2.fleet_state import FleetState

UNKNOWN_SCORE = 5


@dataclass(frozen=True, kw_only=True)
class Offer:
    """A type in a zone, and what it costs there."""

    type: str
    zone: str
    workers: int = 1
    """Of one machine: one a GPU."""
    spot_usd: float | None = None
    """US dollars an hour; None if EC2 names none, and so sells none."""
    on_demand_usd: float | None = None
    """None if nobody knows."""
    score: int = 0
    """EC2's spot placement score, 1 to 10; 0 if it was not asked."""

    def usd(self, lifecycle: str) -> float | None:
        """Return the price of a lifecycle."""
        return self.spot_usd if lifecycle == "spot" else self.on_demand_usd


def usable(
    offers: Sequence[Offer],
    state: FleetState,
    lifecycle: str,
    now: float,
    *,
    must_know_price: bool,
) -> list[Offer]:
    """Return those that may be asked for: on sale, and not known to have no capacity now."""
    found = []
    for offer in offers:
        back_off = state.back_offs.get((offer.type, offer.zone, lifecycle))
        if back_off is not None and now < back_off.until:
            continue
        # A spot price that is not in the history means that the pool does not exist.
        if offer.usd(lifecycle) is None and (must_know_price or lifecycle == "spot"):
            continue
        found.append(offer)
    return found


def best_zone(offers: Sequence[Offer], candidates: Sequence[Offer], lifecycle: str) -> str:
    """Return the zone with the best price for a worker, capacity considered; empty if none.

    A full score costs nothing, the lowest nearly doubles the price; so does, by half, that many of
    the zone's types have just been refused.

    Args:
        offers: All of them.
        candidates: Those that may be asked for.
        lifecycle: What is to be launched.
    """
    rated: list[tuple[float, str]] = []
    for zone in sorted({offer.zone for offer in candidates}):
        here = [offer for offer in candidates if offer.zone == zone]
        num_all = sum(1 for offer in offers if offer.zone == zone)
        price = min((offer.usd(lifecycle) or 0.0) / offer.workers for offer in here)
        score = max(offer.score for offer in here) or UNKNOWN_SCORE
        risk = 1 + (10 - score) / 10
        refused = 1 + 0.5 * (1 - len(here) / max(1, num_all))
        rated.append((price * risk * refused, zone))
    return min(rated)[1] if rated else ""


def best_size(
    candidates: Sequence[Offer], lifecycle: str, missing: int, room: int
) -> tuple[list[Offer], int]:
    """Return offers of one size, and how many machines of it are to be launched.

    All machines of a request have equally many workers, so that EC2 cannot give more than asked
    for.

    Args:
        candidates: What may be asked for.
        lifecycle: What is to be launched.
        missing: Workers that are wanted and neither here nor coming.
        room: Workers that there may be more, ``missing`` included.
    """
    best: tuple[float, int, int] | None = None
    for size in sorted({offer.workers for offer in candidates}):
        count = missing // size
        if count == 0 and size <= room:
            count = 1  # more than wanted, since nothing smaller is there
        if count:
            same = [offer for offer in candidates if offer.workers == size]
            price = min(offer.usd(lifecycle) or 0.0 for offer in same) / size
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
    """Return the offers and the number of machines whose dearest outcome ``room_usd`` pays for.

    EC2 may fill a request from the dearest offer alone. Dear offers are left out where that lets
    more machines in.

    Args:
        candidates: Of one size.
        lifecycle: What is to be launched.
        count: Machines that are wanted.
        room_usd: US dollars an hour that are left; None without a bound.
        disk_usd: US dollars an hour of one machine's disk.
    """
    if room_usd is None:
        return list(candidates), count
    best: tuple[list[Offer], int] = ([], 0)
    for limit in sorted({offer.usd(lifecycle) or 0.0 for offer in candidates}):
        each = limit + disk_usd
        fit = count if each <= 0 else min(count, int(room_usd / each + 1e-9))
        if fit > 0 and fit >= best[1]:
            best = [one for one in candidates if (one.usd(lifecycle) or 0.0) <= limit], fit
    return best
