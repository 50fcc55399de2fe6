"""Wait for the end of a job, or for a condition, and print what a user should know meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import math
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, Self

from etrain_jupyter.errors import EtrainError
from etrain_jupyter.notebook.job.feed import EventFeed
from etrain_jupyter.notebook.job.followed_job import FollowedJob
from etrain_jupyter.notebook.job.history import LatestValues
from etrain_jupyter.notebook.job.link import SLICE_S

ENDED = {"finished": "finished", "stopped": "been stopped", "failed": "failed"}


class JobWait:
    """One wait for a job. It prints a message, and continues, if the scheduler cannot be reached.

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


AGAIN_WITHIN_S = 5.0
"""If presses are more than this many seconds apart, each counts as a first press."""


class Interrupts:
    """Handle the interrupt key during one wait: stop, then stop immediately, then end the wait.

    The key is a signal, and a signal can arrive between any two lines. The handler therefore only
    records the signal. The waiting code polls for it and reacts, in the right cell and without
    holding a lock.

    Several instances may be active at once, for example in ``asyncio.gather(one, other)``; each one
    receives every press. The key works in the main thread only; other threads receive nothing.

    Args:
        job_id: Id of the job, for messages.
        stop: Requests a stop; with True, immediately and without a checkpoint.
    """

    def __init__(self, job_id: str, stop: Callable[[bool], None]) -> None:
        self._job_id, self._stop = job_id, stop
        self._presses: list[float] = []
        self._handled: list[float] = []

    def __enter__(self) -> Self:
        _key.open(self._presses)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        _key.close(self._presses)

    def handle(self) -> None:
        """Act on the presses since the last call, and print a message for each.

        The third consecutive press calls the previous handler, which usually raises
        KeyboardInterrupt or cancels the task of an awaiting cell.
        """
        while self._presses:
            self._press(self._presses.pop(0))

    def _press(self, at: float) -> None:
        # Consecutive presses, each within AGAIN_WITHIN_S of the one before:
        #   1st -> stop with a checkpoint; 2nd -> stop immediately; further -> previous handler
        is_again = bool(self._handled) and at - self._handled[-1] <= AGAIN_WITHIN_S
        self._handled = [*self._handled, at] if is_again else [at]
        if len(self._handled) > 2:
            print(f"etrain: no longer waiting for {self._job_id}, which is stopping.")
            _key.pass_on()
            return
        self._stop(is_again)
        if is_again:
            print(
                f"etrain: stopping {self._job_id} at once, without a checkpoint. "
                "Interrupt again to stop waiting."
            )
        else:
            print(
                f"etrain: stopping {self._job_id} after this step, with a checkpoint. "
                f"Interrupt again within {AGAIN_WITHIN_S:g} s to stop at once."
            )


class _Key:
    """The single SIGINT handler shared by all active instances."""

    def __init__(self) -> None:
        self._open: list[list[float]] = []
        self._before: Any = signal.default_int_handler

    def open(self, presses: list[float]) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        if not self._open:
            # Our own handler may still be installed (see `close`), and must not call itself.
            before = signal.getsignal(signal.SIGINT)
            if before != self._note:
                self._before = before if callable(before) else signal.default_int_handler
            signal.signal(signal.SIGINT, self._note)
        self._open.append(presses)

    def close(self, presses: list[float]) -> None:
        # Compare by identity, because two waits may have recorded equal, often empty, lists.
        self._open[:] = [one for one in self._open if one is not presses]
        # If other code has replaced our handler, do not touch the signal. That code may restore our
        # handler later; our handler then forwards every press to the previous one.
        if not self._open and signal.getsignal(signal.SIGINT) == self._note:
            with contextlib.suppress(ValueError):  # a coroutine may be finalized in another thread
                signal.signal(signal.SIGINT, self._before)

    def pass_on(self) -> None:
        self._before(signal.SIGINT, None)

    def _note(self, _number: int, frame: FrameType | None) -> None:
        if not self._open:  # no wait is active, but other code has restored this handler
            self._before(signal.SIGINT, frame)
        for presses in self._open:
            presses.append(time.monotonic())


_key = _Key()
