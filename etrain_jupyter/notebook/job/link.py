"""Connection from the kernel to a cluster: blocking calls from any thread, over one event loop.

The thread ``etrain-link``, a daemon that the first call starts, runs one asyncio loop for the whole
process and owns every connection. Callers pass requests to this thread and wait in slices of 0.1 s,
so that the kernel notices an interrupt. The thread delays the interpreter's exit by at most 0.5 s.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import threading
import weakref
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from etrain_jupyter.errors import JobLostError, PoolError
from etrain_jupyter.wire.requests import (
    UNKNOWN_JOB,
    NotOursError,
    R,
    RefusedRequestError,
    Request,
    decode_reply,
    exchange,
)

if TYPE_CHECKING:
    from etrain_jupyter.process.address import SchedulerAddress

CONNECT_S = 3.0
"""Connect timeout, in seconds; Dask retries until then if no process is listening."""
RESTART_S = 6.0
"""Maximum wait for a scheduler that has died and is being restarted, in seconds."""
SLICE_S = 0.1
THREAD_NAME = "etrain-link"

T = TypeVar("T")


class ClusterEndedError(JobLostError):
    """The cluster's head is known to have ended, so a retry is pointless."""


class UnreachableError(JobLostError):
    """The cluster's head cannot be reached. It may be alive, but suspended or disconnected."""


class NoCoordinatorError(JobLostError, PoolError):
    """The scheduler replies, but runs no etrain coordinator and therefore has no jobs."""


class NoAnswerError(PoolError):
    """The scheduler did not reply in time, but may still carry out the request."""


class JobLink(Protocol):
    """A job's connection to its cluster. The tests have an implementation without a network."""

    def call(self, request: Request[R], *, timeout: float = 10.0) -> R:
        """Send a request and wait for the reply."""

    def send(self, request: Request[R], *, timeout: float = 10.0) -> Future[R]:
        """Send a request and return at once."""

    def release(self) -> None:
        """Close the connections; a later call opens new ones."""


