"""Describe the maximum cost of a cluster before anything is launched."""

from __future__ import annotations

import time

from etrain_jupyter.plugins.ec2.aws_messages import AwsErrors, pool_error
from etrain_jupyter.plugins.ec2.ec2_api import Clients
from etrain_jupyter.plugins.ec2.head.view import Rules, highest_usd
from etrain_jupyter.plugins.ec2.launch_context import make_offers, survey
from etrain_jupyter.plugins.ec2.ledger import PriceBook, WorstCase, worst_case
from etrain_jupyter.plugins.ec2.network import NOTHING
from etrain_jupyter.plugins.ec2.placement import Offer
from etrain_jupyter.plugins.ec2.prices import Prices
from etrain_jupyter.plugins.ec2.spec import AwsSpotSpec

LOOK_BACK_S = 3600.0


def describe_price(clients: Clients, spec: AwsSpotSpec, num_workers: int) -> str:
    """Return the maximum cost of ``num_workers`` workers as text, with the sources of the prices.

    Raises:
        PoolError: If AWS refuses a request for types, zones or prices.
    """
    types, subnets = survey(clients, spec)
    prices = Prices(clients=clients, region=spec.region, volume_type=spec.volume.type)
    has_head = spec.head == "on-demand"
    now = time.time()
    try:
        # The head's machine is charged on demand from start to end, whatever the workers cost.
        wanted = {*types, *([spec.head_type] if has_head else [])}
        prices.refresh(wanted, since=now - LOOK_BACK_S, now=now)
    except AwsErrors as exc:
        raise pool_error("the prices cannot be read", exc, NOTHING) from exc
    offers = make_offers(spec, types, subnets, prices.book, {}, now)
    # If there is no spot price, EC2 sells none of the types as spot in these zones.
    spot = [one.spot_usd / one.workers for one in offers if one.spot_usd is not None]
    if not spot:
        return f"unknown: EC2 does not offer {', '.join(types)} as spot machines in {spec.region}"
    worst = worst_of(spec, offers, prices.book, num_workers)
    head_usd = prices.book.on_demand.get(spec.head_type, 0.0) if has_head else 0.0
    now_usd = num_workers * min(spot) + head_usd
    workers = f"{num_workers} worker" + ("" if num_workers == 1 else "s")
    limits = {"max_hourly": spec.budget.max_hourly, "max_total": spec.budget.max_total}
    held = [f"budget.{name} {usd:,.2f}" for name, usd in limits.items() if usd is not None]
    bound = f", limited by {' and '.join(held)}" if held else "; no budget is set"
    return (
        f"about ${now_usd:,.2f} an hour for {workers} now; at worst ${worst.hourly:,.2f} an hour "
        f"and ${worst.total:,.2f} in {spec.lifetime.max / 3600:g} h{bound} ({prices.describe()})"
    )


def worst_of(
    spec: AwsSpotSpec, offers: tuple[Offer, ...], book: PriceBook, num_workers: int
) -> WorstCase:
    """Return the cost of workers at the highest price for the whole lifetime."""
    smallest = min(offer.workers for offer in offers)
    # Round up and assume the smallest machines, which gives the most disks.
    num_nodes = -(-num_workers // smallest)
    highest = highest_usd(offers, Rules.of(spec, "")) * smallest
    return worst_case(
        num_nodes=num_nodes,
        highest_usd=highest,
        lifetime_s=spec.lifetime.max,
        volume_gib=spec.volume.gib,
        volume_gib_month=book.volume_gib_month,
        head_usd=book.on_demand.get(spec.head_type, 0.0) if spec.head == "on-demand" else 0.0,
        max_hourly=spec.budget.max_hourly,
        max_total=spec.budget.max_total,
    )
