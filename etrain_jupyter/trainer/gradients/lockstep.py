"""Run tasks in threads, one at a time, that meet in rounds.

With ``sync_batchnorm`` and ``reproducible``, the shards of a rank must all reach a BatchNorm layer
before any of them continues, but each has its own pass::

    shard 0   runs ── meets                    ┌── runs ── meets ...
    shard 1              runs ── meets ── sum ─┘              runs ── meets ...

Only one task runs at any time, so the order of everything that they do is fixed.
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any


class _Abandoned(BaseException):
    """Ends a task because another one has failed; not an Exception, which its code may catch."""


class Lockstep:
    """Threads for a fixed number of tasks.

    Args:
        num_tasks: Maximum number of tasks. A single one runs in the calling thread.
        save: Called when a task stops running; returns a function that is called when it continues.
        set_up: Called in each thread before its first task.
    """

    def __init__(
        self,
        num_tasks: int,
        *,
        save: Callable[[], Callable[[], None]],
        set_up: Callable[[], None],
    ) -> None:
        self._save = save
        self._pool = (
            ThreadPoolExecutor(num_tasks, "shard", initializer=set_up) if num_tasks > 1 else None
        )
        self._turns: list[threading.Semaphore] = []
        self._running: set[int] = set()
        """Tasks that have not ended."""
        self._arrived: dict[int, Any] = {}
        """Task -> its value in the current round."""
        self._combine: Callable[[list[Any]], Any] = list
        self._result: Any = None
        self._first = self._current = 0
        self._error: BaseException | None = None

    def close(self) -> None:
        """End the threads."""
        if self._pool is not None:
            self._pool.shutdown()

    @property
    def is_first(self) -> bool:
        """True in the task that continues first after a round."""
        return self._current == self._first

    def run(self, tasks: Sequence[Callable[[], None]]) -> None:
        """Run all tasks to their ends.

        Raises:
            BaseException: The first error of a task. The others end when they meet.
        """
        self._turns = [threading.Semaphore(0) for _ in tasks]
        self._running, self._arrived = set(range(len(tasks))), {}
        self._first, self._error = 0, None
        if not tasks:
            return
        self._turns[0].release()
        if self._pool is None:
            self._run_task(0, tasks[0])
        else:
            pending = [
                self._pool.submit(contextvars.copy_context().run, self._run_task, number, task)
                for number, task in enumerate(tasks)
            ]
            for future in pending:
                future.result()
        error, self._error, self._result = self._error, None, None
        if error is not None:
            raise error

    def meet(self, value: Any, combine: Callable[[list[Any]], Any]) -> Any:
        """Wait until every task that has not ended is here, too.

        Args:
            value: This task's part.
            combine: Called once, with the values of all tasks in their order.

        Returns:
            The result of ``combine``.
        """
        number = self._current
        is_alone = len(self._turns) == 1
        restore = _nothing if is_alone else self._save()
        self._arrived[number], self._combine = value, combine
        self._pass_on(number)
        self._take_turn(number)
        restore()
        return self._result

    def _run_task(self, number: int, task: Callable[[], None]) -> None:
        try:
            self._take_turn(number)
            task()
            self._running.discard(number)
            self._pass_on(number)
        except _Abandoned:
            pass
        except BaseException as exc:
            self._error = self._error or exc
            for turn in self._turns:
                turn.release()

    def _take_turn(self, number: int) -> None:
        self._turns[number].acquire()
        if self._error is not None:
            raise _Abandoned
        self._current = number

    def _pass_on(self, number: int) -> None:
        # Tasks take turns in their order. The last one of a round ends the round.
        rest = [n for n in sorted(self._running) if n > number and n not in self._arrived]
        if not rest and self._arrived:
            values = [self._arrived[n] for n in sorted(self._arrived)]
            self._first = min(self._arrived)
            self._arrived = {}
            self._result = self._combine(values)
            rest = [self._first]
        if rest:
            self._turns[rest[0]].release()


def _nothing() -> None:
    pass
