"""What the head of a cluster keeps in the bucket: its lease and its ledger; and what nodes say."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from etrain_jupyter.pools.ec2.ledger import Ledger, PriceBook
from etrain_jupyter.storage.objects.s3_bucket import Bucket


@dataclass(frozen=True, kw_only=True)
class NodeState:
    """What the agent of a node says of itself."""

    state: str
    """``booting``, ``ready``, ``refused`` or ``ended``."""
    error: str = ""


class ClusterFiles:
    """The objects of one cluster. All methods raise ``StoreError`` if S3 does not answer.

    Args:
        bucket: Below the pool's prefix.
        cluster_id: Whose.
    """

    def __init__(self, bucket: Bucket, cluster_id: str) -> None:
        self._bucket = bucket
        self._home = f"clusters/{cluster_id}"
        self._ledger = f"ledgers/{cluster_id}.json"

    def num_lives(self) -> int:
        """Return how many heads there have been; 0 for a new cluster."""
        lease = self._read(f"{self._home}/lease.json", "reading the lease")
        return int(lease.get("num_lives", 1)) if lease else 0

    def renew_lease(self, scheduler: str, num_lives: int, renewals: int) -> None:
        """Tell the nodes that the head lives, and where it is; S3 notes when."""
        lease = {"scheduler": scheduler, "num_lives": num_lives, "renewals": renewals}
        data = json.dumps(lease).encode()
        self._bucket.put(f"{self._home}/lease.json", data, "renewing the lease")

    def node_state(self, node: str) -> NodeState | None:
        """Return what a node has said last; None if it has said nothing yet."""
        told = self._read(f"{self._home}/nodes/{node}.json", f"reading the state of {node}")
        if told is None:
            return None
        return NodeState(state=str(told.get("state", "")), error=str(told.get("error") or ""))

    def ledger(self) -> Ledger:
        """Return the rows that were kept; empty for a new cluster."""
        told = self._read(self._ledger, "reading the ledger")
        return Ledger.from_dict(told) if told else Ledger()

    def keep_ledger(
        self, ledger: Ledger, prices: PriceBook, now: float, facts: Mapping[str, Any]
    ) -> None:
        """Keep rows, the prices behind them, and their sum; it stays after the cluster's end."""
        total = ledger.total(prices, now)
        told = {
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
        self._bucket.put(self._ledger, json.dumps(told).encode(), "keeping the ledger")

    def _read(self, key: str, what: str) -> dict[str, Any] | None:
        data = self._bucket.get(key, what)
        try:
            told = json.loads(data) if data is not None else None
        except ValueError:
            return None  # cut short, or somebody else's: as good as none
        return told if isinstance(told, dict) else None
