"""When which worker of a job shall suffer what: faults on purpose, drawn by chance from a seed."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

FAULT_KINDS = ("kill", "segfault", "exit", "stop", "hold_gil", "hang", "notice", "worker")
"""What chaos can do: ``worker`` kills the worker process, ``notice`` warns it before, the
others happen to the trainer."""

MODES = (*FAULT_KINDS, "mix")


@dataclass(frozen=True, kw_only=True)
class Strike:
    """One fault that is due."""

    worker: str
    kind: str


class Chaos:
    """Faults with exponentially distributed times between them. Time is an argument.

    Args:
        mtbf_s: Mean time between two faults of the job.
        mode: One of ``MODES``; ``mix`` draws a kind for each fault.
        seed: Two with the same seed and the same workers at the same times do the same.
        now: When it begins.
        duration_s: How long it lasts; None until the job ends.
    """

    def __init__(
        self, *, mtbf_s: float, mode: str, seed: int, now: float, duration_s: float | None = None
    ) -> None:
        if mode not in MODES:
            raise ValueError(f"no chaos of the mode {mode!r}; there are {', '.join(MODES)}")
        if not mtbf_s > 0:
            raise ValueError(f"mtbf_s={mtbf_s:g}: it must be more than 0")
        self._chance = random.Random(seed)
        self._mtbf_s = mtbf_s
        self._mode = mode
        self._ends_at = math.inf if duration_s is None else now + duration_s
        self._next_at = now + self._chance.expovariate(1 / mtbf_s)

    def is_over(self, now: float) -> bool:
        """Whether nothing will come of it any more."""
        return now >= self._ends_at

    def due(self, workers: Sequence[str], now: float) -> Strike | None:
        """Return the fault that is due, if one is.

        Args:
            workers: Those that train now. If there are none, the fault does not happen.
            now: Several that came due at once count as one.
        """
        if now < self._next_at or self.is_over(now):
            return None
        self._next_at = now + self._chance.expovariate(1 / self._mtbf_s)
        kind = self._chance.choice(FAULT_KINDS) if self._mode == "mix" else self._mode
        number = self._chance.random()
        if not workers:
            return None
        return Strike(worker=workers[int(number * len(workers))], kind=kind)
