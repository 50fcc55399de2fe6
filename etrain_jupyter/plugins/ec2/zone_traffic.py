"""Decide whether workers in several zones pay, considering the price of traffic between zones."""

from __future__ import annotations

USD_PER_GB = 0.02
"""Price of traffic between two zones of a region: 0.01 US dollars per GB out, and as much in."""


def traffic_usd_per_h(
    *, gradient_bytes: float, steps_per_s: float, workers: int, zones: int
) -> float:
    """Return the hourly price of the exchange of gradients between zones.

    In a ring, each rank sends ``2 (w - 1) / w`` times the gradients to its neighbor in each step.
    If the ranks of a zone are neighbors, as many links as there are zones connect two zones.

    Args:
        gradient_bytes: Bytes of all gradients.
        steps_per_s: Optimizer steps per second.
        workers: Number of workers.
        zones: Number of zones with workers.

    >>> round(traffic_usd_per_h(gradient_bytes=1e6, steps_per_s=1.0, workers=4, zones=2), 3)
    0.216
    """
    if zones < 2 or workers < 2:
        return 0.0
    sent = 2 * (workers - 1) / workers * gradient_bytes * zones
    return sent * steps_per_s * 3600 / 1e9 * USD_PER_GB


def pays_to_spread(
    *,
    traffic_usd: float,
    state_bytes: float,
    changes_per_h: float,
    num_more: int,
    spot_usd: float,
    on_demand_usd: float,
) -> bool:
    """Return True if spot workers in another zone cost less than workers on demand.

    The alternatives are to wait without these workers, or to pay the on-demand price. A worker is
    assumed to be worth at most that price, because the job could have it there.

    Args:
        traffic_usd: Hourly price of the exchange of gradients, see ``traffic_usd_per_h``.
        state_bytes: Bytes that a new worker receives.
        changes_per_h: Workers that receive the state from another zone per hour.
        num_more: Number of workers in the other zone.
        spot_usd: Hourly spot price of one of them.
        on_demand_usd: Hourly on-demand price of one of them.

    >>> terms = dict(state_bytes=3e8, changes_per_h=2.0, spot_usd=0.28, on_demand_usd=0.80)
    >>> pays_to_spread(traffic_usd=0.2, num_more=2, **terms)
    True
    >>> pays_to_spread(traffic_usd=8.0, num_more=2, **terms)
    False
    """
    if num_more < 1:
        return False
    state_usd = state_bytes / 1e9 * USD_PER_GB * changes_per_h
    return spot_usd + (traffic_usd + state_usd) / num_more <= on_demand_usd
