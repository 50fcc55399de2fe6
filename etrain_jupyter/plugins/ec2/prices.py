"""Fetch prices: EC2's spot price history, and on-demand rates with their source."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from etrain_jupyter.plugins.ec2.aws_messages import AwsErrors
from etrain_jupyter.plugins.ec2.ec2_api import Clients
from etrain_jupyter.plugins.ec2.ledger import Point, PriceBook
from etrain_jupyter.plugins.ec2.type_table import ON_DEMAND_USD, TABLE_DATE, TABLE_REGION

REFRESH_S = 300.0
VOLUME_USD = {"gp3": 0.08, "gp2": 0.10}
"""US dollars per GiB-month."""


@dataclass(kw_only=True)
class Prices:
    """Prices, refreshed when outdated. Used by one thread."""

    clients: Clients
    region: str
    volume_type: str = "gp3"
    spot: dict[tuple[str, str], list[Point]] = field(default_factory=dict)
    on_demand: dict[str, float] = field(default_factory=dict)
    fetched_at: float = 0.0
    unknown: set[str] = field(default_factory=set)
    """Types without a known on-demand rate."""
    source: str = ""
    """Source and date of the on-demand rates."""

    @property
    def book(self) -> PriceBook:
        """All known prices."""
        return PriceBook(
            spot=self.spot,
            on_demand=self.on_demand,
            volume_gib_month=VOLUME_USD[self.volume_type],
        )

    def refresh(self, types: Iterable[str], *, since: float, now: float) -> None:
        """Fetch missing or outdated prices; spot prices are needed from ``since`` on.

        Raises:
            ClientError: If EC2 refuses the request for spot prices.
        """
        wanted = sorted(set(types))
        # On-demand rates hardly ever change, so request each type once.
        missing = [t for t in wanted if t not in self.on_demand and t not in self.unknown]
        if missing:
            self._fetch_on_demand(missing)
        have = {type for type, _ in self.spot}
        if now - self.fetched_at < REFRESH_S and have >= set(wanted):
            return
        # A new type needs its whole history. The request then returns the history of the other
        # types again; the duplicates are dropped below.
        begin = since if not self.fetched_at or not have >= set(wanted) else self.fetched_at - 60
        fetched = spot_history(self.clients.ec2, wanted, min(begin, now - 60))
        for pool, points in fetched.items():
            # The intervals overlap, and EC2 repeats the price in force at the start of each.
            self.spot[pool] = sorted({*self.spot.get(pool, ()), *points})
        self.fetched_at = now

    def _fetch_on_demand(self, types: list[str]) -> None:
        found = {}
        try:
            for type in types:
                if (usd := on_demand_rate(self.clients.pricing, type, self.region)) is not None:
                    found[type] = usd
            self.source = f"Pricing API, {time.strftime('%Y-%m-%d', time.gmtime())}"
        except (*AwsErrors, ValueError, KeyError):
            # The Pricing API is a separate service. The role may not have permission to use it, and
            # a simulation of AWS may not provide it.
            self.source = f"built-in table, {TABLE_REGION}, {TABLE_DATE}"
        for type in types:
            # The table also fills gaps of the Pricing API.
            usd = found.get(type, ON_DEMAND_USD.get(type))
            if usd is None:
                self.unknown.add(type)
            else:
                self.on_demand[type] = usd

    def describe(self) -> str:
        """Return the sources of the prices as text, for the screen."""
        # The message names the source and the time, because the amounts may differ from the bill.
        at = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(self.fetched_at))
        summary = f"spot prices: EC2, {at}; on-demand rates: {self.source or 'not requested'}"
        if self.source.startswith("built-in") and self.region != TABLE_REGION:
            summary += f" (your region is {self.region})"
        if self.unknown:
            summary += f"; no on-demand rate for {', '.join(sorted(self.unknown))}"
        return summary


def spot_history(
    ec2: Any, types: Iterable[str], since: float
) -> dict[tuple[str, str], list[Point]]:
    """Return price changes by type and zone, starting with the price in force at ``since``."""
    names = sorted(set(types))
    found: dict[tuple[str, str], list[Point]] = {}
    if not names:
        return found
    pages = ec2.get_paginator("describe_spot_price_history").paginate(
        InstanceTypes=names,
        ProductDescriptions=["Linux/UNIX"],
        StartTime=datetime.fromtimestamp(since, UTC),
    )
    for page in pages:
        for one in page["SpotPriceHistory"]:
            # Not every endpoint applies the filter.
            if one.get("ProductDescription") not in ("Linux/UNIX", None):
                continue
            pool = (one["InstanceType"], one["AvailabilityZone"])
            found.setdefault(pool, []).append(
                (one["Timestamp"].timestamp(), float(one["SpotPrice"]))
            )
    return {pool: sorted(points) for pool, points in found.items()}


def on_demand_rate(pricing: Any, type: str, region: str) -> float | None:
    """Return the Pricing API's hourly Linux price in US dollars; None if it lacks the type."""
    attributes = {
        "instanceType": type,
        "regionCode": region,
        "operatingSystem": "Linux",
        "tenancy": "Shared",
        "preInstalledSw": "NA",
        "capacitystatus": "Used",
    }
    filters = [
        {"Type": "TERM_MATCH", "Field": key, "Value": word} for key, word in attributes.items()
    ]
    answer = pricing.get_products(ServiceCode="AmazonEC2", Filters=filters, MaxResults=10)
    # A product is a type in a region, without licences. Reserved terms and zero prices are skipped.
    for text in answer["PriceList"]:
        product = json.loads(text) if isinstance(text, str) else text
        for term in product.get("terms", {}).get("OnDemand", {}).values():
            for dimension in term["priceDimensions"].values():
                usd = float(dimension["pricePerUnit"].get("USD", 0))
                if usd > 0 and dimension.get("unit", "Hrs") == "Hrs":
                    return usd
    return None
