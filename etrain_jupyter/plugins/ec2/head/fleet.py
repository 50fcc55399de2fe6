"""Decide which machines to launch and which to terminate: pure rules, with time as an argument.

``decide`` combines EC2's listing, the launches that EC2 acknowledged but does not list yet, and the
number of workers wanted. The first matching case decides:

==============================  ==================================================================
case                            decision
==============================  ==================================================================
launches have stopped           launch nothing; see ``_decide_halted``
cost per hour above the limit   release the most expensive machines; launch nothing in this tick
too few workers                 launch in pools that have capacity, within the budget
too many workers                release after ``linger_s``; immediately above the maximum
all in place                    with ``migrate``, replace one machine outside the zone
==============================  ==================================================================

With ``policy: deadline``, too few and too many apply to spot and on-demand workers separately: as
many spot workers as wanted, and as many on-demand workers as the jobs' deadlines require.

The number of workers never exceeds ``max_workers``, even if EC2's listings are late. (With
``policy: deadline``, this applies to the workers of each lifecycle: a spot machine boots while the
on-demand machine that it replaces still trains.)
"""

from __future__ import annotations

from dataclasses import dataclass

from etrain_jupyter.plugins.ec2.fleet_state import VISIBLE_S, FleetState
from etrain_jupyter.plugins.ec2.head.fleet_messages import over_hourly_budget
from etrain_jupyter.plugins.ec2.head.launch_plan import plan_launch
from etrain_jupyter.plugins.ec2.head.view import (
    Count,
    Decision,
    FleetWarning,
    Machine,
    Rules,
    View,
    count_workers,
)
from etrain_jupyter.plugins.ec2.placement import usable


def decide(state: FleetState, rules: Rules, view: View) -> Decision:
    """Return what to do now, and the next state. ``state`` has been updated with EC2's listing."""
    now = view.now
    # EC2's listings are eventually consistent. A machine that EC2 acknowledged counts as running
    # until it is listed, or until a query by id shows that it does not exist.
    lookups = tuple(ack.id for ack in state.acks if now - ack.at > VISIBLE_S)
    state = _forget_old_requests(state, view)
    if rules.max_total is not None and not state.halted:
        # Stop before the budget is spent, because all machines are charged until they have saved a
        # last checkpoint and ended.
        reserve_usd = view.rate_usd * rules.reserve_s / 3600
        if view.spent_usd + reserve_usd >= rules.max_total:
            state = state.halt("budget", now)
    state, overdue = _overdue(state, rules, view)
    # Machines that never booted do not count, so that their replacements start in this tick.
    count = count_workers(state, view, {id for id, _ in overdue})
    if state.halted:
        return _decide_halted(state, rules, view, count, overdue, lookups)

    warnings: list[FleetWarning] = []
    # The replacement of a machine with an interruption notice starts while the machine drains.
    ceiling = rules.max_workers + count.num_at_risk
    spares = view.spares if view.wanted else 0
    target = min(max(0, view.wanted - _num_not_replaced(view)) + spares, ceiling)
    releases: list[Release] = []
    # The usual cause is that spot prices have risen: `plan_launch` launches nothing above the
    # limit.
    if rules.max_hourly is not None and view.rate_usd > rules.max_hourly + 1e-9:
        releases = over_budget(count, rules, view)
        if releases:
            text = over_hourly_budget(view.rate_usd, rules.max_hourly, len(releases))
            warnings.append(FleetWarning(key="over budget", text=text))
            count = count.without({id for id, _ in releases})
    gap = _gap_of(view, count, target)
    # The shortage continues while a request is unanswered. The duration of the shortage determines
    # when to use other zones and on-demand machines.
    is_short = gap.is_short or count.num_unanswered > 0
    short_since = (state.short_since or now) if is_short else None
    surplus_since = (state.surplus_since or now) if gap.too_many > 0 else None
    state = state.with_(short_since=short_since, surplus_since=surplus_since)
    # Repeat unanswered requests in each tick, because the same token returns the same machines.
    launches = tuple(request for request, _ in state.unanswered if view.wanted > 0)
    # Launch nothing if machines were released for the budget, because they are charged until they
    # end.
    if gap.is_short and not releases:
        plan = plan_launch(state, rules, view, count, gap.missing, ceiling)
        state = plan.state
        launches = (*launches, *([plan.request] if plan.request else []))
        warnings += plan.warnings
    elif gap.too_many > 0:
        is_late = now - (surplus_since or now) >= rules.linger_s
        # Surplus workers stay warm for the next job during the linger time, unless they exceed the
        # maximum.
        if is_late or gap.count.num_sure > ceiling:
            releases += surplus(gap.count, state, rules, target)
    elif gap.missing == 0 and rules.is_single_zone and rules.on_shortage == "migrate":
        releases += outside_zone(state, view, count)
    if view.on_demand is not None:
        releases += off_schedule(count, view.on_demand, {id for id, _ in releases})
    return Decision(
        state=state,
        launches=launches,
        releases=tuple(releases),
        terminations=tuple(overdue),
        lookups=lookups,
        warnings=tuple(warnings),
    )


