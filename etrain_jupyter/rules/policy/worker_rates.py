"""Model the throughput of a job by its number of workers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

LEAST_S = 30.0
LEAST_STEPS = 3
"""A rate is used once it was measured over this time and this number of steps."""

Rates = tuple[float, ...]
"""Samples per second by the number of workers: ``rates[w]``, with ``rates[0] == 0``. Increasing."""


def rates_of_efficiency(
    max_workers: int, efficiency: float = 1.0, *, up_to: int | None = None
) -> Rates:
    """Return rates relative to one worker, given the scaling efficiency at ``max_workers``.

    The step time is assumed to grow linearly with the number of workers, as in Amdahl's law with a
    cost per worker: ``rate(w) = w / (1 + c (w - 1))``.

    Args:
        max_workers: Number of workers at which the efficiency is known.
        efficiency: Throughput of ``max_workers`` workers, divided by ``max_workers`` times the
            throughput of one; above ``1 / max_workers`` and at most 1.
        up_to: Largest number of workers in the result; None for ``max_workers``.

    >>> rates_of_efficiency(4, 0.8)[4]
    3.2
    """
    cost = 0.0 if max_workers == 1 else (1 / efficiency - 1) / (max_workers - 1)
    return (
        0.0,
        *(round(w / (1 + cost * (w - 1)), 9) for w in range(1, (up_to or max_workers) + 1)),
    )


def fit_rates(measured: Mapping[int, float], max_workers: int) -> Rates:
    """Fit rates to measured ones; an empty tuple if nothing was measured.

    The model is the one of ``rates_of_efficiency``, in the form ``w / rate(w) = a + b (w - 1)``,
    which is linear in its parameters. One measured point determines only ``a``, so the rate is then
    proportional to the number of workers.

    Args:
        measured: Samples per second by number of workers.
        max_workers: Maximum number of workers.

    >>> fit_rates({2: 10.0}, 4)
    (0.0, 5.0, 10.0, 15.0, 20.0)
    """
    points = [(w - 1.0, w / rate) for w, rate in measured.items() if w >= 1 and rate > 0]
    if not points:
        return ()
    mean_x = sum(x for x, _ in points) / len(points)
    mean_y = sum(y for _, y in points) / len(points)
    variance = sum((x - mean_x) ** 2 for x, _ in points)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / variance if variance else 0.0
    # A negative slope would mean more than linear scaling. With a slope above `one`, more workers
    # would be slower. Both are noise, or a point to avoid: the rates never decrease.
    slope = min(max(slope, 0.0), mean_y / (1 + mean_x))
    one = mean_y - slope * mean_x
    return (0.0, *(w / (one + slope * (w - 1)) for w in range(1, max_workers + 1)))


@dataclass
class RateMeter:
    """Measure a job's steps per second by its number of workers, from its progress.

    The rates include evaluations and checkpoints, and exclude the intervals in which the number of
    workers changed.
    """

    totals: dict[int, tuple[float, int]] = field(default_factory=dict)
    """Seconds and steps by number of workers."""
    _last: tuple[float, int, int] | None = None

    def observe(self, now: float, num_workers: int, step: int) -> None:
        """Add an observation.

        Args:
            now: Time in seconds.
            num_workers: Number of workers that train; 0 while the job waits.
            step: The newest step.
        """
        before, self._last = self._last, (now, num_workers, step)
        # After a restore, steps are repeated: the counter went back.
        if before is None or before[1] != num_workers or step < before[2] or not num_workers:
            return
        seconds, steps = self.totals.get(num_workers, (0.0, 0))
        self.totals[num_workers] = seconds + now - before[0], steps + step - before[2]

    @property
    def measured(self) -> dict[int, float]:
        """Steps per second by number of workers, where there are enough observations."""
        return {
            workers: steps / seconds
            for workers, (seconds, steps) in self.totals.items()
            if seconds >= LEAST_S and steps >= LEAST_STEPS
        }
