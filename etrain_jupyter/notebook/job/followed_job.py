"""A job as its log shows it, followed from the notebook."""

from __future__ import annotations

import math
import threading
import time
from typing import TYPE_CHECKING, Any

from etrain_jupyter.errors import EtrainError, JobFailedError, JobLostError
from etrain_jupyter.insight.figures import plot_job
from etrain_jupyter.log.blocks import Events
from etrain_jupyter.log.segments import read_log
from etrain_jupyter.notebook.job.feed import EventFeed
from etrain_jupyter.notebook.job.history import (
    NOT_FOLDABLE,
    JobCost,
    LatestValues,
    cost_of,
    peek_log,
    phases_of,
)
from etrain_jupyter.notebook.job.job_record import Recorded, RunRecord
from etrain_jupyter.notebook.job.known_events import Listener
from etrain_jupyter.notebook.job.link import JobLink
from etrain_jupyter.notebook.job.store_link import StoreLink, refresh_log, try_refresh_log
from etrain_jupyter.notebook.job.stored_exhibits import Exhibit, exhibits_of
from etrain_jupyter.untrusted import plain_line

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from etrain_jupyter.notebook.audit import AuditReport

GLANCE_S = 1.0
"""Total time that properties may wait for the history, in seconds."""
CATCH_UP_S = 10.0
"""Timeout for methods that wait for the whole history, in seconds."""
RESPONSE_S = 5.0
"""Timeout for the coordinator's first response, in seconds."""


