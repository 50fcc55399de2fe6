"""Worker process: one supervisor, connected to one scheduler after another.

The process does no computation itself: its supervisor starts trainers. Worker and trainers outlive
the scheduler. When it dies, the worker waits for the next scheduler and reconnects. A
``SchedulerFinder`` supplies the scheduler's address.

Reactions to a lost connection:

==========================================================  ========================================
case, the first that applies                                what happens
==========================================================  ========================================
the cluster is shutting down                                shut down
the next scheduler is known                                 connect to it
a remote connection dropped, without a request to close     reconnect to the same scheduler
a remote scheduler closed this worker, or a local one is    shut down: it has dismissed this worker
still running ``DISMISSED_S`` later
otherwise                                                   wait for the next one, up to ``away_s``
==========================================================  ========================================
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from etrain_jupyter.plugin import load
from etrain_jupyter.process.entry import die_with_keeper
from etrain_jupyter.process.peers import restricted
from etrain_jupyter.process.tls import configure_dask, read_security, without_http
from etrain_jupyter.worker.forks import Forks

logger = logging.getLogger(__name__)

FIRST_CONNECT_S = 60
"""Timeout for the first connection to a local scheduler, in seconds. On a busy machine, the
scheduler and its workers, which all import at the same time, need much more than a second."""
CONNECT_S = 15
"""Timeout for connecting to a remote or a restarted scheduler, in seconds."""
RECONNECT_S = 5
"""Timeout for reconnecting to the same scheduler, in seconds. After that, look for a restarted
scheduler at a new address."""
CLOSE_S = 5.0

DISMISSED_S = 2.0
"""If the scheduler is still running this many seconds after closing the connection, it has
dismissed this worker. A dying scheduler closes its connections just before its process exits."""

POLL_EVERY_S = 0.05
"""Seconds between attempts to look up the next scheduler."""

KILL_MARGIN_S = 2.0
"""A worker that will receive SIGKILL shuts down by itself this many seconds earlier."""

DISMISSALS = frozenset({"scheduler-remove-worker", "scheduler-close-worker"})
"""Dask's reasons for closing a worker on request, as opposed to a lost connection."""


class SchedulerRecord(Protocol):
    """Address and state of a scheduler."""

    @property
    def address(self) -> str:
        """Address on which it listens."""
        ...

    @property
    def num_lives(self) -> int:
        """Incarnation number of the scheduler, starting at 1."""
        ...

    @property
    def is_serving(self) -> bool:
        """True unless the process is known to be dead."""
        ...


class SchedulerFinder(Protocol):
    """Look up the cluster's current scheduler."""

    away_s: float
    """Seconds to wait for the next scheduler before the worker and its trainers shut down."""
    is_remote: bool
    """True if the scheduler is on another machine. A dropped connection does not mean that it died,
    so the worker retries the same scheduler."""

    def look(self) -> SchedulerRecord | None:
        """Return the newest scheduler; None if the cluster is shutting down."""
        ...


@dataclass(frozen=True, kw_only=True)
class RemoteScheduler:
    """A scheduler on another machine."""

    address: str
    num_lives: int
    is_serving: bool = True
    """Its process cannot be checked from here, so assume True, and try to connect."""


class RecordFinder:
    """Finds a remote scheduler in a file, which the pool keeps up to date."""

    is_remote = True

    def __init__(self, path: Path, *, away_s: float) -> None:
        self._path = path
        self.away_s = away_s

    def look(self) -> RemoteScheduler | None:
        """Return the current scheduler; None without a record, because the cluster has ended."""
        try:
            known = json.loads(self._path.read_text())
            return RemoteScheduler(address=known["scheduler"], num_lives=known["num_lives"])
        except (OSError, ValueError, KeyError):
            return None


@dataclass(frozen=True, kw_only=True)
class WorkerOptions:
    """Identity of a worker, and its first scheduler."""

    name: str
    device: str
    supervisor: str
    """Factory of the supervisor, as ``package.module:attribute``."""
    scheduler: str
    """Address of the first scheduler."""
    num_lives: int
    """Incarnation number of the first scheduler, starting at 1."""
    host: str = "127.0.0.1"
    """This machine's address to listen on."""
    tls: Path
    """Folder with the certificates."""
    scratch: Path
    """Dask's local directory."""
    fork_server: int = -1
    """Descriptor of the connection to this machine's fork server; -1 if it has none."""
    kill_wait_s: float = 0.0
    """Seconds between SIGTERM and SIGKILL from a batch system, which are an interruption notice;
    0.0 to shut down on SIGTERM immediately."""


