"""Which machines to launch and which to end: rules, without any I/O; time is an argument.

``decide`` looks at what EC2 lists, at what it has acknowledged and does not list yet, and at what
is wanted. What it may do: launch in pools that are not known to be empty, as far as the budget
goes; let machines go that nobody wants; end those that never boot; stop before the money does.
There are never more workers than ``max_workers``, whatever EC2 lists and however late.
"""

from __future__ import annotations

from etrain_jupyter.pools.ec2.fleet_state import VISIBLE_S, FleetState, LaunchRequest
from etrain_jupyter.pools.ec2.head.surplus import stranger, surplus, too_dear
from etrain_jupyter.pools.ec2.head.view import Count, Decision, Rules, View, count_workers
from etrain_jupyter.pools.ec2.ledger import LEAST_S
from etrain_jupyter.pools.ec2.placement import (
    Offer,
    best_size,
    best_zone,
    usable,
    within_budget,
)

MOVE_AFTER_S = 60.0
"""A zone that could give nothing for so long is left, or others are used besides."""


def decide(memory: FleetState, rules: Rules, view: View) -> Decision:
    """Return what to do now, and what to remember.

    Args:
        memory: As the last decision and the answers since then left it, with ``listed`` applied.
        rules: What the spec says.
        view: What EC2 lists and what is wanted.
    """
    now = view.now
    warnings: list[tuple[str, str]] = []
    lookups = tuple(ack.id for ack in memory.acks if now - ack.at > VISIBLE_S)
    memory = _forget_old_requests(memory, view)
    if rules.max_total is not None and not memory.halted:
        reserve_usd = view.rate_usd * rules.reserve_s / 3600
        if view.spent_usd + reserve_usd >= rules.max_total:
            memory = memory.halt("budget", now)
    memory, overdue = _overdue(memory, rules, view)
    count = count_workers(memory, view, {id for id, _ in overdue})
    if memory.halted:
        return _stopping(memory, rules, view, count, overdue, lookups)
    ceiling = rules.max_workers + count.num_at_risk
    target = min(view.wanted, ceiling)
    releases: list[tuple[str, str]] = []
    if rules.max_hourly is not None and view.rate_usd > rules.max_hourly + 1e-9:
        releases += too_dear(count, rules, view, warnings)
    missing = target - count.num
    too_many = count.num_sure - target
    is_short = missing > 0 or count.num_unanswered > 0
    short_since = (memory.short_since or now) if is_short else None
    surplus_since = (memory.surplus_since or now) if too_many > 0 else None
    memory = memory.with_(short_since=short_since, surplus_since=surplus_since)
    # As often as it takes: the same token gives the same machines.
    launches = tuple(request for request, _ in memory.unanswered if view.wanted > 0)
    if missing > 0 and not releases:
        memory, request = _launch(memory, rules, view, count, missing, ceiling, warnings)
        launches = (*launches, *([request] if request else []))
    elif too_many > 0:
        is_late = now - (surplus_since or now) >= rules.linger_s
        if is_late or count.num_sure > ceiling:
            releases += surplus(count, memory, rules, target)
    elif missing == 0 and rules.is_single_zone and rules.on_shortage == "migrate":
        releases += stranger(memory, view, count)
    return Decision(
        memory=memory,
        launches=launches,
        releases=tuple(releases),
        terminations=tuple(overdue),
        lookups=lookups,
        warnings=tuple(warnings),
    )


def _forget_old_requests(memory: FleetState, view: View) -> FleetState:
    """Give up requests that nobody needs any more, once what they may have got would be listed."""
    for request, at in memory.unanswered:
        if (memory.halted or view.wanted == 0) and view.now - at > VISIBLE_S:
            memory = memory.forgot(request)
    return memory


