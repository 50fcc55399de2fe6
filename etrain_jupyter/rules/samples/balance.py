"""Share the samples of a step by the measured speeds of the ranks (``batch.split: auto``).

Each rank measures its time per sample and sends it in the step header, so that all ranks know the
same numbers and compute the same shares, without asking the coordinator::

    rank 0   2 ms per sample ─┐                   ┌─ 171, 85 from the next step on
    rank 1   4 ms per sample ─┴─ sum of headers ──┴─ 171, 85 from the next step on

A rank's time per sample depends on its share, because a part of a step takes the same time for any
share. The shares are therefore computed again from the new times, and approach those with which
all ranks take equally long.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from statistics import median

from etrain_jupyter.rules.samples.batch_plan import share_by_speed, share_samples

MIN_GAIN = 0.05
"""Smallest relative reduction of the slowest rank's time for which the shares change. Below it,
the change may be noise, and each change costs the samples that were fetched ahead."""
MIN_STEPS, MAX_STEPS = 8, 200
"""Steps between two decisions."""
MIN_S = 1.0
"""Duration of the steps between two decisions, in seconds, unless they are ``MAX_STEPS``."""
MIN_MEASURED = 4
"""Steps that a median needs."""
NUM_MEASURED = 32
"""Maximum number of steps in a median."""
NUM_SETTLING = 2
"""Steps after a change that are not measured: their samples are not fetched ahead."""


class SampleCost:
    """Time that one rank takes for a sample, without the time that it waits for the others."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._measured: deque[float] = deque(maxlen=NUM_MEASURED)
        self._num_to_skip = NUM_SETTLING

    def add(self, seconds: float, num_samples: int) -> None:
        """Add a step of this rank."""
        if self._num_to_skip:
            self._num_to_skip -= 1
        elif num_samples:
            self._measured.append(seconds / num_samples)

    @property
    def seconds(self) -> float:
        """Median of the last steps; 0 before the first measurement."""
        # Computed here and not in ``add``, which every job calls in every step.
        if len(self._measured) >= MIN_MEASURED:
            self._seconds = median(self._measured)
        return self._seconds

    def begin(self) -> None:
        """Begin to measure with another share; ``seconds`` stays until it is known better."""
        self._seconds = self.seconds
        self._measured.clear()
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

    def observe(self, costs_s: Sequence[float]) -> bool:
        """Observe a step; return True if the shares change from the next step on.

        Args:
            costs_s: ``SampleCost.seconds`` of each rank, shape ``(world_size,)``. A rank that has
                not measured one is assumed to be as fast as the mean of the others.
        """
        self._num_steps += 1
        known = [cost for cost in costs_s if cost > 0]
        if self._num_steps < self._decide_at or not known:
            return False
        costs = [cost if cost > 0 else sum(known) / len(known) for cost in costs_s]
        before_s = max(cost * count for cost, count in zip(costs, self.counts, strict=True))
        wanted = MIN_S / before_s if before_s else MAX_STEPS
        num_steps = NUM_SETTLING + min(max(MIN_STEPS, math.ceil(wanted)), MAX_STEPS)
        self._decide_at = self._num_steps + num_steps
        speeds = tuple(1 / cost for cost in costs)
        if self._batch_size < self._min_share * len(costs):
            return False
        counts = share_by_speed(self._batch_size, speeds, min_share=self._min_share)
        after_s = max(cost * count for cost, count in zip(costs, counts, strict=True))
        if counts == self.counts or after_s > (1 - MIN_GAIN) * before_s:
            return False
        self.speeds, self.counts = speeds, counts
        return True
