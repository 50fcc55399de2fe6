"""Collect the requests that this rank sends to all ranks within a step."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

from etrain_jupyter.rules.samples.ledger import StepRange
from etrain_jupyter.trainer.boundary import BoundaryHooks
from etrain_jupyter.trainer.gradients.step_header import RequestFlags
from etrain_jupyter.trainer.group.process_group import RankGroup
from etrain_jupyter.trainer.loop.evaluations import Evaluations
from etrain_jupyter.trainer.schedule import Mark
from etrain_jupyter.trainer.state.train_state import TrainState


@dataclass(frozen=True, kw_only=True)
class StepRequests:
    """Sources of this rank's requests; read as late as possible, when the step header is sent."""

    state: TrainState
    change_pending: threading.Event
    """Set once this rank knows of a planned change."""
    evaluations: Evaluations
    hooks: BoundaryHooks

    def collect(self, group: RankGroup, span: StepRange) -> RequestFlags:
        """Return this rank's requests; only rank 0 requests evaluations and checkpoints."""
        is_rank_0 = group.rank == 0
        # The boundaries before and after the step in progress, which is not committed yet.
        before = Mark(self.state.step, self.state.position)
        after = Mark(self.state.step + 1, self.state.position + span.samples)
        # The decision depends on the sum of all headers, which is the same on all ranks. Any rank
        # may be the first to learn of a planned change, so each may request a stop. Only rank 0
        # makes the other requests: clocks differ between ranks, and only rank 0 knows how old the
        # newest checkpoint is.
        return RequestFlags(
            is_change_pending=self.change_pending.is_set(),
            is_eval_due=is_rank_0 and self.evaluations.every.is_time_over(time.monotonic()),
            is_save_due=is_rank_0 and self.hooks.wants_save(before, after),
        )
