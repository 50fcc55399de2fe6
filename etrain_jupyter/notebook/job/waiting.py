"""Wait for the end of a job, or for a condition, and print what a user should know meanwhile."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable

from etrain_jupyter.errors import EtrainError
from etrain_jupyter.notebook.job.feed import EventFeed
from etrain_jupyter.notebook.job.followed_job import FollowedJob
from etrain_jupyter.notebook.job.history import LatestValues
from etrain_jupyter.notebook.job.interrupts import Interrupts
from etrain_jupyter.notebook.job.link import SLICE_S

ENDED = {"finished": "finished", "stopped": "been stopped", "failed": "failed"}


class JobWait:
    """One wait for a job. If the scheduler cannot be reached, it says so and continues.

    Args:
        job: The job.
        feed: Its events.
        view: Its values, which the feed updates.
        stop: Requests a stop without waiting for the response; with True, an immediate one.
        timeout: Maximum wait in seconds; None for no limit.
        shows_startup: True to print each stage of the start-up once it has ended.
    """

    def __init__(
        self,
        job: FollowedJob,
        feed: EventFeed,
        view: LatestValues,
        stop: Callable[[bool], None],
        timeout: float | None,
        *,
        shows_startup: bool,
    ) -> None:
        feed.start()
        self._deadline = math.inf if timeout is None else time.monotonic() + timeout
        self._job, self._feed, self._view, self._stop = job, feed, view, stop
        self._shows_startup = shows_startup
        self._trouble = ""
        self._printed_stages: set[str] = set()
        self._is_late: bool | None = None  # unknown until the history is folded

    def until_end(self) -> None:
        """Block until the job has ended or the timeout has passed."""
        with Interrupts(self._job.id, self._stop) as interrupts:
            # Wait in slices: the signal handler only records an interrupt, since it must not take
            # locks or print. `handle` acts on it.
            while time.monotonic() < self._deadline:
                self._print_trouble()
                self._print_startup()
                if self._feed.ended.wait(SLICE_S):
                    break
                interrupts.handle()

    async def until_end_async(self) -> None:
        """Wait until the job has ended, without blocking."""
        with Interrupts(self._job.id, self._stop) as interrupts:
            while not self._feed.ended.is_set():
                self._print_trouble()
                # Sleep instead of waiting for the event, which would block the kernel's event loop.
                await asyncio.sleep(SLICE_S)
                interrupts.handle()

    def until(self, condition: Callable[[], bool]) -> None:
        """Block until ``condition`` holds; an interrupt only ends the wait.

        Raises:
            EtrainError: If the job ends or the timeout passes first.
        """
        job, started_at = self._job, time.monotonic()
        while True:
            # Read this before the condition. Otherwise, the last events could arrive in between,
            # and a condition that they fulfil would count as failed.
            has_ended = self._feed.ended.is_set()
            if condition():
                return
            if has_ended:
                job.raise_for_status()
                why = f" ({job.reason})" if job.reason else ""
                raise EtrainError(
                    f"job {self._job.id} has {ENDED[job.status]} at step {job.step}{why}, and "
                    "the condition of job.wait(until=...) does not hold. Check the condition, or "
                    "let the job train longer."
                )
            if time.monotonic() >= self._deadline:
                waited_s = time.monotonic() - started_at
                raise EtrainError(
                    f"the condition of job.wait(until=...) does not hold after {waited_s:.0f} s: "
                    f"{job!r}. The job continues. Wait again, or with a longer timeout."
                )
            self._print_trouble()
            self._feed.ended.wait(min(SLICE_S, max(0.0, self._deadline - time.monotonic())))

    def _print_startup(self) -> None:
        if not self._shows_startup or not self._feed.caught_up.is_set():
            return
        startup = self._view.startup
        self._is_late = startup.is_over if self._is_late is None else self._is_late
        for stage in () if self._is_late else startup.stages():
            if stage.took_s is not None and stage.name not in self._printed_stages:
                self._printed_stages.add(stage.name)
                print(f"etrain: {self._job.id}: {stage.name} {stage.took_s:.1f} s", flush=True)

    def _print_trouble(self) -> None:
        """Print new trouble, or that it has ended."""
        feed, printed = self._feed, self._trouble
        # Print each kind of trouble once, although its text may change at every retry.
        kind = "scheduler" if feed.trouble else "log" if feed.log_trouble else ""
        if kind and kind != printed:
            trouble = feed.trouble or feed.log_trouble
            print(f"etrain: {self._job.id} was {self._view.status}; {trouble}. Still waiting.")
        elif printed and not kind and not feed.ended.is_set():
            is_back = "responds" if printed == "scheduler" else "can be written"
            print(f"etrain: the {printed} of {self._job.id} {is_back} again.")
        self._trouble = kind
