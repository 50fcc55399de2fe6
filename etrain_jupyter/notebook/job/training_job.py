"""One training job, as the notebook holds it: a view that can be lost and made again.

Nothing here runs the training. The values come from the job's events, the requests go to its
coordinator, and the weights come from its checkpoints.
"""

from __future__ import annotations

import asyncio
import math
import os
import threading
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from etrain_jupyter.errors import (
    EtrainError,
    JobFailedError,
    JobLostError,
)
from etrain_jupyter.log.blocks import Events
from etrain_jupyter.log.events import TERMINAL_STATUSES
from etrain_jupyter.log.phases import phases_of
from etrain_jupyter.log.segments import read_log
from etrain_jupyter.notebook.job.cost import JobCost, cost_of
from etrain_jupyter.notebook.job.feed import EventFeed, Listener
from etrain_jupyter.notebook.job.history import LatestValues, peek_log
from etrain_jupyter.notebook.job.interrupts import Interrupts
from etrain_jupyter.notebook.job.job_record import JobRecord
from etrain_jupyter.notebook.job.link import SLICE_S, JobLink
from etrain_jupyter.notebook.job.plot import plot_job
from etrain_jupyter.notebook.job.requests import ENDED, REQUEST_S, JobRequests
from etrain_jupyter.notebook.job.resume import resume_job
from etrain_jupyter.notebook.job.resume_request import ResumeRequest
from etrain_jupyter.notebook.job.screen import Screen, table_of
from etrain_jupyter.notebook.job.store_link import StoreLink, refresh_log, try_refresh_log
from etrain_jupyter.notebook.job.weights import find_saved, list_saved, load_weights, put_weights
from etrain_jupyter.wire.requests import ListWorkers

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from etrain_jupyter.notebook.audit import AuditReport

GLANCE_S = 1.0
"""Longest wait for the history in all properties together, in seconds."""
CATCH_UP_S = 10.0
"""Longest wait for the history in a method that needs all of it, in seconds."""
ANSWER_S = 5.0
"""Longest wait for the coordinator's first answer, in seconds."""

Model = TypeVar("Model")


