"""What a cluster can cost at most, before anything is made: for a dry run and for the screen."""

from __future__ import annotations

import time
from dataclasses import dataclass

from etrain_jupyter.pools.aws_spot.aws_words import AwsErrors, pool_error
from etrain_jupyter.pools.aws_spot.ec2 import Clients
from etrain_jupyter.pools.aws_spot.ledger import WorstCase, worst_case
from etrain_jupyter.pools.aws_spot.network import NOTHING
from etrain_jupyter.pools.aws_spot.placement import Offer
from etrain_jupyter.pools.aws_spot.prices import VOLUME_USD, Prices
from etrain_jupyter.pools.aws_spot.spec import AwsSpotSpec
from etrain_jupyter.pools.aws_spot.surroundings import make_offers, survey
from etrain_jupyter.pools.aws_spot.view import Rules, dearest_usd


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """The most that a cluster can cost, and what that rests on."""

    worst: WorstCase
    offers: tuple[Offer, ...]
    """Types and zones, with their prices now."""
    prices: str
    """Where prices come from, and of when they are."""
    num_workers: int
    lifetime_s: float

    def describe(self) -> str:
        """Return it in words."""
        spot = [offer for offer in self.offers if offer.spot_usd is not None]
        lines = [
            f"worst case: {self.num_workers} workers, {self.worst.hourly:.2f} US dollars an hour, "
            f"{self.worst.total:.2f} in {self.lifetime_s / 3600:g} h"
        ]
        if self.worst.total < self.worst.uncapped_total:
            lines[0] += f" (without budget {self.worst.uncapped_total:.2f})"
        for offer in sorted(spot, key=lambda one: (one.spot_usd or 0.0) / one.workers)[:5]:
            full = f", {offer.on_demand_usd:g} on demand" if offer.on_demand_usd else ""
            lines.append(f"  {offer.type} in {offer.zone}: {offer.spot_usd:g} an hour{full}")
        return "\n".join([*lines, self.prices])


def estimate(clients: Clients, spec: AwsSpotSpec) -> Estimate:
    """Ask AWS for types, zones and prices; nothing is made.

    Raises:
        PoolError: If the account or the spec does not allow a cluster.
    """
    types, subnets = survey(clients, spec)
    now = time.time()
    prices = Prices(clients=clients, region=spec.region, volume_type=spec.volume.type)
    wanted = {*types, *([spec.head_type] if spec.head == "on-demand" else [])}
    try:
        prices.refresh(wanted, since=now - 3600, now=now)
    except AwsErrors as exc:
        raise pool_error(f"the prices of {spec.region} cannot be read", exc, NOTHING) from exc
    book = prices.book
    offers = make_offers(spec, types, subnets, book, {}, now)
    rules = Rules.of(spec, "")
    smallest = min(offer.workers for offer in offers)
    worst = worst_case(
        num_nodes=spec.workers.max // smallest or 1,
        dearest_usd=dearest_usd(offers, rules) * smallest,
        lifetime_s=spec.lifetime.max,
        volume_gib=spec.volume.gib,
        volume_gib_month=VOLUME_USD[spec.volume.type],
        head_usd=book.on_demand.get(spec.head_type, 0.0) if spec.head == "on-demand" else 0.0,
        max_hourly=spec.budget.max_hourly,
        max_total=spec.budget.max_total,
    )
    return Estimate(
        worst=worst,
        offers=offers,
        prices=prices.describe(),
        num_workers=spec.workers.max,
        lifetime_s=spec.lifetime.max,
    )
