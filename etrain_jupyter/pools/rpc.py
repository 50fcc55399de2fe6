"""Questions to the scheduler of a cluster, from any thread of any process."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from etrain_jupyter.errors import PoolError
from etrain_jupyter.process.address import SchedulerAddress

ANSWER_S = 10.0


def ask(
    address: SchedulerAddress, op: str, *, timeout_s: float = ANSWER_S, **arguments: Any
) -> dict[str, Any]:
    """Call a handler of a cluster's scheduler and wait for its answer.

    It may be called where an event loop runs already, as in a kernel.

    Raises:
        PoolError: If there is no answer in time, or the answer is an error.
    """
    try:
        # The kernel's own thread runs an event loop already, so the question gets another thread.
        with ThreadPoolExecutor(1, thread_name_prefix="etrain-pool-ask") as thread:
            exchange = _exchange(address, op, timeout_s, arguments)
            answer = thread.submit(asyncio.run, exchange).result()
    except (OSError, TimeoutError) as exc:
        raise PoolError(
            f"the scheduler of cluster {address.cluster_id} at {address.address} did not answer "
            f"{op} within {timeout_s:g} s ({exc or type(exc).__name__}). Nothing was changed. "
            "Try again; `%etrain doctor` says more, and `%etrain down` ends the cluster."
        ) from exc
    if not isinstance(answer, dict):
        raise PoolError(
            f"the scheduler at {address.address} runs no etrain coordinator, or no longer. Nothing "
            "was changed. A cell with %%etrain distributed puts one there."
        )
    if "error" in answer:
        raise PoolError(str(answer.get("message") or answer["error"]))
    return answer


async def _exchange(
    address: SchedulerAddress, op: str, timeout_s: float, arguments: dict[str, Any]
) -> dict[str, Any]:
    from distributed import core

    from etrain_jupyter.process.peers import plain_values_only

    rpc: Any = core.rpc
    with plain_values_only():
        async with asyncio.timeout(timeout_s):
            scheduler = rpc(
                address.address, timeout=timeout_s, connection_args=address.connection_args()
            )
            try:
                answer: dict[str, Any] = await getattr(scheduler, op)(**arguments)
                return answer
            finally:
                await scheduler.close_rpc()