class WorkerLifecycle:
    """Lifecycle of a worker process: connect, serve, reconnect, shut down.

    Args:
        options: Identity of the worker.
        finder: Finds the next scheduler.
        on_serving: Called after each connection to a scheduler.
    """

    def __init__(
        self,
        options: WorkerOptions,
        finder: SchedulerFinder,
        on_serving: Callable[[], None] = lambda: None,
    ) -> None:
        self._options = options
        self._finder = finder
        self._on_serving = on_serving
        self._supervisor = load(options.supervisor)(device=options.device)
        # Until this is reset, the supervisor keeps its trainers when a connection ends.
        self._supervisor.outlives_scheduler = True
        if options.fork_server >= 0:
            self._supervisor.forks = Forks(options.fork_server)
        self._address = options.scheduler
        self._num_lives = options.num_lives  # incarnation of the scheduler, counted from 1
        self._stop = asyncio.Event()
        self._draining: asyncio.Task[None] | None = None  # set by the first SIGTERM

    async def run(self) -> None:
        """Serve until shutdown is requested or no next scheduler is found in time."""
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, self._on_sigterm)
        # scheduler 1      serves ......... dies
        # this process     worker A ......... closed | look up, reconnect | worker B ....
        # supervisor       the same throughout: A's ``teardown`` keeps the trainers
        # trainers         train ...................................................
        worker = await self._connect_first()
        if worker is None:
            return
        while not await self._is_end_of(worker):
            next_one = await self._reconnect(is_dismissed=worker.close_reason in DISMISSALS)
            if next_one is None:
                break
            worker = next_one
        self._supervisor.outlives_scheduler = False
        # Dask has already closed this worker, but its teardown kept the trainers, so run it again.
        if worker.status.name in ("closing", "closed", "failed"):
            await worker.finished()
            await self._supervisor.teardown(worker)
        await worker.close(timeout=CLOSE_S, executor_wait=False, reason="shutdown requested")

    def _on_sigterm(self) -> None:
        #     kill_wait_s    cluster        trainers    reaction
        #     0.0            any            any         shut down
        #     above          has ended      any         shut down
        #     above          is up          none        shut down
        #     above          is up          some        report a notice; shut down when they have
        #                                               left, at the second SIGTERM, or in time
        wait_s = self._options.kill_wait_s
        if wait_s <= 0 or self._draining is not None or self._finder.look() is None:
            self._stop.set()
            return
        if not self._supervisor.has_trainers:
            self._stop.set()
            return
        logger.warning("SIGTERM: this process will be killed in %g s", wait_s)
        self._supervisor.note_interruption(wait_s)
        self._draining = asyncio.create_task(self._stop_when_drained(wait_s))

    async def _stop_when_drained(self, wait_s: float) -> None:
        deadline = time.monotonic() + wait_s - min(KILL_MARGIN_S, wait_s / 2)
        while self._supervisor.has_trainers and time.monotonic() < deadline:
            await asyncio.sleep(POLL_EVERY_S)
        self._stop.set()

    async def _connect_first(self) -> Any | None:
        """Connect to the running scheduler. A remote one may be restarting, so retry."""
        deadline = time.monotonic() + self._finder.away_s
        while True:
            try:
                return await self._connect(CONNECT_S if self._finder.is_remote else FIRST_CONNECT_S)
            except (OSError, TimeoutError, RuntimeError) as exc:
                is_final = not self._finder.is_remote or time.monotonic() >= deadline
                if is_final or not is_of_network(exc):
                    raise
            if self._stop.is_set() or (record := self._finder.look()) is None:
                return None
            logger.warning("the scheduler at %s cannot be reached; retrying", self._address)
            self._address, self._num_lives = record.address, record.num_lives

    async def _connect(self, timeout_s: int) -> Any:
        from distributed import Worker

        options = self._options
        worker = noting_its_end(restricted(without_http(Worker)))(
            self._address,
            name=options.name,
            host=options.host,
            protocol="tls",
            security=read_security(options.tls, "worker"),
            nthreads=1,
            memory_limit=0,  # no limit: trainers are separate processes, and this one holds no data
            local_directory=str(options.scratch),
            death_timeout=timeout_s,
            plugins=(self._supervisor,),
        )
        await worker
        logger.info("worker %s serves at %s", options.name, worker.address)
        self._on_serving()
        return worker

    async def _is_end_of(self, worker: Any) -> bool:
        """Wait for shutdown or a lost connection; return True for a shutdown."""
        waiting = [asyncio.ensure_future(w) for w in (self._stop.wait(), worker.finished())]
        _, pending = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        for task in pending:
            task.cancel()
        return self._stop.is_set()

    async def _reconnect(self, *, is_dismissed: bool) -> Any | None:
        """Connect to the next scheduler.

        Return None if there is none or this worker was dismissed.
        """
        lost_at = time.monotonic()
        limit_s = self._finder.away_s
        is_same_tried = self._finder.is_remote and not is_dismissed
        logger.warning("the scheduler at %s is gone: waiting for the next one", self._address)
        while (away_s := time.monotonic() - lost_at) < limit_s and not self._stop.is_set():
            record = self._finder.look()
            if record is None:
                return None  # the cluster is shutting down
            is_next = record.num_lives > self._num_lives and record.is_serving
            if is_next or is_same_tried:
                self._address = record.address
                # Dask wraps a worker's start-up errors in its own types. Retry: the scheduler may
                # have died again.
                with contextlib.suppress(OSError, TimeoutError, RuntimeError):
                    worker = await self._connect(CONNECT_S if is_next else RECONNECT_S)
                    self._num_lives = record.num_lives
                    return worker
            # If there is neither a new scheduler nor a retry, a remote scheduler has dismissed this
            # worker. A local scheduler that is dying takes a moment to exit, so it counts as alive
            # only after DISMISSED_S.
            elif self._finder.is_remote or (record.is_serving and away_s > DISMISSED_S):
                return None
            await asyncio.sleep(POLL_EVERY_S)
        if not self._stop.is_set():
            logger.error(
                "no scheduler was found within %g s: shutting down with the trainers", limit_s
            )
        return None


