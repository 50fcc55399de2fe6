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
           | keep   '. line     ' .   below the line: as many on demand as follow the line
           |            ' .         '
         0 +----------------'.-------------  no slack left: all missing workers on demand
           start                  deadline

With ``keep: 0`` the policy is lazy: it uses the whole slack before it pays for on-demand workers.
This is the cheapest, but nothing is left if on-demand capacity is short at the end. With
``keep: 1`` progress is uniform.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from functools import cached_property

from etrain_jupyter.rules.policy.worker_rates import Rates

USUAL_LOSSES_PER_NODE_HOUR = 0.6
"""Losses of spot machines in public traces of EC2 GPU machines (p3: 0.61, g4dn: 0.54)."""
USUAL_CHANGES_PER_HOUR = 15.0
"""Changes of the number of workers in these traces, for 32 machines."""
RESERVE = 0.01
MAX_DERATE = 0.9


def derate_of(
    *,
    boot_s: float,
    stall_s: float,
    losses_per_node_hour: float = USUAL_LOSSES_PER_NODE_HOUR,
    changes_per_hour: float = USUAL_CHANGES_PER_HOUR,
) -> float:
    """Return the share of its rate by which a full fleet falls short while lost machines boot.

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
    """Time from a launch until the worker trains, in seconds: the 95th percentile."""
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
        """Time reserved at the end: a boot, and three decisions that come late."""
        return self.boot_s + 3 * self.period_s

    @cached_property
    def safe_rate(self) -> float:
        """Samples per second of all workers, of which some are always being replaced."""
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
    """Spot workers that train, without those that EC2 is about to reclaim."""
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
    # Hysteresis of a boot in both directions, so that no worker is launched and released in turns.
    if slack_s > line_s + 2 * terms.boot_s * share:
        return 0
    return min(view.num_on_demand, short)


def least_workers(terms: DeadlineTerms, rates: Rates) -> int | None:
    """Return the least number of workers that meets the deadline safely; None if none does.

    Args:
        terms: The job.
        rates: Rates up to a larger number of workers than those of the job.
    """
    usable_s = terms.time_s - terms.margin_s
    if usable_s <= 0:
        return None
    for workers in range(1, len(rates)):
        if terms.samples / (rates[workers] * (1 - terms.derate)) < usable_s:
            return workers
    return None
