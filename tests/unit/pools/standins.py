"""Minimal coordinator and supervisor for tests of pools.

The scheduler and worker processes import them by name, so this file imports nothing of the tests.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from distributed import SchedulerPlugin, WorkerPlugin

from etrain_jupyter.head.head_coordinator import HeadCoordinator

COORDINATOR = "tests.unit.pools.standins:Coordinator"
FAILING_COORDINATOR = "tests.unit.pools.standins:FailingCoordinator"
SLOW_COORDINATOR = "tests.unit.pools.standins:SlowCoordinator"
SUPERVISOR = "tests.unit.pools.standins:Supervisor"
FAILING_SUPERVISOR = "tests.unit.pools.standins:FailingSupervisor"


class Coordinator(SchedulerPlugin, HeadCoordinator):
    """Idle from the start; ``etrain_test_job`` makes it busy."""

    name = "etrain-coordinator"

    def __init__(self, nodes: Any, *, cluster_id: str, on_shutdown: Callable[[], None]) -> None:
        self._nodes, self._cluster_id, self._on_shutdown = nodes, cluster_id, on_shutdown
        self._has_job = False
        self._idle_since = time.monotonic()

    async def start(self, scheduler: Any) -> None:
        scheduler.handlers |= {
            "etrain_describe": self._describe,
            "etrain_down": self._down,
            "etrain_test_job": self._set_job,
        }

    def idle_s(self) -> float:
        return 0.0 if self._has_job else time.monotonic() - self._idle_since

    async def _describe(self) -> dict[str, Any]:
        return {
            "cluster_id": self._cluster_id,
            "workers": len(self._nodes.nodes()),
            "jobs": int(self._has_job),
            "idle_s": self.idle_s(),
        }

    async def _down(self) -> dict[str, Any]:
        asyncio.get_running_loop().call_later(0.01, self._on_shutdown)
        return {"message": "going down"}

    async def _set_job(self, num_workers: int) -> dict[str, Any]:
        self._has_job = num_workers > 0
        self._idle_since = time.monotonic()
        self._nodes.want(num_workers, reason="test")
        return {}


class FailingCoordinator(Coordinator):
    async def start(self, scheduler: Any) -> None:
        raise RuntimeError("the coordinator has a bad day")


class SlowCoordinator(Coordinator):
    async def start(self, scheduler: Any) -> None:
        await super().start(scheduler)
        await asyncio.sleep(1.0)


class Supervisor(WorkerPlugin):
    name = "etrain-supervisor"

    def __init__(self, *, device: str) -> None:
        self.device = device

    async def teardown(self, worker: Any) -> None:
        pass


class FailingSupervisor(Supervisor):
    async def setup(self, worker: Any) -> None:
        raise RuntimeError("the supervisor has a bad day")
