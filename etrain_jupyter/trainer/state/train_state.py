"""State of a training job on one rank: work plan, workload, counters and best evaluations."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, NamedTuple

from etrain_jupyter.config.schema import Interval, MetricConfig, TrainConfig
from etrain_jupyter.rules.evaluations import (
    EvaluationRecord,
    Trend,
    add_evaluation,
    describe_early_stop,
)
from etrain_jupyter.rules.membership.stimuli import Progress
from etrain_jupyter.rules.samples import ledger
from etrain_jupyter.rules.samples.block_order import BlockLayout
from etrain_jupyter.trainer.references import WorkloadError
from etrain_jupyter.trainer.state.capture import Stateful
from etrain_jupyter.trainer.workload import Workload


@dataclass(frozen=True, kw_only=True)
class WorkPlan:
    """Describes the work in a job; a pure function of the config and the lengths of the data."""

    num_train: int
    """Number of samples in the training set."""
    num_eval: int
    """Number of samples in the evaluation set; 0 if there is none."""
    global_batch_size: int
    """Samples per step. If the batch depends on the number of workers, this is the value for
    ``scaling.base_workers``."""
    steps_per_epoch: int
    """Steps per epoch at ``global_batch_size``."""
    total_steps: int
    """Steps of the job at ``global_batch_size``."""
    layout: BlockLayout | None = None
    """Blocks of the training set; None if it is in memory."""

    @classmethod
    def of(cls, config: TrainConfig, workload: Workload) -> WorkPlan:
        """Return the plan of a job."""
        base_workers = config.scaling.base_workers if config.scaling is not None else 1
        num_train, size = len(workload.train), config.batch.size(base_workers)
        return cls(
            num_train=num_train,
            num_eval=len(workload.eval) if workload.eval is not None else 0,
            global_batch_size=size,
            steps_per_epoch=ledger.steps_per_epoch(num_train, size),
            total_steps=ledger.total_steps(config.epochs, config.steps, num_train, size),
            layout=workload.train.layout,
        )

    @cached_property
    def end(self) -> int:
        """Number of samples that the job trains on, over all epochs."""
        return ledger.position_after(self.total_steps, self.num_train, self.global_batch_size)

    def span(self, position: int, batch_size: int) -> ledger.StepRange:
        """Return the samples of the next step: a full batch, or the rest of its epoch or the job.

        Args:
            position: Samples trained on before the step, over all epochs.
            batch_size: Samples of a full step.
        """
        return ledger.range_at(
            position, num_samples=self.num_train, global_batch_size=batch_size, end=self.end
        )

    def is_boundary(self, position: int) -> bool:
        """Return True if an epoch or the job ends at ``position``."""
        return position % self.num_train == 0 or position == self.end


class Mark(NamedTuple):
    """Progress of a job at a step boundary."""

    step: int
    """Number of committed steps."""
    position: int
    """Number of samples trained on, over all epochs."""


class Every:
    """Schedule for an action that repeats every N steps, epochs or seconds.

    Queries have no side effects. The time is passed as an argument, a ``time.monotonic`` value.
    """

    def __init__(self, interval: Interval, plan: WorkPlan, *, now: float) -> None:
        self._interval, self._num_train = interval, plan.num_train
        self._seconds = interval.value if interval.unit == "s" else 0.0
        self._last_at = now

    def is_due(self, before: Mark, after: Mark, *, now: float) -> bool:
        """Return True if the action is due after the step from ``before`` to ``after``."""
        return self.is_time_over(now) or self.is_passed(before, after)

    def is_passed(self, before: Mark, after: Mark) -> bool:
        """Return True if the step reached a multiple of the interval in steps or epochs."""
        # Compare counts, not remainders, because a step may pass a multiple without hitting it.
        return self._num_until(after) > self._num_until(before)

    def _num_until(self, mark: Mark) -> int:
        return self._interval.num_passed(
            step=mark.step, position=mark.position, num_train=self._num_train
        )

    def is_time_over(self, now: float) -> bool:
        """Return True if the interval is in seconds and has elapsed."""
        return bool(self._seconds) and now - self._last_at >= self._seconds

    def restart(self, now: float) -> None:
        """Restart the interval in seconds."""
        self._last_at = now


class ScorePass(NamedTuple):
    """Identity of one pass of ``eval.predict`` over data.eval.

    A step may be trained again after a restore, with other weights, so the step alone does not
    identify the records.
    """

    step: int = 0
    """Step of the weights; 0 before the first pass."""
    generation: int = 0
    """Generation in which the pass began."""


class BestTracker:
    """Apply ``checkpoint.best`` and ``early_stopping``. Inactive if neither is configured.

    A stateful component of the trainer, which is sent to new ranks and saved in checkpoints, so
    weights are restored together with the results of their own and all earlier evaluations.

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


