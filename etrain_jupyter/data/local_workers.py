"""Processes on this machine that run functions, as an ``Executor``.

Unlike in ``concurrent.futures.ProcessPoolExecutor``, a process that is killed costs only the call
that it ran, which is repeated in a new process; the other processes continue.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import queue
import signal
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import Any

import pyarrow as pa

from etrain_jupyter.data.workers import Workers
from etrain_jupyter.errors import ShardError

MAX_ATTEMPTS = 3
"""Processes that may exit while they run the same call, before it fails."""


@contextlib.contextmanager
def open_local_workers(num_workers: int) -> Iterator[Workers]:
    """Run processes on this machine; an error in the context ends them at once."""
    executor = LocalWorkers(num_workers)
    try:
        yield Workers(executor=executor, num_workers=num_workers)
    except BaseException:
        executor.shutdown(cancel_futures=True)
        raise
    executor.shutdown()


class LocalWorkers(Executor):
    """Runs each call in one of several processes, which start when they are first needed.

    Args:
        num_workers: Number of processes.
    """

    def __init__(self, num_workers: int) -> None:
        self._workers = [_Worker() for _ in range(num_workers)]
        self._idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        for worker in self._workers:
            self._idle.put(worker)
        # One thread for each process waits for its results.
        self._threads = ThreadPoolExecutor(num_workers, thread_name_prefix="etrain-shards")
        self._is_cancelled = False

    @property
    def pids(self) -> list[int]:
        """Ids of the processes that run."""
        return [worker.pid for worker in self._workers if worker.pid]

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Run a function of a module in one of the processes."""
        return self._threads.submit(self._call, fn, args, kwargs)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End the processes: after all calls, or at once with ``cancel_futures``."""
        if cancel_futures:
            self._is_cancelled = True
            for worker in self._workers:
                worker.kill()
        self._threads.shutdown(wait=True, cancel_futures=cancel_futures)
        for worker in self._workers:
            worker.end()

    def _call(self, fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        worker = self._idle.get()
        try:
            for _ in range(MAX_ATTEMPTS):
                try:
                    return worker.call(fn, args, kwargs)
                except ConnectionError:
                    status = worker.end()
                    if self._is_cancelled:
                        break
            raise ShardError(
                f"{MAX_ATTEMPTS} worker processes exited while they worked on the same part, the "
                f"last one with status {status}. All finished parts are kept. A status of -9 often "
                "means that memory ran out: use fewer workers. In a script, call write_shards "
                'under `if __name__ == "__main__":`, because each process imports the script. Then '
                "run it again with the same arguments."
            )
        finally:
            self._idle.put(worker)


class _Worker:
    """One process, which is started for its first call, and again after ``end``."""

    def __init__(self) -> None:
        self._process: SpawnProcess | None = None
        self._pipe: Connection | None = None

    @property
    def pid(self) -> int:
        return (self._process.pid or 0) if self._process is not None else 0

    def call(self, fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a function in the process.

        Raises:
            ConnectionError: If the process exits.
        """
        pipe = self._pipe or self._start()
        try:
            pipe.send((fn, args, kwargs))
            is_result, value = pipe.recv()
        except (EOFError, OSError) as exc:
            raise ConnectionError("the worker process has exited") from exc
        if not is_result:
            raise value
        return value

    def kill(self) -> None:
        process = self._process
        if process is not None:
            with contextlib.suppress(ValueError):  # another thread has just closed it
                process.kill()

    def end(self) -> int | None:
        """End the process and return its exit status."""
        process, pipe = self._process, self._pipe
        self._process = self._pipe = None
        if process is None or pipe is None:
            return None
        pipe.close()  # an idle process exits then
        process.join()
        status = process.exitcode
        process.close()
        return status

    def _start(self) -> Connection:
        # A forked process could inherit the locks of other threads of a notebook, for example.
        context = multiprocessing.get_context("spawn")
        pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()  # so that the pipe closes when the process exits
        self._pipe = pipe
        return pipe


def _serve(pipe: Connection) -> None:
    """Run calls until the other process closes the pipe, or exits."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt is for the notebook
    pa.set_cpu_count(1)  # there is one process for each core
    while True:
        try:
            fn, args, kwargs = pipe.recv()
        except EOFError:
            return
        try:
            answer = True, fn(*args, **kwargs)
        # Reported to the caller. Other errors may not survive pickling.
        except (ShardError, OSError) as exc:
            answer = False, exc
        except Exception:
            answer = False, ShardError(f"a worker process failed:\n{traceback.format_exc()}")
        try:
            pipe.send(answer)
        except BrokenPipeError:
            return