class FollowedJob(Recorded):
    """The part of ``TrainingJob`` that only reads the job's events.

    Args:
        record: The job's record in the run store.
        link: Connection to its cluster; None if the cluster has ended.
    """

    def __init__(self, record: RunRecord, link: JobLink | None) -> None:
        self._follow(record, link)

    def _follow(self, record: RunRecord, link: JobLink | None) -> None:
        """Follow an attempt of the job, from the beginning of its log."""
        self.record, self._link = record, link
        # The thread of a previous feed may still deliver a batch. It changes only the previous
        # view, which is no longer read.
        self._view = LatestValues()
        self._feed = EventFeed(
            record.job_id,
            record.log_path,
            link,
            self._view.add,
            refresh=lambda: try_refresh_log(record),
            is_copy=bool(record.place),
        )
        self._glance_until = math.inf

    def follow_again(self, record: RunRecord, link: JobLink | None) -> None:
        """Follow the next attempt of a resumed job, from the beginning of its log."""
        self._feed.close()
        self._follow(record, link)

    def has_continued(self) -> bool:
        """Return True if the log continues after the end at which following stopped."""
        is_over = self._feed.ended.is_set() and not self._feed.lost
        # Other machines write only to the bucket, so update the copy on this machine first.
        if is_over:
            try_refresh_log(self.record)
        return is_over and not peek_log(self.record.log_path).is_terminal

    @property
    def is_reachable(self) -> bool:
        """True unless the scheduler is known to be unreachable; waits for its first response."""
        self._latest()
        self._feed.wait_until_responded(RESPONSE_S)
        return not self._feed.trouble

    @property
    def note(self) -> str:
        """Why only the job's log is followed; empty if its cluster is reachable."""
        return self._link.why if isinstance(self._link, StoreLink) else ""

    @property
    def status(self) -> str:
        """One of submitted, waiting, running, paused, finished, stopped, failed."""
        # The log of a lost job has no end, so its last status is the one before the cluster ended.
        view = self._glance()
        return "failed" if self._feed.lost else view.status

    @property
    def reason(self) -> str:
        """Reason for the status, if it needs an explanation, such as a wait or a failure.

        If the scheduler is unreachable, or cannot write the job's log because the disk is full, the
        reason says so, and the status is the last known one.
        """
        view = self._glance()
        # Any trouble is known only after a response or a timeout. Pass is_last=False, because a
        # method with a longer timeout may wait for the same response later.
        self._feed.wait_until_responded(self._glance_left(), is_last=False)
        return self._feed.lost or self._feed.trouble or self._feed.log_trouble or view.reason

    @property
    def lost(self) -> str:
        """Why the job counts as lost: its cluster ended first. Empty if not known to be lost."""
        return self._feed.lost

    @property
    def is_over(self) -> bool:
        """True if no more events can come: the job has ended or is lost."""
        return self._feed.ended.is_set()

    @property
    def step(self) -> int:
        """Number of committed optimizer updates."""
        return self._glance().step

    @property
    def epoch(self) -> int:
        """Epoch of the newest step, starting at 0."""
        return self._glance().epoch

    @property
    def world_size(self) -> int:
        """Number of ranks in the newest generation; 0 before the first."""
        return self._glance().world_size

    @property
    def generation(self) -> int:
        """Number of the newest generation, starting at 1; 0 before the first."""
        return self._glance().generation

    @property
    def metrics(self) -> dict[str, float]:
        """The latest ``loss`` and metrics; names of evaluation metrics begin with ``eval_``."""
        return dict(self._glance().metrics)

    @property
    def best(self) -> dict[str, Any] | None:
        """The best evaluation so far, ``{"step", "metric", "value"}``; None if there is none.

        Only jobs with ``checkpoint.best`` have one.
        """
        found = self._glance().best
        if not found:
            return None
        return {"step": found[-1].step, "metric": found[-1].metric, "value": found[-1].value}

    def history(self) -> dict[str, list[Any]]:
        """Return columns of equal length with one row per step, for ``pandas.DataFrame``.

        The columns are step, epoch, samples, loss, lr, world_size, generation, samples_per_s, time,
        the seconds that rank 0 spent in each phase of the step (data_s, compute_s, communication_s,
        optimizer_s) and one per metric. Evaluation columns begin with ``eval_``; a value is in the
        row of the step after which the evaluation ran, and NaN elsewhere.
        """
        return self._latest().columns()

    def exhibits(self, name: str | None = None) -> list[Exhibit]:
        """Return the figures, texts and tables that ``eval.score`` returned, oldest first.

        Each has a ``step``, a ``name`` and a ``format``; ``load()`` returns its content. A job with
        many keeps only the newest; see the guide "Official scores over the whole set".

        Args:
            name: Return only the exhibits with this name; by default all.
        """
        stored = self._latest().list_exhibits()
        return exhibits_of(self.record, [e for e in stored if name in (None, e.name)])

    def phases(self) -> list[dict[str, Any]]:
        """Return the time that each worker spent in each phase, and its parallel efficiency.

        One record per worker, for ``pandas.DataFrame(job.phases())``; see ``history.phases_of``
        for the fields. Workers report their times at least every 30 s.
        """
        return phases_of(self.events())

    def events(self) -> Events:
        """Return the typed events received so far, in order, as a sequence that builds them lazily.

        In this form, a million steps take about 100 MB; a ``list`` of objects would take ten times
        as much.
        """
        self._latest()
        return self._feed.events()

    def subscribe(self, listener: Listener) -> threading.Event:
        """Call ``listener`` with the list of all events so far, then with each new batch.

        The calls come in order from one background thread; their exceptions are counted and
        dropped.

        Returns:
            An event that is set once the listener has received the history.
        """
        return self._feed.subscribe(listener)

    def audit(self) -> AuditReport:
        """Prove from the log which samples the job trained on, and that ranks had equal weights.

        Raises:
            EtrainError: If the log has values that no job can have.
        """
        from etrain_jupyter.notebook.audit import audit_log

        # The feed may not have received the end of the log yet; the log itself is complete.
        refresh_log(self.record)
        try:
            events = read_log(self.record.log_path)
        except (OSError, EtrainError):
            # If the log is unreadable, fall back to the events that the coordinator sent. They may
            # be incomplete, but the audit reports gaps.
            events = Events()
        try:
            return audit_log(events or self.events())
        except (*NOT_FOLDABLE, LookupError, MemoryError) as exc:
            raise EtrainError(
                f"the log of job {self.id} cannot be audited: it has values that no job has "
                f"({type(exc).__name__}: {plain_line(str(exc), 100)}). Nothing was changed. If "
                "another user wrote it, do not trust its numbers."
            ) from exc

    def plot(self, over: str = "steps") -> Figure:
        """Return a Matplotlib figure of the loss, metrics, learning rate and number of workers.

        Lost and preempted workers are marked. Requires the matplotlib package. For several jobs in
        the same axes, use ``etrain_jupyter.compare(jobs).plot()``.

        Args:
            over: ``steps``, ``samples``, ``time`` (from the first step, without the time between an
                end and a resume), or ``usd``.

        Raises:
            ConfigError: If the axis is unknown, the pool has no prices for ``usd``, or matplotlib
                is not installed.
        """
        return plot_job(self, over)

    def cost(self) -> JobCost:
        """Return the cost of the job so far: spent, saved compared with on-demand prices, wasted.

        ``is_known`` is False if the pool has no prices, as on your own machine.
        """
        return cost_of(self._latest())

    def raise_for_status(self) -> None:
        """Raise an error if the job has failed or is lost."""
        view = self._latest()
        if self._feed.lost:
            raise JobLostError(
                f"job {self.id} is lost at step {view.step}: {self._feed.lost}. "
                f"{self._describe_saved()} To continue it, type %etrain resume {self.id}."
            )
        if view.status == "failed":
            error = view.user_error
            cause = ((error.error if error else view.reason) or "no reason was given").rstrip(".")
            where = f" on {' and '.join(error.workers)}" if error and error.workers else ""
            when = f"after step {view.step}" if view.step else "before its first step"
            flag = f" with --resume {self.id} to continue from there" if view.saved_step else ""
            raise JobFailedError(
                f"job {self.id} failed {when}{where}: {cause}. {self._describe_saved()} Fix the "
                f"cause and run the cell again{flag}; %etrain logs shows the workers' output.",
                job_id=self.id,
                traceback=error.traceback if error else "",
            )

    def _describe_saved(self) -> str:
        if not self._view.saved_step:
            return "Nothing was saved."
        return (
            f"The weights of step {self._view.saved_step} are saved in {self.record.where}; "
            "job.load_into(model) loads them."
        )

    def __repr__(self) -> str:
        view = self._glance()
        total = f"/{view.total_steps}" if view.total_steps else ""
        loss = f", loss {view.metrics['loss']:.4g}" if "loss" in view.metrics else ""
        reason = f" ({self.reason})" if self.reason else ""
        text = (
            f"<TrainingJob {self.id}: {self.status}{reason}, step {view.step}{total}{loss}, "
            f"{view.world_size} workers>"
        )
        return plain_line(text, max_length=2000)

    def _latest(self) -> LatestValues:
        self._feed.start()
        # A log of a million steps takes longer. Without its events, the job would seem to have
        # neither steps nor checkpoints.
        while not self._feed.wait_until_caught_up(CATCH_UP_S) and self._feed.is_reading:
            pass
        return self._view

    def _glance(self) -> LatestValues:
        """Return the values that are known now.

        Reading the history may take a long time if the cluster or the bucket is slow or the log is
        long. Until the feed has read it, these are the values at the end of the log on this
        machine.
        """
        self._feed.start()
        # All properties share one second of waiting per attempt, so a slow bucket delays a cell
        # only once.
        if self._feed.wait_until_caught_up(self._glance_left()):
            return self._view
        return peek_log(self.record.log_path)

    def _glance_left(self) -> float:
        # The time starts when the first property is read, not when the object is created.
        if self._glance_until == math.inf:
            self._glance_until = time.monotonic() + GLANCE_S
        return max(0.0, self._glance_until - time.monotonic())
