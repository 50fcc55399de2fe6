"""Run functions of this package as tasks of an existing Dask cluster.

If a worker is lost, Dask runs its tasks again on another worker. As in every Dask client, results
are unpickled here, so the cluster's owner is trusted; see ``docs/explanation/security.md``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent.futures import CancelledError
from dataclasses import dataclass
from typing import Any

from etrain_jupyter.data.workers import Workers
from etrain_jupyter.errors import PoolError
from etrain_jupyter.pools.address.messages import installed_here, unfit_workers
from etrain_jupyter.process.address import SchedulerAddress

CONNECT_S = 10.0


@dataclass(frozen=True, kw_only=True)
class FitWorkers:
    """The workers of a cluster that have this notebook's versions."""

    num_threads: int
    """Number of tasks that they run at the same time."""
    addresses: list[str] | None
    """Their addresses; None if all workers can be used, including those that join later."""
    warning: str = ""
    """Message about the other workers; empty if there are none."""


async def find_fit_workers(address: str, client: Any) -> FitWorkers:
    """Find the workers that can run tasks; raise ``PoolError`` if there are none."""
    from etrain_jupyter.pools.address.guest_worker import look_here

    here = installed_here()
    found = await client.run(look_here, on_error="return")
    if not found:
        raise PoolError(
            f"{address} has no workers. Nothing was done. Start some, for example with `dask "
            "worker`."
        )
    unfit = unfit_workers(address, found, here)
    fit = [worker for worker in found if not unfit_workers(address, {worker: found[worker]}, here)]
    if unfit and not fit:
        raise PoolError(f"{unfit.text} Nothing was done. {unfit.advice}")
    threads = await client.nthreads()
    return FitWorkers(
        num_threads=sum(int(threads.get(worker, 0)) for worker in fit),
        addresses=fit if unfit else None,
        warning=f"{unfit.text} The other {len(fit)} are used. {unfit.advice}" if unfit else "",
    )


@contextlib.contextmanager
def open_tasks(address: SchedulerAddress, fit: FitWorkers) -> Iterator[Workers]:
    """Connect to a scheduler for the duration of a context, whose end cancels running tasks.

    Raises:
        PoolError: In the context, if the scheduler ends, or if a task ends its workers.
    """
    import distributed
    from distributed.scheduler import KilledWorker

    make: Any = distributed.Client
    with make(
        address.address,
        security=address.security() if address.tls_ca else None,
        timeout=CONNECT_S,
        set_as_default=False,
        name="etrain",
    ) as client:
        # If tasks were pure, Dask would reuse the result of an equal call in an earlier write.
        executor = client.get_executor(pure=False, workers=fit.addresses)
        try:
            yield Workers(executor=executor, num_workers=max(1, fit.num_threads))
        except KilledWorker as exc:
            raise PoolError(
                f"several workers of {address.address} exited while they ran the same task, the "
                f"last one {exc.last_worker.address}. All finished tasks are kept. Often their "
                "memory was too small: each thread needs about 1 GB. Then run the same call again."
            ) from exc
        except CancelledError as exc:
            raise PoolError(
                f"the connection to {address.address} was lost. All finished tasks are kept. Run "
                "the same call again when its scheduler is back."
            ) from exc
        finally:
            executor.shutdown(wait=False)
