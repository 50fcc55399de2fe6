"""What a day of ``spot`` cost: by our ledger, by the bill, and at the scale of the day. Pure.

Played in minutes, each machine that EC2 takes lives for less than an hour, which costs nothing, and
each other one pays for a minute at least, which is hours of the day. So the bill is counted once
more with the seconds of the day.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from etrain_jupyter.testing.fakeaws.bill import LEAST_S, Bill, BillRow, is_waived


def day_usd(before: Bill, after: Bill, scale: float) -> tuple[float, float]:
    """Return what machines would have cost in the day's own time, as spot and on demand.

    Without disks. Waived is what EC2 takes in the first hour of the day's time.

    Args:
        before: The bill when the day began.
        after: The bill when it was over.
        scale: Seconds of the day in one of the bill's.
    """
    earlier = {row.instance_id: row.seconds for row in before.rows}
    spot = on_demand = 0.0
    for row in after.rows:
        day_s = (row.seconds - earlier.get(row.instance_id, 0.0)) * scale
        charged_s = max(LEAST_S, row.seconds)
        on_demand += row.on_demand_usd / charged_s * day_s
        if not _is_free(row, scale):
            spot += (row.compute_usd + row.waived_usd) / charged_s * day_s
    return spot, on_demand


def _is_free(row: BillRow, scale: float) -> bool:
    return not row.is_alive and is_waived(row.lifecycle, row.reason, row.seconds * scale)


def money_of(
    ledger: Mapping[str, Any],
    bill: Bill,
    *,
    day: tuple[float, float],
    full_price_usd: float,
    share_done: float,
) -> dict[str, Any]:
    """Return the figures about money.

    Args:
        ledger: What the pool keeps of a cluster that has ended.
        bill: What the cloud says of it.
        day: What ``day_usd`` returned.
        full_price_usd: What as many machines on demand cost in a day, by which all steps are done.
        share_done: Which share of those steps was done.
    """
    spot, on_demand = day
    return {
        "spent_usd_ledger": ledger["spent_usd"],
        "spent_usd_bill": bill.usd,
        "ledger_by_bill": ledger["spent_usd"] / bill.usd,
        "waived_usd_ledger": ledger["waived_usd"],
        "waived_usd_bill": sum(row.waived_usd for row in bill.rows),
        "on_demand_usd": ledger["on_demand_usd"],
        "on_demand_usd_bill": sum(row.on_demand_usd for row in bill.rows),
        "saved_share": 1 - ledger["spent_usd"] / ledger["on_demand_usd"],
        "day_spent_usd": spot,
        "day_on_demand_usd": on_demand,
        "day_saved_share": 1 - spot / on_demand,
        "full_price_usd": full_price_usd,
        "usd_a_step_by_full_price": spot / full_price_usd / share_done if share_done else None,
    }
