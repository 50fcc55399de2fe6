"""Schedule random faults for a job's workers, from a seed."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

FAULT_KINDS = ("kill", "segfault", "exit", "stop", "hold_gil", "hang", "notice", "worker")
"""Kinds of faults: ``worker`` kills the worker process, ``notice`` sends it an interruption notice,
the others affect the trainer."""

MODES = (*FAULT_KINDS, "mix")


@dataclass(frozen=True, kw_only=True)
class Strike:
    """One fault that is due."""

    worker: str
    kind: str


class Chaos:
    """Faults with exponentially distributed times between them. Callers pass the time.

    Args:
        mtbf_s: Mean seconds between faults in the job.
        mode: One of ``MODES``; ``mix`` draws a kind for each fault.
        seed: The same seed, with the same workers at the same times, gives the same faults.
        now: Start time.
        duration_s: Seconds after which no more faults are due; None for the whole job.
    """

    def __init__(
        self, *, mtbf_s: float, mode: str, seed: int, now: float, duration_s: float | None = None
    ) -> None:
        if mode not in MODES:
            raise ValueError(f"unknown chaos mode {mode!r}; choose one of {', '.join(MODES)}")
        if not mtbf_s > 0:
            raise ValueError(f"mtbf_s={mtbf_s:g} must be greater than 0")
        self._random = random.Random(seed)
        self._mtbf_s = mtbf_s
        self._mode = mode
        self._ends_at = math.inf if duration_s is None else now + duration_s
        self._next_at = now + self._random.expovariate(1 / mtbf_s)

    def is_over(self, now: float) -> bool:
        """Return whether no more faults will follow."""
        return now >= self._ends_at

    def due(self, workers: Sequence[str], now: float) -> Strike | None:
        """Return the fault that is due, if any.

        Args:
            workers: The workers that train now. If there are none, the fault is dropped.
            now: The current time. Several overdue faults count as one.
        """
        if now < self._next_at or self.is_over(now):
            return None
        self._next_at = now + self._random.expovariate(1 / self._mtbf_s)
        kind = self._random.choice(FAULT_KINDS) if self._mode == "mix" else self._mode
        # Draw the same random numbers with and without workers, so later faults do not depend on
        # whether the job happens to be waiting.
        number = self._random.random()
        if not workers:
            return None
        return Strike(worker=workers[int(number * len(workers))], kind=kind)
