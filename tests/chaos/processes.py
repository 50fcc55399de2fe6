"""Processes of a cluster of several machines: ``python -m tests.chaos.processes ROLE ...``.

The same processes as in a local pool, but listening on a machine's address: a scheduler with the
coordinator, and workers with the supervisor.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path

from etrain_jupyter.process.tls import configure_dask, read_security, without_http


async def run_scheduler(options: argparse.Namespace) -> None:
    """Run a scheduler until this process is killed."""
    from distributed import Scheduler

    from etrain_jupyter.head.coordinator.coordinator import Coordinator
    from etrain_jupyter.head.coordinator.nodes import NoNodes

    ended = asyncio.Event()
    coordinator = Coordinator(NoNodes(), cluster_id="machines", on_shutdown=ended.set)
    scheduler = await without_http(Scheduler)(
        host=options.host,
        port=options.port,
        protocol="tls",
        security=read_security(options.tls, "scheduler"),
        dashboard=False,
        plugins=[coordinator],
    )
    await ended.wait()
    await scheduler.close()


async def run_worker(options: argparse.Namespace) -> None:
    """Run a worker until this process is killed or the scheduler has stopped."""
    from distributed import Worker

    from etrain_jupyter.worker.supervisor import Supervisor

    worker = await without_http(Worker)(
        f"tls://{options.scheduler}:{options.port}",
        name=options.name,
        host=options.host,
        protocol="tls",
        security=read_security(options.tls, "worker"),
        nthreads=1,
        memory_limit=0,
        local_directory=str(Path(options.tls).parent / "scratch"),
        plugins=(Supervisor(device="cpu"),),
    )
    await worker.finished()


def main() -> None:
    """Run the given role."""
    parser = argparse.ArgumentParser()
    parser.add_argument("role", choices=("scheduler", "worker"))
    parser.add_argument("--host", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--tls", required=True)
    parser.add_argument("--scheduler", default="")
    parser.add_argument("--name", default="")
    options = parser.parse_args()
    configure_dask(Path(options.tls).parent / "scratch")
    asyncio.run(run_scheduler(options) if options.role == "scheduler" else run_worker(options))


if __name__ == "__main__":
    sys.exit(main())
