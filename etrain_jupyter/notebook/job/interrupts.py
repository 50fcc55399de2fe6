"""The interrupt key while somebody waits for a job: what each press of it means.

The key is a signal, and a signal may come between any two lines. So its handler only notes that it
came, and whoever waits looks now and then and answers: in the right cell, with no lock held.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, Self

AGAIN_WITHIN_S = 5.0
"""A press that comes later than this after the one before counts as a first one."""


class Interrupts:
    """Takes over the interrupt key for one wait: stop, then stop at once, then leave the wait.

    Several may be open at the same time, for example in ``asyncio.gather(one, other)``; each hears
    every press. Outside of the main thread there is no such key, and nothing is heard.

    Args:
        job_id: The job, for what is said.
        stop: Asks it to stop; with True at once, without a checkpoint.
    """

    def __init__(self, job_id: str, stop: Callable[[bool], None]) -> None:
        self._job_id, self._stop = job_id, stop
        self._heard: list[float] = []
        self._answered: list[float] = []
        self.were_any = False
        """Whether the key was pressed, and so stopped the job."""

    def __enter__(self) -> Self:
        _key.open(self._heard)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        _key.close(self._heard)

    def answer(self) -> None:
        """Do what the presses since the last call ask for, and say so.

        The third one in a row does what the key does elsewhere, which as a rule raises
        KeyboardInterrupt, or cancels the task of a cell that awaits.
        """
        while self._heard:
            self._press(self._heard.pop(0))

    def _press(self, at: float) -> None:
        is_again = bool(self._answered) and at - self._answered[-1] <= AGAIN_WITHIN_S
        self._answered = [*self._answered, at] if is_again else [at]
        self.were_any = True
        if len(self._answered) > 2:
            print(f"etrain: no longer waiting for {self._job_id}, which was asked to stop at once.")
            _key.pass_on()
            return
        self._stop(is_again)
        if is_again:
            print(
                f"etrain: stopping {self._job_id} at once, without a checkpoint. "
                "Interrupt again to leave the wait."
            )
        else:
            print(
                f"etrain: stopping {self._job_id} after this step, with a checkpoint. "
                f"Interrupt again within {AGAIN_WITHIN_S:g} s to stop at once."
            )


class _Key:
    """The one handler of SIGINT behind all that are open."""

    def __init__(self) -> None:
        self._open: list[list[float]] = []
        self._before: Any = signal.default_int_handler

    def open(self, heard: list[float]) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        if not self._open:
            before = signal.getsignal(signal.SIGINT)
            if before != self._note:
                self._before = before if callable(before) else signal.default_int_handler
            signal.signal(signal.SIGINT, self._note)
        self._open.append(heard)

    def close(self, heard: list[float]) -> None:
        # By identity: two that are open may have heard the same.
        self._open[:] = [one for one in self._open if one is not heard]
        # Whoever has put another handler above ours meanwhile puts ours back at its own end, so
        # that it must go on working; it passes on what nobody here waits for.
        if not self._open and signal.getsignal(signal.SIGINT) == self._note:
            with contextlib.suppress(ValueError):  # a coroutine may be thrown away elsewhere
                signal.signal(signal.SIGINT, self._before)

    def pass_on(self) -> None:
        self._before(signal.SIGINT, None)

    def _note(self, _number: int, frame: FrameType | None) -> None:
        if not self._open:
            self._before(signal.SIGINT, frame)
        for heard in self._open:
            heard.append(time.monotonic())


_key = _Key()
