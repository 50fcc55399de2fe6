"""Head process of the benchmark ``scale``: a real scheduler and coordinator over TLS."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from etrain_jupyter.head.coordinator.coordinator import Coordinator
from etrain_jupyter.head.coordinator.nodes import NoNodes
from etrain_jupyter.process.entry import collect_garbage_rarely, log_to_stderr
from etrain_jupyter.process.peers import WORKER_REQUESTS, restricted
from etrain_jupyter.process.tls import configure_dask, read_security, without_http


async def serve(folder: Path) -> None:
    """Print the scheduler's address and the time from a cold start; serve until stdin closes."""
    from distributed import Scheduler

    # As in ``head.main``, but without a node source: the benchmark starts the workers itself.
    coordinator = Coordinator(NoNodes(), cluster_id="scale", on_shutdown=lambda: None)
    scheduler = restricted(without_http(Scheduler), worker_may=WORKER_REQUESTS)(
        host="127.0.0.1",
        port=0,
        protocol="tls",
        security=read_security(folder / "tls", "scheduler"),
        dashboard=False,
        plugins=[coordinator],
    )
    coordinator.register(scheduler)
    coordinator.replay(folder / "jobs", died_at=0.0)
    await scheduler
    print(scheduler.address, flush=True)
    await asyncio.to_thread(sys.stdin.read)


def main() -> None:
    """Run until the parent closes this process's standard input."""
    folder = Path(sys.argv[1])
    log_to_stderr()
    collect_garbage_rarely()
    configure_dask(folder / "scratch")
    asyncio.run(serve(folder))


if __name__ == "__main__":
    main()
