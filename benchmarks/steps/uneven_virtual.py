"""The rules of ``batch.split: auto`` in virtual time, for ``uneven --virtual``.

The ranks take the times of the workload ``sleeping``, with noise. So the figures do not depend on
the machine, and a change of speed can be repeated with many seeds.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks.steps.uneven_work import BATCH, SAMPLE_S
from etrain_jupyter.rules.samples.balance import Balance, SampleCost

CHANGES: tuple[tuple[tuple[float, ...], tuple[float, ...]], ...] = (
    ((1.0, 0.5), (0.5, 1.0)),
    ((1.0, 1.0), (1.0, 0.5)),
    ((1.0, 0.5), (1.0, 1.0)),
    ((1.0, 1.0, 1.0, 1.0), (1.0, 1.0, 1.0, 0.5)),
)
NOISES = (0.0, 0.2)
NUM_BEFORE, NUM_AFTER = 100, 120
"""Steps before and after the change."""
OVERHEAD_S = 0.013
"""Time of a step outside of the ranks' own work, as measured with real ranks."""
NUM_SEEDS = 15


class VirtualRanks:
    """Ranks that train with the rules of the trainer, without training anything.

    Attributes:
        speeds: Relative speed of each rank; it may be changed at any time.
        changed_at: Number of steps before each change of the shares.
    """

    def __init__(self, speeds: Sequence[float], noise: float, seed: int) -> None:
        self.speeds = speeds
        self.changed_at: list[int] = []
        self._random = random.Random(seed)
        self._noise = noise
        self._balance = Balance(len(speeds), batch_size=BATCH, min_share=2)
        self._costs = [SampleCost() for _ in speeds]
        self._num_steps = 0

    def step(self) -> tuple[float, float]:
        """Train a step; return its duration, and its duration without noise, in seconds."""
        sent = [cost.seconds for cost in self._costs]
        errors = [cost.error for cost in self._costs]
        exact_s = [
            SAMPLE_S * count / speed
            for count, speed in zip(self._balance.counts, self.speeds, strict=True)
        ]
        times_s = [one * math.exp(self._random.gauss(0, self._noise)) for one in exact_s]
        for cost, time_s, count in zip(self._costs, times_s, self._balance.counts, strict=True):
            cost.add(time_s, count)
        self._num_steps += 1
        if self._balance.observe(sent, errors):
            self.changed_at.append(self._num_steps)
            for cost in self._costs:
                cost.begin()
        return max(times_s) + OVERHEAD_S, max(exact_s)


def measure_changes() -> list[dict[str, Any]]:
    """Return how long the shares take to follow each change of speed."""
    return [
        {"before": before, "after": after, "noise": noise, **_measure(before, after, noise)}
        for before, after in CHANGES
        for noise in NOISES
    ]


def _measure(before: Sequence[float], after: Sequence[float], noise: float) -> dict[str, float]:
    steps, seconds, early, late = [], [], [], []
    for seed in range(NUM_SEEDS):
        ranks = VirtualRanks(before, noise, seed)
        for _ in range(NUM_BEFORE):
            ranks.step()
        ranks.speeds = after
        limit_s = BATCH * SAMPLE_S / sum(after) / 0.9
        taken = [ranks.step() for _ in range(NUM_AFTER)]
        # The last step that is more than 10 % slower than with ideal shares.
        num_slow = max(
            (n for n, (_, exact_s) in enumerate(taken, 1) if exact_s > limit_s), default=0
        )
        steps.append(num_slow)
        seconds.append(sum(time_s for time_s, _ in taken[:num_slow]))
        early.append(sum(at <= NUM_BEFORE for at in ranks.changed_at))
        late.append(sum(at > NUM_BEFORE for at in ranks.changed_at))
    return {
        "steps": statistics.median(steps),
        "seconds": statistics.median(seconds),
        "changes_before": statistics.mean(early),
        "changes_after": statistics.mean(late),
    }
