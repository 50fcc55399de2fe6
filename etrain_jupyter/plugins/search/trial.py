"""One trial of a running study, and its evaluations: a fold over the events of its job."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from etrain_jupyter.log.events import (
    CostUpdated,
    EvalCompleted,
    EvalScored,
    Event,
    JobPlanned,
    JobRestored,
    StepCompleted,
    UserErrorRaised,
)
from etrain_jupyter.plugins.search.rules import TrialState


@dataclass(frozen=True, kw_only=True)
class TrialEvaluation:
    """Values of one evaluation, after a number of training samples."""

    samples: int
    values: dict[str, float]


@dataclass(kw_only=True)
class TrialProgress:
    """Progress of one trial. ``apply`` returns each new evaluation once."""

    plan: JobPlanned | None = None
    samples: int = 0
    """Training samples so far, over all epochs; steps that a restore has undone are not counted."""
    usd: float = 0.0
    reason: str = ""
    """The notebook's exception; empty unless the job has failed with one."""
    last: TrialEvaluation | None = None
    """The newest evaluation."""
    _samples_at: dict[int, int] = field(default_factory=dict)  # by step of an evaluation
    _step: int = 0

    def apply(self, event: Event) -> TrialEvaluation | None:
        """Add the next event of the log, and return the evaluation in it, if any."""
        match event:
            case JobPlanned():
                self.plan = event
            case StepCompleted() if self.plan is not None:
                length = self.plan.num_train_samples
                self.samples = event.epoch * length + event.first + event.samples
                self._step = event.step
            case JobRestored() if self._step:
                # Assume steps of equal size, although the last one of an epoch may be smaller. The
                # next StepCompleted corrects the number.
                self.samples = self.samples * event.step // self._step
                self._step = event.step
            case EvalCompleted():
                self._samples_at[event.step] = self.samples
                return self._evaluated(self.samples, event.values)
            case EvalScored():
                # Scores arrive later than their evaluation, so later steps may precede them.
                samples = self._samples_at.get(event.step, self.samples)
                return self._evaluated(samples, event.values)
            case CostUpdated():
                self.usd = event.spent_usd
            case UserErrorRaised():
                self.reason = event.error
            case _:
                pass
        return None

    def apply_all(self, events: Iterable[Event]) -> list[TrialEvaluation]:
        """Add several events, and return their evaluations."""
        return [found for event in events if (found := self.apply(event)) is not None]

    def _evaluated(self, samples: int, values: dict[str, float]) -> TrialEvaluation:
        self.last = TrialEvaluation(samples=samples, values=dict(values))
        return self.last


def is_usable(value: float | None) -> bool:
    """Return whether a metric's value can be compared."""
    return value is not None and math.isfinite(value)


@dataclass(kw_only=True)
class Trial:
    """One trial of this study."""

    number: int
    values: dict[str, Any]
    job_id: str
    state: TrialState = "RUNNING"
    reason: str = ""
    """Why it was pruned, or failed."""
    progress: TrialProgress = field(default_factory=TrialProgress)
    is_prune_sent: bool = False
    is_started: bool = False
    retry_at: float = 0.0
    ended_as: str = ""
    """Status of its ended job."""
    latest: float | None = None
    """The newest value of the metric."""
    samples: int = 0
    """Samples of a trial that had ended before this scheduler started."""

    @property
    def num_samples(self) -> int:
        """Samples that it was trained on so far."""
        return max(self.samples, self.progress.samples)
