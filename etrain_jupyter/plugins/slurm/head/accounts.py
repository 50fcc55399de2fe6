"""Record the hours and the cost of each worker's SLURM job."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Collection, Sequence
from pathlib import Path

from etrain_jupyter.head.coordinator.nodes import NodeCost
from etrain_jupyter.plugins.slurm.commands import QueuedJob
from etrain_jupyter.process.files import write_private

LIFECYCLE = "slurm"


class Accounts:
    """Costs of a cluster's jobs since its start, in a file that outlives the scheduler.

    Args:
        path: The file.
        usd_per_h: Price of a job per hour; None if unknown, so that nothing is recorded.
    """

    def __init__(self, path: Path, usd_per_h: float | None) -> None:
        self._path = path
        self._usd_per_h = usd_per_h
        self._used_s: dict[str, float] = {}  # by worker
        with contextlib.suppress(OSError, ValueError):
            self._used_s = json.loads(path.read_text())

    def record(self, jobs: Sequence[QueuedJob]) -> None:
        """Update the running jobs' times, from SLURM's own clock."""
        if self._usd_per_h is None:
            return
        now = {job.worker: job.used_s for job in jobs if job.is_running}
        # A requeued job would start from 0 again.
        changed = {
            worker: used_s for worker, used_s in now.items() if used_s > self._used_s.get(worker, 0)
        }
        if changed:
            self._used_s |= changed
            write_private(self._path, json.dumps(self._used_s))

    def costs(self, living: Collection[str]) -> list[NodeCost]:
        """Return the cost of each job; empty if the price is unknown.

        Args:
            living: Workers whose jobs run.
        """
        return [
            NodeCost(
                node_id=worker,
                workers=(worker,),
                lifecycle=LIFECYCLE,
                spent_usd=used_s / 3600 * (self._usd_per_h or 0.0),
                on_demand_usd=used_s / 3600 * (self._usd_per_h or 0.0),
                is_alive=worker in living,
                hours=used_s / 3600,
            )
            for worker, used_s in self._used_s.items()
        ]
