"""State of a study at one moment, as it is displayed."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class TrialRow:
    """One trial of a study."""

    number: int
    state: str
    """``RUNNING``, ``COMPLETE``, ``PRUNED`` or ``FAIL``, as in Optuna."""
    params: dict[str, Any]
    value: float
    """The newest value of the metric; NaN before the first evaluation."""
    samples: int
    """Training samples at that value; those of the whole trial once it has ended."""
    reason: str
    job_id: str
    curve: tuple[tuple[int, float], ...] = ()
    """Samples and value of each evaluation."""


@dataclass(frozen=True, kw_only=True)
class StudyView:
    """A study at one moment."""

    name: str
    study_id: str
    status: str
    reason: str
    metric: str
    mode: str
    num_trials: int
    num_samples: int
    """Samples of a whole trial; 0 until it is known."""
    rungs: tuple[int, ...] = ()
    trials: tuple[TrialRow, ...] = field(default=())

    @property
    def best(self) -> TrialRow | None:
        """The best complete trial; while there is none, the best running one, then pruned one."""
        # A pruned trial was compared at a rung, so its value may be better than those of trials
        # that have gone further.
        for state in ("COMPLETE", "RUNNING", "PRUNED"):
            rows = [t for t in self.trials if t.state == state and not math.isnan(t.value)]
            if rows:
                return (max if self.mode == "max" else min)(rows, key=lambda row: row.value)
        return None
