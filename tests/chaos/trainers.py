"""Strategies to start the rig's trainers, all of them with the product's fork server."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Protocol

import psutil

from etrain_jupyter.process.fork_server import ForkServerProcess
from etrain_jupyter.rules.membership import stalls
from etrain_jupyter.worker import supervisor
from etrain_jupyter.worker.forks import Forks


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Timeouts after which the product declares a process dead or hung."""

    hang_s: float
    """``ETRAIN_HANG_S``: timeout for a rank without progress."""
    beat_s: float = supervisor.BEAT_S
    """Interval of the supervisors' heartbeats."""
    restore_patience: float = stalls.RESTORE_PATIENCE
    warm_up_patience: float = stalls.WARM_UP_PATIENCE
    """Timeout of a trainer that restores or warms up, as a multiple of ``hang_s``."""


class Trainers(Protocol):
    """Strategy to start the trainers of a rig's workers."""

    limits: Limits
    warms_up: bool
    """If true, a job waits until each worker can fork; if false, workers start while it starts."""

    def forks(self) -> Forks:
        """Return the connection of a new worker to its fork server."""

    async def detach(self) -> None:
        """Wait until every trainer has exited."""


class Served:
    """Trainers that one fork server forks for all workers, as in a local cluster.

    A hung rank is detected after a few seconds instead of 30, by the product's ``ETRAIN_HANG_S``.

    Args:
        process: A fork server, which several rigs may use.
    """

    limits = Limits(hang_s=6.0)
    warms_up = True

    def __init__(self, process: ForkServerProcess) -> None:
        self._process = process

    def forks(self) -> Forks:
        """Connect to the fork server."""
        connection = self._process.connect()
        assert connection is not None, "the fork server has failed"
        return Forks(connection.detach())

    @property
    def living(self) -> list[psutil.Process]:
        """Trainers that are running."""
        server = self._process._process
        assert server is not None
        return psutil.Process(server.pid).children()

    async def detach(self) -> None:
        """Wait until every trainer has exited."""
        async with asyncio.timeout(30):
            while self.living:
                await asyncio.sleep(0.01)


class Spawned:
    """Trainers that each worker forks from its own fork server, as on pools other than ``local``.

    A hung rank is detected after a few seconds instead of 30, by the product's ``ETRAIN_HANG_S``.
    """

    limits = Limits(hang_s=6.0)
    warms_up = True

    def forks(self) -> Forks:
        """Return forks without a server, which start one."""
        return Forks()

    async def detach(self) -> None:
        """Do nothing: a worker that closes waits for its trainers."""
