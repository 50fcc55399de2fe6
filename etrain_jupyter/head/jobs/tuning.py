"""Settings that the coordinator chooses from a job's events: checkpoint interval and size."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import cast

from etrain_jupyter.head.coordinator import clock
from etrain_jupyter.head.jobs.job_spec import JobSpec
from etrain_jupyter.log import events
from etrain_jupyter.log.job_record import JobRecord
from etrain_jupyter.rules.checkpoint_interval import Evidence, describe_choice
from etrain_jupyter.rules.membership.membership import JobState
from etrain_jupyter.rules.sizing.goodput import Limit, Size, choose_size, describe_size, is_material
from etrain_jupyter.rules.sizing.speed_evidence import SizingView, SpeedEvidence
from etrain_jupyter.wire.messages import PaceUpdate


class Tuning:
    """Choose the interval of ``checkpoint.every: auto``, and the size of ``target: goodput``.

    Args:
        spec: The job.
        record: Fold of its log.
        past: Events of its log so far.
        log: Appends an event, given its class and fields.
    """

    def __init__(
        self,
        spec: JobSpec,
        record: JobRecord,
        past: Sequence[events.Event],
        log: Callable[..., None],
    ) -> None:
        self._spec, self._record, self._log = spec, record, log
        self._evidence = Evidence()
        self._speeds = SpeedEvidence()
        self.size: Size | None = None
        """The newest size; None until the first review, or without ``target: goodput``."""
        for event in past:
            self._fold(event, None)
        if past:
            # Events carry wall time. Convert the evidence to the coordinator's clock, which is
            # never adjusted.
            self._evidence.shift(clock.from_wall(0.0))

    def fold(self, event: events.Event) -> None:
        """Add an event that is being appended to the log."""
        self._fold(event, clock.now())

    def _fold(self, event: events.Event, at: float | None) -> None:
        self._evidence.fold(event, at)
        if self._spec.is_sized:
            self._speeds.fold(event)

    def review_pace(self, state: JobState) -> PaceUpdate | None:
        """Review the checkpoint interval; log and return it if it changes."""
        if not self._spec.is_paced or state.outcome:
            return None
        choice = self._evidence.review(clock.now())
        if choice is None:
            return None
        values = dataclasses.asdict(choice)
        self._log(events.CheckpointIntervalChosen, **values, reason=describe_choice(choice))
        return PaceUpdate(interval_s=choice.interval_s)

    def pace(self, *, restore: bool) -> PaceUpdate | None:
        """Return the next generation's checkpoint interval and the age of the newest checkpoint."""
        choice = self._evidence.choice
        if choice is None:
            return None
        # A restored state equals the newest checkpoint, so nothing has been trained since.
        age_s = 0.0 if restore else self._evidence.age_s(clock.now())
        return PaceUpdate(interval_s=choice.interval_s, age_s=age_s)

    def review_size(self, view: SizingView, state: JobState) -> bool:
        """Review how many workers to use; return True if the jobs' shares may change.

        Args:
            view: Facts about the pool; its bounds are those of the job.
            state: The job's state.
        """
        if not self._spec.is_sized or state.outcome:
            return False
        terms, sized = self._speeds.terms(view), self._record.sized
        old = self.size
        if old is None and sized is not None:  # chosen by the previous scheduler
            limit = cast("Limit", sized.limit)
            old = Size(workers=sized.workers, limit=limit, goodputs=tuple(sized.goodputs))
        new = choose_size(terms, current=old.workers if old else 0)
        self.size = new
        if is_material(new, old):
            self._log(
                events.WorkersSized,
                workers=new.workers,
                offered=terms.max_workers,
                limit=new.limit,
                goodputs=list(new.goodputs),
                measured=sorted(terms.measured),
                reason=describe_size(terms, new),
            )
        return old is None or new != old

    def wanted_workers(self, state: JobState) -> int:
        """Return the number of workers that the job takes if the pool has them."""
        if not self._spec.is_sized:
            return state.max_workers
        wanted = self.size.workers if self.size is not None else state.min_workers
        return min(max(wanted, state.min_workers), state.max_workers)
