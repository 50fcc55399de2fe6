"""Decide how many workers to run on demand, so that a job meets its deadline at the lowest cost.

Elastic form of Uniform Progress (Wu et al., "Can't Be Late: Optimizing Spot Instance Savings under
Deadlines", NSDI 2024). The paper runs all workers or none, on spot or on demand. Here, any number
of spot workers trains, and on-demand workers make up for the rest::

    slack  time to the deadline, minus the time that all workers need for the rest of the job
    line   part of the initial slack to keep at this time: keep * slack0 * remaining / total

    slack
    slack0 |.
           |  '.  . - ' - .           spot is plentiful: no worker on demand
           |     '.         ' .
           | keep   '. line     ' .   below the line: enough on demand to follow the line
           |            ' .         '
         0 +----------------'.-------------  no slack left: all missing workers on demand
           start                  deadline

With ``keep: 0`` the policy is lazy: it uses the whole slack before it pays for on-demand workers.
This is the cheapest, but nothing is left if on-demand capacity is short at the end. With
``keep: 1`` progress is uniform.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from etrain_jupyter.display.numbers import counted
from etrain_jupyter.head.coordinator.nodes import JobProgress
from etrain_jupyter.plugins.ec2.head.spare_plan import BootTimes
from etrain_jupyter.plugins.ec2.head.view import FleetWarning, Machine
from etrain_jupyter.plugins.ec2.spec import AwsSpotSpec
from etrain_jupyter.rules.sizing.goodput import RateMeter, Rates, fit_rates

USUAL_LOSSES_PER_NODE_HOUR = 0.6
"""Spot machines lost per machine hour in public traces of EC2 GPUs (p3: 0.61, g4dn: 0.54)."""
USUAL_CHANGES_PER_HOUR = 15.0
"""How often the number of workers changes per hour in these traces, for 32 machines."""
RESERVE = 0.01
MAX_DERATE = 0.9


STALL_S = 1.0
"""Time without training when the number of workers changes, in seconds."""


def derate_of(
    *,
    boot_s: float,
    stall_s: float,
    losses_per_node_hour: float = USUAL_LOSSES_PER_NODE_HOUR,
    changes_per_hour: float = USUAL_CHANGES_PER_HOUR,
) -> float:
    """Return the share of a full fleet's rate that is lost to boots and changes of the workers.

    >>> round(derate_of(boot_s=210.0, stall_s=1.0), 3)
    0.049
    """
    lost = losses_per_node_hour * boot_s / 3600 + changes_per_hour * stall_s / 3600 + RESERVE
    return min(lost, MAX_DERATE)


@dataclass(frozen=True, kw_only=True)
class DeadlineTerms:
    """The parts of the decision that do not change while a job runs."""

    rates: Rates
    """Samples per second by number of workers, up to the maximum number."""
    samples: float
    """Samples of the whole job; above 0."""
    time_s: float
    """Time from the start of the job to its deadline, in seconds."""
    boot_s: float = 300.0
    """95th percentile of the time from a launch until the worker trains, in seconds."""
    period_s: float = 30.0
    """Interval between two decisions, in seconds."""
    derate: float = 0.05
    """See ``derate_of``."""
    keep: float = 0.5
    """Part of the slack that is kept for the end, between 0 and 1."""

    @property
    def max_workers(self) -> int:
        """Maximum number of workers."""
        return len(self.rates) - 1

    @property
    def margin_s(self) -> float:
        """Time reserved at the end, for one boot and three late decisions."""
        return self.boot_s + 3 * self.period_s

    @cached_property
    def safe_rate(self) -> float:
        """Samples per second of all workers, given that some are always being replaced."""
        return self.rates[-1] * (1 - self.derate)

    @cached_property
    def slack_s(self) -> float:
        """Slack at the start; 0 or less if the deadline cannot be met safely."""
        return self.time_s - self.least_time_s

    @property
    def least_time_s(self) -> float:
        """The shortest time to the deadline that can be met safely, without any slack."""
        return self.margin_s + self.samples / self.safe_rate


@dataclass(frozen=True, kw_only=True)
class DeadlineView:
    """Progress of a job, and its workers."""

    samples_left: float
    remaining_s: float
    """Time to the deadline, in seconds; negative after it."""
    num_spot: int
    """Spot workers that train, except those that EC2 is about to reclaim."""
    num_on_demand: int
    """On-demand workers, including those that boot."""


def on_demand_workers(terms: DeadlineTerms, view: DeadlineView) -> int:
    """Return the number of workers to run on demand, in addition to all spot workers available.

    ===============================  ===============================================================
    the rest needs all workers       all that spot does not provide, until the end
    slack below the line             enough for the rate that follows the line
    slack well above the line        none
    between                          keep those that run, as far as they are needed
    ===============================  ===============================================================
    """
    if view.samples_left <= 0:
        return 0
    missing = max(0, terms.max_workers - view.num_spot)
    usable_s = view.remaining_s - terms.margin_s
    needed = view.samples_left / usable_s if usable_s > 0 else float("inf")
    if needed >= terms.safe_rate:
        return missing
    kept_s = terms.keep * max(0.0, terms.slack_s)
    slack_s = usable_s - view.samples_left / terms.safe_rate
    line_s = kept_s * view.remaining_s / terms.time_s
    # The slack shrinks along its line if the job trains at this share of the safe rate.
    share = 1 - kept_s / terms.time_s
    target = max(needed, terms.safe_rate * share)
    enough = bisect_left(terms.rates, min(target, terms.rates[-1]) * (1 - 1e-9))
    short = max(0, enough - view.num_spot)
    if slack_s < line_s:
        return short
    # Hysteresis of one boot time in each direction, so that workers are not launched and released
    # alternately.
    if slack_s > line_s + 2 * terms.boot_s * share:
        return 0
    return min(view.num_on_demand, short)


def least_workers(terms: DeadlineTerms, rates: Rates) -> int | None:
    """Return the least number of workers that meets the deadline safely; None if none does.

    ``rates`` cover a larger number of workers than the job's own rates.
    """
    usable_s = terms.time_s - terms.margin_s
    if usable_s <= 0:
        return None
    for workers in range(1, len(rates)):
        if terms.samples / (rates[workers] * (1 - terms.derate)) < usable_s:
            return workers
    return None


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
        """Return the number of on-demand workers for ``jobs``, which are in order of submission."""
        self._measure(jobs, machines, now)
        staying = [m for m in machines if not m.is_leaving]
        spot = sum(
            m.workers for m in staying if m.lifecycle == "spot" and m.is_ready and not m.is_at_risk
        )
        owned = sum(m.workers for m in staying if m.lifecycle == "on-demand")
        total, warnings = 0, []
        # Share the workers among the jobs in the same order as `allocate`.
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
        """Expected boot time in seconds: the longest of the recent boots."""
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
    return FleetWarning(
        key=f"behind {job.job_id}",
        text=(
            f"Job {job.job_id} is behind schedule at step {job.step} of {job.total_steps}: "
            f"{counted(number, 'worker')} on demand, at the full price, until it has caught up "
            f"(capacity.policy: deadline, finish_by {finish_by_s / 3600:.3g} h)."
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