class TrainingJob(JobRequests):
    """A job that somebody submitted.

    It follows the job's events from the first access on; ``await job`` and ``job.wait()`` block
    until the job has ended. A property such as ``job.step`` returns the last value that is known:
    it waits for the history for at most ``GLANCE_S``, and then reads the end of the log on this
    machine. A method that needs the whole history waits for the job's folder, cluster or bucket
    for at most ``CATCH_UP_S``.

    Args:
        record: What the run store says of it.
        link: The line to its cluster; None if there is no such cluster any more.

    Attributes:
        screen: What draws the job where it is displayed; None for the plain table.
        was_interrupted: Whether the interrupt key stopped it in ``wait``.
    """

    def __init__(self, record: JobRecord, link: JobLink | None) -> None:
        self.record = record
        self.screen: Screen | None = None
        self.was_interrupted = False
        self._link = link
        self._view = LatestValues()
        self._feed = self._make_feed()
        self._glance_until = math.inf

    def _make_feed(self) -> EventFeed:
        record = self.record
        return EventFeed(
            record.job_id,
            record.log_path,
            self._link,
            self._view.add,
            refresh=lambda: try_refresh_log(record),
        )

    def follow_again(self, record: JobRecord, link: JobLink | None) -> None:
        """Follow the job's next life, from the beginning of its log: it was resumed."""
        self._feed.close()
        self.record, self._link, self.was_interrupted = record, link, False
        self._view = LatestValues()
        self._feed = self._make_feed()
        self._glance_until = math.inf
        if self.screen is not None:
            self._feed.subscribe(self.screen.add_events)

    def has_gone_on(self) -> bool:
        """Whether the log has more than the end at which this stopped following it."""
        is_over = self._feed.ended.is_set() and not self._feed.lost
        if is_over:
            try_refresh_log(self.record)
        return is_over and not peek_log(self.record.log_path).is_terminal

    @property
    def is_reachable(self) -> bool:
        """Whether the job's scheduler answers, as far as is known; waits for its first answer."""
        self._latest()
        self._feed.wait_until_answered(ANSWER_S)
        return not self._feed.trouble

    @property
    def note(self) -> str:
        """Why only its log is followed from here; empty where its cluster can be asked."""
        return self._link.why if isinstance(self._link, StoreLink) else ""

    def resume_as(self, wish: ResumeRequest) -> str:
        """Let the job go on that has ended, or whose cluster has; see ``resume``."""
        return resume_job(self, wish)

    # --- what it is -----------------------------------------------------------------------------

    @property
    def id(self) -> str:
        """The id: its name and eight hexadecimal digits."""
        return self.record.job_id

    @property
    def name(self) -> str:
        """The name, which several jobs may share."""
        return self.record.name

    @property
    def status(self) -> str:
        """One of submitted, waiting, running, paused, finished, stopped, failed."""
        view = self._glance()
        return "failed" if self._feed.lost else view.status

    @property
    def reason(self) -> str:
        """Why it has this status, where that needs saying: waiting for whom, failed by what.

        While its scheduler cannot be reached, or cannot write the job's log because the disk is
        full, that is said here, and the status is the last known.
        """
        view = self._glance()
        self._feed.wait_until_answered(self._glance_left(), is_last=False)
        return self._feed.lost or self._feed.trouble or self._feed.log_trouble or view.reason

    @property
    def lost(self) -> str:
        """Why the job counts as lost: its cluster went before its end; empty as far as is known."""
        return self._feed.lost

    @property
    def is_over(self) -> bool:
        """Whether nothing more will be heard of it: it has ended, or was lost."""
        return self._feed.ended.is_set()

    @property
    def step(self) -> int:
        """Optimizer updates committed so far."""
        return self._glance().step

    @property
    def epoch(self) -> int:
        """The epoch of the newest step, from 0."""
        return self._glance().epoch

    @property
    def world_size(self) -> int:
        """Ranks of the newest generation; 0 before the first."""
        return self._glance().world_size

    @property
    def generation(self) -> int:
        """The newest generation, from 1; 0 before the first."""
        return self._glance().generation

    @property
    def metrics(self) -> dict[str, float]:
        """Latest ``loss`` and metrics; those of the evaluation begin with ``eval_``."""
        return dict(self._glance().metrics)

    def history(self) -> dict[str, list[Any]]:
        """Return columns of equal length, one row a step, for ``pandas.DataFrame(job.history())``.

        The columns are step, epoch, samples, loss, lr, world_size, generation, samples_per_s, time,
        what rank 0 spent the step on (data_s, compute_s, communication_s, optimizer_s) and one for
        each metric. Evaluations are in columns that begin with ``eval_``, in the row of
        the step after which they were made, NaN elsewhere.
        """
        return self._latest().columns()

    def phases(self) -> list[dict[str, Any]]:
        """Return what the time of each worker went into, and its efficiency against one alone.

        One record a worker, for ``pandas.DataFrame(job.phases())``; see ``events.phases.phases_of``
        for its fields. They are told every half a minute at least.
        """
        return phases_of(self.events())

    def events(self) -> Events:
        """Return the typed events that have come so far, in order: a sequence, made as it is read.

        A million steps take about 100 MB in it; as a ``list`` of objects ten times as much.
        """
        self._latest()
        return self._feed.events()

    def workers(self) -> list[dict[str, Any]]:
        """Return one record a worker: worker, rank, state, device ...; none after the end.

        The states are those of the dashboard: starting, warm, training, waiting.
        """
        if self._latest().status in TERMINAL_STATUSES or self._link is None:
            return []
        found = self._link.call(ListWorkers(job_id=self.id), timeout=REQUEST_S)
        return [
            record | {"state": _WORKER_STATES.get(record["state"], record["state"])}
            for record in found.workers
        ]

    def subscribe(self, listener: Listener) -> threading.Event:
        """Have ``listener`` called with the list of all events so far, then with each new batch.

        It is called from one background thread, in order; what it raises is counted and dropped.

        Returns:
            Set once the listener has had what happened before.
        """
        return self._feed.subscribe(listener)

    def audit(self) -> AuditReport:
        """Prove from the durable log what was trained: each sample's count, equal weights."""
        from etrain_jupyter.notebook.audit import audit_log

        refresh_log(self.record)
        try:
            events = read_log(self.record.log_path)
        except (OSError, EtrainError):
            events = Events()
        return audit_log(events or self.events())

    def plot(self) -> Figure:
        """Return a Matplotlib figure: loss, learning rate and number of workers by step.

        Lost and preempted workers are marked. Requires the package matplotlib.

        Raises:
            ConfigError: If matplotlib is not installed.
        """
        return plot_job(self)

    def cost(self) -> JobCost:
        """Return what the job has cost so far: spent, saved against on-demand, wasted.

        ``is_known`` is False where the pool has no prices, as on your own machine.
        """
        return cost_of(self._latest())

    # --- waiting --------------------------------------------------------------------------------

    def wait(
        self,
        timeout: float | None = None,
        *,
        until: Callable[[TrainingJob], bool] | None = None,
    ) -> str:
        """Block until the job has ended, or until a condition holds; return the status.

        While the scheduler cannot be reached, a message says so and the wait continues: the job may
        still be running. The first interrupt stops the job with a checkpoint, and the wait
        continues. A second one within 5 s stops the job immediately, a third one ends the wait.
        With ``until``, an interrupt only ends the wait.

        Args:
            timeout: Longest wait in seconds; without it, no limit.
            until: A condition that is polled about five times a second, for example
                ``lambda job: job.world_size == 4``.

        Raises:
            EtrainError: If the job ends, or the timeout passes, before ``until`` holds.
            JobFailedError: If the job fails before ``until`` holds.
            JobLostError: If the job's cluster ends before ``until`` holds.
        """
        self._feed.start()
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        if until is not None:
            return self._wait_until(until, deadline)
        kind = ""
        with self._interrupts() as interrupts:
            while time.monotonic() < deadline:
                kind = self._say_trouble(kind)
                if self._feed.ended.wait(SLICE_S):
                    break
                self._answer(interrupts)
        return self.status

    def _wait_until(self, condition: Callable[[TrainingJob], bool], deadline: float) -> str:
        """Block until ``condition`` holds; raise if the job ends or the time passes before."""
        started_at = time.monotonic()
        kind = ""
        while True:
            # Read before the condition: what happened until the end must count for it.
            has_ended = self._feed.ended.is_set()
            if condition(self):
                return self.status
            if has_ended:
                self.raise_for_status()
                raise EtrainError(
                    f"job {self.id} has {ENDED[self.status]} at step {self.step}, and the "
                    "condition of job.wait(until=...) does not hold. Check the condition, or let "
                    "the job train longer."
                )
            if time.monotonic() >= deadline:
                waited_s = time.monotonic() - started_at
                raise EtrainError(
                    f"the condition of job.wait(until=...) does not hold after {waited_s:.0f} s: "
                    f"{self!r}. The job continues. Wait again, or with a longer timeout."
                )
            kind = self._say_trouble(kind)
            self._feed.ended.wait(min(SLICE_S, max(0.0, deadline - time.monotonic())))

    def __await__(self) -> Generator[Any, None, str]:
        """Wait without blocking; the interrupt key of a notebook means what it does in ``wait``.

        To cancel the waiting task is something else: it leaves the job alone.
        """
        return self._wait_async().__await__()

    async def _wait_async(self) -> str:
        self._feed.start()
        said = ""
        with self._interrupts() as interrupts:
            while not self._feed.ended.is_set():
                said = self._say_trouble(said)
                await asyncio.sleep(SLICE_S)
                self._answer(interrupts)
        return self.status

    def _interrupts(self) -> Interrupts:
        # Sent, not called: another interrupt may come before the answer does.
        return Interrupts(self.id, lambda now: self._send_request("stop", {"now": now}))

    def _answer(self, interrupts: Interrupts) -> None:
        interrupts.answer()
        self.was_interrupted |= interrupts.were_any

    def _say_trouble(self, said: str) -> str:
        """Print what is wrong since ``said``, or that it is over; return what is wrong now."""
        feed = self._feed
        kind = "scheduler" if feed.trouble else "log" if feed.log_trouble else ""
        if kind and kind != said:
            trouble = feed.trouble or feed.log_trouble
            print(f"etrain: {self.id} was {self._view.status}; {trouble}. The wait goes on.")
        elif said and not kind and not feed.ended.is_set():
            is_back = "answers" if said == "scheduler" else "is written"
            print(f"etrain: the {said} of {self.id} {is_back} again.")
        return kind

    def result(self) -> dict[str, Any]:
        """Block until the job has ended and return a summary.

        Raises:
            JobFailedError: If it failed; carries the traceback of the notebook's own code.
            JobLostError: If its cluster went away before it had ended.
        """
        self.wait()
        self.raise_for_status()
        view = self._view
        return {
            "job_id": self.id,
            "status": view.status,
            "step": view.step,
            "epoch": view.epoch,
            "duration_s": view.changed_at - view.started_at,
            **({"reason": view.reason} if view.reason else {}),
            **({"best": self.best} if view.best else {}),
            **view.metrics,
        }

    def raise_for_status(self) -> None:
        """Raise what failed the job or lost it; do nothing otherwise."""
        view = self._latest()
        if self._feed.lost:
            raise JobLostError(
                f"job {self.id} is lost at step {view.step}: {self._feed.lost}. "
                f"{self._what_remains()} %etrain resume lets it go on from there."
            )
        if view.status == "failed":
            error = view.user_error
            raise JobFailedError(
                f"job {self.id} failed {self._cause_of_failure()} {self._what_remains()} Mend it "
                "and run the cell again, with --resume JOB to go on from there; %etrain logs shows "
                "what the workers printed.",
                job_id=self.id,
                traceback=error.traceback if error else "",
            )

    def _cause_of_failure(self) -> str:
        view, error = self._view, self._view.user_error
        cause = (error.error if error else view.reason) or "no reason was given"
        place = f" on {' and '.join(error.workers)}" if error and error.workers else ""
        when = f"after step {view.step}" if view.step else "before its first step"
        return f"{when}{place}: {cause.rstrip('.')}."

    # --- weights --------------------------------------------------------------------------------

    @property
    def best(self) -> dict[str, Any] | None:
        """The best evaluation so far, ``{"step", "metric", "value"}``; None without any.

        Only a job with ``checkpoint.best`` has one.
        """
        found = self._glance().best
        if not found:
            return None
        return {"step": found[-1].step, "metric": found[-1].metric, "value": found[-1].value}

    def state_dict(self, which: str | int = "last") -> dict[str, Any]:
        """Return weights that are saved, as tensors by name.

        Args:
            which: ``last`` for the newest checkpoint that verifies; ``best`` for the one whose
                evaluation was the best, see ``checkpoint.best``; a number for that of this step.

        Raises:
            CheckpointError: If there is none yet.
            ConfigError: For another ``which``.
        """
        return load_weights(find_saved(self.record, which, self._reached()))

    def load_into(self, model: Model, which: str | int = "last") -> Model:
        """Load saved weights into ``model`` and return it; ``which`` as in ``state_dict``.

        Raises:
            CheckpointError: If there is none yet, or if the model is another one than the job's.
        """
        put_weights(self.state_dict(which), model, self.record)
        return model

    def export(
        self,
        path: str | os.PathLike[str],
        *,
        format: str = "safetensors",
        which: str | int = "last",
        model: Any = None,
        overwrite: bool = False,
    ) -> Path:
        """Write saved weights to one file, or to a folder that ``from_pretrained`` opens.

        Args:
            path: A file; a folder with ``format="transformers"``. What is missing above is made.
            format: ``safetensors`` or ``transformers``.
            which: As in ``state_dict``.
            model: With ``transformers``: the model whose ``config`` is written. Needed only where
                the job's own model had none.
            overwrite: Whether files of that name may be replaced.

        Returns:
            What was written.

        Raises:
            CheckpointError: If there is no such checkpoint, or if it cannot be written there.
            ConfigError: For another format or ``which``, and for a path that exists.
        """
        from etrain_jupyter.notebook.job.export import export_file, export_folder, find_format

        is_folder = find_format(format, model) == "transformers"
        saved = find_saved(self.record, which, self._reached())
        if is_folder:
            return export_folder(self.record, saved, Path(path), model=model, overwrite=overwrite)
        return export_file(self.record, saved, Path(path), overwrite=overwrite)

    def checkpoints(self, verify: bool = False) -> list[dict[str, Any]]:
        """Return one record for each checkpoint that is saved, the newest first.

        For ``pandas.DataFrame(job.checkpoints())``: step, age_s, size_bytes, stall_s (for how long
        training stood still for it), generation, is_newest, is_best, verified, problem, where.

        Args:
            verify: Also read all of their parts and compare them with what was written.
        """
        from etrain_jupyter.notebook.job.saved_records import records_of

        where, listed, best = list_saved(self.record, self._reached(), verify=verify)
        stalls = self._latest().stalls
        return records_of(listed, best=best, where=where, now=time.time(), stalls=stalls)

    def _reached(self) -> dict[int, float]:
        """Return the evaluations that were the best when they were made, as the log has them."""
        return {best.step: best.value for best in self._latest().best}

    # --- showing --------------------------------------------------------------------------------

    def __repr__(self) -> str:
        view = self._glance()
        total = f"/{view.total_steps}" if view.total_steps else ""
        loss = f", loss {view.metrics['loss']:.4g}" if "loss" in view.metrics else ""
        reason = f" ({self.reason})" if self.reason else ""
        return (
            f"<TrainingJob {self.id}: {self.status}{reason}, step {view.step}{total}{loss}, "
            f"{view.world_size} workers>"
        )

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> Any:
        if self.screen is not None:
            return self.screen._repr_mimebundle_(include=include, exclude=exclude)
        table = table_of(self._glance(), self.id, self.status)
        return {"text/plain": repr(self), "text/html": table}

    def _latest(self) -> LatestValues:
        """Return the folded values, with the whole history in them."""
        self._feed.start()
        self._feed.wait_until_caught_up(CATCH_UP_S)
        return self._view

    def _glance(self) -> LatestValues:
        """Return the values that are known now.

        Until the feed has read the history, from a slow cluster or bucket or from a long log, these
        are the values at the end of the log on this machine.
        """
        self._feed.start()
        if self._feed.wait_until_caught_up(self._glance_left()):
            return self._view
        return peek_log(self.record.log_path)

    def _glance_left(self) -> float:
        """Return the rest of the time that properties may wait, which begins with the first one."""
        if self._glance_until == math.inf:
            self._glance_until = time.monotonic() + GLANCE_S
        return max(0.0, self._glance_until - time.monotonic())


_WORKER_STATES = {"reported": "waiting"}
"""States of which the coordinator has a word of its own."""
