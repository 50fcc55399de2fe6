"""How often ``checkpoint.every: auto`` saves: a rule of what a checkpoint costs and prevents.

A checkpoint is needed when nobody holds the state any more; while one rank survives, it has the
weights, and nothing is read. So what counts is not how often a worker is lost but how often all
holders are lost before anybody has taken over, or the user goes on elsewhere. From that rate and
the measured cost of a checkpoint follows the interval that wastes the least time.

Sources:
    J. W. Young, A first order approximation to the optimum checkpoint interval, Communications of
    the ACM 17(9), 1974: ``sqrt(2 C M)``.
    J. T. Daly, A higher order estimate of the optimum checkpoint interval for restart dumps, Future
    Generation Computer Systems 22(3), 2006, equation 37: Young's with two terms more, and ``M``
    where a checkpoint costs more than twice that.
    K. N. Fleming, A reliability model for common mode failures in redundant safety systems, 1975:
    the share of failures that take all units at once (beta factor).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

FIRST_S = 10.0
"""When the first checkpoint is made: it tells what one costs."""
SHORTEST_S, LONGEST_S = 10.0, 600.0
"""What a user waits for who goes on elsewhere, and what is lost at most, count too."""
MOST_COST = 0.01
"""Of the time; goes before the bounds above."""
MOST_WRITING = 0.5
"""Of the time; a store that is slow is not written to all the time."""

PRIOR_WORKER_S = 24 * 3600.0
"""One loss in so much time of a worker is what is known before any was seen."""
PRIOR_JOB_S = 24 * 3600.0
"""One loss of everything at once (a machine, the cluster, the session) in so much time of a job."""
TOGETHER = 0.1
"""The share of single losses that is expected to take all others along: a spot market takes a whole
zone. A tenth is the usual guess where no data are; see Fleming."""
REPLACED_S = 120.0
"""How long until somebody else has the state of a worker that was lost."""
MATERIAL = 1.25
"""A new interval counts, and is told, once it differs by this factor."""


@dataclass(frozen=True, kw_only=True)
class Interruptions:
    """What was seen of a job's interruptions so far."""

    num_holders: int = 1
    """Ranks that hold the state now."""
    num_lost: int = 0
    """Workers that were lost or taken, together with all others or alone."""
    worker_s: float = 0.0
    """In how much time of workers, added up."""
    num_all_lost: int = 0
    """How often nobody held the state any more."""
    job_s: float = 0.0
    """In how much time in which the job trained."""


@dataclass(frozen=True, kw_only=True)
class Costs:
    """What one checkpoint takes."""

    cost_s: float
    """Of training: while it stands still for the copy, and by which it is slower meanwhile."""
    duration_s: float = 0.0
    """From the step boundary until it is durable."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """An interval, and why it is this one."""

    interval_s: float
    cost_s: float
    loss_rate_per_h: float
    """How often all holders of the state are expected to be lost."""
    limit: str
    """What bounds it: ``shortest``, ``longest``, ``cost`` or ``writing``; empty if nothing does."""


def worker_loss_rate(seen: Interruptions) -> float:
    """Return how often one worker is expected to be lost, a second.

    The mean of a Gamma distribution: the prior is worth one loss in ``PRIOR_WORKER_S``.

    >>> worker_loss_rate(Interruptions(num_lost=1, worker_s=24 * 3600.0)) * 24 * 3600
    1.0
    """
    return (1 + seen.num_lost) / (PRIOR_WORKER_S + seen.worker_s)


def total_loss_rate(seen: Interruptions) -> float:
    """Return how often everything is expected to be lost, a second.

    Three ways: something takes all at once, as was seen or as the prior says; one of the losses
    takes the others along; or all are lost one by one, each before another one has been replaced.
    The last is how often ``n`` units that fail and are repaired on their own are down together:
    ``n / r * (x / (1 + x)) ** n``, where ``x`` is the rate times the time ``r`` of a repair.

    >>> alone, four = (total_loss_rate(Interruptions(num_holders=n)) for n in (1, 4))
    >>> round(alone * 24 * 3600, 2), round(four * 24 * 3600, 2)  # a day
    (2.0, 1.4)
    """
    rate, num = worker_loss_rate(seen), max(1, seen.num_holders)
    at_once = (1 + seen.num_all_lost) / (PRIOR_JOB_S + seen.job_s)
    share = rate * REPLACED_S / (1 + rate * REPLACED_S)
    one_by_one = num / REPLACED_S * share**num
    together = TOGETHER * num * rate if num > 1 else 0.0
    return at_once + together + one_by_one


def daly_interval(cost_s: float, mean_time_s: float) -> float:
    """Return how long to train between two checkpoints so that the least time is wasted.

    Args:
        cost_s: ``C``, what one takes of training.
        mean_time_s: ``M``, between two losses that need one.

    >>> round(daly_interval(1.0, 3600.0), 1), round((2 * 1.0 * 3600.0) ** 0.5, 1)  # Young's
    (84.2, 84.9)
    """
    if cost_s >= 2 * mean_time_s:
        return mean_time_s
    ratio = cost_s / (2 * mean_time_s)
    young_s = math.sqrt(2 * cost_s * mean_time_s)
    return young_s * (1 + math.sqrt(ratio) / 3 + ratio / 9) - cost_s


def choose_interval(costs: Costs, seen: Interruptions) -> Choice:
    """Choose the interval between two checkpoints from what they cost and what has happened.

    >>> chosen = choose_interval(Costs(cost_s=0.1), Interruptions(num_holders=4))
    >>> round(chosen.interval_s), chosen.limit
    (111, '')
    """
    rate = total_loss_rate(seen)
    optimum_s, limit = daly_interval(costs.cost_s, 1 / rate), ""
    if optimum_s > LONGEST_S:
        optimum_s, limit = LONGEST_S, "longest"
    least = {
        "shortest": SHORTEST_S,
        "writing": costs.duration_s / MOST_WRITING,
        "cost": costs.cost_s / MOST_COST,
    }
    for name, least_s in least.items():
        if least_s > optimum_s:
            optimum_s, limit = least_s, name
    return Choice(
        interval_s=optimum_s, cost_s=costs.cost_s, loss_rate_per_h=rate * 3600, limit=limit
    )


def is_material(new: Choice, old: Choice | None) -> bool:
    """Whether the interval differs from the one that holds by more than measuring does."""
    if old is None:
        return True
    shorter, longer = sorted((new.interval_s, old.interval_s))
    return longer >= MATERIAL * shorter


_WHY = {
    "shortest": "the shortest",
    "longest": "the longest",
    "cost": f"so that they cost no more than {MOST_COST:.0%} of the time",
    "writing": f"so that they are written for no more than {MOST_WRITING:.0%} of the time",
}


def words_of(choice: Choice) -> str:
    """Say it to a person.

    >>> words_of(Choice(interval_s=84.2, cost_s=1.0, loss_rate_per_h=1.0, limit=""))
    'every 84 s: one costs 1.0 s of training, and all holders of the state are expected to be lost \
once in 1.0 h'
    """
    why = f", {_WHY[choice.limit]}" if choice.limit else ""
    return (
        f"every {choice.interval_s:.0f} s{why}: one costs {_span(choice.cost_s)} of training, and "
        f"all holders of the state are expected to be lost once in {1 / choice.loss_rate_per_h:.1f}"
        " h"
    )


def _span(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 1 else f"{seconds * 1000:.0f} ms"
