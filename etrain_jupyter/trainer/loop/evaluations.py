"""Schedule evaluations of the current weights and report their results."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from etrain_jupyter.trainer.control.faults import Places
from etrain_jupyter.trainer.control.reporter import Send
from etrain_jupyter.trainer.group.gathering import gather_json
from etrain_jupyter.trainer.group.process_group import RankGroup
from etrain_jupyter.trainer.loop.evaluation import Evaluation, EvaluationResult
from etrain_jupyter.trainer.micro_batch import MicroBatch
from etrain_jupyter.trainer.scoring.score_process import Scorer
from etrain_jupyter.trainer.scoring.set_scores import IsPending, SetScores
from etrain_jupyter.trainer.state.train_state import Every, ScorePass, TrainState
from etrain_jupyter.wire.messages import BestFound, EvalFinished


class Evaluations:
    """The evaluations of one job on one rank."""

    def __init__(
        self,
        state: TrainState,
        *,
        micro: MicroBatch,
        send: Send,
        places: Places,
        scorer: Scorer | None = None,
    ) -> None:
        self._state = state
        self._send = send
        self._places = places
        self._evaluation = Evaluation(state.workload, state.config, state.plan, micro)
        self.every = Every(state.config.eval.every, state.plan, now=time.monotonic())
        """The interval of the evaluations."""
        self.has_scores = state.config.eval.predict is not None
        """True if the job has ``eval.score``."""
        self._scores: SetScores | None = None
        """None if the job has no ``eval.score``."""
        if self.has_scores:
            assert scorer is not None
            self._scores = SetScores(state, micro=micro, scorer=scorer, send=send, places=places)
        self._measured: tuple[ScorePass, EvaluationResult] | None = None
        """Loss and metrics of the pass in progress, while it waits for its scores."""

    @property
    def _names(self) -> list[str]:
        workload = self._state.workload
        return [*workload.measures.names, *workload.whole_set]

    def check_names(self) -> None:
        """Check after the warm-up that the metrics named by other config keys are evaluated.

        Raises:
            WorkloadError: If a metric is not evaluated. Names that ``score`` may return are checked
                later.
        """
        if self._scores is None:
            self._state.best_tracker.check(self._names)

    @property
    def _needs_scores(self) -> bool:
        """True if ``checkpoint.best`` or ``early_stopping`` depends on the scores."""
        measured = ["loss", *self._names] if self._state.config.eval.loss else []
        return self._scores is not None and bool(self._state.best_tracker.missing(measured))

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
            False if a planned change interrupted it; the next generation continues the evaluation.
        """
        state, started_at = self._state, time.perf_counter()
        if self._scores is not None and not self._predict(self._scores, group, is_pending):
            return False
        result = None
        if state.config.eval.loss:
            result = self._measure(group, is_pending)
            if result is None:
                return False
        # Only these decisions wait for the scores. All ranks must make them after the same step,
        # and the best weights are those of this step.
        if self._needs_scores and not self.collect(group, is_pending=is_pending):
            return False
        # Update the counters before the report. If a rank dies after this point, the survivors have
        # the same counters and records, and the next rank 0 reports the evaluation again.
        state.num_evals += 1
        state.evaluated_step, state.is_eval_owed = state.step, False
        self.every.restart(time.monotonic())
        record = self._take(result, time.perf_counter() - started_at)
        self._reach("evaluated", group)
        if record is not None:  # all ranks keep it, and rank 0 sends it
            self._send(EvalFinished(generation=group.generation, record=record))
        if group.rank == 0:
            self.report(group.generation)
        return True

    def _predict(self, scores: SetScores, group: RankGroup, is_pending: IsPending) -> bool:
        # At most one pass is being scored at any time.
        if self._state.score_pass.step != self._state.step:
            if not scores.collect(group, is_pending):
                return False
            scores.begin(group)
        return scores.predict(group, is_pending)

    def _measure(self, group: RankGroup, is_pending: IsPending) -> EvaluationResult | None:
        """Evaluate the loss and the metrics; None if a planned change interrupted it."""
        state = self._state
        known = self._known_measures(group)
        if known is None:
            known = self._evaluation.run(
                group,
                step=state.step,
                weights=state.weights_version,
                is_pending=is_pending,
                at_batch=lambda: self._reach("eval", group),
            )
        if self._scores is not None and known is not None:
            self._measured = (state.score_pass, known)
        return known

    def _known_measures(self, group: RankGroup) -> EvaluationResult | None:
        # The previous generation may have been interrupted while it waited for the scores.
        if self._scores is None:
            return None
        has_own = self._measured is not None and self._measured[0] == self._state.score_pass
        mine = self._measured[1] if has_own and self._measured is not None else None
        rows = gather_json(group, mine)
        return next((EvaluationResult(*row) for row in rows if row is not None), None)

    # --- eval.score ---

    def resume(self, group: RankGroup, *, is_pending: IsPending) -> bool:
        """At the start of a generation, continue to score; return False if interrupted."""
        return self._scores is None or self._scores.resume(group, is_pending)

    def collect(self, group: RankGroup, *, is_pending: IsPending) -> bool:
        """Wait for the scores of the newest evaluation; return False if interrupted."""
        if self._scores is None or not self._scores.collect(group, is_pending):
            return self._scores is None
        if group.rank == 0:
            self._scores.report(group.generation)
        return True

    def poll(self, group: RankGroup) -> None:
        """Report scores that have just been computed on this rank.

        Raises:
            ScoreError: If ``score`` failed.
        """
        if self._scores is not None:
            self._scores.poll(group)

    def close(self) -> None:
        """Stop a run of ``score``."""
        if self._scores is not None:
            self._scores.close()

    # --- results ---

    def _reach(self, place: str, group: RankGroup) -> None:
        self._places.reach(place, rank=group.rank, step=self._state.step, phase="evaluating")

    def _take(self, result: EvaluationResult | None, duration_s: float) -> dict[str, Any] | None:
        state = self._state
        values = {} if result is None else {"loss": result.loss, **result.metrics}
        scores = self._scores.record if self._scores is not None else None
        values |= scores["scores"] if scores else {}
        if self._needs_scores:
            state.best_tracker.check([name for name in values if name != "loss"])
        state.best_tracker.take(state.step, values)
        if result is None:
            return None
        return {
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
        """On rank 0, report the newest scores and the best evaluation."""
        # Also called at the start of a generation, because the previous rank 0 may have died before
        # it reported these results. The coordinator ignores duplicate reports.
        if self._scores is not None:
            self._scores.report(generation)
        best = self._state.best_tracker.best_record()
        if best is not None:
            self._send(BestFound(generation=generation, record=best))
