"""A worker process: one supervisor, and a connection to one scheduler after the other.

It computes nothing itself: the supervisor in it starts trainers. It outlives its scheduler, with
its trainers: it waits for the next one and connects to that. Where the next one is, a finder knows.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from etrain_jupyter.process.entry import load_factory
from etrain_jupyter.process.parent_pipe import die_with_keeper
from etrain_jupyter.process.peers import restricted
from etrain_jupyter.process.tls import configure_dask, read_security, without_http

logger = logging.getLogger(__name__)

CONNECT_S = 15
"""How long to try to reach the scheduler, which runs already when a worker starts."""
RECONNECT_S = 5
"""How long to try the same scheduler once more: another one may be somewhere else by then."""
CLOSE_S = 5.0

DISMISSED_S = 2.0
"""A scheduler that still runs so long after it has closed the connection wants this worker to end.
One that dies closes its connections a moment before it is gone."""

LOOK_EVERY_S = 0.05

DISMISSALS = frozenset({"scheduler-remove-worker", "scheduler-close-worker"})
"""Why Dask closes a worker that somebody wants to end, and not one whose connection was cut."""


class SchedulerRecord(Protocol):
    """What is known of a scheduler."""

    @property
    def address(self) -> str:
        """Where it listens."""
        ...

    @property
    def num_lives(self) -> int:
        """Which of the cluster's schedulers it is, counted from 1."""
        ...

    @property
    def is_serving(self) -> bool:
        """Whether it runs, as far as can be told."""
        ...


class SchedulerFinder(Protocol):
    """Knows where the cluster's scheduler is."""

    away_s: float
    """How long to wait for the next scheduler before giving up, trainers and all."""
    is_remote: bool
    """Whether the scheduler is on another machine: a connection that was cut says nothing about it,
    so that the same one is tried again."""

    def look(self) -> SchedulerRecord | None:
        """Return the newest one; None if the cluster ends."""
        ...


@dataclass(frozen=True, kw_only=True)
class WorkerOptions:
    """Who a worker is, and where it begins."""

    name: str
    device: str
    supervisor: str
    """``package.module:attribute``."""
    scheduler: str
    """The first one's address."""
    num_lives: int
    """Which of the cluster's schedulers that is, counted from 1."""
    host: str = "127.0.0.1"
    """Address of this machine to listen on."""
    tls: Path
    """Folder with the certificates."""
    scratch: Path
    """Folder for Dask."""


