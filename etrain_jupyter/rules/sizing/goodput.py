"""Size a job by its goodput: add a worker only while it is worth its cost.

Goodput is the progress per second: samples per second, times the progress of a sample (AdaScale).
More workers rarely raise it in proportion. So the job takes the number of workers with the smallest
product of time and cost, which is the largest ``goodput ** 2 / cost``::

    goodput       .  - '          another worker brings at least half of the goodput per dollar
        |     . '  |              of the workers before it, up to here
        |   /      |
        | /        |
        +----------+------- workers

With linear scaling, the job takes all workers; if a second worker makes nothing faster, it takes
one. ``%etrain plan`` uses the same rule to recommend an option without a deadline or budget.

Rates that were not measured are predictions, so a job at most doubles its workers at once, and
measures before it continues, as in Pollux (Qiao et al., OSDI 2021).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

MIN_GAIN = 1.05
"""The number of workers changes only if ``goodput ** 2 / cost`` rises by this factor, so that noise
in the measured rates does not move workers to and fro."""

Limit = Literal["unmeasured", "measuring", "cost", "max", "min", "deadline"]
"""Reason for a number of workers:

==============  ====================================================================================
unmeasured      nothing has been measured yet: the minimum
measuring       the most workers for which a prediction is trusted; more may follow
cost            a further worker is not worth its cost
max             all workers that the job may use
min             fewer would be better, but ``workers.min`` forbids it
deadline        more than their cost justifies, because the deadline requires them
==============  ====================================================================================
"""


@dataclass(frozen=True, kw_only=True)
class GoodputTerms:
    """Inputs of the decision."""

    min_workers: int
    max_workers: int
    rates: Rates = ()
    """Samples per second by number of workers, from 0 to ``max_workers``, measured or predicted;
    empty before anything was measured."""
    measured: frozenset[int] = frozenset()
    """Numbers of workers whose rate was measured."""
    is_exchange_known: bool = True
    """False if the job never ran on two workers, so that ``rates`` guess the cost of more."""
    progress: tuple[float, ...] | None = None
    """Progress of a sample by number of workers, relative to one worker; None if the gradient noise
    was not measured. Every sample then counts the same."""
    usd_per_worker_h: float | None = None
    """Price of a worker. If None, the price is unknown, and the cost is in worker-seconds."""
    usd_per_h: float = 0.0
    """Price of what runs regardless of the number of workers, such as the scheduler's machine."""
    needed_rate: float = 0.0
    """Samples per second that the deadline requires; 0 without a deadline."""

    def goodput(self, workers: int) -> float:
        """Return the progress per second."""
        factor = self.progress[workers] if self.progress is not None else 1.0
        return self.rates[workers] * factor

    def cost(self, workers: int) -> float:
        """Return US dollars per hour, or the number of workers if the price is unknown."""
        if self.usd_per_worker_h is None:
            return float(workers)
        return self.usd_per_worker_h * workers + self.usd_per_h

    def value(self, workers: int) -> float:
        """Return what the rule maximizes; its inverse is proportional to time times cost."""
        return self.goodput(workers) ** 2 / self.cost(workers)


@dataclass(frozen=True, kw_only=True)
class Size:
    """Number of workers that a job takes, if the pool has them."""

    workers: int
    limit: Limit
    goodputs: tuple[float, ...] = ()
    """Goodput by number of workers, from 0 to ``workers``; empty before it was measured."""


def choose_size(terms: GoodputTerms, current: int = 0) -> Size:
    """Choose the number of workers of a job.

    Args:
        terms: Rates, prices and bounds.
        current: The number chosen previously; 0 if there is none.

    >>> terms = GoodputTerms(min_workers=1, max_workers=4, rates=(0.0, 10.0, 19.0, 20.0, 20.5),
    ...                      measured=frozenset({1, 2}))
    >>> choose_size(terms).workers, choose_size(terms).limit
    (2, 'cost')
    """
    low, high = terms.min_workers, terms.max_workers
    if not terms.measured or len(terms.rates) <= high:
        return Size(workers=low, limit="unmeasured")
    if not terms.is_exchange_known and low == 1 < high:
        # The second worker is worth the attempt, as its cost cannot be predicted from the first.
        return _size(terms, 2, "measuring")
    trusted = max(low, min(high, 2 * max(terms.measured)))
    best = max(range(low, trusted + 1), key=lambda workers: (terms.value(workers), -workers))
    if low <= current <= trusted and terms.value(best) < MIN_GAIN * terms.value(current):
        best = current
    enough = _enough(terms, trusted)
    if enough > best:
        is_trusted = terms.rates[enough] >= terms.needed_rate or trusted == high
        return _size(terms, enough, "deadline" if is_trusted else "measuring")
    if best == high:
        return _size(terms, best, "max")
    if best == trusted and best not in terms.measured:
        return _size(terms, best, "measuring")
    if best == low and low > 1:
        return _size(terms, best, "min")
    return _size(terms, best, "cost")


