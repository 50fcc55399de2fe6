"""Send requests to the scheduler of a cluster, from any thread in any process."""

from __future__ import annotations

import asyncio
import getpass
import os
import platform
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from etrain_jupyter.errors import PoolError
from etrain_jupyter.process.address import SchedulerAddress
from etrain_jupyter.wire.requests import (
    NotOursError,
    RefusedRequestError,
    Request,
    call_scheduler,
)

ANSWER_S = 10.0
"""Default timeout for a reply, in seconds."""

R = TypeVar("R")


def ask(address: SchedulerAddress, request: Request[R], *, timeout_s: float = ANSWER_S) -> R:
    """Send a request to a cluster's scheduler and wait for the reply.

    It may be called where an event loop is running, as in a kernel.

    Raises:
        PoolError: If there is no reply in time, or the scheduler refuses.
    """
    try:
        # The kernel's own thread already runs an event loop, so the request gets another thread.
        with ThreadPoolExecutor(1, thread_name_prefix="etrain-pool-ask") as thread:
            exchange = _exchange(address, request, timeout_s)
            return thread.submit(asyncio.run, exchange).result()
    except (OSError, TimeoutError) as exc:
        raise PoolError(
            f"the scheduler of cluster {address.cluster_id} at {address.address} did not answer "
            f"{request.op} within {timeout_s:g} s ({exc or type(exc).__name__}). Retry; `%etrain "
            f"doctor` shows the cause, and `%etrain down {address.cluster_id}` shuts it down."
        ) from exc
    except NotOursError as exc:
        raise PoolError(
            f"the scheduler at {address.address} runs no etrain coordinator. Nothing was changed. "
            "Run a cell with %%etrain distributed to install it."
        ) from exc
    except RefusedRequestError as exc:
        raise PoolError(str(exc)) from exc


def describe_caller() -> str:
    """Return who runs this process and where, for the log of a job that it ends."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container may run under a user id without a name
        user = f"user {os.getuid()}"
    # Jupyter's server sets the variable to the path of the notebook.
    notebook = Path(os.environ.get("JPY_SESSION_NAME", "")).name
    place = f"notebook {notebook}" if notebook else "a notebook"
    if not notebook and "ipykernel" not in sys.modules:
        place = "a terminal or script"
    return f"{user} in {place} (process {os.getpid()} on {platform.node()})"


async def _exchange(address: SchedulerAddress, request: Request[R], timeout_s: float) -> R:
    from distributed import core

    from etrain_jupyter.process.peers import plain_values_only

    rpc: Any = core.rpc
    # A scheduler's reply is untrusted, so accept only plain values, and do not unpickle anything.
    with plain_values_only():
        # Limit the whole exchange: Dask's own timeout covers the connection, not the wait for the
        # reply.
        async with asyncio.timeout(timeout_s):
            scheduler = rpc(
                address.address, timeout=timeout_s, connection_args=address.connection_args()
            )
            try:
                return await call_scheduler(scheduler, request)
            finally:
                await scheduler.close_rpc()
