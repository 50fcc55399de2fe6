"""Fold a job's checkpoints and interruptions from its log, for ``checkpoint_interval``.

It uses only events. A coordinator that resumes a job therefore gets the same result as the previous
one, and the evidence does not depend on rank 0, which may be lost.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections import deque

from etrain_jupyter.log import events as t
from etrain_jupyter.rules.policy.checkpoint_interval import (
    Choice,
    Costs,
    Interruptions,
    choose_interval,
    is_material,
)

KEEP_COSTS = 5
"""Number of newest checkpoints whose median cost is used: the first one also allocates memory."""


class Evidence:
    """Folds a job's events, and chooses the interval that follows from them."""

    def __init__(self) -> None:
        self.choice: Choice | None = None
        """The current interval; None before the first choice."""
        self._costs: deque[Costs] = deque(maxlen=KEEP_COSTS)
        self._seen = Interruptions()
        self._began_at: float | None = None  # when ``num_holders`` ranks began to train, or None
        self._newest_at = 0.0  # time of the newest event
        # When the newest durable state was current; at first, the start of training.
        self._saved_at: float | None = None
        self._is_resuming = False  # between ``JobResumed`` and the restore that follows

    def fold(self, event: t.Event, at: float | None = None) -> None:
        """Add one event of the log.

        Args:
            event: The event.
            at: Its time by the clock of ``review``. None for an event that was read from the log:
                its wall time is used, and ``shift`` converts all times afterwards.
        """
        at = event.time if at is None else at
        match event:
            case t.GenerationFormed():
                # generation     1 (4 ranks)     2 (3 ranks)     waiting     3 (4 ranks)
                # worker_s       + 4 x 60 s      + 3 x 20 s      + 0         + 4 x ...
                self._stop_clock(at)
                self._seen = dataclasses.replace(self._seen, num_holders=max(1, event.world_size))
                self._began_at = at
                if self._saved_at is None:
                    self._saved_at = at
            case t.JobStatusChanged(status=status) if status != "running":
                self._stop_clock(at)
            case t.WorkerLost():
                self._count_lost()
            case t.WorkerLeft(reason="preempted"):
                self._count_lost()
            case t.JobRestored():
                if not self._is_resuming:  # else already counted, or the user had ended the job
                    self._count_all_lost()
                self._is_resuming = False
                self._saved_at = at  # nothing has been trained since
            case t.JobResumed():
                self._on_resumed(event)
            case t.CheckpointCommitted():
                cost_s = event.stall_s + event.slowed_s
                self._costs.append(Costs(cost_s=cost_s, duration_s=event.duration_s))
                self._saved_at = at - event.duration_s  # its state is that of the step boundary
            case t.CheckpointIntervalChosen():
                self.choice = Choice(
                    interval_s=event.interval_s,
                    cost_s=event.cost_s,
                    loss_rate_per_h=event.loss_rate_per_h,
                    limit=event.limit,
                )
            case _:
                pass
        self._newest_at = at

    def shift(self, by_s: float) -> None:
        """Convert all times from a clock that is ``by_s`` seconds behind."""
        self._newest_at += by_s
        if self._began_at is not None:
            self._began_at += by_s
        if self._saved_at is not None:
            self._saved_at += by_s

    def review(self, now: float) -> Choice | None:
        """Choose again; return the choice if it differs from the current one.

        Before the first checkpoint there is no choice: trainers start with a fixed interval.
        """
        costs = self.costs()
        if costs is None:
            return None
        new = choose_interval(costs, self.seen(now))
        if not is_material(new, self.choice):
            return None
        self.choice = new
        return new

    def seen(self, now: float) -> Interruptions:
        """Return the interruptions so far."""
        passed_s = max(0.0, now - self._began_at) if self._began_at is not None else 0.0
        seen = self._seen
        return dataclasses.replace(
            seen,
            worker_s=seen.worker_s + passed_s * seen.num_holders,
            job_s=seen.job_s + passed_s,
        )

    def costs(self) -> Costs | None:
        """Return the cost of a checkpoint; None before the first."""
        if not self._costs:
            return None
        return Costs(
            cost_s=statistics.median(known.cost_s for known in self._costs),
            duration_s=statistics.median(known.duration_s for known in self._costs),
        )

    def age_s(self, now: float) -> float:
        """Return the seconds since the newest durable state, or since training began if none."""
        return max(0.0, now - self._saved_at) if self._saved_at is not None else 0.0

    # --- events ---

    def _count_lost(self) -> None:
        self._seen = dataclasses.replace(self._seen, num_lost=self._seen.num_lost + 1)

    def _on_resumed(self, event: t.JobResumed) -> None:
        # Stop at the previous event: nothing was trained between the end and the resume.
        self._stop_clock(self._newest_at)
        self._is_resuming = True
        self._saved_at = None
        if event.from_status not in t.TERMINAL_STATUSES:  # the whole cluster died
            self._count_all_lost()

    def _count_all_lost(self) -> None:
        self._seen = dataclasses.replace(self._seen, num_all_lost=self._seen.num_all_lost + 1)

    def _stop_clock(self, now: float) -> None:
        self._seen, self._began_at = self.seen(now), None
