"""Read a pool's current prices from EC2, and describe its maximum cost before a launch."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

from etrain_jupyter.display.numbers import counted
from etrain_jupyter.plugins.ec2.aws_messages import AwsErrors, pool_error
from etrain_jupyter.plugins.ec2.ec2_api import Clients, TypeFacts, placement_scores
from etrain_jupyter.plugins.ec2.head.view import Rules, highest_usd
from etrain_jupyter.plugins.ec2.launch_context import make_offers, survey, workers_of
from etrain_jupyter.plugins.ec2.ledger import HOURS_OF_MONTH, PriceBook
from etrain_jupyter.plugins.ec2.network import NOTHING
from etrain_jupyter.plugins.ec2.placement import Offer
from etrain_jupyter.plugins.ec2.prices import Prices
from etrain_jupyter.plugins.ec2.spec import AwsSpotSpec

LOOK_BACK_S = 3600.0


@dataclass(frozen=True, kw_only=True)
class LivePrices:
    """Prices in US dollars an hour, by machine type."""

    workers: Mapping[str, int]
    """Workers per machine, for each type that the region offers."""
    on_demand: Mapping[str, float]
    spot: Mapping[str, Mapping[str, float]]
    """By type and zone, in the zones where the pool can launch machines."""
    scores: Mapping[str, int]
    """Spot placement score of the best zone, 1 to 10; empty if EC2 gives none."""
    head_usd: float
    """Price of the scheduler's machine; 0 if the scheduler runs in the notebook."""
    source: str


def read_live_prices(
    spec: AwsSpotSpec, *, since: float, now: float, clients: Clients | None = None
) -> LivePrices:
    """Query EC2. Nothing is launched or changed.

    ``since`` is the beginning of the price history to read, in seconds since the epoch.

    Raises:
        PoolError: If EC2 refuses a request for types, zones or prices.
    """
    clients = clients or Clients(spec)
    types, subnets, prices, head_usd = _read(clients, spec, since, now)
    book = prices.book
    spot = {
        name: {zone: usd for zone in subnets if (usd := book.spot_at(name, zone, now)) is not None}
        for name in types
    }
    scores = {
        name: max(found.values())
        for name in types
        if (found := placement_scores(clients.ec2, [name], spec.workers.max, spec.region))
    }
    return LivePrices(
        workers={name: workers_of(spec, facts) for name, facts in types.items()},
        on_demand=book.on_demand,
        spot=spot,
        scores=scores,
        head_usd=head_usd,
        source=prices.describe(),
    )


def _read(
    clients: Clients, spec: AwsSpotSpec, since: float, now: float
) -> tuple[Mapping[str, TypeFacts], Mapping[str, str], Prices, float]:
    """Return the pool's types and subnets, the types' prices, and the scheduler machine's price."""
    types, subnets = survey(clients, spec)
    prices = Prices(clients=clients, region=spec.region, volume_type=spec.volume.type)
    # The head's machine is charged on demand from start to end, whatever the workers cost.
    heads = [spec.head_type] if spec.head == "on-demand" else []
    try:
        prices.refresh({*types, *heads}, since=since, now=now)
    except AwsErrors as exc:
        raise pool_error("the prices cannot be read", exc, NOTHING) from exc
    head_usd = sum(prices.book.on_demand.get(type, 0.0) for type in heads)
    return types, subnets, prices, head_usd


def describe_price(clients: Clients, spec: AwsSpotSpec, num_workers: int) -> str:
    """Return the maximum cost of ``num_workers`` workers as text, with the sources of the prices.

    Raises:
        PoolError: If AWS refuses a request for types, zones or prices.
    """
    now = time.time()
    types, subnets, prices, head_usd = _read(clients, spec, now - LOOK_BACK_S, now)
    offers = make_offers(spec, types, subnets, prices.book, {}, now)
    # If there is no spot price, EC2 sells none of the types as spot in these zones.
    spot = [one.spot_usd / one.workers for one in offers if one.spot_usd is not None]
    if not spot:
        return f"unknown: EC2 does not offer {', '.join(types)} as spot machines in {spec.region}"
    hourly, total = worst_of(spec, offers, prices.book, num_workers)
    now_usd = num_workers * min(spot) + head_usd
    limits = {"max_hourly": spec.budget.max_hourly, "max_total": spec.budget.max_total}
    held = [f"budget.{name} {usd:,.2f}" for name, usd in limits.items() if usd is not None]
    bound = f", limited by {' and '.join(held)}" if held else "; no budget is set"
    return (
        f"about ${now_usd:,.2f} an hour for {counted(num_workers, 'worker')} now; at worst "
        f"${hourly:,.2f} an hour "
        f"and ${total:,.2f} in {spec.lifetime.max / 3600:g} h{bound} ({prices.describe()})"
    )


def worst_of(
    spec: AwsSpotSpec, offers: tuple[Offer, ...], book: PriceBook, num_workers: int
) -> tuple[float, float]:
    """Return the cost of workers at the highest price, per hour and for the whole lifetime."""
    smallest = min(offer.workers for offer in offers)
    # Round up and assume the smallest machines, which gives the most disks.
    num_nodes = -(-num_workers // smallest)
    disk = spec.volume.gib * book.volume_gib_month / HOURS_OF_MONTH
    hourly = num_nodes * (highest_usd(offers, Rules.of(spec, "")) * smallest + disk)
    if spec.head == "on-demand" and (head_usd := book.on_demand.get(spec.head_type, 0.0)):
        hourly += head_usd + disk
    hourly = min(hourly, spec.budget.max_hourly or hourly)
    total = hourly * spec.lifetime.max / 3600
    return hourly, min(total, spec.budget.max_total or total)