class TrainState:
    """Everything that checkpoints and state transfers contain.

    The training loop advances it; the checkpointer copies and restores it. Both run in the main
    thread.
    """

    def __init__(self, workload: Workload, config: TrainConfig, plan: WorkPlan) -> None:
        self.workload = workload
        self.config = config
        self.plan = plan
        self.best_tracker = BestTracker(config)
        self.step = 0
        """Number of committed steps."""
        self.weights_version = 0
        """Number of times that the weights changed on this rank; not part of a checkpoint."""
        self.position = 0
        """Number of samples trained on, over all epochs."""
        self.position_before = 0
        """``position`` before the last step."""
        self.num_evals = 0
        """Number of completed evaluations."""
        self.evaluated_step = 0
        """Step whose weights were evaluated last."""
        self.is_eval_owed = False
        """True if rank 0's timer has requested an evaluation that is still pending."""
        self.score_pass = ScorePass()
        """The newest pass of ``eval.predict``, begun or complete."""
        self.is_scored = False
        """True once the scores of that pass are reported, as far as this rank knows."""

    @property
    def is_done(self) -> bool:
        """True if nothing is left to train: the plan is complete, or training stops early."""
        return self.position >= self.plan.end or self.best_tracker.is_over

    @property
    def marks(self) -> tuple[Mark, Mark]:
        """Progress before and after the last step."""
        # Stored rather than computed, because the size of a step may depend on the number of
        # workers, and the last step of an epoch may be smaller.
        return Mark(self.step - 1, self.position_before), Mark(self.step, self.position)

    @property
    def progress(self) -> Progress:
        """Numbers of committed steps and completed evaluations."""
        return (self.step, self.num_evals)

    def counters(self) -> dict[str, int]:
        """Return the counters for a checkpoint or a state transfer."""
        weight = self.workload.weight
        scores = {}
        if self.config.eval.predict is not None:
            step, generation = self.score_pass
            scores = {"score_step": step, "score_pass": generation}
            scores["is_scored"] = int(self.is_scored)
        return {
            **scores,
            "step": self.step,
            "position": self.position,
            "position_before": self.position_before,
            "num_evals": self.num_evals,
            "evaluated_step": self.evaluated_step,
            "is_eval_asked": int(self.is_eval_owed),  # a key of the checkpoint format
            "weight_exponent": weight.exponent if weight is not None else 0,
        }

    def set_counters(self, counters: Mapping[str, int]) -> None:
        """Adopt another trainer's ``counters``. Missing counters keep their values."""
        self.weights_version += 1
        self.step = int(counters.get("step", self.step))
        self.position = int(counters.get("position", self.position))
        self.position_before = int(counters.get("position_before", self.position_before))
        self.num_evals = int(counters.get("num_evals", self.num_evals))
        self.evaluated_step = int(counters.get("evaluated_step", self.evaluated_step))
        self.is_eval_owed = bool(counters.get("is_eval_asked", self.is_eval_owed))
        if "score_step" in counters:
            self.score_pass = ScorePass(int(counters["score_step"]), int(counters["score_pass"]))
            self.is_scored = bool(counters["is_scored"])
        if self.workload.weight is not None and "weight_exponent" in counters:
            self.workload.weight.exponent = int(counters["weight_exponent"])
