"""Prepare batches in a background thread while the previous ones are trained on."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

NUM_AHEAD = 2
"""Number of batches that are prepared in advance."""

Item = TypeVar("Item")
Result = TypeVar("Result")


class Ahead:
    """One thread that prepares a few batches in advance, in order.

    It must not run code of the notebook: the random generators of torch, NumPy and Python are
    shared by all threads, so numbers that such code draws would change those of the model.
    """

    def __init__(self) -> None:
        # Its thread starts with the first batch, and outlives generations.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="etrain-batches")

    def map(self, prepare: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
        """Yield ``prepare(item)`` of each item, in order.

        ``items`` is consumed by the caller's thread. Each call of ``next`` submits one item more
        than it returns, until ``NUM_AHEAD`` are waiting::

            caller   next ─ submit 1 2 3, wait for 1 ── train on 1 ── next ─ submit 4, wait for 2
            thread            prepare 1 ─ 2 ─ 3 ─────────────────────────────── 4
        """
        waiting: deque[Future[Result]] = deque()
        try:
            for item in items:
                waiting.append(self._thread.submit(prepare, item))
                if len(waiting) > NUM_AHEAD:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            # The next generation starts with other samples.
            for future in waiting:
                future.cancel()

    def close(self) -> None:
        """Stop the thread, after the batch in progress."""
        self._thread.shutdown(wait=True, cancel_futures=True)
