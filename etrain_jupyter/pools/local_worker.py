"""A worker process of a local cluster: ``python -m etrain_jupyter.pools.local_worker``.

Started by the head only. It computes nothing itself: the supervisor in it starts trainers. It never
outlives the head: on Linux the kernel kills it together with the head, elsewhere the end of the
pipe on its standard input tells it.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import importlib
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from etrain_jupyter.pools.tls import configure_dask, read_security, without_http

logger = logging.getLogger(__name__)

PR_SET_PDEATHSIG = 1
CONNECT_S = 15
"""How long to try to reach the scheduler, which runs already when a worker starts."""
CLOSE_S = 5.0


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


def die_with_parent(parent: int) -> None:
    """Make sure that this process ends when the one that started it does, however that ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    # It may have died before the line above.
    if os.getppid() != parent:
        os._exit(1)
    # Trainers must neither read from the pipe nor keep it open.
    pipe = os.dup(0)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    threading.Thread(
        target=_await_end_of, args=(pipe,), name="etrain-parent-watch", daemon=True
    ).start()


def _await_end_of(pipe: int) -> None:
    """Wait until the pipe's other end is closed, then end this process and its group."""
    while os.read(pipe, 1):
        pass
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


async def run_worker(arguments: argparse.Namespace) -> None:
    """Serve until the scheduler's connection is lost or somebody asks for the end."""
    from distributed import Worker

    state_dir = Path(arguments.state_dir)
    worker = without_http(Worker)(
        arguments.scheduler,
        name=arguments.name,
        host="127.0.0.1",
        protocol="tls",
        security=read_security(state_dir / "tls", "worker"),
        nthreads=1,
        memory_limit=0,
        local_directory=str(state_dir / "scratch"),
        death_timeout=CONNECT_S,
        plugins=(load_factory(arguments.supervisor)(device=arguments.device),),
    )
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    await worker
    logger.info("worker %s serves at %s", arguments.name, worker.address)
    waiting = [asyncio.ensure_future(stop.wait()), asyncio.ensure_future(worker.finished())]
    _, pending = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    for task in pending:
        task.cancel()
    await worker.close(timeout=CLOSE_S, executor_wait=False, reason="asked to end")


def parse_arguments(words: list[str] | None = None) -> argparse.Namespace:
    """Read what the head gave."""
    parser = argparse.ArgumentParser(prog="etrain-local-worker")
    parser.add_argument("state_dir")
    for name in ("scheduler", "name", "device", "supervisor"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--parent", type=int, required=True)
    return parser.parse_args(words)


def main() -> None:
    """Run until the end, and leave no thread behind that could keep the process."""
    arguments = parse_arguments()
    die_with_parent(arguments.parent)
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
