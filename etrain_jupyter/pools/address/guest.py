"""Plugin for the workers of an external Dask cluster, sent as code instead of by name.

Dask installs a plugin on every worker that joins, including those without this package. A plugin
pickled by name would prevent such a worker from starting. So this one is pickled with its code,
depends on Dask only, and disables itself where it cannot work. For the same reason, this module has
no top-level imports from this package.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from typing import Any

from distributed import WorkerPlugin

UNFIT = "etrain-unfit"
"""Dask topic for the reason why a worker cannot train."""


class GuestSupervisor(WorkerPlugin):
    """Start a supervisor on a worker that has etrain-jupyter ``version`` and torch."""

    name = "etrain-supervisor"
    idempotent = True

    def __init__(self, version: str) -> None:
        self._version = version
        self._supervisor: Any = None

    async def setup(self, worker: Any) -> None:
        """Start the supervisor, or log why it cannot start."""
        try:
            # Do not import this at the top, because this module is sent as code; see its docstring.
            from etrain_jupyter.pools.address.guest_worker import make_supervisor

            self._supervisor = make_supervisor(self._version)
        except Exception as exc:
            # An error of this plugin must not affect the worker's other tasks.
            why = f"{type(exc).__name__}: {exc}"
            worker.log_event("etrain-unfit", {"name": str(worker.name), "why": why})
            return
        await self._supervisor.setup(worker)

    async def teardown(self, worker: Any) -> None:
        """Stop the trainers."""
        if self._supervisor is not None:
            await self._supervisor.teardown(worker)


_sending = threading.Lock()
"""Guards ``_num_sending``."""
_num_sending = 0
"""Number of threads inside ``sent_as_code``; there may be several."""


@contextlib.contextmanager
def sent_as_code() -> Iterator[None]:
    """Make Dask pickle this module's definitions by value while the context is active."""
    # cloudpickle's registry is global to the process and does not count registrations. Without our
    # own count, the first thread to finish would unregister the module for the other threads.
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
