"""Decide when a checkpoint is due."""

from __future__ import annotations

import threading

from etrain_jupyter.config.schema import Interval
from etrain_jupyter.rules.checkpoint_interval import FIRST_S
from etrain_jupyter.trainer.state.train_state import Every, Mark, WorkPlan
from etrain_jupyter.wire.messages import PaceUpdate

RETRY_S = 30.0
"""Retry a failed checkpoint after this many seconds, unless the next checkpoint is due earlier."""


class CheckpointPace:
    """Timer for ``checkpoint.every: auto``; the coordinator chooses the interval."""

    # No lock is needed. The control thread calls ``adopt`` while the main thread queries, but both
    # read and write single numbers, and a slightly stale value does no harm.
    def __init__(self, *, now: float) -> None:
        self.interval_s = FIRST_S
        self._last_at = now

    def adopt(self, pace: PaceUpdate, *, now: float) -> None:
        """Adopt the coordinator's interval and, if given, the age of the newest checkpoint."""
        self.interval_s = pace.interval_s
        # The message contains an age rather than a time, because the machines' clocks differ.
        if pace.age_s is not None:
            self._last_at = now - pace.age_s

    def is_due(self, now: float) -> bool:
        """Return True if the newest checkpoint is at least one interval old."""
        return now - self._last_at >= self.interval_s

    def restart(self, now: float) -> None:
        """Restart the interval, because a checkpoint has started."""
        self._last_at = now

    def retry_soon(self, now: float) -> None:
        """Shorten the interval after a failed checkpoint, because the store may recover soon."""
        # Due RETRY_S from now, or after one interval if that is shorter.
        self._last_at = now - max(0.0, self.interval_s - RETRY_S)


class CheckpointPolicy:
    """Decide when a checkpoint is due: by schedule, by interval, or on request.

    A pure state machine: the time is an argument, a ``time.monotonic`` value, and only the methods
    that record an event change the state. ``is_due`` may be called any number of times.

    Args:
        every: ``checkpoint.every``; None for ``auto``.
    """

    def __init__(self, every: Interval | None, plan: WorkPlan, *, now: float) -> None:
        self._every = Every(every, plan, now=now) if every is not None else None
        self.pace = CheckpointPace(now=now)
        self._is_requested = threading.Event()
        self._is_owed = False

    def request(self) -> None:
        """Request a checkpoint at the next step boundary. Can be called from any thread."""
        self._is_requested.set()

    @property
    def is_owed(self) -> bool:
        """True if a checkpoint has become due but has not started yet."""
        return self._is_owed

    def is_due(self, before: Mark, after: Mark, *, is_rank_0: bool, now: float) -> bool:
        """Return True if a checkpoint is due after the step from ``before`` to ``after``."""
        return self._is_owed or self._becomes_due(before, after, is_rank_0=is_rank_0, now=now)

    def _becomes_due(self, before: Mark, after: Mark, *, is_rank_0: bool, now: float) -> bool:
        # A request from the coordinator, for example before the machine is interrupted.
        if self._is_requested.is_set():
            return True
        if self._every is not None:
            return self._every.is_due(before, after, now=now)
        # Only rank 0 knows the age of the newest checkpoint. A rank that becomes rank 0 later
        # learns it from the coordinator; see ``CheckpointPace.adopt``.
        return is_rank_0 and self.pace.is_due(now)

    def take_step(
        self, before: Mark, after: Mark, *, is_rank_0: bool, is_agreed: bool, now: float
    ) -> None:
        """Record a committed step. If a checkpoint is now due, it is owed until ``take_start``.

        Args:
            before: Progress before the step.
            after: Progress after it.
            is_rank_0: True on rank 0, the only rank that starts checkpoints.
            is_agreed: True if rank 0 has asked all ranks to save after this step.
            now: The current time.
        """
        # Every rank records this, not only rank 0. A rank that becomes rank 0 after a failure does
        # not know whether the previous rank 0's last checkpoint became durable, so it saves another
        # one:
        #
        #     rank 0   step 100 is due ── starts ── (dies while writing)
        #     rank 1   step 100 is owed ───────────── becomes rank 0 ── saves step 101
        if self._becomes_due(before, after, is_rank_0=is_rank_0, now=now):
            self._is_owed = True
            if self._every is not None and not self._is_requested.is_set():
                self._every.restart(now)
        # The ranks agreed on a checkpoint in the step's header, and the other ranks are already
        # writing their parts. So the checkpoint is owed even if the coordinator has since reported
        # a newer one, after which it would otherwise no longer be due.
        if is_agreed and is_rank_0:
            self._is_owed = True

    def take_start(self) -> None:
        """Record the start of the checkpoint that was owed or requested."""
        self._is_owed = False
        self._is_requested.clear()
