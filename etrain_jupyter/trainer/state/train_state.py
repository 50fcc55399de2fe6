"""State of a training job on one rank: the workload, its counters and its best evaluations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from etrain_jupyter.config.schema import TrainConfig
from etrain_jupyter.rules.membership.stimuli import Progress
from etrain_jupyter.trainer.schedule import Mark, WorkPlan
from etrain_jupyter.trainer.state.best_tracker import BestTracker
from etrain_jupyter.trainer.workload import Workload


class ScorePass(NamedTuple):
    """Identity of one pass of ``eval.predict`` over data.eval.

    A step may be trained again after a restore, with other weights, so the step alone does not
    identify the records.
    """

    step: int = 0
    """Step of the weights; 0 before the first pass."""
    generation: int = 0
    """Generation in which the pass began."""


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
