"""Schedule evaluations of the current weights and report their results."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from etrain_jupyter.trainer.control.reporter import Send
from etrain_jupyter.trainer.group.process_group import RankGroup
from etrain_jupyter.trainer.loop.evaluation import Evaluation, EvaluationResult
from etrain_jupyter.trainer.micro_batch import MicroBatch
from etrain_jupyter.trainer.places import Places
from etrain_jupyter.trainer.schedule import Every
from etrain_jupyter.trainer.state.train_state import TrainState
from etrain_jupyter.wire.messages import BestFound, EvalFinished


class Evaluations:
    """The evaluations of one job on one rank."""

    def __init__(self, state: TrainState, *, micro: MicroBatch, send: Send, places: Places) -> None:
        self._state = state
        self._send = send
        self._places = places
        self._evaluation = Evaluation(state.workload, state.config, state.plan, micro)
        self.every = Every(state.config.eval.every, state.plan, now=time.monotonic())
        """The interval of the evaluations."""
        self._record: dict[str, Any] | None = None
        """Record of the last evaluation. Every rank keeps it, because any rank may become rank
        0."""

    def is_due(self) -> bool:
        """Return True if the current state must be evaluated before the next step."""
        state = self._state
        # The second condition also covers evaluations that took place before this rank received or
        # restored the state.
        if state.workload.eval is None or state.step == state.evaluated_step:
            return False
        # All ranks must make the same decision, so no clock is read here. An interval in seconds is
        # measured on rank 0's clock; the step header then sets ``is_eval_owed`` on all ranks. The
        # flag is part of the state, so that an interrupted evaluation is repeated. The final state
        # is always evaluated.
        return self.every.is_passed(*state.marks) or state.is_eval_owed or state.is_done

    def run(self, group: RankGroup, *, is_pending: Callable[[], bool]) -> bool:
        """Evaluate the current weights.

        Returns:
            False if a planned change interrupted it; the next generation restarts the evaluation.
        """
        state, started_at = self._state, time.perf_counter()
        result = self._evaluation.run(
            group,
            step=state.step,
            is_pending=is_pending,
            at_batch=lambda: self._reach("eval", group),
        )
        if result is None:
            return False
        # Update the counters before the report. If a rank dies after this point, the survivors have
        # the same counters, and the next rank 0 reports the evaluation again.
        state.num_evals += 1
        state.evaluated_step, state.is_eval_owed = state.step, False
        self.every.restart(time.monotonic())
        self._take(result, time.perf_counter() - started_at)
        self._reach("evaluated", group)
        if group.rank == 0:
            self.report(group.generation)
        return True

    def _reach(self, place: str, group: RankGroup) -> None:
        self._places.reach(place, rank=group.rank, step=self._state.step, phase="evaluating")

    def _take(self, result: EvaluationResult, duration_s: float) -> None:
        state = self._state
        state.best_tracker.take(state.step, {"loss": result.loss, **result.metrics})
        self._record = {
            "step": state.step,
            # The epoch of the last sample trained on. At the end of an epoch, ``position`` already
            # belongs to the next epoch.
            "epoch": (state.position - 1) // state.plan.num_train,
            "samples": result.num_samples,
            "loss": result.loss,
            "metrics": result.metrics,
            "duration_s": duration_s,
            "time": time.time(),
        }

    def report(self, generation: int) -> None:
        """On rank 0, report the evaluation of this state and the best evaluation."""
        # Also at the start of a generation, because the previous rank 0 may have died between the
        # evaluation and its report. The coordinator ignores duplicate reports:
        #
        #     rank 0   evaluated 40 ── (dies)
        #     rank 1   evaluated 40 ── becomes rank 0 ── reports 40
        state, record = self._state, self._record
        # If the counters differ, this rank has restored or received a state, and the record belongs
        # to another state.
        if record is not None and record["step"] == state.step == state.evaluated_step:
            self._send(EvalFinished(generation=generation, record=record))
        best = state.best_tracker.best_record()
        if best is not None:
            self._send(BestFound(generation=generation, record=best))
