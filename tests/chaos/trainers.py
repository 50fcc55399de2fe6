"""Strategies to start the rig's trainers: like the product, or forked without it (``forks.py``)."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from etrain_jupyter.head.fork_server import ForkServerProcess
from etrain_jupyter.rules.membership import stalls
from etrain_jupyter.worker import supervisor
from etrain_jupyter.worker.forks import ForkedProcess, ForkServer

_create_subprocess_exec = asyncio.create_subprocess_exec
"""asyncio's own function; a rig replaces it to track its workers' processes."""


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


class Process(Protocol):
    """Interface of a trainer's process for the rig and the supervisor."""

    pid: int

    @property
    def returncode(self) -> int | None:
        """Exit status; None while it is running."""

    def kill(self) -> None:
        """Send SIGKILL."""


class Trainers(Protocol):
    """Interface that starts trainers, as a substitute for ``asyncio.create_subprocess_exec``."""

    limits: Limits
    warms_up: bool
    """If true, a job waits for warm spares; if false, workers start while the job starts."""

    def attach(self) -> None:
        """Attach to the running event loop."""

    async def detach(self) -> None:
        """Detach from the running event loop, after every process has exited."""

    async def start_process(self, *words: str, pass_fds: Sequence[int], **options: Any) -> Process:
        """Start a trainer."""


class Served:
    """Trainers that the product's fork server forks, as in a local cluster.

    A hung rank is detected after a few seconds instead of 30, by the product's ``ETRAIN_HANG_S``.

    Args:
        process: A fork server, which several rigs may use.
    """

    limits = Limits(hang_s=6.0)
    warms_up = True

    def __init__(self, process: ForkServerProcess) -> None:
        self._process = process
        self._server: ForkServer | None = None
        self._started: list[ForkedProcess] = []

    def attach(self) -> None:
        """Connect to the fork server."""
        self._started.clear()
        connection = self._process.connect()
        assert connection is not None, "the fork server has failed"
        self._server = ForkServer(connection.detach())

    async def detach(self) -> None:
        """Kill the remaining processes and wait until all have exited."""
        assert self._server is not None
        async with asyncio.timeout(30):
            for process in self._started:
                process.kill()
                while process.returncode is None:
                    await asyncio.sleep(0.01)
        self._server.close()

    async def start_process(
        self, *_: str, pass_fds: Sequence[int], env: Mapping[str, str], **options: Any
    ) -> ForkedProcess:
        """Fork the process."""
        assert self._server is not None
        process = await self._server.fork_spare(pass_fds, env)
        self._started.append(process)
        return process


class Spawned:
    """Trainers that run the supervisor's own command, with the product's timeouts except one.

    A hung rank is detected after a few seconds instead of 30, by the product's ``ETRAIN_HANG_S``.
    """

    limits = Limits(hang_s=6.0)
    # Otherwise spares would import at the same time as the trainers, for twice the CPU time.
    warms_up = True

    def __init__(self) -> None:
        self._started: list[asyncio.subprocess.Process] = []

    def attach(self) -> None:
        """Forget the processes of the previous rig."""
        self._started.clear()

    async def detach(self) -> None:
        """Kill the remaining processes and wait until all have exited."""
        for process in self._started:
            if process.returncode is None:
                process.kill()
            await asyncio.wait_for(process.wait(), 30)

    async def start_process(self, *words: str, **options: Any) -> asyncio.subprocess.Process:
        """Spawn the process."""
        process = await _create_subprocess_exec(*words, **options)
        self._started.append(process)
        return process