class ClusterLink:
    """A connection to one scheduler.

    Args:
        address: Address of the scheduler, for example ``tls://127.0.0.1:40231``.
        connection_args: Returns the keyword arguments for ``distributed.core.rpc`` (the TLS
            context). Called for each new connection, since it reads the cluster's certificates.
        has_ended: Returns True if the cluster is known to have ended; called after a failure.
        locate: Returns the current address of the scheduler, or an empty string while it is being
            restarted. Called before each new connection.
    """

    def __init__(
        self,
        address: str,
        connection_args: Callable[[], dict[str, Any]] | None = None,
        *,
        has_ended: Callable[[], bool] = lambda: False,
        locate: Callable[[], str] | None = None,
    ) -> None:
        self.address = address
        self._locate = locate or (lambda: address)
        self._connection_args = connection_args or dict
        self._has_ended = has_ended
        self._has_failed = False
        self._rpc: Any = None
        self._num_in_flight = 0
        self._is_released = False
        _links.add(self)

    def call(self, request: Request[R], *, timeout: float = 10.0) -> R:
        """Send the scheduler a request and wait for its reply.

        Args:
            request: The request.
            timeout: Timeout of the reply, in seconds.

        Raises:
            JobLostError: If the scheduler does not know the job. An ``UnreachableError`` if the
                scheduler cannot be reached now, a ``ClusterEndedError`` if its cluster has ended.
            PoolError: If the scheduler refuses, or has another wire version. A ``NoAnswerError`` if
                it does not reply in time.
        """
        return wait_interruptibly(self.send(request, timeout=timeout))

    def send(self, request: Request[R], *, timeout: float = 10.0) -> Future[R]:
        """Send the scheduler a request; return a future that raises the same errors as ``call``."""
        return _run_in_loop(self._send(request, timeout))

    def release(self) -> None:
        """Close the connections when no call is in flight; a later call opens new ones."""
        if self._rpc is not None and _loop_is_running():
            _run_in_loop(self._release())

    async def _send(self, request: Request[R], timeout: float) -> R:
        from etrain_jupyter.process.peers import plain_values_only

        # Only the loop's thread uses the counter, so it needs no lock.
        self._num_in_flight += 1
        try:
            # Unpickling would run the scheduler's code in this kernel.
            with plain_values_only():
                return await self._reply_to(request, timeout)
        finally:
            self._num_in_flight -= 1
            if self._is_released and not self._num_in_flight:
                await self._close()

    async def _reply_to(self, request: Request[R], timeout: float) -> R:
        # A scheduler of ours that dies is restarted by its keeper, possibly at another port:
        #   connection breaks      OSError; the cluster looks alive -> UnreachableError
        #   keeper restarts it     `_locate` returns "" -> the next request waits up to RESTART_S
        #   scheduler is back      `_locate` returns its address -> a new connection
        #   keeper has exited too   `_has_ended` -> ClusterEndedError, and the feed stops retrying
        try:
            if self._has_failed:
                # A killed process closes its connections a moment before it disappears, so the
                # failed request may have found it alive. Check again before the next request.
                self._refuse_if_ended()
            reply = await asyncio.wait_for(self._exchange(request), timeout)
            self._has_failed = False
            return decode_reply(request, reply)
        except NotOursError as exc:
            # The scheduler, which another tool started, was restarted without our coordinator.
            raise NoCoordinatorError(
                f"{exc}. %etrain resume continues a job from its newest checkpoint."
            ) from None
        except RefusedRequestError as exc:
            if exc.kind == UNKNOWN_JOB:
                raise JobLostError(str(exc)) from None
            raise PoolError(str(exc)) from exc
        except UnicodeEncodeError as exc:
            start = max(0, exc.start - 40)
            raise PoolError(
                f"{exc.object[start : exc.end + 40]!a} cannot be sent to the scheduler: UTF-8 "
                "cannot encode it. Nothing was sent. Rename the file, folder or key."
            ) from exc
        except TimeoutError as exc:  # before OSError, its base class
            # A suspended head may be killed before the next request, so check again whether the
            # cluster has ended.
            self._has_failed = True
            raise NoAnswerError(
                f"the scheduler at {self.address} did not respond to {request.op} within "
                f"{timeout:g} s. It may be busy or suspended, and may still carry out the request. "
                "Training does not wait for it. %etrain doctor shows which clusters are alive."
            ) from exc
        except OSError as exc:
            # CommClosedError, refused connections and TLS failures are all OSErrors.
            self._has_failed = True
            self._refuse_if_ended()
            # At the same address, Dask opens a new connection itself. At another address, or if
            # there is none yet, drop this connection, so that the next request calls
            # `_find_scheduler`.
            found = self._locate()
            if found != self.address:
                await self._disconnect()
            if not found:
                raise UnreachableError(
                    f"the scheduler at {self.address} has died and is being restarted; its jobs "
                    "keep training. The request may or may not have been carried out. Retry in a "
                    "few seconds."
                ) from exc
            raise UnreachableError(
                f"the scheduler at {self.address} cannot be reached. The committed steps of its "
                "jobs are in their run folders. %etrain doctor shows which clusters are alive."
            ) from exc

    def _refuse_if_ended(self) -> None:
        if self._has_ended():
            raise ClusterEndedError(
                "its cluster has ended. The committed steps of its jobs are in their run folders. "
                "Run the cell again to start a new cluster."
            )

    async def _exchange(self, request: Request[Any]) -> Any:
        if self._rpc is None:
            from distributed.core import rpc

            # A restarted scheduler gets another address if its previous port is in use.
            self.address = await self._find_scheduler()
            self._rpc = rpc(  # type: ignore[no-untyped-call]
                self.address, timeout=CONNECT_S, connection_args=self._connection_args()
            )
        return await exchange(self._rpc, request)

    async def _find_scheduler(self) -> str:
        """Return the scheduler's address; wait for one that is being restarted."""
        # Poll, because the address comes from a file that the keeper writes.
        for _ in range(int(RESTART_S / SLICE_S)):
            if found := self._locate():
                return found
            await asyncio.sleep(SLICE_S)
        raise ConnectionRefusedError(f"no process listens at {self.address}")

    async def _release(self) -> None:
        self._is_released = True
        # Otherwise the last call in flight closes them; it may be a long poll.
        if not self._num_in_flight:
            await self._close()

    async def _close(self) -> None:
        self._is_released = False
        await self._disconnect()

    async def _disconnect(self) -> None:
        # Clear it before waiting, because a request in the meantime opens a new connection.
        closing, self._rpc = self._rpc, None
        if closing is not None:
            with contextlib.suppress(OSError):
                await closing.close_rpc()