def _num_not_replaced(view: View) -> int:
    """Return the number of workers that leave because the jobs are on schedule without them."""
    # The coordinator wants a replacement for each worker that leaves; see `Sharing`.
    if view.on_demand is None:
        return 0
    leaving = (m for m in view.machines if m.is_leaving and m.lifecycle == "on-demand")
    return sum(machine.workers for machine in leaving)


@dataclass(frozen=True, kw_only=True)
class _Gap:
    """Difference between the workers and their target."""

    missing: int
    """Workers to launch; spot workers with ``policy: deadline``."""
    too_many: int
    is_short: bool
    count: Count
    """The workers that ``missing`` and ``too_many`` refer to."""


def _gap_of(view: View, count: Count, target: int) -> _Gap:
    # Two counts, because EC2 may or may not have launched the machines of an unanswered request:
    # `num` includes them, so that they are not launched twice; `num_sure` does not, so that no
    # running machine is released in favour of one that may not exist.
    own = count if view.on_demand is None else count.only("spot")
    missing = target - own.num
    is_short = missing > 0
    if view.on_demand is not None:
        is_short |= view.on_demand > count.num_on_demand
    return _Gap(missing=missing, too_many=own.num_sure - target, is_short=is_short, count=own)


def _forget_old_requests(state: FleetState, view: View) -> FleetState:
    """Without demand, drop unanswered requests as soon as EC2 would list their machines."""
    # While there is demand, `decide` repeats an unanswered request until there is an answer.
    # Without demand, its machines (if any) are listed after VISIBLE_S, and released like all
    # others.
    for request, at in state.unanswered:
        if (state.halted or view.wanted == 0) and view.now - at > VISIBLE_S:
            state = state.forgot(request)
    return state


def _overdue(state: FleetState, rules: Rules, view: View) -> tuple[FleetState, list[Release]]:
    """Find nodes whose workers did not connect in time; each counts as a boot failure."""
    # Nodes turn themselves off after lifetime.boot, too. This covers those whose timer never ran.
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
    """Launch nothing; if the budget is nearly spent, terminate machines after the drain time."""
    is_spent = state.halted == "budget"
    ends = overdue
    #   halted_at                        + reserve_s               max_total spent
    #       |---- jobs checkpoint, drain ----|---- terminate all -------|
    if is_spent and view.now - state.halted_at >= rules.reserve_s:
        ends = [(machine.id, "the budget is spent") for machine in view.machines]
    # If the budget is spent, release machines as soon as they are idle. After boot failures or
    # refusals, keep them while they are wanted, because the coordinator saves and stops the jobs
    # first.
    target = 0 if is_spent else min(view.wanted, count.num_sure)
    releases = [] if count.num_sure == target else surplus(count, state, rules, target)
    return Decision(
        state=state, releases=tuple(releases), terminations=tuple(ends), lookups=lookups
    )


Release = tuple[str, str]
"""Id of a machine, and why it is released."""