def is_of_network(error: BaseException) -> bool:
    """Return True if a worker failed to start because of a network error."""
    from distributed.comm.core import CommClosedError

    kinds = (TimeoutError, ConnectionError, CommClosedError)
    return isinstance(error, kinds) or isinstance(error.__cause__, kinds)


def noting_its_end(server: type[Any]) -> type[Any]:
    """Return a subclass of a Dask ``Worker`` that records the first reason for closing it."""

    # Dask calls ``close`` several times; later reasons merely follow from the first.
    async def close(self: Any, *args: Any, reason: str = "worker-close", **kwargs: Any) -> Any:
        self.close_reason = self.close_reason or reason
        return await server.close(self, *args, reason=reason, **kwargs)

    return type(server.__name__, (server,), {"close": close, "close_reason": ""})


def make_parser(prog: str) -> argparse.ArgumentParser:
    """Return a parser for the options common to all workers."""
    parser = argparse.ArgumentParser(prog=prog)
    for name in ("name", "device", "supervisor"):
        parser.add_argument(f"--{name}", required=True)
    return parser


def run_worker(
    arguments: argparse.Namespace,
    finder: SchedulerFinder,
    *,
    scheduler: str,
    num_lives: int,
    tls: Path,
    scratch: Path,
    host: str = "127.0.0.1",
    fork_server: int = -1,
    kill_wait_s: float = 0.0,
    on_serving: Callable[[], None] = lambda: None,
) -> None:
    """Run a worker process until it shuts down; leftover threads do not keep it alive.

    Logging must already be set up. The process exits when its parent exits, which closes the pipe
    on standard input.

    Args:
        arguments: From ``make_parser``.
        finder: Finds the scheduler, even if it was restarted at another address.
        scheduler: Address of the first scheduler.
        num_lives: Its incarnation number, starting at 1.
        tls: Folder with the certificates.
        scratch: Folder for Dask.
        host: This machine's address to listen on.
        fork_server: Descriptor of the connection to this machine's fork server; -1 if it has none.
        kill_wait_s: Seconds between SIGTERM and SIGKILL; 0.0 to shut down on SIGTERM immediately.
        on_serving: Called after each connection to a scheduler.
    """
    options = WorkerOptions(
        name=arguments.name,
        device=arguments.device,
        supervisor=arguments.supervisor,
        scheduler=scheduler,
        num_lives=num_lives,
        host=host,
        tls=tls,
        scratch=scratch,
        fork_server=fork_server,
        kill_wait_s=kill_wait_s,
    )

    async def run() -> None:  # the constructor needs a running event loop
        await WorkerLifecycle(options, finder, on_serving=on_serving).run()

    die_with_keeper()
    configure_dask(scratch)
    code = 0
    try:
        asyncio.run(run())
    except Exception:
        logger.exception("this worker failed")
        code = 1
    logging.shutdown()
    # A normal exit would join Dask's thread pools, possibly waiting forever for a blocked thread.
    os._exit(code)