def _overdue(
    memory: FleetState, rules: Rules, view: View
) -> tuple[FleetState, list[tuple[str, str]]]:
    """Find nodes that never said hello in time; each counts as one that cannot boot."""
    late = [
        m
        for m in view.machines
        if not m.is_ready and not m.is_leaving and view.now - m.launched_at > rules.boot_s
    ]
    for machine in late:
        memory = memory.failed_to_boot(machine.id, rules.max_boot_failures, view.now)
    why = f"no worker said hello within {rules.boot_s:g} s"
    return memory, [(machine.id, why) for machine in late]


def _stopping(
    memory: FleetState,
    rules: Rules,
    view: View,
    count: Count,
    overdue: list[tuple[str, str]],
    lookups: tuple[str, ...],
) -> Decision:
    """Launch nothing; when the money is about to end, end what has not left by then."""
    is_spent = memory.halted == "budget"
    ends = overdue
    if is_spent and view.now - memory.halted_at >= rules.reserve_s:
        ends = [(machine.id, "the budget is spent") for machine in view.machines]
    target = 0 if is_spent else min(view.wanted, count.num_sure)
    releases = [] if count.num_sure == target else surplus(count, memory, rules, target)
    return Decision(
        memory=memory, releases=tuple(releases), terminations=tuple(ends), lookups=lookups
    )


def _launch(
    memory: FleetState,
    rules: Rules,
    view: View,
    count: Count,
    missing: int,
    ceiling: int,
    warnings: list[tuple[str, str]],
) -> tuple[FleetState, LaunchRequest | None]:
    """Return what to ask for next: one lifecycle and one size at a time."""
    num_base = min(missing, rules.on_demand_base - count.num_on_demand)
    plans = [("on-demand", num_base)] if num_base > 0 else [("spot", missing)]
    short_s = view.now - (memory.short_since or view.now)
    num_fallback = min(missing, rules.most_on_demand - count.num_on_demand)
    if num_base <= 0 and num_fallback > 0 and short_s >= rules.on_demand_after_s:
        plans.append(("on-demand", num_fallback))
    for lifecycle, number in plans:
        memory, candidates = _candidates(memory, rules, view, count, lifecycle)
        if not candidates:
            continue
        most = number if lifecycle == "on-demand" else ceiling - count.num
        same, num_nodes = best_size(candidates, lifecycle, number, most)
        room = _room_usd(rules, view, count)
        fit, num_fit = within_budget(same, lifecycle, num_nodes, room, disk_usd=rules.disk_usd)
        if not num_fit and not count.num and _is_spent(rules, view, same, lifecycle):
            return memory.halt("budget", view.now), None
        if num_fit < num_nodes:
            warnings.append(("no money", _no_money(rules, view, num_nodes, num_fit)))
        if num_fit:
            if (lifecycle, num_base <= 0) == ("on-demand", True):
                text = _full_price(rules, fit[0].type, num_fit, short_s)
                warnings.append(("full price", text))
            request = LaunchRequest(
                token=f"{rules.cluster_id}-{memory.life}-{memory.seq + 1}",
                lifecycle=lifecycle,
                num_nodes=num_fit,
                workers_each=fit[0].workers,
                overrides=tuple((offer.type, offer.zone) for offer in fit),
            )
            return memory, request
        return memory, None
    warnings.append(("no capacity", _no_capacity(memory, rules, view, missing, short_s)))
    return memory, None


def _candidates(
    memory: FleetState, rules: Rules, view: View, count: Count, lifecycle: str
) -> tuple[FleetState, list[Offer]]:
    """Return the offers that placement allows; the zone of the workers may change."""
    has_budget = rules.max_hourly is not None or rules.max_total is not None
    found = usable(view.offers, memory, lifecycle, view.now, must_know_price=has_budget)
    if not rules.is_single_zone or not found:
        return memory, found
    zone = memory.zone
    if not count.zones:
        zone = best_zone(view.offers, found, lifecycle)
    elif zone not in count.zones and not any(offer.zone == zone for offer in found):
        zone = count.main_zone
    here = [offer for offer in found if offer.zone == zone]
    short_s = view.now - (memory.short_since or view.now)
    if not here and short_s >= MOVE_AFTER_S:
        if rules.on_shortage == "spread":
            return memory.with_(zone=zone), found
        if rules.on_shortage == "migrate":
            zone = best_zone(view.offers, found, lifecycle)
            here = [offer for offer in found if offer.zone == zone]
    return memory.with_(zone=zone), here


