"""Instances as tests see them, and their real cost under EC2's rules. Pure.

Machines are charged per second at the spot price in force, for at least a minute; a spot machine
that EC2 reclaims in its first hour is free; disks are charged while they exist.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from etrain_jupyter.plugins.ec2.simulator.market import CapacityPool, Lifecycle, Market

LEAST_S = 60.0
FIRST_HOUR_S = 3600.0
DISK_USD_PER_GB_H = 0.08 / 730
"""gp3: 8 cents per GB-month, at 730 hours a month."""


@dataclass(frozen=True, kw_only=True)
class InstanceRecord:
    """One instance, as a test sees it."""

    instance_id: str
    instance_type: str
    zone: str
    lifecycle: str
    address: str
    state: str
    """EC2's instance state."""
    reason: str
    """EC2's code for why it ended; empty while it runs."""
    launched_at: float
    ended_at: float | None
    tags: Mapping[str, str] = field(default_factory=dict)
    pid: int | None = None
    """The first process, while it runs."""
    off_at: float | None = None
    """When its timer (``shutdown -h +N``) turns it off; None if there is no timer."""


@dataclass(frozen=True, kw_only=True)
class Usage:
    """One machine, from launch to end."""

    instance_id: str
    pool: CapacityPool
    lifecycle: Lifecycle
    launched_at: float
    ended_at: float | None = None
    disk_ended_at: float | None = None
    """None while the disk exists; a stopped machine keeps its disk."""
    reason: str = ""
    disk_gb: int = 8


@dataclass(frozen=True, kw_only=True)
class BillRow:
    """Cost of one machine so far."""

    instance_id: str
    instance_type: str
    zone: str
    lifecycle: Lifecycle
    seconds: float
    compute_usd: float
    """Cost after the waiver."""
    waived_usd: float
    disk_usd: float
    on_demand_usd: float
    """Cost of the same time at the on-demand price, without the waiver."""
    is_alive: bool
    reason: str

    @property
    def usd(self) -> float:
        """Total cost."""
        return self.compute_usd + self.disk_usd


@dataclass(frozen=True, kw_only=True)
class Bill:
    """Cost of all machines so far."""

    rows: tuple[BillRow, ...]

    @property
    def usd(self) -> float:
        """Total cost."""
        return sum(row.usd for row in self.rows)

    @property
    def compute_usd(self) -> float:
        """Cost without disks."""
        return sum(row.compute_usd for row in self.rows)

    @property
    def num_alive(self) -> int:
        """Number of machines that are still charged."""
        return sum(row.is_alive for row in self.rows)


def is_waived(lifecycle: Lifecycle, reason: str, seconds: float) -> bool:
    """Return True if EC2 reclaimed a spot machine in its first hour, which is then free."""
    # A machine that the user terminates is charged, even during an interruption notice.
    return (
        lifecycle == "spot" and reason.startswith("Server.SpotInstance") and seconds < FIRST_HOUR_S
    )


def make_bill(usages: Iterable[Usage], market: Market, now: float) -> Bill:
    """Compute the bill as of an instant."""
    return Bill(rows=tuple(_row(usage, market, now) for usage in usages))


def _row(usage: Usage, market: Market, now: float) -> BillRow:
    end = now if usage.ended_at is None else usage.ended_at
    seconds = max(0.0, end - usage.launched_at)
    # At least LEAST_S are charged. The waiver depends on the actual duration, and requires that the
    # machine has ended, because a running machine is charged.
    charged_until = usage.launched_at + max(seconds, LEAST_S)
    usd = market.charge_usd(usage.pool, usage.lifecycle, usage.launched_at, charged_until)
    free = usage.ended_at is not None and is_waived(usage.lifecycle, usage.reason, seconds)
    disk_end = now if usage.disk_ended_at is None else usage.disk_ended_at
    disk_s = max(LEAST_S, disk_end - usage.launched_at)
    return BillRow(
        instance_id=usage.instance_id,
        instance_type=usage.pool.instance_type,
        zone=usage.pool.zone,
        lifecycle=usage.lifecycle,
        seconds=seconds,
        compute_usd=0.0 if free else usd,
        waived_usd=usd if free else 0.0,
        disk_usd=disk_s / 3600 * usage.disk_gb * DISK_USD_PER_GB_H,
        on_demand_usd=market.charge_usd(usage.pool, "on-demand", usage.launched_at, charged_until),
        is_alive=usage.ended_at is None,
        reason=usage.reason,
    )
