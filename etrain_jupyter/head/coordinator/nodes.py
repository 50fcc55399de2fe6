"""Interface between the coordinator and the pool that starts and stops its workers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass(frozen=True, kw_only=True)
class NodeCost:
    """Cost of one node since it was started."""

    node_id: str
    workers: tuple[str, ...]
    """Its current and former workers."""
    lifecycle: str
    """``spot``, ``on-demand`` or a batch system."""
    spent_usd: float
    """May decrease if a cloud waives the first hour of a spot machine that it interrupts."""
    on_demand_usd: float
    """Cost of the same machine hours at on-demand prices."""
    is_alive: bool
    hours: float = 0.0
    """Hours since it was started."""
    machine: str = ""
    """Its machine type; empty if the pool has no types."""


@dataclass(frozen=True, kw_only=True)
class JobProgress:
    """Progress of an active job, for a pool that plans for deadlines."""

    job_id: str
    attempt_at: float
    """When the job was submitted or resumed, in seconds since the epoch."""
    first_step: int
    """Step at which this attempt began."""
    step: int
    total_steps: int
    """0 if unknown, because the job has not started."""
    num_workers: int
    """Number of workers that are training; 0 while the job waits or is paused."""
    min_workers: int
    max_workers: int
    is_paused: bool = False
    gradient_bytes: float = 0.0
    """Bytes of the gradients that the workers exchange in a step; 0 if unknown."""
    steps_per_s: float = 0.0
    """Current steps per second; 0 before the first step."""
    type_rates: Mapping[str, float] = field(default_factory=dict)
    """Measured samples per second of one worker, by machine type. Empty if the workers' shares of a
    step do not follow their speeds, which makes every worker as slow as the slowest."""


class NodeSource(Protocol):
    """Start and stop workers. Called on the scheduler's event loop; no method blocks."""

    replaces_early: bool
    """True to replace a worker as soon as its machine is at risk or has an interruption notice,
    rather than after its release. Set if each worker has its own machine."""
    trains_after_notice: bool
    """True if a worker with an interruption notice trains until its replacement joins. Set if the
    pool launches the replacement at the notice."""
    finish_by_s: float | None
    """Deadline of every job, in seconds after its submission or resume; None if there is none."""

    def want(self, count: int, *, reason: str) -> None:
        """Start missing workers, up to ``count`` in total, within the pool's capacity."""
        ...

    def capacity(self) -> int | None:
        """Return the maximum number of workers; None if it is unknown."""
        ...

    def nodes(self) -> list[dict[str, Any]]:
        """Return one record per worker: ``worker``, ``pid``, ``state``, ``device``."""
        ...

    def release(self, worker: str, *, drain_s: float) -> None:
        """Stop a worker gracefully, or by force after ``drain_s`` seconds."""
        ...

    def kill(self, worker: str) -> None:
        """Kill a worker, or terminate its machine, immediately."""
        ...

    def note_notice(self, worker: str, *, kind: str, deadline: float = 0.0) -> None:
        """Handle an interruption notice or a rebalance recommendation for a worker's machine.

        The pool may start a replacement.

        Args:
            worker: Name of the worker.
            kind: ``rebalance`` or ``interruption``.
            deadline: Time of the interruption in seconds since the epoch; 0.0 if unknown.
        """
        ...


class NoNodes:
    """Node source for clusters whose workers are managed elsewhere."""

    replaces_early = True
    trains_after_notice = False
    finish_by_s: float | None = None

    def want(self, count: int, *, reason: str) -> None:
        """Do nothing."""

    def capacity(self) -> int | None:
        """Return None, because the capacity is unknown."""
        return None

    def nodes(self) -> list[dict[str, Any]]:
        """Return no nodes."""
        return []

    def release(self, worker: str, *, drain_s: float) -> None:
        """Do nothing."""

    def kill(self, worker: str) -> None:
        """Do nothing."""

    def note_notice(self, worker: str, *, kind: str, deadline: float = 0.0) -> None:
        """Do nothing."""
