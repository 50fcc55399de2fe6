"""What the evaluations of one trainer come to: which step is the best, and whether to end early.

Its state is part of the trainer's: it goes to newcomers and into checkpoints, so that whoever goes
on from some weights knows what was said of them and of those before.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict
from typing import Any

from etrain_jupyter.config.schema import TrainConfig
from etrain_jupyter.rules.policy.evaluations import (
    EvaluationRecord,
    Trend,
    add_evaluation,
    words_of_end,
)
from etrain_jupyter.trainer.references import WorkloadError
from etrain_jupyter.trainer.state.capture import Stateful


class BestTracker:
    """Follows ``checkpoint.best`` and ``early_stopping``; knows nothing if neither is asked for.

    Attributes:
        best: The best evaluations, best first; replaced as a whole, so that any thread may read it.
    """

    def __init__(self, config: TrainConfig) -> None:
        self._asked_best = config.checkpoint.best
        self._asked_end = config.early_stopping
        self.best: tuple[EvaluationRecord, ...] = ()
        self._trend = Trend()

    @property
    def extras(self) -> Mapping[str, Stateful]:
        """Return what has a state: itself, if it has anything to judge."""
        return {"judge": self} if self._asked_best or self._asked_end else {}

    def check(self, names: Collection[str]) -> None:
        """Refuse what no evaluation would tell.

        Args:
            names: What the warm-up's pass has measured.

        Raises:
            WorkloadError: If a metric is not among them.
        """
        asked = {"checkpoint.best": self._asked_best, "early_stopping": self._asked_end}
        for key, wanted in asked.items():
            if wanted is not None and wanted.metric not in ("loss", *names):
                raise WorkloadError(
                    f"{key} names the metric {wanted.metric!r}, which is not evaluated. There are: "
                    f"{', '.join(('loss', *names))}."
                )

    def take(self, step: int, values: Mapping[str, float]) -> None:
        """Take in an evaluation.

        Args:
            step: The step that the weights stand at.
            values: The means over the evaluation set by name, with ``loss``.
        """
        if self._asked_best is not None:
            found = EvaluationRecord(step, values[self._asked_best.metric])
            self.best = add_evaluation(self.best, found, mode=self._asked_best.mode)
        if self._asked_end is not None:
            found = EvaluationRecord(step, values[self._asked_end.metric])
            asked = self._asked_end
            self._trend = self._trend.after(found, mode=asked.mode, min_delta=asked.min_delta)

    @property
    def is_over(self) -> bool:
        """Whether the job shall end early."""
        return self._asked_end is not None and self._trend.num_stale >= self._asked_end.patience

    def best_record(self) -> dict[str, Any] | None:
        """Return what the log is told of the best evaluation; None before the first."""
        if self._asked_best is None or not self.best:
            return None
        return {"metric": self._asked_best.metric, **self.best[0]._asdict()}

    def end_record(self) -> dict[str, Any] | None:
        """Return what the log is told of an early end; None if there is none."""
        if self._asked_end is None or not self.is_over:
            return None
        return {
            "metric": self._asked_end.metric,
            "step": self._trend.step,
            "best": self._trend.best,
            "best_step": self._trend.best_step,
            "num_evals": self._trend.num_stale,
            "reason": words_of_end(self._trend, metric=self._asked_end.metric),
        }

    def state_dict(self) -> dict[str, Any]:
        """Return what the evaluations have come to."""
        return {
            "best": [list(known) for known in self.best],
            "trend": asdict(self._trend),
            "asked": self._asked,
        }

    @property
    def _asked(self) -> dict[str, Any]:
        """Return what the numbers are of: a resumed job may ask for others."""
        asked = {"best": self._asked_best, "trend": self._asked_end}
        return {
            name: [wanted.metric, wanted.mode] if wanted is not None else None
            for name, wanted in asked.items()
        }

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Take over what another trainer's evaluations have come to."""
        theirs = state_dict.get("asked", self._asked)  # none in older checkpoints
        if theirs["best"] == self._asked["best"]:
            self.best = tuple(EvaluationRecord(*known) for known in state_dict["best"])
        if theirs["trend"] == self._asked["trend"]:
            self._trend = Trend(**state_dict["trend"])
