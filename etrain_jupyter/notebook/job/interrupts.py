"""Handle the interrupt key while a cell waits for a job.

The key is a signal, and a signal can arrive between any two lines. The handler therefore only
records the signal. The waiting code polls for it and reacts, in the right cell and without holding
a lock.
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
"""If presses are more than this many seconds apart, each counts as a first press."""


class Interrupts:
    """Handle the interrupt key during one wait: stop, then stop immediately, then end the wait.

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
        self.were_any = False
        """True if the key was pressed, which stopped the job."""

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
        self.were_any = True
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
            # Our own handler may still be installed, see `close`; it must not call itself.
            before = signal.getsignal(signal.SIGINT)
            if before != self._note:
                self._before = before if callable(before) else signal.default_int_handler
            signal.signal(signal.SIGINT, self._note)
        self._open.append(presses)

    def close(self, presses: list[float]) -> None:
        # Compare by identity: two waits may have recorded equal lists, for example empty ones.
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
