"""A cluster's objects in the bucket: lease, ledger, and the nodes' reports."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from etrain_jupyter.plugins.ec2.ledger import Ledger, PriceBook
from etrain_jupyter.storage.objects.s3_bucket import Bucket


@dataclass(frozen=True, kw_only=True)
class BootPhase:
    """One phase of a node's boot."""

    name: str
    """``download``, ``environment`` or ``install``, see ``machine.install``."""
    seconds: float
    at: float
    """Its end, in seconds since the epoch."""
    detail: str = ""

    @classmethod
    def read_all(cls, report: Mapping[str, Any]) -> tuple[BootPhase, ...]:
        """Return the phases in a node's report, without those that are not valid."""
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
        # Keep the ledger outside of the cluster's folder, which `reaping` deletes: the costs must
        # remain.
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

    def store_ledger(
        self, ledger: Ledger, prices: PriceBook, now: float, facts: Mapping[str, Any]
    ) -> None:
        """Write rows, prices and totals; the ledger outlives the cluster."""
        # Totals and prices are stored only for people who read the file: `ledger` reads nothing but
        # the rows.
        total = ledger.total(prices, now)
        data = {
            **facts,
            **ledger.to_dict(),
            "at": now,
            "spent_usd": total.spent,
            "on_demand_usd": total.on_demand,
            "saved_usd": total.saved,
            "waived_usd": total.waived,
            "volumes_usd": total.volume,
            "node_hours": total.hours,
            "is_known": total.is_known,
            "rate_usd": ledger.rate(prices, now),
            "spot_prices": [
                [type, zone, list(points)]
                for (type, zone), points in prices.spot.items()
                if any((row.type, row.zone) == (type, zone) for row in ledger.rows.values())
            ],
            "on_demand_prices": dict(prices.on_demand),
        }
        self._bucket.put(self._ledger, json.dumps(data).encode(), "the ledger cannot be written")

    def _read(self, key: str, what: str) -> dict[str, Any] | None:
        data = self._bucket.get(key, what)
        try:
            value = json.loads(data) if data is not None else None
        except ValueError:
            return None  # truncated, or not ours: treat it as missing
        return value if isinstance(value, dict) else None
