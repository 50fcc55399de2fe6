"""The most that a cluster can cost, in words, before anything is launched."""

from __future__ import annotations

import time
from collections.abc import Sequence

from etrain_jupyter.pools.aws_spot.aws_words import AwsErrors, pool_error
from etrain_jupyter.pools.aws_spot.ec2 import Clients
from etrain_jupyter.pools.aws_spot.ledger import worst_case
from etrain_jupyter.pools.aws_spot.network import NOTHING
from etrain_jupyter.pools.aws_spot.prices import Prices
from etrain_jupyter.pools.aws_spot.spec import AwsSpotSpec

LOOK_BACK_S = 3600.0


def price_in_words(clients: Clients, spec: AwsSpotSpec, num_nodes: int) -> str:
    """Return what ``num_nodes`` machines cost at most, and on what that rests.

    Raises:
        PoolError: If AWS does not tell its prices.
    """
    types = spec.capacity.types
    prices = Prices(clients=clients, region=spec.region)
    now = time.time()
    try:
        prices.refresh(types, since=now - LOOK_BACK_S, now=now)
    except AwsErrors as exc:
        raise pool_error("the prices cannot be read", exc, NOTHING) from exc
    rates = [rate for rate in _rates(prices, types, spec, now) if rate is not None]
    if not rates:
        return f"not known: EC2 sells none of {', '.join(types)} in {spec.region} as spot machines"
    worst = worst_case(
        num_nodes=num_nodes,
        dearest_usd=max(rates),
        lifetime_s=spec.lifetime.max,
        volume_gib=spec.volume.gib,
        max_hourly=spec.budget.max_hourly,
        max_total=spec.budget.max_total,
    )
    machines = f"{num_nodes} machine" + ("" if num_nodes == 1 else "s")
    now_usd = num_nodes * min(rates)
    limits = {"max_hourly": spec.budget.max_hourly, "max_total": spec.budget.max_total}
    held = [f"budget.{name} {usd:,.2f}" for name, usd in limits.items() if usd is not None]
    bound = f", held by {' and '.join(held)}" if held else "; no budget is set"
    return (
        f"about ${now_usd:,.2f} an hour for {machines} now; at worst ${worst.hourly:,.2f} an hour "
        f"and ${worst.total:,.2f} in {spec.lifetime.max / 3600:g} h{bound} ({prices.describe()})"
    )


def _rates(
    prices: Prices, types: Sequence[str], spec: AwsSpotSpec, now: float
) -> list[float | None]:
    book = prices.book
    zones = {zone for type_, zone in book.spot if type_ in types}
    if spec.capacity.zones != "auto":
        zones &= set(spec.capacity.zones)
    found = [book.rate(name, zone, "spot", now) for name in types for zone in zones]
    if spec.capacity.on_demand.most:
        found += [book.rate(name, "", "on-demand", now) for name in types]
    return found
