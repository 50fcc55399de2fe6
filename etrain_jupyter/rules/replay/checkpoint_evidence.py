"""What the log tells of a job's checkpoints and interruptions, for ``checkpoint_interval``.

Folded from the events and from nothing else: whoever resumes the job knows what the coordinator
before it knew, and a rank 0 that dies takes nothing along.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections import deque
from collections.abc import Callable

from etrain_jupyter.log import events as t
from etrain_jupyter.rules.policy.checkpoint_interval import (
    Choice,
    Costs,
    Interruptions,
    choose_interval,
    is_material,
)

KEEP_COSTS = 5
"""The newest checkpoints whose median counts: the first one also pays for the memory."""


class Evidence:
    """Folds a job's events, and chooses the interval that follows from them."""

    def __init__(self) -> None:
        self.choice: Choice | None = None
        """What holds."""
        self._costs: deque[Costs] = deque(maxlen=KEEP_COSTS)
        self._seen = Interruptions()
        self._began_at: float | None = None
        """Since when ``num_holders`` ranks train; None while nobody does."""
        self._newest_at = 0.0
        self._saved_at: float | None = None
        """When the newest durable state was the present one; at first, when training began."""
        self._is_resuming = False

    def fold(self, event: t.Event, at: float | None = None) -> None:
        """Take one event of the log in.

        Args:
            event: The event.
            at: When it happened, by the clock of ``review``; None to take the event's wall time,
                for a log that is read: ``shift`` moves all of it to that clock.
        """
        at = event.time if at is None else at
        take = _TAKE.get(type(event))
        if take is not None:
            take(self, event, at)
        self._newest_at = at

    def shift(self, by_s: float) -> None:
        """Move all instants, which are those of another clock."""
        self._newest_at += by_s
        if self._began_at is not None:
            self._began_at += by_s
        if self._saved_at is not None:
            self._saved_at += by_s

    def review(self, now: float) -> Choice | None:
        """Choose anew; return the interval if it is another one than what holds.

        Before the first checkpoint nothing is: trainers begin with the interval of that themselves.
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
        """Return what a checkpoint takes; None before the first."""
        if not self._costs:
            return None
        return Costs(
            cost_s=statistics.median(known.cost_s for known in self._costs),
            duration_s=statistics.median(known.duration_s for known in self._costs),
        )

    def age_s(self, now: float) -> float:
        """Return how old the newest durable state is; without any, how long the job trains."""
        return max(0.0, now - self._saved_at) if self._saved_at is not None else 0.0

    # --- events ---

    def _on_formed(self, event: t.GenerationFormed, at: float) -> None:
        self._stop_clock(at)
        self._seen = dataclasses.replace(self._seen, num_holders=max(1, event.world_size))
        self._began_at = at
        if self._saved_at is None:
            self._saved_at = at

    def _on_status(self, event: t.JobStatusChanged, at: float) -> None:
        if event.status != "running":
            self._stop_clock(at)

    def _on_lost(self, event: t.WorkerLost, _: float) -> None:
        self._seen = dataclasses.replace(self._seen, num_lost=self._seen.num_lost + 1)

    def _on_left(self, event: t.WorkerLeft, _: float) -> None:
        if event.reason == "preempted":
            self._seen = dataclasses.replace(self._seen, num_lost=self._seen.num_lost + 1)

    def _on_restored(self, event: t.JobRestored, at: float) -> None:
        if not self._is_resuming:  # else it was counted, or somebody had ended the job
            self._count_all_lost()
        self._is_resuming = False
        self._saved_at = at  # nothing was trained since

    def _on_resumed(self, event: t.JobResumed, _: float) -> None:
        self._stop_clock(self._newest_at)
        self._is_resuming = True
        self._saved_at = None
        if event.from_status not in t.TERMINAL_STATUSES:
            self._count_all_lost()

    def _count_all_lost(self) -> None:
        self._seen = dataclasses.replace(self._seen, num_all_lost=self._seen.num_all_lost + 1)

    def _on_committed(self, event: t.CheckpointCommitted, at: float) -> None:
        cost_s = event.stall_s + event.slowed_s
        self._costs.append(Costs(cost_s=cost_s, duration_s=event.duration_s))
        self._saved_at = at - event.duration_s

    def _on_chosen(self, event: t.CheckpointIntervalChosen, _: float) -> None:
        self.choice = Choice(
            interval_s=event.interval_s,
            cost_s=event.cost_s,
            loss_rate_per_h=event.loss_rate_per_h,
            limit=event.limit,
        )

    def _stop_clock(self, now: float) -> None:
        self._seen, self._began_at = self.seen(now), None


_TAKE: dict[type[t.Event], Callable[..., None]] = {
    t.GenerationFormed: Evidence._on_formed,
    t.JobStatusChanged: Evidence._on_status,
    t.WorkerLost: Evidence._on_lost,
    t.WorkerLeft: Evidence._on_left,
    t.JobRestored: Evidence._on_restored,
    t.JobResumed: Evidence._on_resumed,
    t.CheckpointCommitted: Evidence._on_committed,
    t.CheckpointIntervalChosen: Evidence._on_chosen,
}
