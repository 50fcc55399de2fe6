"""Worker plugin for a Dask cluster that others started. It is sent as code, not by its name.

Dask sends a plugin to every new worker, also to one without this package. A plugin that is sent by
its name would keep such a worker from starting. So this one is pickled with its code, needs nothing
but Dask, and does nothing where it cannot work. That is why this module imports nothing of ours at
its top.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from typing import Any

from distributed import WorkerPlugin

UNFIT = "etrain-unfit"
"""Dask's topic under which a worker says why it takes no part."""


class GuestSupervisor(WorkerPlugin):
    """Start a supervisor on a worker, if what it needs is installed there.

    Args:
        version: The coordinator's etrain-jupyter.
    """

    name = "etrain-supervisor"
    idempotent = True

    def __init__(self, version: str) -> None:
        self._version = version
        self._supervisor: Any = None

    async def setup(self, worker: Any) -> None:
        """Start, or report why not."""
        try:
            from etrain_jupyter.pools.external.guest_worker import make_supervisor

            self._supervisor = make_supervisor(self._version)
        except Exception as exc:
            # The worker has other work to do, whatever is wrong with our package here.
            why = f"{type(exc).__name__}: {exc}"
            worker.log_event("etrain-unfit", {"name": str(worker.name), "why": why})
            return
        await self._supervisor.setup(worker)

    async def teardown(self, worker: Any) -> None:
        """End the trainers."""
        if self._supervisor is not None:
            await self._supervisor.teardown(worker)


_sending = threading.Lock()
"""Guards ``_num_sending``."""
_num_sending = 0
"""Number of threads inside ``sent_as_code``."""


@contextlib.contextmanager
def sent_as_code() -> Iterator[None]:
    """Have Dask pickle the classes of this module with their code, in this context."""
    global _num_sending
    import cloudpickle

    here = sys.modules[__name__]
    with _sending:
        _num_sending += 1
        if _num_sending == 1:
            cloudpickle.register_pickle_by_value(here)
    try:
        yield
    finally:
        with _sending:
            _num_sending -= 1
            if _num_sending == 0:
                cloudpickle.unregister_pickle_by_value(here)
