"""The one thread of a generation that may block inside gloo, because it can be abandoned."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future

Work = Callable[[], None]


class Exchange:
    """Runs pieces of work one after the other on a thread of its own.

    Somebody who waits for a piece waits for its future *or* for the generation's abort. The thread
    may then still be inside gloo: it ends as soon as gloo lets go of it, and does no other piece.
    """

    def __init__(self) -> None:
        self._pieces: queue.SimpleQueue[tuple[Work, Future[None]] | None] = queue.SimpleQueue()
        self._ended = False
        # A daemon: a process may end although a thread of it is stuck inside gloo.
        threading.Thread(target=self._run, daemon=True, name="etrain-exchange").start()

    def submit(self, work: Work) -> Future[None]:
        """Do ``work`` after all that was submitted before it."""
        future: Future[None] = Future()
        self._pieces.put((work, future))
        return future

    def end(self) -> None:
        """Drop the pieces that have not begun, and let the thread end. Does not wait for it."""
        self._ended = True
        self._pieces.put(None)

    def _run(self) -> None:
        while True:
            piece = self._pieces.get()
            if piece is None:
                return
            work, future = piece
            if self._ended:
                future.cancel()
                continue
            try:
                work()
            except BaseException as exc:
                future.set_exception(exc)
            else:
                future.set_result(None)
            # Not kept until the next piece comes: the work holds tensors.
            del piece, work, future
