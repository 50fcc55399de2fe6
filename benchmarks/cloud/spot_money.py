"""Costs of a day of ``spot``: by the ledger, by the bill, and in the day's own time. Pure.

Because the day is played in minutes, the actual bill is not representative. A machine that EC2
interrupts always runs for less than an hour, so it is free. Every other machine pays for at least
one minute, which represents hours of the day. So the bill is also computed with the seconds of the
day.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from etrain_jupyter.plugins.ec2.simulator.bill import LEAST_S, Bill, BillRow, is_waived


def day_usd(before: Bill, after: Bill, scale: float) -> tuple[float, float]:
    """Compute what the machines would have cost in the day's own time, without disks.

    A machine that EC2 interrupts within the first hour of the day's time is free.

    Args:
        before: The bill at the beginning of the day.
        after: The bill at the end of the day.
        scale: Seconds of the day per second of the bill.

    Returns:
        The spot price and the on-demand price, in USD.
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
    """Return the cost figures of a day.

    Args:
        ledger: The pool's ledger of the terminated cluster.
        bill: The cloud's bill for the cluster.
        day: The result of ``day_usd``.
        full_price_usd: Price of the maximum number of on-demand machines for the whole day, with
            which all steps would be committed.
        share_done: Share of those steps that was committed.
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
