"""A training job in the notebook: a view that can be discarded and recreated at any time.

This module does not run the training. Values come from the job's events, requests go to its
coordinator, and weights come from its checkpoints.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Generator, Iterable
from pathlib import Path
from typing import Any, Protocol, TypeVar

from etrain_jupyter.display.tables import html_table
from etrain_jupyter.log.events import TERMINAL_STATUSES, Event
from etrain_jupyter.notebook.job.job_record import RunRecord
from etrain_jupyter.notebook.job.link import JobLink
from etrain_jupyter.notebook.job.requests import REQUEST_S, JobRequests
from etrain_jupyter.notebook.job.track import track_job
from etrain_jupyter.notebook.job.waiting import JobWait
from etrain_jupyter.notebook.job.weights import (
    Saved,
    find_saved,
    list_saved,
    load_weights,
    put_weights,
)
from etrain_jupyter.wire.requests import ListWorkers

Model = TypeVar("Model")
_WORKER_STATES = {"reported": "waiting"}
"""States that have a different name in the coordinator."""


class Screen(Protocol):
    """The display of a job: the dashboard, which receives events and no job objects."""

    def show(self) -> None:
        """Display the job in the running cell."""

    def add_events(self, events: Iterable[Event]) -> None:
        """Receive the next events of the job; known events are skipped."""

    def settle(self) -> None:
        """Update the static copy in the saved notebook."""

    def _repr_mimebundle_(self, **_kwargs: Any) -> Any:
        """Return the MIME representations."""


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
        super().__init__(record, link)
        self.screen: Screen | None = None
        self.was_interrupted = False

    def follow_again(self, record: RunRecord, link: JobLink | None) -> None:
        """Follow the next attempt of a resumed job, from the beginning of its log."""
        super().follow_again(record, link)
        self.was_interrupted = False
        if self.screen is not None:
            # It skips events that it has already seen.
            self._feed.subscribe(self.screen.add_events)

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

    def track(self, to: str | None = None, **options: Any) -> str:
        """Write the values of the job so far to a logger.

        The job may be running or ended. The call can be repeated, because each value appears only
        once. For a job that logs while it trains, use ``log.to`` in the cell.

        Args:
            to: ``tensorboard`` or the name of a plug-in's logger; by default the loggers in the
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
        # With a condition, an interrupt only ends the wait, because the cell only observes the job.
        if until is not None:
            self._new_wait(timeout).until(lambda: until(self))
            return self.status
        self._new_wait(timeout).until_end()
        return self._ended_status()

    def _ended_status(self) -> str:
        """Return the status; raise if the job has failed or is lost, so that "Run All" stops."""
        if self._feed.ended.is_set():
            self.raise_for_status()
        return self.status

    def __await__(self) -> Generator[Any, None, str]:
        """Wait without blocking; a notebook's interrupt key works as in ``wait``.

        Cancelling the waiting task does not affect the job.
        """
        return self._wait_async().__await__()

    async def _wait_async(self) -> str:
        await self._new_wait(None).until_end_async()
        return self._ended_status()

    def _new_wait(self, timeout: float | None) -> JobWait:
        def stop(now: bool) -> None:
            # The flag stays set after the wait, so that the cell ends with an error and "Run All"
            # stops.
            self.was_interrupted = True
            # Do not wait for the response, so that a second press can still request an immediate
            # stop.
            self._send_request("stop", {"now": now})

        # A dashboard shows the stages of the start-up.
        shows_startup = self.screen is None
        return JobWait(self, self._feed, self._view, stop, timeout, shows_startup=shows_startup)

    def result(self) -> dict[str, Any]:
        """Wait until the job has ended, and return a summary.

        Raises:
            JobFailedError: If the job failed; the error has the traceback of the notebook's code.
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

    def state_dict(self, which: str | int = "last", *, weights: str = "auto") -> dict[str, Any]:
        """Return saved weights, as tensors by name; print their step if the job is still training.

        Only the parts of the checkpoint with the weights are read, not the optimizer's state.

        Args:
            which: ``last`` for the newest checkpoint with valid weights; ``best`` for the one with
                the best evaluation (see ``checkpoint.best``); a number for the checkpoint at that
                step.
            weights: With ``ema``: ``averaged`` for the averaged weights, which were evaluated, or
                ``raw`` for the trained ones. ``auto`` uses averaged weights if there are any.

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

        ``pandas.DataFrame`` accepts the list. The fields are step, age_s, size_bytes, stall_s (for
        how long it blocked training), generation, is_newest, is_best, verified, problem, where.

        Args:
            verify: True to read all parts and check their digests.
        """
        from etrain_jupyter.notebook.job.saved_records import records_of

        where, listed, best = list_saved(self.record, self._best_evals(), verify=verify)
        stalls = self._latest().stalls
        return records_of(listed, best=best, where=where, now=time.time(), stalls=stalls)

    def _find_saved(self, which: str | int, weights: str) -> Saved:
        """Return a checkpoint; print its step if the job is still training."""
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

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> Any:
        if self.screen is not None:
            return self.screen._repr_mimebundle_(include=include, exclude=exclude)
        view = self._glance()
        rows = {
            "job": self.id,
            "status": self.status,
            "step": f"{view.step} of {view.total_steps}" if view.total_steps else str(view.step),
            "workers": str(view.world_size),
            **{name: f"{value:.4g}" for name, value in view.metrics.items()},
        }
        table = html_table([], list(rows.items()), has_row_heads=True)
        return {"text/plain": repr(self), "text/html": table}
