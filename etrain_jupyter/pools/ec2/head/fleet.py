"""Decide which machines to launch and which to end: pure rules; time is an argument.

``decide`` combines what EC2 lists, what it has acknowledged but does not list yet, and the number
of workers wanted. It launches in pools that have capacity, within the budget; releases machines
that are not needed; ends those that never boot; and stops before the budget is spent. There are
never more workers than ``max_workers``, however late EC2's listings are.
"""

from __future__ import annotations

from etrain_jupyter.pools.ec2.fleet_state import VISIBLE_S, FleetState
from etrain_jupyter.pools.ec2.head.fleet_messages import over_hourly_budget
from etrain_jupyter.pools.ec2.head.launch_plan import plan_launch
from etrain_jupyter.pools.ec2.head.surplus import Release, outside_zone, over_budget, surplus
from etrain_jupyter.pools.ec2.head.view import (
    Count,
    Decision,
    FleetWarning,
    Rules,
    View,
    count_workers,
)


def decide(state: FleetState, rules: Rules, view: View) -> Decision:
    """Return what to do now, and the next state.

    Args:
        state: State after the last decision and the answers since then, ``listed`` applied.
        rules: The limits of the spec.
        view: What EC2 lists and how many workers are wanted.
    """
    now = view.now
    lookups = tuple(ack.id for ack in state.acks if now - ack.at > VISIBLE_S)
    state = _forget_old_requests(state, view)
    if rules.max_total is not None and not state.halted:
        reserve_usd = view.rate_usd * rules.reserve_s / 3600
        if view.spent_usd + reserve_usd >= rules.max_total:
            state = state.halt("budget", now)
    state, overdue = _overdue(state, rules, view)
    count = count_workers(state, view, {id for id, _ in overdue})
    if state.halted:
        return _decide_halted(state, rules, view, count, overdue, lookups)

    warnings: list[FleetWarning] = []
    ceiling = rules.max_workers + count.num_at_risk
    target = min(view.wanted, ceiling)
    releases: list[Release] = []
    if rules.max_hourly is not None and view.rate_usd > rules.max_hourly + 1e-9:
        releases = over_budget(count, rules, view)
        if releases:
            text = over_hourly_budget(view.rate_usd, rules.max_hourly, len(releases))
            warnings.append(FleetWarning(key="over budget", text=text))
            count = count.without({id for id, _ in releases})
    missing = target - count.num
    too_many = count.num_sure - target
    is_short = missing > 0 or count.num_unanswered > 0
    short_since = (state.short_since or now) if is_short else None
    surplus_since = (state.surplus_since or now) if too_many > 0 else None
    state = state.with_(short_since=short_since, surplus_since=surplus_since)
    # Repeat unanswered requests each time: the same token returns the same machines.
    launches = tuple(request for request, _ in state.unanswered if view.wanted > 0)
    if missing > 0 and not releases:
        plan = plan_launch(state, rules, view, count, missing, ceiling)
        state = plan.state
        launches = (*launches, *([plan.request] if plan.request else []))
        warnings += plan.warnings
    elif too_many > 0:
        is_late = now - (surplus_since or now) >= rules.linger_s
        if is_late or count.num_sure > ceiling:
            releases += surplus(count, state, rules, target)
    elif missing == 0 and rules.is_single_zone and rules.on_shortage == "migrate":
        releases += outside_zone(state, view, count)
    return Decision(
        state=state,
        launches=launches,
        releases=tuple(releases),
        terminations=tuple(overdue),
        lookups=lookups,
        warnings=tuple(warnings),
    )


def _forget_old_requests(state: FleetState, view: View) -> FleetState:
    """Drop unanswered requests that are not needed, once EC2 would list their machines."""
    for request, at in state.unanswered:
        if (state.halted or view.wanted == 0) and view.now - at > VISIBLE_S:
            state = state.forgot(request)
    return state


def _overdue(state: FleetState, rules: Rules, view: View) -> tuple[FleetState, list[Release]]:
    """Find nodes whose workers did not connect in time; each counts as a boot failure."""
    late = [
        m
        for m in view.machines
        if not m.is_ready and not m.is_leaving and view.now - m.launched_at > rules.boot_s
    ]
    for machine in late:
        state = state.failed_to_boot(machine.id, rules.max_boot_failures, view.now)
    why = f"no worker connected within {rules.boot_s:g} s"
    return state, [(machine.id, why) for machine in late]


def _decide_halted(
    state: FleetState,
    rules: Rules,
    view: View,
    count: Count,
    overdue: list[Release],
    lookups: tuple[str, ...],
) -> Decision:
    """Launch nothing; with the budget nearly spent, end the machines after the drain time."""
    is_spent = state.halted == "budget"
    ends = overdue
    if is_spent and view.now - state.halted_at >= rules.reserve_s:
        ends = [(machine.id, "the budget is spent") for machine in view.machines]
    target = 0 if is_spent else min(view.wanted, count.num_sure)
    releases = [] if count.num_sure == target else surplus(count, state, rules, target)
    return Decision(
        state=state, releases=tuple(releases), terminations=tuple(ends), lookups=lookups
    )