class WorkerLifecycle:
    """One worker process.

    Args:
        options: Who it is.
        finder: Where the next scheduler is.
        on_serving: Called each time that it has connected to a scheduler.
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
        self._supervisor = load_factory(options.supervisor)(device=options.device)
        # It keeps its trainers when a connection ends, until we say otherwise.
        self._supervisor.outlives_scheduler = True
        self._address = options.scheduler
        self._num_lives = options.num_lives
        """Which of the cluster's schedulers it is connected to, counted from 1."""
        self._stop = asyncio.Event()

    async def run(self) -> None:
        """Serve until no scheduler comes back or somebody asks for the end."""
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, self._stop.set)
        worker = await self._connect_first()
        if worker is None:
            return
        while not await self._is_end_of(worker):
            next_one = await self._reconnect(is_dismissed=worker.close_reason in DISMISSALS)
            if next_one is None:
                break
            worker = next_one
        self._supervisor.outlives_scheduler = False
        if worker.status.name in ("closing", "closed", "failed"):
            await worker.finished()
            await self._supervisor.teardown(worker)
        await worker.close(timeout=CLOSE_S, executor_wait=False, reason="asked to end")

    async def _connect_first(self) -> Any | None:
        """Connect to the scheduler that runs already; one elsewhere may just be starting again."""
        deadline = time.monotonic() + self._finder.away_s
        while True:
            try:
                return await self._connect()
            except (OSError, TimeoutError, RuntimeError) as exc:
                is_final = not self._finder.is_remote or time.monotonic() >= deadline
                if is_final or not is_of_network(exc):
                    raise
            if self._stop.is_set() or (record := self._finder.look()) is None:
                return None
            logger.warning("the scheduler at %s cannot be reached yet", self._address)
            self._address, self._num_lives = record.address, record.num_lives

    async def _connect(self, timeout_s: int = CONNECT_S) -> Any:
        from distributed import Worker

        options = self._options
        worker = noting_its_end(restricted(without_http(Worker)))(
            self._address,
            name=options.name,
            host=options.host,
            protocol="tls",
            security=read_security(options.tls, "worker"),
            nthreads=1,
            memory_limit=0,
            local_directory=str(options.scratch),
            death_timeout=timeout_s,
            plugins=(self._supervisor,),
        )
        await worker
        logger.info("worker %s serves at %s", options.name, worker.address)
        self._on_serving()
        return worker

    async def _is_end_of(self, worker: Any) -> bool:
        """Wait; return whether somebody has asked for the end, and not lost the connection."""
        waiting = [asyncio.ensure_future(w) for w in (self._stop.wait(), worker.finished())]
        _, pending = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        for task in pending:
            task.cancel()
        return self._stop.is_set()

    async def _reconnect(self, *, is_dismissed: bool) -> Any | None:
        """Connect to the next scheduler; None if there will be none, or none for us."""
        lost_at = time.monotonic()
        limit_s = self._finder.away_s
        is_same_tried = self._finder.is_remote and not is_dismissed
        logger.warning("the scheduler at %s is gone: waiting for the next one", self._address)
        while (away_s := time.monotonic() - lost_at) < limit_s and not self._stop.is_set():
            record = self._finder.look()
            if record is None:
                return None  # the cluster ends
            is_next = record.num_lives > self._num_lives and record.is_serving
            if is_next or is_same_tried:
                self._address = record.address
                # Dask wraps what goes wrong while a worker starts; the scheduler may die again.
                with contextlib.suppress(OSError, TimeoutError, RuntimeError):
                    worker = await self._connect(CONNECT_S if is_next else RECONNECT_S)
                    self._num_lives = record.num_lives
                    return worker
            elif self._finder.is_remote or (record.is_serving and away_s > DISMISSED_S):
                return None
            await asyncio.sleep(LOOK_EVERY_S)
        if not self._stop.is_set():
            logger.error(
                "no scheduler came within %g s: this worker ends, with its trainers", limit_s
            )
        return None


def is_of_network(error: BaseException) -> bool:
    """Tell whether a worker failed to start because nobody answered, and not by itself."""
    from distributed.comm.core import CommClosedError

    kinds = (TimeoutError, ConnectionError, CommClosedError)
    return isinstance(error, kinds) or isinstance(error.__cause__, kinds)


def noting_its_end(server: type[Any]) -> type[Any]:
    """Return a subclass of a Dask ``Worker`` that knows why it was closed first."""

    async def close(self: Any, *args: Any, reason: str = "worker-close", **kwargs: Any) -> Any:
        self.close_reason = self.close_reason or reason
        return await server.close(self, *args, reason=reason, **kwargs)

    return type(server.__name__, (server,), {"close": close, "close_reason": ""})


async def _run(make: Callable[[], WorkerLifecycle]) -> None:
    await make().run()  # made where its event loop runs


def run_process(make: Callable[[], WorkerLifecycle], *, scratch: Path) -> None:
    """Be a worker process until the end, and leave no thread behind that could keep it.

    It never outlives whoever started it: the end of the pipe on its standard input tells it.

    Args:
        make: Returns its life.
        scratch: Folder for Dask.
    """
    die_with_keeper()
    configure_dask(scratch)
    code = 0
    try:
        asyncio.run(_run(make))
    except Exception:
        logger.exception("this worker failed")
        code = 1
    logging.shutdown()
    # Dask's pools of threads would be joined at a normal exit, which may take as long as whatever
    # they wait for.
    os._exit(code)
