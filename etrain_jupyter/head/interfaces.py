"""Interfaces of the scheduler process: its coordinator, and its node source for the workers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from etrain_jupyter.head.coordinator.nodes import JobProgress, NodeCost, NodeSource
from etrain_jupyter.process.cluster_dir import ClusterDir
from etrain_jupyter.process.cluster_settings import ClusterSettings

if TYPE_CHECKING:
    from distributed import Scheduler


@dataclass(frozen=True, kw_only=True)
class HeadFacts:
    """Arguments and callbacks for a node source. Call the callbacks on the head's event loop."""

    cluster: ClusterDir
    settings: ClusterSettings
    parent_pipe: int
    """Pipe that worker processes on this machine inherit; see ``process.entry``."""
    incarnation: int
    """Incarnation number of the scheduler, from 1."""
    is_connected: Callable[[str], bool]
    """Return True if a worker with this name is connected to the scheduler."""
    is_busy: Callable[[str], bool]
    """Return True if a job may be using a worker, which must then not be released as surplus."""
    on_gone: Callable[[str, str], None]
    """Report a worker whose machine is gone, with the reason; its connection may stay open for
    minutes."""
    on_warning: Callable[[str], None]
    """Show a warning to the users of all jobs."""
    on_note: Callable[[str], None]
    """Show progress to the users of all jobs."""
    on_notice: Callable[[str, float], None]
    """Report that the pool will terminate the machine of a worker in use, and when (epoch time)."""
    progress: Callable[[], Sequence[JobProgress]]
    """Return the progress of all active jobs, in order of submission."""
    on_halt: Callable[[str], None]
    """Report that the pool can provide no more workers, with the reason; all jobs save and stop."""


class HeadNodes(NodeSource, Protocol):
    """Start and stop a cluster's workers; each of its schedulers creates its own instance."""

    async def start(self, scheduler_address: str) -> None:
        """Start operating. The scheduler is already listening at ``scheduler_address``.

        Raises:
            PoolError: If a resource that the node source needs is unavailable.
        """
        ...

    def hold(self, count: int, *, reason: str) -> None:
        """Keep at least ``count`` workers even if the jobs want fewer."""
        ...

    def reap(self) -> None:
        """Remove workers that have exited; called about once per second, never blocks."""
        ...

    def costs(self) -> Sequence[NodeCost]:
        """Return the cost of each node since the cluster started, including terminated nodes."""
        ...

    async def close(self, *, grace_s: float) -> None:
        """Stop all workers, by force after ``grace_s`` seconds; wait until they have exited."""
        ...


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
        """Save and stop all jobs, because the pool can provide no more workers."""
        return