def over_budget(count: Count, rules: Rules, view: View) -> list[Release]:
    """Release the most expensive machines until the rest costs at most ``max_hourly``."""
    prices = {(offer.type, offer.zone): offer for offer in view.offers}
    limit = rules.max_hourly or 0.0

    def usd(machine: Machine) -> float:
        offer = prices.get((machine.type, machine.zone))
        return (offer.usd(machine.lifecycle) or 0.0) if offer else 0.0

    # Machines that are leaving are still charged for, but not for long.
    leaving_usd = sum(usd(m) + rules.disk_usd for m in view.machines if m.is_leaving)
    rate, releases = view.rate_usd - leaving_usd, []
    # Release machines with a notice first, because EC2 is likely to reclaim them anyway.
    for machine in sorted(count.staying, key=lambda m: (m.is_at_risk, usd(m)), reverse=True):
        if rate <= limit + 1e-9:
            break
        rate -= usd(machine) + rules.disk_usd
        releases.append((machine.id, "above budget.max_hourly"))
    return releases


def surplus(count: Count, state: FleetState, rules: Rules, target: int) -> list[Release]:
    """Release machines beyond ``target`` workers.

    Busy machines stay. Release order: at risk of an interruption, not ready, outside the zone, on
    demand, newest. ``on_demand_base`` workers stay on demand.
    """
    releases = []
    too_many = count.num_sure - target
    num_on_demand = sum(m.workers for m in count.staying if m.lifecycle == "on-demand")
    num_base = min(rules.on_demand_base, target)
    candidates = sorted(
        (m for m in count.staying if not m.is_busy),
        key=lambda m: (
            not m.is_at_risk,
            m.is_ready,
            m.zone == state.zone,
            m.lifecycle == "spot",
            -m.launched_at,
            m.id,
        ),
    )
    for machine in candidates:
        # Releasing it would leave too few workers; a smaller machine may come later in the order.
        if machine.workers > too_many:
            continue
        if machine.lifecycle == "on-demand":
            # Spot machines beyond the target are released instead, even if they come later.
            if num_on_demand - machine.workers < num_base:
                continue
            num_on_demand -= machine.workers
        too_many -= machine.workers
        releases.append((machine.id, "no longer needed"))
    return releases


def off_schedule(count: Count, target: int, already: set[str]) -> list[Release]:
    """Release on-demand machines beyond ``target`` workers, which the deadlines no longer need.

    Machines that still boot are released first, then the newest. A machine in use is released, too:
    its workers leave at a step boundary, and the job continues on spot workers.
    """
    # Machines of an unanswered request may not exist, so they do not replace running ones.
    here = [m for m in count.staying if m.lifecycle == "on-demand" and m.id not in already]
    too_many = sum(m.workers for m in here) - target
    releases = []
    for machine in sorted(here, key=lambda m: (m.is_ready, -m.launched_at, m.id)):
        if machine.workers <= too_many:
            too_many -= machine.workers
            releases.append((machine.id, "the job is on schedule without it"))
    return releases


def outside_zone(state: FleetState, view: View, count: Count) -> list[Release]:
    """Release one machine outside the zone once all are ready; it is replaced inside the zone."""
    # One at a time, and only from a settled fleet. The job loses at most one machine's workers, and
    # the next move waits until the replacement is training.
    is_settled = not count.coming and all(m.is_ready for m in count.staying)
    outside = [m for m in count.staying if m.zone != state.zone]
    if not (state.zone and outside and is_settled):
        return []
    offers = usable(view.offers, state, "spot", view.now, must_know_price=True)
    # Without capacity in the zone, the release would only shrink the job. If the zone has no other
    # machine, `launch_plan` may still choose another zone.
    has_offer = any(offer.zone == state.zone for offer in offers)
    if not has_offer or not any(m.zone == state.zone for m in count.staying):
        return []
    machine = min(outside, key=lambda m: (m.is_busy, -m.launched_at, m.id))
    return [(machine.id, f"the others are in {state.zone}")]
