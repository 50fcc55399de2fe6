"""A training job in the notebook: a view that can be discarded and recreated at any time.

This module does not run the training. Values come from the job's events, requests go to its
coordinator, and weights come from its checkpoints.
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
from etrain_jupyter.insight.figures import plot_job
from etrain_jupyter.log.blocks import Events
from etrain_jupyter.log.events import TERMINAL_STATUSES
from etrain_jupyter.log.segments import read_log
from etrain_jupyter.notebook.job.cost import JobCost, cost_of
from etrain_jupyter.notebook.job.feed import EventFeed, Listener
from etrain_jupyter.notebook.job.history import NOT_FOLDABLE, LatestValues, peek_log, phases_of
from etrain_jupyter.notebook.job.interrupts import Interrupts
from etrain_jupyter.notebook.job.job_record import RunRecord
from etrain_jupyter.notebook.job.link import SLICE_S, JobLink
from etrain_jupyter.notebook.job.requests import ENDED, REQUEST_S, JobRequests, ResumeRequest
from etrain_jupyter.notebook.job.resume import resume_job
from etrain_jupyter.notebook.job.screen import Screen, table_of
from etrain_jupyter.notebook.job.store_link import StoreLink, refresh_log, try_refresh_log
from etrain_jupyter.notebook.job.stored_exhibits import Exhibit, exhibits_of
from etrain_jupyter.notebook.job.track import track_job
from etrain_jupyter.notebook.job.weights import (
    Saved,
    find_saved,
    list_saved,
    load_weights,
    put_weights,
)
from etrain_jupyter.untrusted import plain_line
from etrain_jupyter.wire.requests import ListWorkers

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from etrain_jupyter.notebook.audit import AuditReport

GLANCE_S = 1.0
"""Total time that properties may wait for the history, in seconds."""
CATCH_UP_S = 10.0
"""Timeout for methods that wait for the whole history, in seconds."""
RESPONSE_S = 5.0
"""Timeout for the coordinator's first response, in seconds."""

Model = TypeVar("Model")


