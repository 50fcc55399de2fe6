"""A cluster's costs so far: prices and ledger, kept up to date and stored in the bucket."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from etrain_jupyter.plugins.ec2.ec2_api import Clients, Instance
from etrain_jupyter.plugins.ec2.head.cluster_files import ClusterFiles
from etrain_jupyter.plugins.ec2.head.roster import rows_of
from etrain_jupyter.plugins.ec2.ledger import Ledger
from etrain_jupyter.plugins.ec2.prices import Prices
from etrain_jupyter.plugins.ec2.spec import AwsSpotSpec


class Accounts:
    """One cluster's costs. Used by the reconcile thread only."""

    def __init__(
        self, spec: AwsSpotSpec, cluster_id: str, clients: Clients, files: ClusterFiles
    ) -> None:
        self._spec = spec
        self._id = cluster_id
        self._files = files
        self.prices = Prices(clients=clients, region=spec.region, volume_type=spec.volume.type)
        self.ledger = Ledger()

    def load(self) -> None:
        """Read the ledger of previous heads.

        Raises:
            StoreError: If the bucket cannot be read.
        """
        self.ledger = self._files.ledger()

    def refresh_prices(self, types: Iterable[str], now: float) -> None:
        """Fetch new prices, with the price history since the launch of machines in the ledger."""
        # The ledger may contain machines from previous heads, priced by the spot history since
        # their launch. Start a minute earlier, so that the first point is the price in force at the
        # launch.
        launches = (row.launched_at for row in self.ledger.rows.values())
        self.prices.refresh({*types}, since=min(launches, default=now) - 60, now=now)

    def record(
        self, instances: Sequence[Instance], now: float, *, living: Iterable[str] = ()
    ) -> None:
        """Record machines that EC2 lists, and the end of those that it no longer lists.

        ``living`` contains the ids of machines that run but are missing from the listing.
        """
        rows = rows_of(instances, self.ledger, now, volume_gib=self._spec.volume.gib, living=living)
        self.ledger = self.ledger.with_rows(rows)

    def spent_usd(self, now: float) -> float:
        """Return the US dollars owed if all machines were terminated now."""
        return self.ledger.committed(self.prices.book, now)

    def rate_usd(self, now: float) -> float:
        """Return the hourly cost of the running machines, in US dollars."""
        return self.ledger.rate(self.prices.book, now)

    def store(self, now: float) -> None:
        """Write the ledger to the bucket."""
        facts = {
            "cluster_id": self._id,
            "region": self._spec.region,
            "prices": self.prices.describe(),
            "max_total": self._spec.budget.max_total,
        }
        self._files.store_ledger(self.ledger, self.prices.book, now, facts)
