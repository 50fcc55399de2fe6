"""Recommend an option, with the reason, or name changes that would meet the goal."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from etrain_jupyter.display.numbers import dollars, duration
from etrain_jupyter.plugins.planner.planning.options import Option


@dataclass(frozen=True, kw_only=True)
class Goal:
    """The deadline and the budget of the user."""

    deadline_h: float | None = None
    budget_usd: float | None = None


@dataclass(frozen=True, kw_only=True)
class Advice:
    """The recommendation."""

    option: Option | None
    """None if no option meets the deadline and the budget."""
    reason: str


def advise(options: Sequence[Option], goal: Goal, larger: Sequence[Option] = ()) -> Advice:
    """Recommend an option.

    ===================  ===========================================================================
    deadline             the cheapest that meets it even if steps take a standard error longer,
                         else the cheapest that is predicted to meet it
    budget only          the fastest that costs at most the budget
    neither              the smallest product of time and cost on the Pareto front
    ===================  ===========================================================================

    Args:
        options: The options, at least one.
        goal: Deadline and budget.
        larger: Options beyond the maximum number of workers, in case no option is fast enough.
    """
    priced = [one for one in options if not math.isnan(one.usd)]
    among = priced or list(options)
    if goal.deadline_h is None and goal.budget_usd is None:
        best = min((one for one in among if one.is_on_front), key=lambda o: o.hours * o.cost)
        return Advice(option=best, reason=_balance_of(best, among))
    affordable = [one for one in among if _is_affordable(one, goal)]
    if not affordable:
        return Advice(option=None, reason=_too_expensive(among, goal))
    if goal.deadline_h is None:
        best = min(affordable, key=lambda one: (one.hours, one.cost))
        return Advice(
            option=best,
            reason=f"the fastest within the budget of {dollars(goal.budget_usd or 0.0)}",
        )
    deadline_h = goal.deadline_h
    in_time = [one for one in affordable if one.hours <= deadline_h]
    if not in_time:
        return Advice(option=None, reason=_too_late(affordable, among, larger, goal))
    safe = [one for one in in_time if one.late_hours <= deadline_h]
    best = min(safe or in_time, key=lambda one: (one.cost, one.hours))
    what = "the cheapest" if priced else "the fewest worker hours"
    reason = f"{what} that meets the deadline of {duration(deadline_h)}"
    if safe:
        reason += (
            f" even if steps are {best.error:.0%} slower, with "
            f"{duration(deadline_h - best.hours)} to spare"
        )
    else:
        reason += (
            f", but only if the prediction holds: {best.error:.0%} slower steps would take "
            f"{duration(best.late_hours)}"
        )
    return Advice(option=best, reason=reason)


def _is_affordable(option: Option, goal: Goal) -> bool:
    # An option without a price cannot exceed a budget, but does not meet one either.
    return goal.budget_usd is None or option.usd <= goal.budget_usd


def _balance_of(best: Option, among: Sequence[Option]) -> str:
    fastest = min(among, key=lambda one: one.hours)
    cheapest = min(among, key=lambda one: one.cost)
    is_priced = not math.isnan(best.usd)
    if best == fastest == cheapest:
        return f"the fastest and the {'cheapest' if is_priced else 'fewest worker hours'}"
    what = f"the smallest product of time and {'cost' if is_priced else 'worker hours'}"
    others = []
    if best != fastest:
        others.append(
            f"{fastest.describe()} would be {duration(best.hours - fastest.hours)} faster for "
            f"{_cost_of(fastest)}"
        )
    if best != cheapest:
        others.append(
            f"{cheapest.describe()} would cost {_cost_of(cheapest)} and take "
            f"{duration(cheapest.hours)}"
        )
    return f"{what}; {', and '.join(others)}"


def _cost_of(option: Option) -> str:
    if math.isnan(option.usd):
        return f"{option.worker_hours:.2g} worker hours"
    return dollars(option.usd)


def _too_expensive(among: Sequence[Option], goal: Goal) -> str:
    budget_usd = goal.budget_usd or 0.0
    priced = [one for one in among if not math.isnan(one.usd)]
    if not priced:
        return (
            f"the budget of {dollars(budget_usd)} cannot be checked, because no option has a "
            "price. Name a pool with prices (--pool) or machine types (--types)"
        )
    cheapest = min(priced, key=lambda one: one.usd)
    return (
        f"no option costs at most {dollars(budget_usd)}. The cheapest, {cheapest.describe()}, "
        f"costs {dollars(cheapest.usd)}, {dollars(cheapest.usd - budget_usd)} more. Alternatives: "
        f"--budget {math.ceil(cheapest.usd * 100) / 100:g}, or "
        f"{budget_usd / cheapest.usd:.0%} of the samples"
    )


def _as_deadline(hours: float) -> str:
    """Return a deadline of at least this many hours, as a user would type it.

    >>> _as_deadline(0.31), _as_deadline(7.26)
    ('20min', '7.3h')
    """
    minutes = math.ceil(hours * 60 + 1)
    return f"{minutes}min" if minutes < 120 else f"{math.ceil(minutes / 6) / 10:g}h"


def _too_late(
    affordable: Sequence[Option], among: Sequence[Option], larger: Sequence[Option], goal: Goal
) -> str:
    deadline_h = goal.deadline_h or 0.0
    fastest = min(affordable, key=lambda one: one.hours)
    within = f" within {dollars(goal.budget_usd)}" if goal.budget_usd is not None else ""
    remedies = [f"--deadline {_as_deadline(fastest.hours)}"]
    more = [one for one in larger if one.hours <= deadline_h and _is_affordable(one, goal)]
    if more:
        least = min(more, key=lambda one: (one.workers, one.cost))
        remedies.append(f"--workers {least.workers} ({least.describe()}, {_cost_of(least)})")
    dearer = [one for one in among if one.hours <= deadline_h and not math.isnan(one.usd)]
    if dearer:
        cheapest = min(dearer, key=lambda one: one.usd)
        remedies.append(f"--budget {math.ceil(cheapest.usd * 100) / 100:g} ({cheapest.describe()})")
    remedies.append(f"{deadline_h / fastest.hours:.0%} of the samples")
    return (
        f"no option finishes in {duration(deadline_h)}{within}. The fastest, "
        f"{fastest.describe()}, takes {duration(fastest.hours)}, "
        f"{duration(fastest.hours - deadline_h)} too long. Alternatives: "
        f"{'; '.join(remedies)}"
    )
