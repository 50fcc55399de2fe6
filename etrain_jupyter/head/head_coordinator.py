"""Interface between the scheduler process and the coordinator that it hosts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from etrain_jupyter.head.coordinator.nodes import JobProgress, NodeCost

if TYPE_CHECKING:
    from distributed import Scheduler


class HeadCoordinator(Protocol):
    """Assign workers to jobs; a plugin of the Dask scheduler.

    A cluster's settings file names the class as ``module:attribute``; ``head.main`` calls it with
    the node source, ``cluster_id`` and ``on_shutdown``. Subclass this protocol explicitly to
    inherit its methods. Except for ``idle_s``, they are implemented for a coordinator that tracks
    neither records nor costs.
    """

    def idle_s(self) -> float:
        """Return the seconds since the last job ended; 0.0 while a job is active."""
        ...

    def is_busy(self, worker: str) -> bool:
        """Return True if a job may be using this worker.

        The default assumes that an active job uses every worker.
        """
        return self.idle_s() == 0.0

    def progress(self) -> Sequence[JobProgress]:
        """Return the progress of all active jobs, in order of submission."""
        return ()

    def register(self, scheduler: Scheduler) -> None:
        """Register request handlers before the scheduler starts listening."""
        return

    def replay(self, folder: Path, *, died_at: float) -> None:
        """Restore the previous scheduler's jobs from ``folder``, and keep records there.

        Args:
            folder: Folder with one record per job.
            died_at: When the previous scheduler died, in seconds since the epoch; 0.0 for the
                first scheduler of a cluster.
        """
        return

    def take_costs(self, costs: Sequence[NodeCost]) -> None:
        """Update the cost of every node."""
        return

    def take_notice(self, worker: str, leaves_at: float) -> None:
        """Handle an interruption notice: the machine disappears at ``leaves_at`` (epoch time)."""
        return

    def note(self, text: str) -> None:
        """Show the pool's progress to the users of all active jobs."""
        return

    def warn(self, text: str) -> None:
        """Show a warning to the users of all jobs."""
        return

    def halt(self, why: str) -> None:
        """Save and stop all jobs: the pool can provide no more workers."""
        return
