"""Model the throughput of machine types, and what each costs per sample."""

from __future__ import annotations

from collections.abc import Mapping

from etrain_jupyter.log.job_record import TypeWork

LEAST_BUSY_S = 20.0
"""A type counts as measured once its workers have computed for this time, in seconds."""


def rates_by_type(work: Mapping[str, TypeWork]) -> dict[str, float]:
    """Return samples per second of one worker, by type, where there are enough measurements.

    >>> rates_by_type({"g5.xlarge": TypeWork(samples=600, busy_s=30.0)})
    {'g5.xlarge': 20.0}
    """
    return {
        type: one.samples / one.busy_s
        for type, one in work.items()
        if type and one.busy_s >= LEAST_BUSY_S and one.samples > 0
    }


def samples_by_type(work: Mapping[str, TypeWork], total: int) -> dict[str, float]:
    """Divide ``total`` samples among the types in proportion to the reported samples.

    Ranks report at intervals, and the last samples of a lost rank are never reported.
    """
    reported = sum(one.samples for one in work.values())
    return {type: total * one.samples / reported for type, one in work.items() if one.samples}


def usd_per_1k_samples(usd_per_h: float, samples_per_s: float) -> float:
    """Return the cost of a thousand samples on a worker with this price and throughput.

    >>> round(usd_per_1k_samples(0.36, 20.0), 6)
    0.005
    """
    return usd_per_h / 3.6 / samples_per_s