def open_link(address: SchedulerAddress) -> ClusterLink:
    """Return a connection to a cluster of this user; the first request opens it.

    Args:
        address: From a pool or from ``own_clusters``, never from a file that others can write.
    """
    from etrain_jupyter.process.cluster_dir import ClusterDir

    # A scheduler that etrain did not start has no files.
    files = ClusterDir(Path(address.state_dir)) if address.state_dir else None

    def has_ended() -> bool:
        """Return True if the files of the cluster show that it has ended; sends no request."""
        record = files.record() if files else None
        return files is not None and (record is None or (record.is_here and not record.is_alive))

    def locate() -> str:
        record = files.record() if files else None
        if record is None or not record.is_here:
            return address.address
        return record.address if record.is_serving else ""

    return ClusterLink(
        address.address,
        address.connection_args,
        has_ended=has_ended,
        locate=locate,
    )


def wait_interruptibly(future: Future[T], timeout: float | None = None) -> T:
    """Return a future's result, waiting in slices so that a KeyboardInterrupt is noticed.

    Raises:
        TimeoutError: If there is no result after ``timeout`` seconds.
    """
    left = timeout
    while True:
        try:
            return future.result(SLICE_S if left is None else min(SLICE_S, max(left, 0.0)))
        except TimeoutError:
            # Either the slice has ended, or the future itself has failed with a TimeoutError.
            if future.done():
                return future.result()
            if left is not None:
                left -= SLICE_S
                if left <= 0:
                    raise
        except KeyboardInterrupt:
            future.cancel()
            raise


_links: weakref.WeakSet[ClusterLink] = weakref.WeakSet()
_starting = threading.Lock()
_loop: asyncio.AbstractEventLoop | None = None
_thread: threading.Thread | None = None


def _loop_is_running() -> bool:
    # After a fork, the child process has a copy of the variable, but not the thread.
    return _thread is not None and _thread.is_alive()


def _run_in_loop(work: Coroutine[Any, Any, T]) -> Future[T]:
    global _loop, _thread
    with _starting:
        if _loop is None or not _loop_is_running():
            _loop = asyncio.new_event_loop()
            _thread = threading.Thread(target=_loop.run_forever, name=THREAD_NAME, daemon=True)
            _thread.start()
            # A process that starts a second thread after a fork must not register the hook twice.
            atexit.unregister(_close_all)
            atexit.register(_close_all)
        return asyncio.run_coroutine_threadsafe(work, _loop)


def _close_all() -> None:
    """Close the connections when the process exits, in at most 0.5 s."""
    if _loop is None or _thread is None or not _loop_is_running():
        return
    loop, thread = _loop, _thread

    async def close() -> None:
        with contextlib.suppress(TimeoutError):
            closing = [link._close() for link in list(_links)]
            await asyncio.wait_for(asyncio.gather(*closing, return_exceptions=True), 0.3)
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
        # Let the cancelled tasks run their `finally` clauses first.
        loop.call_later(0.05, loop.stop)

    loop.call_soon_threadsafe(lambda: asyncio.ensure_future(close()))
    thread.join(0.5)
