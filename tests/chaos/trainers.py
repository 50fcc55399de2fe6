"""Ways to start the rig's trainers: as the product does, or (``forks.py``) from a zygote."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from etrain_jupyter.rules.membership import stalls
from etrain_jupyter.worker import supervisor

_create_subprocess_exec = asyncio.create_subprocess_exec
"""Of asyncio, before a rig replaces it to learn of its workers' processes."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Times after which the product takes something for dead or stuck."""

    hang_s: float
    """``ETRAIN_HANG_S``: how long a rank may make no progress."""
    beat_s: float = supervisor.BEAT_S
    """Interval of the supervisors' heartbeats."""
    restore_patience: float = stalls.RESTORE_PATIENCE
    warm_up_patience: float = stalls.WARM_UP_PATIENCE
    """How many times ``hang_s`` a trainer may be frozen while it restores or warms up."""


class Process(Protocol):
    """A trainer's process, as the rig and the supervisor need it."""

    pid: int

    @property
    def returncode(self) -> int | None:
        """Exit status; None while it runs."""

    def kill(self) -> None:
        """Send SIGKILL."""


class Trainers(Protocol):
    """What starts trainers, in place of ``asyncio.create_subprocess_exec``."""

    limits: Limits
    warms_up: bool
    """Whether a job waits until its workers' spares are warm; else workers come while it starts."""

    def attach(self) -> None:
        """Begin to serve the running loop."""

    async def detach(self) -> None:
        """Let go of the running loop. Every process has ended then."""

    async def start_process(self, *words: str, pass_fds: Sequence[int], **options: Any) -> Process:
        """Start a trainer."""


class Spawned:
    """Trainers that run the supervisor's own command, with the product's own limits but one.

    A rank that hangs is found after some seconds instead of 30: ``ETRAIN_HANG_S`` is an option of
    the product.
    """

    limits = Limits(hang_s=6.0)
    # Otherwise spares would import beside the trainers that still do: twice the processor time.
    warms_up = True

    def __init__(self) -> None:
        self._started: list[asyncio.subprocess.Process] = []

    def attach(self) -> None:
        """Forget the processes of the rig before."""
        self._started.clear()

    async def detach(self) -> None:
        """Wait until the last one has ended."""
        for process in self._started:
            if process.returncode is None:
                process.kill()
            await asyncio.wait_for(process.wait(), 30)

    async def start_process(self, *words: str, **options: Any) -> asyncio.subprocess.Process:
        """Spawn the process."""
        process = await _create_subprocess_exec(*words, **options)
        self._started.append(process)
        return process
