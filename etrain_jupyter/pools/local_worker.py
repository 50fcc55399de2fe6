"""A worker process of a local cluster: ``python -m etrain_jupyter.pools.local_worker``.

Started by the head only. It computes nothing itself: the supervisor in it starts trainers. It never
outlives the keeper: the end of the pipe on its standard input tells it. But it does outlive the
scheduler, with its trainers: it waits for the next one and connects to that.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib
import logging
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from etrain_jupyter.pools.lifeline import die_with_keeper
from etrain_jupyter.pools.state_dir import ClusterDir, ClusterRecord
from etrain_jupyter.pools.tls import configure_dask, read_security, without_http

logger = logging.getLogger(__name__)

CONNECT_S = 15
"""How long to try to reach the scheduler, which runs already when a worker starts."""
CLOSE_S = 5.0

AWAY_S = 60.0
"""How long to wait for the next scheduler before giving up, trainers and all."""

DISMISSED_S = 2.0
"""A scheduler that still runs so long after it has closed the connection wants this worker to end.
One that dies closes its connections a moment before it is gone."""

LOOK_EVERY_S = 0.05


def load_factory(reference: str) -> Callable[..., Any]:
    """Return what ``package.module:attribute`` names."""
    module, _, attribute = reference.partition(":")
    factory: Callable[..., Any] = getattr(importlib.import_module(module), attribute)
    return factory


def log_to_stderr() -> None:
    """Write messages to standard error, which is a file in the state directory."""
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", force=True
    )


class WorkerLife:
    """One worker process: the supervisor, and a connection to one scheduler after the other."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._arguments = arguments
        self._cluster = ClusterDir(Path(arguments.state_dir))
        self._supervisor = load_factory(arguments.supervisor)(device=arguments.device)
        # It keeps its trainers when a connection ends, until we say otherwise.
        self._supervisor.outlives_scheduler = True
        self._address: str = arguments.scheduler
        self._num_lives: int = arguments.num_lives
        """Which of the cluster's schedulers it is connected to, counted from 1."""
        self._stop = asyncio.Event()

    async def run(self) -> None:
        """Serve until no scheduler comes back or somebody asks for the end."""
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, self._stop.set)
        worker = await self._connect()
        while not await self._is_end_of(worker):
            next_one = await self._reconnect()
            if next_one is None:
                break
            worker = next_one
        self._supervisor.outlives_scheduler = False
        if worker.status.name in ("closing", "closed", "failed"):
            await worker.finished()
            await self._supervisor.teardown(worker)
        await worker.close(timeout=CLOSE_S, executor_wait=False, reason="asked to end")

    async def _connect(self) -> Any:
        from distributed import Worker

        worker = without_http(Worker)(
            self._address,
            name=self._arguments.name,
            host="127.0.0.1",
            protocol="tls",
            security=read_security(self._cluster.tls, "worker"),
            nthreads=1,
            memory_limit=0,
            local_directory=str(self._cluster.scratch),
            death_timeout=CONNECT_S,
            plugins=(self._supervisor,),
        )
        await worker
        logger.info("worker %s serves at %s", self._arguments.name, worker.address)
        return worker

    async def _is_end_of(self, worker: Any) -> bool:
        """Wait; return whether somebody has asked for the end, and not lost the connection."""
        waiting = [asyncio.ensure_future(w) for w in (self._stop.wait(), worker.finished())]
        _, pending = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        for task in pending:
            task.cancel()
        return self._stop.is_set()

    async def _reconnect(self) -> Any | None:
        """Connect to the next scheduler; None if there will be none, or none for us."""
        lost_at = time.monotonic()
        logger.warning("the scheduler at %s is gone: waiting for the next one", self._address)
        while (away_s := time.monotonic() - lost_at) < AWAY_S and not self._stop.is_set():
            record = self._cluster.record()
            if record is None:
                return None  # the cluster ends
            if self._is_next(record):
                self._address = record.address
                # Dask wraps what goes wrong while a worker starts; the scheduler may die again.
                with contextlib.suppress(OSError, TimeoutError, RuntimeError):
                    worker = await self._connect()
                    self._num_lives = record.num_lives
                    return worker
            elif record.is_serving and away_s > DISMISSED_S:
                return None
            await asyncio.sleep(LOOK_EVERY_S)
        if not self._stop.is_set():
            logger.error(
                "no scheduler came within %g s: this worker ends, with its trainers", AWAY_S
            )
        return None

    def _is_next(self, record: ClusterRecord) -> bool:
        return record.num_lives > self._num_lives and record.is_serving


def parse_arguments(words: list[str] | None = None) -> argparse.Namespace:
    """Read what the head gave."""
    parser = argparse.ArgumentParser(prog="etrain-local-worker")
    parser.add_argument("state_dir")
    for name in ("scheduler", "name", "device", "supervisor"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--num-lives", type=int, required=True)
    return parser.parse_args(words)


async def run_worker(arguments: argparse.Namespace) -> None:
    """Make the life where its event loop runs."""
    await WorkerLife(arguments).run()


def main() -> None:
    """Run until the end, and leave no thread behind that could keep the process."""
    arguments = parse_arguments()
    die_with_keeper()
    log_to_stderr()
    configure_dask(Path(arguments.state_dir) / "scratch")
    code = 0
    try:
        asyncio.run(run_worker(arguments))
    except Exception:
        logger.exception("worker %s failed", arguments.name)
        code = 1
    logging.shutdown()
    # Dask's pools of threads would be joined at a normal exit, which may take as long as whatever
    # they wait for.
    os._exit(code)


if __name__ == "__main__":
    main()