def _enough(terms: GoodputTerms, trusted: int) -> int:
    """Return the fewest workers that meet the deadline; the fastest number if none does."""
    if terms.needed_rate <= 0:
        return 0
    numbers = range(terms.min_workers, trusted + 1)
    fastest = max(numbers, key=lambda workers: (terms.rates[workers], -workers))
    return next((w for w in numbers if terms.rates[w] >= terms.needed_rate), fastest)


def _size(terms: GoodputTerms, workers: int, limit: Limit) -> Size:
    goodputs = tuple(terms.goodput(number) for number in range(workers + 1))
    return Size(workers=workers, limit=limit, goodputs=goodputs)


def describe_size(terms: GoodputTerms, size: Size) -> str:
    """Return the reason for a size as text for users, with the assumptions behind it.

    >>> terms = GoodputTerms(min_workers=1, max_workers=4, rates=(0.0, 10.0, 19.0, 20.0, 20.5),
    ...                      measured=frozenset({1, 2}), usd_per_worker_h=0.5,
    ...                      progress=(1.0,) * 5)
    >>> describe_size(terms, choose_size(terms))
    '2 of 4 workers: 3 are predicted to make 5 % more progress per second at 50 % more cost'
    """
    workers, most = size.workers, terms.max_workers
    head = f"{workers} of {most} workers" if workers < most else f"all {workers} workers"
    if size.limit == "unmeasured":
        return f"{head} until their speed is measured"
    if size.limit == "measuring":
        text = f"{head} to measure their speed: {_compare(terms, workers, max(terms.measured))}"
        if not terms.is_exchange_known:
            text = f"{head} to measure the exchange of gradients, which one worker does not need"
    elif size.limit == "deadline":
        text = f"{head} for the deadline, which requires {terms.needed_rate:.3g} samples/s"
        if terms.rates[workers] < terms.needed_rate:
            text += f" (at most {terms.rates[workers]:.3g} are predicted, so it will be late)"
    elif workers < most:
        text = f"{head}: {_compare(terms, workers + 1, workers)}"
    elif workers > 1:
        text = f"{head}: {_compare(terms, workers, workers - 1)}"
    else:
        text = f"{head}: workers.max is 1"
    if size.limit == "min":
        text += "; workers.min does not allow fewer"
    assumed = _assumptions(terms)
    return f"{text}. Assumed: {'; '.join(assumed)}" if assumed else text


def _compare(terms: GoodputTerms, workers: int, base: int) -> str:
    gain = terms.goodput(workers) / max(terms.goodput(base), 1e-12) - 1
    cost = terms.cost(workers) / terms.cost(base) - 1
    what = "make" if workers in terms.measured else "are predicted to make"
    if workers == 1:
        what = what.replace("are", "is")
    progress = f"{abs(gain):.0%}".replace("%", " %")
    more = "more" if gain >= 0 else "less"
    if progress == "0 %":
        progress, more = "no", "more"
    than = f" than {base}" if workers != base + 1 else ""
    extra = f"{cost:.0%}".replace("%", " %")
    return f"{workers} {what} {progress} {more} progress per second{than} at {extra} more cost"


def _assumptions(terms: GoodputTerms) -> list[str]:
    found = []
    if terms.usd_per_worker_h is None:
        found.append("the pool has no price, so the cost is worker-seconds")
    if terms.progress is None:
        found.append(
            "the gradient noise is not measured, so progress is throughput, whatever the batch"
        )
    return found


def is_material(new: Size, old: Size | None) -> bool:
    """Return True if a size is worth an event: its number of workers or its reason changed."""
    return old is None or (new.workers, new.limit) != (old.workers, old.limit)


def progress_of(gains: tuple[float, ...]) -> tuple[float, ...]:
    """Return the progress of a sample from AdaScale's gain by number of workers.

    Args:
        gains: How many steps of one worker a step is worth, by number of workers from 0.

    >>> progress_of((0.0, 1.0, 1.5))
    (0.0, 1.0, 0.75)
    """
    return tuple(
        gain / workers if workers and math.isfinite(gain) else 0.0
        for workers, gain in enumerate(gains)
    )


LEAST_S = 30.0
LEAST_STEPS = 3
"""A rate is used once it has been measured for this many seconds and this many steps."""

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
    # would be slower. Both are noise, or a point to avoid. The rates never decrease.
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
        # After a restore, steps are repeated, so the counter has decreased.
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
