"""Share the samples of a step by the measured speeds of the ranks (``batch.split: auto``).

Each rank measures its time per sample and sends it in the step header, so that all ranks know the
same numbers and compute the same shares, without asking the coordinator::

    rank 0   2 ms per sample ─┐                   ┌─ 171, 85 from the next step on
    rank 1   4 ms per sample ─┴─ sum of headers ──┴─ 171, 85 from the next step on

A rank's time per sample depends on its share, because part of a step takes the same time regardless
of the share. The shares are therefore computed again from the new times, and approach those with
which all ranks take equally long.

The shares follow a lasting change of a rank's speed within about ten steps, and noise does not
change them. Two rules together achieve this:

- Each rank takes the median of all its steps since its speed last changed; see ``ChangeDetector``.
  The median becomes more accurate with each step, and starts over after a change.
- The shares change only if the gain is larger than the accuracy of the medians can explain.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from statistics import median

from etrain_jupyter.rules.samples.batch_plan import share_by_speed, share_samples

MIN_GAIN = 0.05
"""The shares change only if the slowest rank's time falls by at least this fraction, because each
change discards the samples that were fetched ahead."""
MIN_STEPS, MAX_STEPS = 8, 200
"""Bounds for the number of steps between two changes of the shares."""
MIN_S = 1.0
"""Minimum duration of the steps between two changes, in seconds, unless there are ``MAX_STEPS``."""
MIN_MEASURED = 4
"""Minimum number of steps in a median."""
MIN_MEASURED_S = 0.1
"""Minimum duration of the steps in a median, in seconds. A shorter hiccup does not count."""
NUM_MEASURED = 128
"""Maximum number of steps in a median."""
NUM_DIFFERENCES = 64
"""Maximum number of steps from which the noise is estimated."""
NUM_SETTLING = 2
"""Steps after a change that are not measured, because their samples are not fetched ahead."""
PRIOR_NOISE, PRIOR_STEPS = 0.1, 4
"""Relative noise that is assumed before it is measured, and its weight as a number of steps."""
NUM_ERRORS = 3.0
"""Standard errors by which a gain must differ from zero, for one rank; see ``Balance._bar``."""
_NORMAL = 1 / (0.6745 * math.sqrt(2))
"""Ratio of the standard deviation of normal values to the median of the absolute differences
between neighboring values."""
_MEDIAN = math.sqrt(math.pi / 2)
"""Ratio of the standard error of the median of normal values to that of their mean."""
CHANGE_ALLOWANCE = 1.0
"""Allowance subtracted from each deviation, in standard deviations. A change of twice this size is
detected fastest."""
CHANGE_LIMIT = 6.0
"""Sum at which a change is detected, in standard deviations. With normal noise and a known level,
noise alone reaches it about once in 400,000 values (D. Siegmund's approximation, 1985)."""
MAX_DEVIATION = 3.0
"""Each value counts as at most this many standard deviations. One slow step does not suffice."""


class ChangeDetector:
    """Detect a lasting change of a noisy level within a few values, with Page's cumulative sums.

    There is one sum for each direction. It adds up how far the values are above (or below) the
    level, less an allowance, and never falls below zero. So noise keeps it near zero, and a lasting
    change makes it grow with every value::

        level         0  0  0  0  0  0  3  3  3  3
        value         1 -1  0  4  0 -1  3  2  4  3      in standard deviations; 4 counts as 3
        sum (above)   0  0  0  2  1  0  2  3  5  7      over 6: the change began after the last 0

    Source: E. S. Page, "Continuous Inspection Schemes", Biometrika 41 (1954), 100-115. The last
    zero of a sum as the estimate of the time of the change: D. M. Hawkins, D. H. Olwell,
    "Cumulative Sum Charts and Charting for Quality Improvement" (1998), chapter 1.

    >>> detector = ChangeDetector()
    >>> [detector.add(deviation) for deviation in (0.5, -1.0, 9.0, 0.0, 2.5, 3.0, 3.5)]
    [0, 0, 0, 0, 0, 0, 5]
    """

    def __init__(self) -> None:
        self._above = self._below = 0.0
        self._num_above = self._num_below = 0

    @property
    def num_suspect(self) -> int:
        """Number of the last values that may belong to a change; 0 if none of them may."""
        return max(self._num_above, self._num_below)

    def add(self, deviation: float) -> int:
        """Add a value; return how many of the last values are at a new level, usually 0.

        Args:
            deviation: Difference from the level, in standard deviations.
        """
        deviation = min(max(deviation, -MAX_DEVIATION), MAX_DEVIATION)
        self._above = max(0.0, self._above + deviation - CHANGE_ALLOWANCE)
        self._below = max(0.0, self._below - deviation - CHANGE_ALLOWANCE)
        self._num_above = self._num_above + 1 if self._above else 0
        self._num_below = self._num_below + 1 if self._below else 0
        if self._above >= CHANGE_LIMIT:
            return self._num_above
        return self._num_below if self._below >= CHANGE_LIMIT else 0

    def reset(self) -> None:
        """Start over, for values at another level."""
        self._above = self._below = 0.0
        self._num_above = self._num_below = 0


class SampleCost:
    """Time that one rank takes for a sample, excluding the time that it waits for the others.

    Noise is relative to the time, so the median, the noise and the changes are computed on its
    logarithm.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        """Median of the steps since the last change; 0 before the first measurement."""
        self.error = 0.0
        """Standard error of ``seconds``, relative to it."""
        self._measured: deque[float] = deque(maxlen=NUM_MEASURED)
        self._differences: deque[float] = deque(maxlen=NUM_DIFFERENCES)
        """Absolute differences between neighboring values. A change of the level adds only one
        large difference, so the differences are kept after a change."""
        self._detector = ChangeDetector()
        self._level = 0.0
        """Median of the steps that are certainly at the current level."""
        self._measured_s = 0.0
        self._num_to_skip = NUM_SETTLING

    def add(self, seconds: float, num_samples: int) -> None:
        """Add a step of this rank."""
        if self._num_to_skip:
            self._num_to_skip -= 1
        elif num_samples and seconds > 0:
            self._add(math.log(seconds / num_samples), seconds)

    def _add(self, value: float, seconds: float) -> None:
        if self._measured:
            self._differences.append(abs(value - self._measured[-1]))
        self._measured.append(value)
        self._measured_s += seconds
        noise = self._noise()
        if len(self._measured) >= MIN_MEASURED:
            num_changed = self._detector.add((value - self._level) / noise)
            if num_changed:  # keep only the steps since then
                kept = list(self._measured)[-num_changed:]
                self._measured.clear()
                self._measured.extend(kept)
                self._measured_s = len(kept) * seconds
                self._detector.reset()
        found = median(self._measured)
        if not self._detector.num_suspect:
            self._level = found
        self._report(found, noise)

    def _report(self, found: float, noise: float) -> None:
        num_steps = len(self._measured)
        if num_steps < MIN_MEASURED or self._measured_s < MIN_MEASURED_S:
            return
        # If steps 1 to 3 were slow and the fourth is not, a hiccup was taken for a change. The
        # detector corrects this two steps later.
        if num_steps < 2 * MIN_MEASURED and self._detector.num_suspect:
            return
        self.seconds = math.exp(found)
        self.error = _MEDIAN * noise / math.sqrt(num_steps)

    def _noise(self) -> float:
        """Return the standard deviation of the logarithms, which is about the relative noise."""
        num_steps = len(self._differences)
        measured = _NORMAL * median(self._differences) if num_steps else 0.0
        total = PRIOR_STEPS * PRIOR_NOISE**2 + num_steps * measured**2
        return math.sqrt(total / (PRIOR_STEPS + num_steps))

    def begin(self) -> None:
        """Start measuring with another share; keep ``seconds`` until there is a better value."""
        self._measured.clear()
        self._measured_s = 0.0
        self._detector.reset()
        self._num_to_skip = NUM_SETTLING


class Balance:
    """The shares of one generation; equal on all ranks.

    Args:
        world_size: Number of ranks.
        batch_size: Samples of a full step.
        min_share: Smallest share of a rank.

    >>> balance = Balance(2, batch_size=256, min_share=2)
    >>> balance.observe([0.002, 0.004])
    True
    >>> balance.counts
    (171, 85)
    """

    def __init__(self, world_size: int, *, batch_size: int, min_share: int) -> None:
        self._batch_size, self._min_share = batch_size, min_share
        self.speeds: tuple[float, ...] | None = None
        """Relative speeds; None for even shares."""
        self.counts = share_samples(batch_size, world_size)
        """Shape ``(world_size,)``: samples of each rank in a full step."""
        self._num_steps = 0
        # The ranks may have measured their times in the previous generation.
        self._decide_at = 1

    def observe(self, costs_s: Sequence[float], errors: Sequence[float] = ()) -> bool:
        """Observe a step; return True if the shares change from the next step on.

        Args:
            costs_s: ``SampleCost.seconds`` of each rank, shape ``(world_size,)``. A rank that has
                not measured one is assumed to be as fast as the mean of the others.
            errors: ``SampleCost.error`` of each rank; empty if the times are exact.
        """
        self._num_steps += 1
        known = [cost for cost in costs_s if cost > 0]
        is_small = self._batch_size < self._min_share * len(costs_s)
        if self._num_steps < self._decide_at or not known or is_small:
            return False
        costs = [cost if cost > 0 else sum(known) / len(known) for cost in costs_s]
        times_s = [cost * count for cost, count in zip(costs, self.counts, strict=True)]
        before_s = max(times_s)
        speeds = tuple(1 / cost for cost in costs)
        # Check this first, in every step, because it takes less time than computing the shares.
        best_s = self._batch_size / sum(speeds)
        if math.log(before_s / best_s) <= self._bar(times_s.index(before_s), speeds, errors):
            return False
        counts = share_by_speed(self._batch_size, speeds, min_share=self._min_share)
        after_s = max(cost * count for cost, count in zip(costs, counts, strict=True))
        if counts == self.counts or after_s > (1 - MIN_GAIN) * before_s:
            return False
        wanted = MIN_S / before_s
        num_steps = NUM_SETTLING + min(max(MIN_STEPS, math.ceil(wanted)), MAX_STEPS)
        self._decide_at = self._num_steps + num_steps
        self.speeds, self.counts = speeds, counts
        return True

    def _bar(self, slowest: int, speeds: Sequence[float], errors: Sequence[float]) -> float:
        """Return the logarithm of the gain below which the shares do not change.

        The gain is the time of the slowest rank, relative to the time T = batch / sum(speeds) that
        all ranks would take with ideal shares. An error in the time of rank i changes T in
        proportion to the rank's part of the speeds. It changes the time of the slowest rank only if
        i is that rank::

            log gain = log(cost[slowest] * count[slowest]) - log(T)
            d log(T) / d log(cost[i]) = speeds[i] / sum(speeds)

        With more ranks, the largest error among them is larger, because the maximum of n normal
        values is about sqrt(2 * log(n)) standard deviations.
        """
        total = sum(speeds)
        variance = sum(
            ((rank == slowest) - speed / total) ** 2 * error**2
            for rank, (speed, error) in enumerate(zip(speeds, errors, strict=False))
        )
        num_errors = NUM_ERRORS + math.sqrt(2 * math.log(len(speeds)))
        return max(-math.log(1 - MIN_GAIN), num_errors * math.sqrt(variance))