def _room_usd(rules: Rules, view: View, count: Count) -> float | None:
    """Return the US dollars an hour that new machines may cost; None without a budget."""
    rooms = []
    if rules.max_hourly is not None:
        rooms.append(rules.max_hourly - view.rate_usd - count.coming_usd)
    if rules.max_total is not None:
        rooms.append(_total_room_usd(rules.max_total, rules, view) - count.coming_usd)
    return max(0.0, min(rooms)) if rooms else None


def _total_room_usd(max_total: float, rules: Rules, view: View) -> float:
    """Return the US dollars an hour that new machines may cost without being what ends all.

    They owe a minute at once, and then all machines must have the money to stop in time.
    """
    left_usd = max_total - view.spent_usd - view.rate_usd * rules.reserve_s / 3600
    return left_usd / ((LEAST_S + rules.reserve_s) / 3600)


def _is_spent(rules: Rules, view: View, offers: list[Offer], lifecycle: str) -> bool:
    """Whether what is left of ``max_total`` does not pay for a single machine."""
    if rules.max_total is None:
        return False
    room = max(0.0, _total_room_usd(rules.max_total, rules, view))
    return not within_budget(offers, lifecycle, 1, room, disk_usd=rules.disk_usd)[1]


def _no_money(rules: Rules, view: View, num_nodes: int, num_fit: int) -> str:
    bounds = []
    if rules.max_hourly is not None:
        bounds.append(f"budget.max_hourly is {rules.max_hourly:g}")
    if rules.max_total is not None:
        bounds.append(f"budget.max_total is {rules.max_total:g}, spent {view.spent_usd:.2f}")
    return (
        f"The budget lets in {num_fit} of {num_nodes} more nodes: {view.rate_usd:.2f} US dollars "
        f"an hour now, {' and '.join(bounds)}. Training goes on with fewer. Raise the budget in "
        "pools.yaml, or lower workers.max."
    )


def _no_capacity(memory: FleetState, rules: Rules, view: View, missing: int, short_s: float) -> str:
    workers = "1 worker" if missing == 1 else f"{missing} workers"
    since = f" since {short_s:.0f} s" if short_s >= 1 else " now"
    refused = {key: one for key, one in memory.back_offs.items() if one.until > view.now}
    where = ""
    if refused:
        types = sorted({type for type, _, _ in refused})
        zones = sorted({zone for _, zone, _ in refused})
        wait_s = min(one.until for one in refused.values()) - view.now
        where = (
            f", of {', '.join(types)} in {', '.join(zones)}. The next attempt is in {wait_s:.0f} s"
        )
    after = f"after {rules.on_demand_after_s:g} s of it"
    if rules.most_on_demand:
        more = (
            f"At most {rules.most_on_demand} come on demand {after}. Add types or zones to capacity"
        )
    else:
        more = (
            f"Add types or zones to capacity, or set capacity.on_demand.max to pay in full {after}"
        )
    return f"EC2 has no capacity for {workers}{since}{where}. Training goes on when it has. {more}."


def _full_price(rules: Rules, type: str, num_nodes: int, short_s: float) -> str:
    nodes = "1 node" if num_nodes == 1 else f"{num_nodes} nodes"
    return (
        f"EC2 has had no spot capacity since {short_s:.0f} s: {nodes} of {type} asked for on "
        f"demand, at the full price (capacity.on_demand: after {rules.on_demand_after_s:g} s, max "
        f"{rules.most_on_demand})."
    )
