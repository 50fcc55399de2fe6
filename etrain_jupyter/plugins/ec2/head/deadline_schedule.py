"""Apply ``capacity.policy: deadline``: how many workers the jobs' deadlines require on demand.

The rule is ``rules.policy.deadline``. This module measures its inputs: the rate of each job by its
number of workers, and the boot time of machines.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from etrain_jupyter.head.coordinator.nodes import JobProgress
from etrain_jupyter.plugins.ec2.deadline import (
    DeadlineTerms,
    DeadlineView,
    derate_of,
    on_demand_workers,
)
from etrain_jupyter.plugins.ec2.head.boot_times import BootTimes
from etrain_jupyter.plugins.ec2.head.view import FleetWarning, Machine
from etrain_jupyter.plugins.ec2.spec import AwsSpotSpec
from etrain_jupyter.rules.policy.worker_rates import RateMeter, fit_rates

STALL_S = 1.0
"""Time without training when the number of workers changes, in seconds."""


@dataclass(frozen=True, kw_only=True)
class SchedulePlan:
    """Number of on-demand workers for the deadlines, and messages about them."""

    on_demand: int
    """Number of on-demand workers."""
    warnings: tuple[FleetWarning, ...] = ()


@dataclass(kw_only=True)
class DeadlineSchedule:
    """The jobs' deadlines. Used by the reconcile thread only."""

    finish_by_s: float
    keep: float
    base: int
    """Number of workers that always run on demand, while any are wanted."""
    most: int
    """Maximum number of on-demand workers."""
    max_workers: int
    """Maximum number of workers of the pool."""
    start_after_s: float
    """Time without a worker after which a job starts on demand, in seconds."""
    tick_s: float = 5.0
    _meters: dict[str, RateMeter] = field(default_factory=dict)
    _boots: BootTimes = field(default_factory=BootTimes)

    @classmethod
    def of(cls, spec: AwsSpotSpec) -> DeadlineSchedule | None:
        """Return the schedule of a pool; None unless its policy is ``deadline``."""
        capacity = spec.capacity
        if capacity.policy != "deadline" or capacity.finish_by is None:
            return None
        return cls(
            finish_by_s=capacity.finish_by,
            keep=capacity.keep,
            base=capacity.on_demand.base,
            most=capacity.most_on_demand(spec.workers.max),
            max_workers=spec.workers.max,
            start_after_s=capacity.on_demand.after,
            tick_s=spec.tick,
        )

    def plan(
        self, jobs: Sequence[JobProgress], machines: Sequence[Machine], wanted: int, now: float
    ) -> SchedulePlan:
        """Return the number of on-demand workers.

        Args:
            jobs: Active jobs, in order of submission.
            machines: The running machines.
            wanted: Number of workers wanted.
            now: Time in seconds since the epoch.
        """
        self._measure(jobs, machines, now)
        staying = [m for m in machines if not m.is_leaving]
        spot = sum(
            m.workers for m in staying if m.lifecycle == "spot" and m.is_ready and not m.is_at_risk
        )
        owned = sum(m.workers for m in staying if m.lifecycle == "on-demand")
        total, warnings = 0, []
        # Share the workers among the jobs in the order in which `allocate` does.
        for job in jobs:
            most = min(job.max_workers, self.max_workers)
            has_spot = min(spot, most)
            has_owned = min(owned, most - has_spot)
            number, warning = self._plan_job(job, most, has_spot, has_owned, now)
            spot, owned, total = spot - has_spot, owned - has_owned, total + number
            warnings += [warning] if warning else []
        least = min(self.base, wanted)
        limited = min(max(total, least), self.most, max(wanted, 0))
        return SchedulePlan(on_demand=limited, warnings=tuple(warnings))

    def _plan_job(
        self, job: JobProgress, most: int, spot: int, owned: int, now: float
    ) -> tuple[int, FleetWarning | None]:
        if job.is_paused:
            return owned, None
        left = job.total_steps - job.step
        rates = fit_rates(self._meters[job.job_id].measured, most)
        if not rates or not job.total_steps:
            # Nothing is known about the job until it has trained for a while. Without spot
            # capacity, start it on demand, because otherwise it would never be measured.
            is_late = now - job.attempt_at > self.start_after_s
            return max(owned, max(1, job.min_workers) - spot if is_late else 0), None
        terms = DeadlineTerms(
            rates=rates,
            samples=max(1, job.total_steps - job.first_step),
            time_s=self.finish_by_s,
            boot_s=self.boot_s,
            period_s=self.tick_s,
            derate=derate_of(boot_s=self.boot_s, stall_s=STALL_S),
            keep=self.keep,
        )
        remaining_s = job.attempt_at + self.finish_by_s - now
        view = DeadlineView(
            samples_left=left, remaining_s=remaining_s, num_spot=spot, num_on_demand=owned
        )
        number = on_demand_workers(terms, view)
        needed_s = left / rates[-1]
        if needed_s > remaining_s:
            return number, _too_late(job, most, needed_s, remaining_s, self.finish_by_s)
        return number, _behind(job, number, self.finish_by_s) if number > owned else None

    @property
    def boot_s(self) -> float:
        """Boot time to expect, in seconds: the longest of the last ones."""
        return self._boots.longest_s

    def _measure(
        self, jobs: Sequence[JobProgress], machines: Sequence[Machine], now: float
    ) -> None:
        ids = {job.job_id for job in jobs}
        self._meters = {id: meter for id, meter in self._meters.items() if id in ids}
        for job in jobs:
            meter = self._meters.setdefault(job.job_id, RateMeter())
            meter.observe(now, job.num_workers, job.step)
        self._boots.observe(machines, now)


def _behind(job: JobProgress, number: int, finish_by_s: float) -> FleetWarning:
    workers = "1 worker" if number == 1 else f"{number} workers"
    return FleetWarning(
        key=f"behind {job.job_id}",
        text=(
            f"Job {job.job_id} is behind schedule at step {job.step} of {job.total_steps}: "
            f"{workers} on demand, at the full price, until it has caught up (capacity.policy: "
            f"deadline, finish_by {finish_by_s / 3600:.3g} h)."
        ),
    )


def _too_late(
    job: JobProgress, most: int, needed_s: float, remaining_s: float, finish_by_s: float
) -> FleetWarning:
    missing_s = needed_s - remaining_s
    return FleetWarning(
        key=f"late {job.job_id}",
        text=(
            f"Job {job.job_id} cannot finish in time: {most} workers need "
            f"{needed_s / 3600:.2f} h for its remaining steps, and "
            f"{max(0.0, remaining_s) / 3600:.2f} h are left. All workers run as available, on "
            "demand where spot is short. Set capacity.finish_by to "
            f"{(finish_by_s + missing_s) / 3600 + 0.05:.1f} h or more, or raise workers.max."
        ),
    )
