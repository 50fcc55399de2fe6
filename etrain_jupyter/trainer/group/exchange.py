"""Exchange thread of a generation, which may block inside gloo because it can be abandoned."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future

Work = Callable[[], None]


class Exchange:
    """Run work items one after another in a thread."""

    # main thread    submit ── Pending.wait ─────── X aborted: CommunicationError, next generation
    # this thread       └─ work: inside gloo, with a peer that is silent ....... released, ends
    def __init__(self) -> None:
        self._pieces: queue.SimpleQueue[tuple[Work, Future[None]] | None] = queue.SimpleQueue()
        self._ended = False
        # A daemon, so that the process can exit even if this thread is stuck inside gloo.
        threading.Thread(target=self._run, daemon=True, name="etrain-exchange").start()

    def submit(self, work: Work) -> Future[None]:
        """Run ``work`` after everything submitted before it."""
        future: Future[None] = Future()
        self._pieces.put((work, future))
        return future

    def end(self) -> None:
        """Drop work items that have not started, and let the thread exit. Does not wait for it."""
        self._ended = True
        self._pieces.put(None)

    def _run(self) -> None:
        while True:
            piece = self._pieces.get()
            if piece is None:
                return
            work, future = piece
            # Items still in the queue must not start in an aborted generation.
            if self._ended:
                future.cancel()
                continue
            try:
                work()
            except BaseException as exc:
                future.set_exception(exc)
            else:
                future.set_result(None)
            # The work refers to tensors. These variables would keep it alive until the next item
            # arrives.
            del piece, work, future
