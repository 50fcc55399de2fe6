"""Read current prices and placement scores of a pool's machine types from EC2."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from etrain_jupyter.plugins.ec2.aws_messages import AwsErrors, pool_error
from etrain_jupyter.plugins.ec2.ec2_api import Clients, placement_scores
from etrain_jupyter.plugins.ec2.launch_context import survey, workers_of
from etrain_jupyter.plugins.ec2.network import NOTHING
from etrain_jupyter.plugins.ec2.prices import Prices
from etrain_jupyter.plugins.ec2.spec import AwsSpotSpec


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
    """Price of the machine of the scheduler; 0 if it runs in the notebook."""
    source: str


def read_live_prices(
    spec: AwsSpotSpec, *, since: float, now: float, clients: Clients | None = None
) -> LivePrices:
    """Query EC2. Nothing is launched or changed.

    Args:
        spec: The pool.
        since: Beginning of the price history to read, in seconds since the epoch.
        now: The time, in seconds since the epoch.
        clients: Clients for the pool's region; by default new ones.

    Raises:
        PoolError: If EC2 refuses a request for types, zones or prices.
    """
    clients = clients or Clients(spec)
    types, subnets = survey(clients, spec)
    prices = Prices(clients=clients, region=spec.region, volume_type=spec.volume.type)
    has_head = spec.head == "on-demand"
    try:
        prices.refresh({*types, *([spec.head_type] if has_head else [])}, since=since, now=now)
    except AwsErrors as exc:
        raise pool_error("the prices cannot be read", exc, NOTHING) from exc
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
        head_usd=book.on_demand.get(spec.head_type, 0.0) if has_head else 0.0,
        source=prices.describe(),
    )