class TrainingJob(JobRequests):
    """A submitted job.

    The object follows the job's events starting with the first access. ``await job`` and
    ``job.wait()`` wait until the job has ended. A property such as ``job.step`` returns the last
    known value: it waits for the history for at most ``GLANCE_S``, and then reads the end of the
    log on this machine. A method that needs the whole history waits for the cluster or the bucket
    for at most ``CATCH_UP_S``, and until the log on this machine has been read.

    Args:
        record: The job's record in the run store.
        link: Connection to its cluster; None if the cluster has ended.

    Attributes:
        screen: The display of the job; None for a plain table.
        was_interrupted: True if the interrupt key stopped the job during ``wait``.
    """

    def __init__(self, record: RunRecord, link: JobLink | None) -> None:
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
            is_copy=bool(record.place),
        )

    def follow_again(self, record: RunRecord, link: JobLink | None) -> None:
        """Follow the next attempt of a resumed job, from the beginning of its log."""
        # The thread of the old feed may still deliver a batch. It changes only the old view, which
        # is no longer read; the screen skips events that it has already seen.
        self._feed.close()
        self.record, self._link, self.was_interrupted = record, link, False
        self._view = LatestValues()
        self._feed = self._make_feed()
        self._glance_until = math.inf
        if self.screen is not None:
            self._feed.subscribe(self.screen.add_events)

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

    def resume_as(self, request: ResumeRequest) -> str:
        """Resume a job that has ended, or whose cluster has ended; see ``resume``."""
        return resume_job(self, request)

    # --- identity and progress -------------------------------------------------------------------

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

        Each has a ``step``, a ``name`` and a ``format``; ``load()`` returns its content. The oldest
        are removed from jobs that have many, see the guide "Official scores over the whole set".

        Args:
            name: Only those with this name; all by default.
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

    def workers(self) -> list[dict[str, Any]]:
        """Return one record per worker (worker, rank, state, device ...); empty once the job ends.

        The states are those of the dashboard: starting, warm, training, waiting.
        """
        # The coordinator of an ended job has either released its workers or exited.
        if self._latest().status in TERMINAL_STATUSES or self._link is None:
            return []
        found = self._link.call(ListWorkers(job_id=self.id), timeout=REQUEST_S)
        return [
            record | {"state": _WORKER_STATES.get(record["state"], record["state"])}
            for record in found.workers
        ]

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
            EtrainError: If the log has values that no job has.
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

        Lost and preempted workers are marked. Requires the package matplotlib. For several jobs in
        the same axes, use ``etrain_jupyter.compare(jobs).plot()``.

        Args:
            over: ``steps``, ``samples``, ``time`` (from the first step, without the time between an
                end and a resume), or ``usd``.

        Raises:
            ConfigError: If the axis is unknown, the pool has no prices for ``usd``, or matplotlib
                is not installed.
        """
        return plot_job(self, over)

    def track(self, to: str | None = None, **options: Any) -> str:
        """Write the values of the job so far to a logger.

        Works for a running and for an ended job, and can be repeated: a value appears once. For a
        job that logs while it trains, use ``log.to`` in the cell.

        Args:
            to: ``tensorboard`` or the name of a logger of a plug-in; by default the loggers in the
                job's ``log.to``.
            **options: Options of the logger, as in ``log.to``.

        Raises:
            ConfigError: If the logger is unknown, an option is invalid, or the running job
                already writes to it.
            LoggerError: If the destination fails; the call can be repeated.
        """
        return track_job(
            self.record,
            to,
            options,
            status=self.status,
            is_over=self.is_over,
            list_exhibits=self.exhibits,
        )

    def cost(self) -> JobCost:
        """Return the cost of the job so far: spent, saved compared with on-demand prices, wasted.

        ``is_known`` is False if the pool has no prices, as on your own machine.
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

        If the scheduler cannot be reached, a message says so and the wait continues, because the
        job may still be running. The first interrupt stops the job with a checkpoint, and the wait
        continues. A second interrupt within 5 s stops the job immediately, and a third one ends the
        wait. With ``until``, an interrupt only ends the wait.

        Args:
            timeout: Maximum wait in seconds; no limit by default.
            until: A condition that is polled about five times a second, for example
                ``lambda job: job.world_size == 4``.

        Raises:
            EtrainError: If the job ends, or the timeout passes, before ``until`` holds.
            JobFailedError: If the job fails.
            JobLostError: If the job's cluster ends before the job.
        """
        self._feed.start()
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        # With a condition, an interrupt only ends the wait, because the cell only observes the job.
        if until is not None:
            return self._wait_until(until, deadline)
        kind = ""
        show_startup = self._startup_printer()
        with self._interrupts() as interrupts:
            # Wait in slices: the signal handler only records an interrupt, since it must not take
            # locks or print. `_handle_interrupts` acts on it.
            while time.monotonic() < deadline:
                kind = self._print_trouble(kind)
                show_startup()
                if self._feed.ended.wait(SLICE_S):
                    break
                self._handle_interrupts(interrupts)
        return self._ended_status()

    def _ended_status(self) -> str:
        """Return the status; raise if the job has failed or is lost, so that "Run All" stops."""
        if self._feed.ended.is_set():
            self.raise_for_status()
        return self.status

    def _wait_until(self, condition: Callable[[TrainingJob], bool], deadline: float) -> str:
        """Block until ``condition`` holds; raise if the job ends or the wait times out first."""
        started_at = time.monotonic()
        kind = ""
        while True:
            # Read this before the condition. Otherwise, the last events could arrive in between,
            # and a condition that they fulfil would count as failed.
            has_ended = self._feed.ended.is_set()
            if condition(self):
                return self.status
            if has_ended:
                self.raise_for_status()
                why = f" ({self.reason})" if self.reason else ""
                raise EtrainError(
                    f"job {self.id} has {ENDED[self.status]} at step {self.step}{why}, and the "
                    "condition of job.wait(until=...) does not hold. Check the condition, or let "
                    "the job train longer."
                )
            if time.monotonic() >= deadline:
                waited_s = time.monotonic() - started_at
                raise EtrainError(
                    f"the condition of job.wait(until=...) does not hold after {waited_s:.0f} s: "
                    f"{self!r}. The job continues. Wait again, or with a longer timeout."
                )
            kind = self._print_trouble(kind)
            self._feed.ended.wait(min(SLICE_S, max(0.0, deadline - time.monotonic())))

    def __await__(self) -> Generator[Any, None, str]:
        """Wait without blocking; a notebook's interrupt key works as in ``wait``.

        Cancelling the waiting task does not affect the job.
        """
        return self._wait_async().__await__()

    async def _wait_async(self) -> str:
        self._feed.start()
        printed = ""
        with self._interrupts() as interrupts:
            while not self._feed.ended.is_set():
                printed = self._print_trouble(printed)
                # Sleep instead of waiting for the event, which would block the kernel's event loop.
                await asyncio.sleep(SLICE_S)
                self._handle_interrupts(interrupts)
        return self._ended_status()

    def _interrupts(self) -> Interrupts:
        # Do not wait for the response, so that a second press can still request an immediate stop.
        return Interrupts(self.id, lambda now: self._send_request("stop", {"now": now}))

    def _handle_interrupts(self, interrupts: Interrupts) -> None:
        interrupts.handle()
        # The flag stays set after the wait, so that the cell ends with an error and "Run All"
        # stops.
        self.was_interrupted |= interrupts.were_any

    def _startup_printer(self) -> Callable[[], None]:
        """Return a function that prints each stage of the start-up once it has ended."""
        startup, printed = self._view.startup, set[str]()
        is_late: bool | None = None  # unknown until the history is folded

        def print_new() -> None:
            nonlocal is_late
            if self.screen is not None or not self._feed.caught_up.is_set():
                return  # a dashboard shows the stages
            is_late = startup.is_over if is_late is None else is_late
            for stage in () if is_late else startup.stages():
                if stage.took_s is not None and stage.name not in printed:
                    printed.add(stage.name)
                    print(f"etrain: {self.id}: {stage.name} {stage.took_s:.1f} s", flush=True)

        return print_new

    def _print_trouble(self, printed: str) -> str:
        """Print new trouble (not of kind ``printed``), or that it has ended; return its kind."""
        feed = self._feed
        # Print each kind of trouble once, although its text may change at every retry.
        kind = "scheduler" if feed.trouble else "log" if feed.log_trouble else ""
        if kind and kind != printed:
            trouble = feed.trouble or feed.log_trouble
            print(f"etrain: {self.id} was {self._view.status}; {trouble}. Still waiting.")
        elif printed and not kind and not feed.ended.is_set():
            is_back = "responds" if printed == "scheduler" else "can be written"
            print(f"etrain: the {printed} of {self.id} {is_back} again.")
        return kind

    def result(self) -> dict[str, Any]:
        """Wait until the job has ended, and return a summary.

        Raises:
            JobFailedError: If the job failed; it has the traceback of the notebook's own code.
            JobLostError: If the cluster ended before the job.
        """
        self.wait()
        view = self._latest()
        return {
            "job_id": self.id,
            "status": view.status,
            "step": view.step,
            "epoch": view.epoch,
            "duration_s": max(0.0, view.changed_at - view.started_at),
            **({"reason": view.reason} if view.reason else {}),
            **({"best": self.best} if view.best else {}),
            **view.metrics,
        }

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
            flag = f" with --resume {self.id} to continue from there" if view.saved_step else ""
            raise JobFailedError(
                f"job {self.id} failed {self._cause_of_failure()} {self._describe_saved()} Fix the "
                f"cause and run the cell again{flag}; %etrain logs shows the workers' output.",
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
        """The best evaluation so far, ``{"step", "metric", "value"}``; None if there is none.

        Only jobs with ``checkpoint.best`` have one.
        """
        found = self._glance().best
        if not found:
            return None
        return {"step": found[-1].step, "metric": found[-1].metric, "value": found[-1].value}

    def state_dict(self, which: str | int = "last", *, weights: str = "auto") -> dict[str, Any]:
        """Return saved weights, as tensors by name; print their step if the job still trains.

        Only the parts of the checkpoint with the weights are read, not the optimizer's state.

        Args:
            which: ``last`` for the newest checkpoint with valid weights; ``best`` for the one with
                the best evaluation, see ``checkpoint.best``; a number for the checkpoint at that
                step.
            weights: With ``ema``: ``averaged`` for the averaged weights, which were evaluated, or
                ``raw`` for those that are trained. ``auto`` is ``averaged`` if there are any.

        Raises:
            CheckpointError: If the checkpoint does not exist, or has no averaged weights.
            ConfigError: If ``which`` or ``weights`` is invalid.
        """
        saved = self._find_saved(which, weights)
        return load_weights(saved, weights)

    def load_into(self, model: Model, which: str | int = "last", *, weights: str = "auto") -> Model:
        """Load saved weights into ``model`` and return it; arguments as in ``state_dict``.

        Raises:
            CheckpointError: If the checkpoint does not exist, or does not fit the model.
        """
        put_weights(self.state_dict(which, weights=weights), model, self.record)
        return model

    def export(
        self,
        path: str | os.PathLike[str],
        *,
        format: str = "safetensors",
        which: str | int = "last",
        weights: str = "auto",
        model: Any = None,
        overwrite: bool = False,
    ) -> Path:
        """Write saved weights to one file, or to a folder for ``from_pretrained``.

        Args:
            path: A file; a folder with ``format="transformers"``. Missing parents are created.
            format: ``safetensors`` or ``transformers``.
            which: As in ``state_dict``.
            weights: As in ``state_dict``.
            model: Only with ``transformers``: the model whose ``config`` is written. Required if
                the job's own model has no config.
            overwrite: True to replace existing files.

        Returns:
            The path of the file or folder.

        Raises:
            CheckpointError: If the checkpoint does not exist, or the path is not writable.
            ConfigError: If the format or ``which`` is invalid, or if the path exists.
        """
        from etrain_jupyter.notebook.job.export import (
            export_file,
            export_folder,
            export_source,
            find_format,
        )

        is_folder = find_format(format, model) == "transformers"
        saved = self._find_saved(which, weights)
        with export_source(saved, weights) as source:
            if is_folder:
                return export_folder(
                    self.record, source, Path(path), model=model, overwrite=overwrite
                )
            return export_file(self.record, source, Path(path), overwrite=overwrite)

    def checkpoints(self, verify: bool = False) -> list[dict[str, Any]]:
        """Return one record for each saved checkpoint, newest first.

        For ``pandas.DataFrame(job.checkpoints())``. The fields are step, age_s, size_bytes, stall_s
        (for how long it blocked training), generation, is_newest, is_best, verified, problem,
        where.

        Args:
            verify: True to read all parts and check their digests.
        """
        from etrain_jupyter.notebook.job.saved_records import records_of

        where, listed, best = list_saved(self.record, self._best_evals(), verify=verify)
        stalls = self._latest().stalls
        return records_of(listed, best=best, where=where, now=time.time(), stalls=stalls)

    def _find_saved(self, which: str | int, weights: str) -> Saved:
        """Return a checkpoint; print its step if the job still trains."""
        saved = find_saved(self.record, which, self._best_evals(), weights)
        if not self.is_over:
            print(
                f"etrain: {self.id} is {self.status} at step {self.step:,}; these are its weights "
                f"of step {saved.step:,}."
            )
        return saved

    def _best_evals(self) -> dict[int, float]:
        # The log may be ahead of the newest checkpoint, which has the same values.
        return {best.step: best.value for best in self._latest().best}

    # --- display ---------------------------------------------------------------------------------

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

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> Any:
        if self.screen is not None:
            return self.screen._repr_mimebundle_(include=include, exclude=exclude)
        table = table_of(self._glance(), self.id, self.status)
        return {"text/plain": repr(self), "text/html": table}

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


_WORKER_STATES = {"reported": "waiting"}
"""States that have a different name in the coordinator."""
