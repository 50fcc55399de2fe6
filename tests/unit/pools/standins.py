"""Minimal coordinator and supervisor for tests of pools.

The scheduler and worker processes import them by name, so this file imports nothing of the tests.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from distributed import SchedulerPlugin, WorkerPlugin

from etrain_jupyter.head.interfaces import HeadCoordinator
from etrain_jupyter.wire.requests import (
    ClusterFacts,
    DescribeCluster,
    Done,
    Request,
    ShutDownCluster,
    ShuttingDown,
    handler_of,
)

COORDINATOR = "tests.unit.pools.standins:Coordinator"
FAILING_COORDINATOR = "tests.unit.pools.standins:FailingCoordinator"
SLOW_COORDINATOR = "tests.unit.pools.standins:SlowCoordinator"
SUPERVISOR = "tests.unit.pools.standins:Supervisor"
FAILING_SUPERVISOR = "tests.unit.pools.standins:FailingSupervisor"


@dataclass(frozen=True, kw_only=True)
class PretendJob(Request[Done]):
    """Behave as with a job of that many workers; none if 0."""

    op: ClassVar[str] = "etrain_test_job"

    num_workers: int


class Coordinator(SchedulerPlugin, HeadCoordinator):
    """Idle from the start; ``PretendJob`` makes it busy."""

    name = "etrain-coordinator"

    def __init__(self, nodes: Any, *, cluster_id: str, on_shutdown: Callable[[], None]) -> None:
        self._nodes, self._cluster_id, self._on_shutdown = nodes, cluster_id, on_shutdown
        self._has_job = False
        self._idle_since = time.monotonic()

    async def start(self, scheduler: Any) -> None:
        handlers: dict[type[Request[Any]], Any] = {
            DescribeCluster: self._describe,
            ShutDownCluster: self._down,
            PretendJob: self._set_job,
        }
        for request, handler in handlers.items():
            scheduler.handlers[request.op] = handler_of(request, handler)

    def idle_s(self) -> float:
        return 0.0 if self._has_job else time.monotonic() - self._idle_since

    async def _describe(self, request: DescribeCluster) -> ClusterFacts:
        return ClusterFacts(
            cluster_id=self._cluster_id,
            pid=os.getpid(),
            workers=len(self._nodes.nodes()),
            jobs=int(self._has_job),
            idle_s=self.idle_s(),
        )

    async def _down(self, request: ShutDownCluster) -> ShuttingDown:
        asyncio.get_running_loop().call_later(0.01, self._on_shutdown)
        return ShuttingDown()

    async def _set_job(self, request: PretendJob) -> Done:
        self._has_job = request.num_workers > 0
        self._idle_since = time.monotonic()
        self._nodes.want(request.num_workers, reason="test")
        return Done()


class FailingCoordinator(Coordinator):
    async def start(self, scheduler: Any) -> None:
        raise RuntimeError("the coordinator has a bad day")


class SlowCoordinator(Coordinator):
    async def start(self, scheduler: Any) -> None:
        await super().start(scheduler)
        await asyncio.sleep(1.0)


class Supervisor(WorkerPlugin):
    name = "etrain-supervisor"
    has_trainers = False

    def __init__(self, *, device: str) -> None:
        self.device = device

    async def teardown(self, worker: Any) -> None:
        pass


class FailingSupervisor(Supervisor):
    async def setup(self, worker: Any) -> None:
        raise RuntimeError("the supervisor has a bad day")
