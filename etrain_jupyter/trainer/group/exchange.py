"""Exchange thread of a generation: it may block inside gloo, because it can be abandoned."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future

Work = Callable[[], None]


class Exchange:
    """Run work items one after another in a thread.

    A caller waits for an item's future *or* for the abort of the generation. The thread may then
    still be inside gloo: it ends as soon as gloo releases it, and runs no other item.
    """

    def __init__(self) -> None:
        self._pieces: queue.SimpleQueue[tuple[Work, Future[None]] | None] = queue.SimpleQueue()
        self._ended = False
        # A daemon, so that the process can exit although this thread is stuck inside gloo.
        threading.Thread(target=self._run, daemon=True, name="etrain-exchange").start()

    def submit(self, work: Work) -> Future[None]:
        """Run ``work`` after everything submitted before it."""
        future: Future[None] = Future()
        self._pieces.put((work, future))
        return future

    def end(self) -> None:
        """Drop the items that have not begun, and let the thread end. Does not wait for it."""
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
            # Not kept until the next item arrives: the work refers to tensors.
            del piece, work, future
