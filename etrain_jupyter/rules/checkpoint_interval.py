"""Choose the interval of ``checkpoint.every: auto`` from the cost and the benefit of a checkpoint.

A checkpoint is not read as long as one rank survives, because that rank has the weights. The rate
at which single workers are lost is therefore less important than the rate at which a checkpoint is
needed. That is the case if all ranks are lost before a replacement has the state, or if the job
resumes on another cluster. This rate and the measured cost of a checkpoint determine the interval
that wastes the least time.

Sources:
    J. W. Young, A first order approximation to the optimum checkpoint interval, Communications of
    the ACM 17(9), 1974: ``sqrt(2 C M)``.
    J. T. Daly, A higher order estimate of the optimum checkpoint interval for restart dumps, Future
    Generation Computer Systems 22(3), 2006, equation 37: Young's formula with two more terms, or
    ``M`` if a checkpoint costs at least ``2 M``.
    K. N. Fleming, A reliability model for common mode failures in redundant safety systems, 1975:
    the share of failures that affect all units at once (beta factor).
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections import deque
from dataclasses import dataclass

from etrain_jupyter.log import events as t

FIRST_S = 10.0
"""Seconds until the first checkpoint, which measures the cost."""
SHORTEST_S, LONGEST_S = 10.0, 600.0
"""Bounds in seconds: below the first, checkpoints are needlessly frequent; the second limits the
work that is lost when a user continues elsewhere."""
MAX_COST_SHARE = 0.01
"""Maximum share of the time that checkpoints may cost; overrides the bounds above."""
MAX_WRITING_SHARE = 0.5
"""Maximum share of the time spent writing to a slow store."""

PRIOR_WORKER_S = 24 * 3600.0
"""Prior: one loss per this many worker-seconds."""
PRIOR_JOB_S = 24 * 3600.0
"""Prior: one loss of everything at once (a machine, the cluster, the session) per this many seconds
of training."""
COMMON_LOSS_SHARE = 0.1
"""Share of single losses that take all other workers with them: a spot market may interrupt a whole
zone. A tenth is the usual estimate without data; see Fleming."""
REPLACEMENT_S = 120.0
"""Seconds until another worker holds the state of a lost worker."""
MIN_CHANGE_FACTOR = 1.25
"""A new interval takes effect, and is logged, if it differs by this factor."""


@dataclass(frozen=True, kw_only=True)
class Interruptions:
    """The interruptions of a job so far."""

    num_holders: int = 1
    """Ranks that hold the state now."""
    num_lost: int = 0
    """Workers that were lost or interrupted, together with all others or alone."""
    worker_s: float = 0.0
    """Worker-seconds of training over which ``num_lost`` was counted."""
    num_all_lost: int = 0
    """Number of times that no trainer held the state any more."""
    job_s: float = 0.0
    """Seconds for which the job trained."""


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Cost of one checkpoint."""

    cost_s: float
    """Seconds of training: blocked for the copy, plus the slowdown while it is written."""
    duration_s: float = 0.0
    """Seconds from the step boundary until it is durable."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """An interval, and what determined it."""

    interval_s: float
    cost_s: float
    loss_rate_per_h: float
    """Expected rate of losing all holders of the state."""
    limit: str
    """The bound that applies: ``shortest``, ``longest``, ``cost``, ``writing``; empty if none."""


def worker_loss_rate(seen: Interruptions) -> float:
    """Return the expected loss rate of one worker, per second.

    The mean of a Gamma distribution: the prior is worth one loss in ``PRIOR_WORKER_S``.

    >>> worker_loss_rate(Interruptions(num_lost=1, worker_s=24 * 3600.0)) * 24 * 3600
    1.0
    """
    return (1 + seen.num_lost) / (PRIOR_WORKER_S + seen.worker_s)


def total_loss_rate(seen: Interruptions) -> float:
    """Return the expected rate of losing all holders of the state, per second.

    This is the sum of three rates. First, one event ends all holders at once (as observed, with a
    prior). Second, the loss of one holder takes the others with it. Third, all holders are lost one
    by one before the first is replaced; this is the rate at which ``n`` units with independent
    failures and repairs are down together:
    ``n / r * (x / (1 + x)) ** n``, where ``x`` is the failure rate times the repair time ``r``.

    >>> alone, four = (total_loss_rate(Interruptions(num_holders=n)) for n in (1, 4))
    >>> round(alone * 24 * 3600, 2), round(four * 24 * 3600, 2)  # a day
    (2.0, 1.4)
    """
    rate, num = worker_loss_rate(seen), max(1, seen.num_holders)
    at_once = (1 + seen.num_all_lost) / (PRIOR_JOB_S + seen.job_s)  # again, the prior is one loss
    share = (
        rate * REPLACEMENT_S / (1 + rate * REPLACEMENT_S)
    )  # fraction of the time for which a worker is missing
    one_by_one = num / REPLACEMENT_S * share**num
    together = (
        COMMON_LOSS_SHARE * num * rate if num > 1 else 0.0
    )  # with one holder: the same as one by one
    return at_once + together + one_by_one


def daly_interval(cost_s: float, mean_time_s: float) -> float:
    """Return the interval between checkpoints that wastes the least time.

    Args:
        cost_s: ``C``, seconds of training that a checkpoint costs.
        mean_time_s: ``M``, mean seconds between losses that require a checkpoint.

    >>> round(daly_interval(1.0, 3600.0), 1), round((2 * 1.0 * 3600.0) ** 0.5, 1)  # Young's
    (84.2, 84.9)
    """
    if cost_s >= 2 * mean_time_s:
        return mean_time_s  # outside the range of the series
    ratio = cost_s / (2 * mean_time_s)
    young_s = math.sqrt(2 * cost_s * mean_time_s)
    return young_s * (1 + math.sqrt(ratio) / 3 + ratio / 9) - cost_s


def choose_interval(costs: Costs, seen: Interruptions) -> Choice:
    """Choose the interval between two checkpoints from their cost and the interruptions so far.

    >>> chosen = choose_interval(Costs(cost_s=0.1), Interruptions(num_holders=4))
    >>> round(chosen.interval_s), chosen.limit
    (111, '')
    """
    rate = total_loss_rate(seen)
    optimum_s, limit = daly_interval(costs.cost_s, 1 / rate), ""
    if optimum_s > LONGEST_S:
        optimum_s, limit = LONGEST_S, "longest"
    # The lower bounds override the upper bound: with checkpoints that cost 10 s each, the cost must
    # stay below 1 % of the time even if the interval exceeds ``LONGEST_S``. The largest lower bound
    # applies, and its name is returned.
    least = {
        "shortest": SHORTEST_S,
        "writing": costs.duration_s / MAX_WRITING_SHARE,
        "cost": costs.cost_s / MAX_COST_SHARE,
    }
    for name, least_s in least.items():
        if least_s > optimum_s:
            optimum_s, limit = least_s, name
    return Choice(
        interval_s=optimum_s, cost_s=costs.cost_s, loss_rate_per_h=rate * 3600, limit=limit
    )


def is_material(new: Choice, old: Choice | None) -> bool:
    """Return whether the interval differs from the current one by more than measurement noise."""
    if old is None:
        return True
    shorter, longer = sorted((new.interval_s, old.interval_s))
    return longer >= MIN_CHANGE_FACTOR * shorter


_WHY = {
    "shortest": "the minimum",
    "longest": "the maximum",
    "cost": f"so that they cost no more than {MAX_COST_SHARE:.0%} of the time",
    "writing": f"so that they are written for no more than {MAX_WRITING_SHARE:.0%} of the time",
}


def describe_choice(choice: Choice) -> str:
    """Return the choice as text for users.

    >>> describe_choice(Choice(interval_s=84.2, cost_s=1.0, loss_rate_per_h=1.0, limit=""))
    'every 84 s: each costs 1.0 s of training, and the loss of all ranks with the state is \
expected once in 1.0 h'
    """
    why = f", {_WHY[choice.limit]}" if choice.limit else ""
    cost = _format_duration(choice.cost_s)
    return (
        f"every {choice.interval_s:.0f} s{why}: each costs {cost} of training, and the loss of all "
        f"ranks with the state is expected once in {1 / choice.loss_rate_per_h:.1f} h"
    )


def _format_duration(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 1 else f"{seconds * 1000:.0f} ms"


KEEP_COSTS = 5
"""The median cost of this many newest checkpoints is used; the first one also allocates memory."""


class Evidence:
    """Folds a job's events, and chooses the interval that follows from them.

    A coordinator that resumes a job therefore gets the same result as the previous one, and the
    evidence does not depend on rank 0, which may be lost.
    """

    def __init__(self) -> None:
        self.choice: Choice | None = None
        """The current interval; None before the first choice."""
        self._costs: deque[Costs] = deque(maxlen=KEEP_COSTS)
        self._seen = Interruptions()
        self._began_at: float | None = None  # when ``num_holders`` ranks began to train, or None
        self._newest_at = 0.0  # time of the newest event
        # When the newest durable state was current; at first, the start of training.
        self._saved_at: float | None = None
        self._is_resuming = False  # between ``JobResumed`` and the restore that follows

    def fold(self, event: t.Event, at: float | None = None) -> None:
        """Add one event of the log.

        Args:
            event: The event.
            at: Its time on the clock of ``review``; None for an event that was read from the log.
                The event's wall time is then used, and ``shift`` converts all times afterwards.
        """
        at = event.time if at is None else at
        match event:
            case t.GenerationFormed():
                # generation     1 (4 ranks)     2 (3 ranks)     waiting     3 (4 ranks)
                # worker_s       + 4 x 60 s      + 3 x 20 s      + 0         + 4 x ...
                self._stop_clock(at)
                self._seen = dataclasses.replace(self._seen, num_holders=max(1, event.world_size))
                self._began_at = at
                if self._saved_at is None:
                    self._saved_at = at
            case t.JobStatusChanged(status=status) if status != "running":
                self._stop_clock(at)
            case t.WorkerLost():
                self._count_lost()
            case t.WorkerLeft(reason="preempted"):
                self._count_lost()
            case t.JobRestored():
                if not self._is_resuming:  # else already counted, or the user had ended the job
                    self._count_all_lost()
                self._is_resuming = False
                self._saved_at = at  # nothing has been trained since
            case t.JobResumed():
                self._on_resumed(event)
            case t.CheckpointCommitted():
                cost_s = event.stall_s + event.slowed_s
                self._costs.append(Costs(cost_s=cost_s, duration_s=event.duration_s))
                self._saved_at = at - event.duration_s  # its state is that of the step boundary
            case t.CheckpointIntervalChosen():
                self.choice = Choice(
                    interval_s=event.interval_s,
                    cost_s=event.cost_s,
                    loss_rate_per_h=event.loss_rate_per_h,
                    limit=event.limit,
                )
            case _:
                pass
        self._newest_at = at

    def shift(self, by_s: float) -> None:
        """Convert all times from a clock that is ``by_s`` seconds behind."""
        self._newest_at += by_s
        if self._began_at is not None:
            self._began_at += by_s
        if self._saved_at is not None:
            self._saved_at += by_s

    def review(self, now: float) -> Choice | None:
        """Choose again; return the choice if it differs from the current one.

        Before the first checkpoint, no interval is chosen; trainers start with a fixed one.
        """
        costs = self.costs()
        if costs is None:
            return None
        new = choose_interval(costs, self.seen(now))
        if not is_material(new, self.choice):
            return None
        self.choice = new
        return new

    def seen(self, now: float) -> Interruptions:
        """Return the interruptions so far."""
        passed_s = max(0.0, now - self._began_at) if self._began_at is not None else 0.0
        seen = self._seen
        return dataclasses.replace(
            seen,
            worker_s=seen.worker_s + passed_s * seen.num_holders,
            job_s=seen.job_s + passed_s,
        )

    def costs(self) -> Costs | None:
        """Return the cost of a checkpoint; None before the first."""
        if not self._costs:
            return None
        return Costs(
            cost_s=statistics.median(known.cost_s for known in self._costs),
            duration_s=statistics.median(known.duration_s for known in self._costs),
        )

    def age_s(self, now: float) -> float:
        """Return the seconds since the newest durable state, or since training began if none."""
        return max(0.0, now - self._saved_at) if self._saved_at is not None else 0.0

    # --- events ---

    def _count_lost(self) -> None:
        self._seen = dataclasses.replace(self._seen, num_lost=self._seen.num_lost + 1)

    def _on_resumed(self, event: t.JobResumed) -> None:
        # Stop at the previous event, because nothing was trained between the end and the resume.
        self._stop_clock(self._newest_at)
        self._is_resuming = True
        self._saved_at = None
        if event.from_status not in t.TERMINAL_STATUSES:  # the whole cluster died
            self._count_all_lost()

    def _count_all_lost(self) -> None:
        self._seen = dataclasses.replace(self._seen, num_all_lost=self._seen.num_all_lost + 1)

    def _stop_clock(self, now: float) -> None:
        self._seen, self._began_at = self.seen(now), None
