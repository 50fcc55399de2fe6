"""Track the best evaluations and decide on early stopping.

The tracker is a stateful component of the trainer: it is sent to new ranks and saved in
checkpoints, so weights are restored together with the results of their own and all earlier
evaluations.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict
from typing import Any

from etrain_jupyter.config.schema import MetricConfig, TrainConfig
from etrain_jupyter.rules.policy.evaluations import (
    EvaluationRecord,
    Trend,
    add_evaluation,
    describe_early_stop,
)
from etrain_jupyter.trainer.references import WorkloadError
from etrain_jupyter.trainer.state.capture import Stateful


class BestTracker:
    """Apply ``checkpoint.best`` and ``early_stopping``. Inactive if neither is configured.

    Attributes:
        best: The best evaluations, best first. Replaced as a whole, so that any thread may read it.
    """

    def __init__(self, config: TrainConfig) -> None:
        self._best_config = config.checkpoint.best
        self._stop_config = config.early_stopping
        self.best: tuple[EvaluationRecord, ...] = ()
        self._trend = Trend()

    @property
    def extras(self) -> Mapping[str, Stateful]:
        """Return the stateful components to checkpoint: this tracker, if it is in use."""
        return {"evaluations": self} if self._best_config or self._stop_config else {}

    def check(self, names: Collection[str]) -> None:
        """Check that the configured metrics are evaluated.

        Args:
            names: Names of the metrics and scores, without ``loss``.

        Raises:
            WorkloadError: If a configured metric is not among them.
        """
        for key in self.missing(["loss", *names]):
            raise WorkloadError(
                f"{key} names the metric {self._wanted[key].metric!r}, which is not evaluated. The "
                f"metrics are: {', '.join(('loss', *names))}."
            )

    def missing(self, names: Collection[str]) -> list[str]:
        """Return the keys, such as ``checkpoint.best``, whose metric is not among ``names``."""
        return [key for key, wanted in self._wanted.items() if wanted.metric not in names]

    @property
    def _wanted(self) -> dict[str, MetricConfig]:
        both = {"checkpoint.best": self._best_config, "early_stopping": self._stop_config}
        return {key: wanted for key, wanted in both.items() if wanted is not None}

    def take(self, step: int, values: Mapping[str, float]) -> None:
        """Record an evaluation."""
        if self._best_config is not None:
            found = EvaluationRecord(step, values[self._best_config.metric])
            self.best = add_evaluation(self.best, found, mode=self._best_config.mode)
        if self._stop_config is not None:
            found = EvaluationRecord(step, values[self._stop_config.metric])
            asked = self._stop_config
            self._trend = self._trend.after(found, mode=asked.mode, min_delta=asked.min_delta)

    @property
    def is_over(self) -> bool:
        """True if the job should stop early."""
        return self._stop_config is not None and self._trend.num_stale >= self._stop_config.patience

    def best_record(self) -> dict[str, Any] | None:
        """Return the log record of the best evaluation; None if there is none yet."""
        if self._best_config is None or not self.best:
            return None
        return {"metric": self._best_config.metric, **self.best[0]._asdict()}

    def end_record(self) -> dict[str, Any] | None:
        """Return the log record of early stopping; None if the job does not stop early."""
        if self._stop_config is None or not self.is_over:
            return None
        return {
            "metric": self._stop_config.metric,
            "step": self._trend.step,
            "best": self._trend.best,
            "best_step": self._trend.best_step,
            "num_evals": self._trend.num_stale,
            "reason": describe_early_stop(self._trend, metric=self._stop_config.metric),
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the best evaluations and the trend."""
        return {
            "best": [list(known) for known in self.best],
            "trend": asdict(self._trend),
            "metrics": self._metrics_in_use,
        }

    @property
    def _metrics_in_use(self) -> dict[str, Any]:
        # Saved with the values, because a resumed job may use another metric or direction, and its
        # values must not be compared with these.
        asked = {"best": self._best_config, "trend": self._stop_config}
        return {
            name: [wanted.metric, wanted.mode] if wanted is not None else None
            for name, wanted in asked.items()
        }

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Adopt another trainer's evaluations where the metrics are the same."""
        theirs = state_dict["metrics"]
        if theirs["best"] == self._metrics_in_use["best"]:
            self.best = tuple(EvaluationRecord(*known) for known in state_dict["best"])
        if theirs["trend"] == self._metrics_in_use["trend"]:
            self._trend = Trend(**state_dict["trend"])
