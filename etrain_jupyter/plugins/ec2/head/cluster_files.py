"""A cluster's objects in the bucket: lease, ledger, and the nodes' reports."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from etrain_jupyter.plugins.ec2.ec2_api import Clients, Instance
from etrain_jupyter.plugins.ec2.ledger import Ledger, Row
from etrain_jupyter.plugins.ec2.prices import Prices
from etrain_jupyter.plugins.ec2.spec import AwsSpotSpec
from etrain_jupyter.storage.objects.s3_bucket import Bucket


@dataclass(frozen=True, kw_only=True)
class BootPhase:
    """One phase of a node's boot."""

    name: str
    """``download``, ``environment`` or ``install``; see ``machine.install``."""
    seconds: float
    at: float
    """Its end, in seconds since the epoch."""
    detail: str = ""

    @classmethod
    def read_all(cls, report: Mapping[str, Any]) -> tuple[BootPhase, ...]:
        """Return the valid phases in a node's report."""
        found = []
        for one in report.get("phases") or ():
            with suppress(KeyError, TypeError, ValueError):
                found.append(
                    cls(
                        name=str(one["name"]),
                        seconds=float(one["seconds"]),
                        at=float(one["at"]),
                        detail=str(one.get("detail", "")),
                    )
                )
        return tuple(found)

    def __str__(self) -> str:
        return f"{self.name} {self.seconds:.1f} s" + (f" ({self.detail})" if self.detail else "")


@dataclass(frozen=True, kw_only=True)
class NodeState:
    """The last report of a node's agent."""

    state: str
    """``booting``, ``ready``, ``refused`` or ``ended``."""
    error: str = ""
    phases: tuple[BootPhase, ...] = ()
    """The completed phases of its boot."""


class ClusterFiles:
    """The objects of one cluster. All methods raise ``StoreError`` if S3 fails."""

    def __init__(self, bucket: Bucket, cluster_id: str) -> None:
        self._bucket = bucket
        self._home = f"clusters/{cluster_id}"
        # Keep the ledger outside of the cluster's folder, which `reaping` deletes, because the
        # costs must remain.
        self._ledger = f"ledgers/{cluster_id}.json"

    def num_lives(self) -> int:
        """Return the incarnation number of the last head; 0 for a new cluster."""
        lease = self._read(f"{self._home}/lease.json", "the lease cannot be read")
        return int(lease["num_lives"]) if lease else 0

    def renew_lease(self, scheduler: str, num_lives: int, renewals: int) -> None:
        """Renew the lease, which contains the scheduler's address; S3 records the renewal time."""
        lease = {"scheduler": scheduler, "num_lives": num_lives, "renewals": renewals}
        data = json.dumps(lease).encode()
        self._bucket.put(f"{self._home}/lease.json", data, "the lease cannot be renewed")

    def node_state(self, node: str) -> NodeState | None:
        """Return a node's last report; None if there is none yet."""
        report = self._read(
            f"{self._home}/nodes/{node}.json", f"the state of {node} cannot be read"
        )
        if report is None:
            return None
        return NodeState(
            state=str(report.get("state", "")),
            error=str(report.get("error") or ""),
            phases=BootPhase.read_all(report),
        )

    def ledger(self) -> Ledger:
        """Return the stored ledger; empty for a new cluster."""
        data = self._read(self._ledger, "the ledger cannot be read")
        return Ledger.from_dict(data) if data else Ledger()

    def store_ledger(self, data: Mapping[str, Any]) -> None:
        """Write the ledger, which outlives the cluster."""
        self._bucket.put(self._ledger, json.dumps(data).encode(), "the ledger cannot be written")

    def _read(self, key: str, what: str) -> dict[str, Any] | None:
        data = self._bucket.get(key, what)
        try:
            value = json.loads(data) if data is not None else None
        except ValueError:
            return None  # truncated, or not ours: treat it as missing
        return value if isinstance(value, dict) else None


class Accounts:
    """One cluster's prices and ledger, stored in the bucket. Used by the reconcile thread only."""

    def __init__(
        self, spec: AwsSpotSpec, cluster_id: str, clients: Clients, files: ClusterFiles
    ) -> None:
        self._spec = spec
        self._id = cluster_id
        self._files = files
        self.prices = Prices(clients=clients, region=spec.region, volume_type=spec.volume.type)
        self.ledger = Ledger()

    def refresh_prices(self, types: Iterable[str], now: float) -> None:
        """Fetch new prices, with the price history since the launch of machines in the ledger."""
        # The ledger may contain machines from previous heads, priced by the spot history since
        # their launch. Start a minute earlier, so that the first point is the price in force at the
        # launch.
        launches = (row.launched_at for row in self.ledger.rows.values())
        self.prices.refresh({*types}, since=min(launches, default=now) - 60, now=now)

    def record(self, instances: Sequence[Instance], living: Iterable[str], now: float) -> None:
        """Record machines that EC2 lists, and the end of those that it no longer lists.

        ``living`` contains the ids of machines that run but are missing from the listing.
        """
        rows = [
            Row(
                id=one.id,
                type=one.type,
                zone=one.zone,
                lifecycle=one.lifecycle,
                launched_at=one.launched_at,
                # EC2 gives the time only inside StateTransitionReason, and not for every reason.
                ended_at=None if one.is_living else one.ended_at or now,
                reason="" if one.is_living else one.reason,
                volume_gib=float(self._spec.volume.gib),
                role=one.tags.get("etrain:role", "node"),
            )
            for one in instances
        ]
        # EC2 stops listing machines an hour after they end.
        known = {one.id for one in instances} | set(living)
        rows += [
            dataclasses.replace(row, ended_at=now)
            for row in self.ledger.rows.values()
            if row.ended_at is None and row.id not in known
        ]
        self.ledger = self.ledger.with_rows(rows)

    def spent_usd(self, now: float) -> float:
        """Return the US dollars owed if all machines were terminated now."""
        return self.ledger.committed(self.prices.book, now)

    def rate_usd(self, now: float) -> float:
        """Return the hourly cost of the running machines, in US dollars."""
        return self.ledger.rate(self.prices.book, now)

    def store(self, now: float) -> None:
        """Write rows, prices and totals to the bucket."""
        # Totals and prices are stored only for people who read the file: `ClusterFiles.ledger`
        # reads nothing but the rows.
        book = self.prices.book
        total = self.ledger.total(book, now)
        pools = {(row.type, row.zone) for row in self.ledger.rows.values()}
        data = {
            "cluster_id": self._id,
            "region": self._spec.region,
            "prices": self.prices.describe(),
            "max_total": self._spec.budget.max_total,
            **self.ledger.to_dict(),
            "at": now,
            "spent_usd": total.spent,
            "on_demand_usd": total.on_demand,
            "saved_usd": total.saved,
            "waived_usd": total.waived,
            "volumes_usd": total.volume,
            "node_hours": total.hours,
            "is_known": total.is_known,
            "rate_usd": self.rate_usd(now),
            "spot_prices": [
                [type, zone, list(points)]
                for (type, zone), points in book.spot.items()
                if (type, zone) in pools
            ],
            "on_demand_prices": dict(book.on_demand),
        }
        self._files.store_ledger(data)
