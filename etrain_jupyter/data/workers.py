"""Processes or machines that ``write_shards`` can use."""

from __future__ import annotations

import contextlib
import multiprocessing
import queue
import signal
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import Any, NamedTuple

from etrain_jupyter.errors import ShardError

MAX_ATTEMPTS = 3
"""A call fails after this many processes have exited while they ran it."""


class Workers(NamedTuple):
    """Processes that run functions of this package."""

    executor: Executor
    num_workers: int
    """Calls that run at the same time."""


OpenWorkers = Callable[[], AbstractContextManager[Workers]]
"""Connects to workers, or starts them, for the time of a context."""


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


class LocalWorkers(ThreadPoolExecutor):
    """Run each call in one of several processes, which start when they are first needed.

    Unlike in ``ProcessPoolExecutor``, a process that is killed costs only the call that it ran,
    which is repeated in a new process, and the processes exit when this one is killed. Unlike
    Dask's ``LocalCluster``, it opens no port and sets no variables such as ``OMP_NUM_THREADS`` in
    the notebook's environment, which trainers on this machine would inherit.
    """

    def __init__(self, num_workers: int) -> None:
        # Each thread waits for the result of one process.
        super().__init__(num_workers, thread_name_prefix="etrain-shards")
        self._pipes: dict[SpawnProcess, Connection] = {}
        self._free: queue.SimpleQueue[SpawnProcess] = queue.SimpleQueue()
        self._is_cancelled = False

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Run a function of a module in one of the processes."""
        return super().submit(self._call, (fn, args, kwargs))

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End the processes: after all calls, or at once with ``cancel_futures``."""
        if cancel_futures:
            self._is_cancelled = True
            for process in list(self._pipes):
                with contextlib.suppress(ValueError):  # its thread has just closed it
                    process.kill()
        super().shutdown(cancel_futures=cancel_futures)
        for process in list(self._pipes):
            self._end(process)

    def _call(self, call: tuple[Callable[..., Any], Any, Any]) -> Any:
        status: int | None = None
        for _ in range(MAX_ATTEMPTS):
            try:
                process = self._free.get_nowait()
            except queue.Empty:
                process = self._start()
            pipe = self._pipes[process]
            try:
                pipe.send(call)
                is_result, value = pipe.recv()
            except (EOFError, OSError):
                status = self._end(process)
                if self._is_cancelled:
                    break
                continue
            self._free.put(process)
            if not is_result:
                raise value
            return value
        raise ShardError(
            f"{MAX_ATTEMPTS} worker processes exited while they worked on the same part, the "
            f"last one with status {status}. All finished parts are kept. A status of -9 often "
            "means that memory ran out: use fewer workers. In a script, call write_shards "
            'under `if __name__ == "__main__":`, because each process imports the script. Then '
            "run it again with the same arguments."
        )

    def _start(self) -> SpawnProcess:
        # A forked process could inherit the locks of other threads of a notebook, for example.
        context = multiprocessing.get_context("spawn")
        pipe, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(theirs,), daemon=True)
        process.start()
        theirs.close()  # so that the pipe closes when the process exits
        self._pipes[process] = pipe
        return process

    def _end(self, process: SpawnProcess) -> int | None:
        self._pipes.pop(process).close()  # an idle process exits then
        process.join()
        status = process.exitcode
        process.close()
        return status


def _serve(pipe: Connection) -> None:
    """Run calls until the other process closes the pipe, or exits."""
    import pyarrow as pa

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
