"""Plan the next launch request: lifecycle, size, zone, and what the budget allows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from etrain_jupyter.plugins.ec2.fleet_state import FleetState, LaunchRequest
from etrain_jupyter.plugins.ec2.head.fleet_messages import budget_too_small, full_price, no_capacity
from etrain_jupyter.plugins.ec2.head.view import Count, FleetWarning, Rules, View
from etrain_jupyter.plugins.ec2.ledger import LEAST_S
from etrain_jupyter.plugins.ec2.placement import (
    Offer,
    best_size,
    best_value,
    best_zone,
    pays_to_spread,
    traffic_usd_per_h,
    usable,
    within_budget,
    zone_wait_s,
)


@dataclass(frozen=True, kw_only=True)
class LaunchPlan:
    """The next request, if any."""

    state: FleetState
    request: LaunchRequest | None = None
    warnings: Sequence[FleetWarning] = ()


@dataclass(frozen=True, kw_only=True)
class _Option:
    """One way to launch, tried in order."""

    lifecycle: str
    num_workers: int
    is_fallback: bool = False
    """True if it uses on-demand machines only because spot capacity is missing."""


def plan_launch(
    state: FleetState, rules: Rules, view: View, count: Count, missing: int, ceiling: int
) -> LaunchPlan:
    """Return the request for up to ``missing`` workers: one lifecycle and one machine size.

    ===============================  ==============================================================
    fewer on demand than the base    on demand, for the base
    otherwise                        spot
    no spot capacity for long        spot; if no pool is usable, on demand up to ``most_on_demand``
    with ``policy: deadline``        on demand as the deadlines require, otherwise spot
    ===============================  ==============================================================
    """
    # `decide` has set short_since by now, at the latest in this tick.
    short_s = view.now - (state.short_since or view.now)
    # One request per tick, with one lifecycle. The next tick sees its machines as acknowledged, and
    # requests only the missing ones.
    options = _options(rules, view, count, missing, short_s)
    for option in options:
        state, candidates = _candidates(state, rules, view, count, option.lifecycle)
        if candidates:
            return _plan(state, rules, view, count, option, candidates, ceiling, short_s)
    if view.on_demand is not None:
        missing = sum(option.num_workers for option in options)
    text = no_capacity(state, rules, view, missing, short_s)
    return LaunchPlan(state=state, warnings=[FleetWarning(key="no capacity", text=text)])


def _options(rules: Rules, view: View, count: Count, missing: int, short_s: float) -> list[_Option]:
    if view.on_demand is not None:
        # On demand first, because the deadline depends on it. If neither type nor zone has
        # capacity, try spot.
        numbers = {"on-demand": view.on_demand - count.num_on_demand, "spot": missing}
        return [_Option(lifecycle=life, num_workers=n) for life, n in numbers.items() if n > 0]
    num_base = min(missing, rules.on_demand_base - count.num_on_demand)
    # The base comes first, without waiting, because it keeps a job going without spot
    # capacity.
    if num_base > 0:
        return [_Option(lifecycle="on-demand", num_workers=num_base)]
    options = [_Option(lifecycle="spot", num_workers=missing)]
    # A spare worker is not worth the full price.
    num_fallback = min(missing - view.spares, rules.most_on_demand - count.num_on_demand)
    if num_fallback > 0 and short_s >= rules.on_demand_after_s:
        # Listed after spot, so that a spot pool whose back-off has just ended is tried first.
        options.append(_Option(lifecycle="on-demand", num_workers=num_fallback, is_fallback=True))
    return options


def _plan(
    state: FleetState,
    rules: Rules,
    view: View,
    count: Count,
    option: _Option,
    candidates: list[Offer],
    ceiling: int,
    short_s: float,
) -> LaunchPlan:
    lifecycle = option.lifecycle
    most = _room_of(rules, view, count, option, ceiling)
    present = {m.type for m in view.machines} | {ack.type for ack in state.acks}
    candidates, most_nodes = best_value(candidates, lifecycle, view.type_rates, present, most)
    same, num_nodes = best_size(candidates, lifecycle, option.num_workers, most)
    num_nodes = num_nodes if most_nodes is None else min(num_nodes, most_nodes)
    room = _room_usd(rules, view, count)
    fit, num_fit = within_budget(same, lifecycle, num_nodes, room, disk_usd=rules.disk_usd)
    # If machines are left, training continues. Otherwise, at most the head costs money, and the
    # limit at which `decide` stops would never be reached, so end the jobs now.
    if not num_fit and not count.num and _is_spent(rules, view, same, lifecycle):
        return LaunchPlan(state=state.halt("budget", view.now))
    warnings = []
    if num_fit < num_nodes:
        text = budget_too_small(rules, view, num_nodes, num_fit)
        warnings.append(FleetWarning(key="budget too small", text=text))
    if not num_fit:
        return LaunchPlan(state=state, warnings=warnings)
    if option.is_fallback:
        text = full_price(rules, fit[0].type, num_fit, short_s)
        warnings.append(FleetWarning(key="full price", text=text))
    request = LaunchRequest(
        # Unique across all heads of the cluster: `life` counts the heads and `seq` the requests.
        # For a reused token, EC2 would return the machines of the old request.
        token=f"{rules.cluster_id}-{state.life}-{state.seq + 1}",
        lifecycle=lifecycle,
        num_nodes=num_fit,
        workers_each=fit[0].workers,
        overrides=tuple((offer.type, offer.zone) for offer in fit),
        is_urgent=view.on_demand is not None and lifecycle == "on-demand",
    )
    return LaunchPlan(state=state, request=request, warnings=warnings)


def _room_of(rules: Rules, view: View, count: Count, option: _Option, ceiling: int) -> int:
    """Return the largest number of workers to launch.

    A machine with several GPUs may have more workers than are missing.
    """
    if view.on_demand is None:
        # Spot machines may exceed the need up to the pool's maximum, on-demand machines not at all.
        return option.num_workers if option.lifecycle == "on-demand" else ceiling - count.num
    if option.lifecycle == "on-demand":
        # Exceed the need rather than miss the deadline.
        return rules.most_on_demand - count.num_on_demand
    return ceiling - count.only("spot").num


def _candidates(
    state: FleetState, rules: Rules, view: View, count: Count, lifecycle: str
) -> tuple[FleetState, list[Offer]]:
    """Return the offers that the placement allows, and the state, whose zone may have changed.

    ======================================  ===========================================
    placement allows several zones          all usable offers
    no workers yet                          the best zone
    no workers or offers in the zone        the zone of most workers
    no offers in the zone for 60 s, or 15 s
    if EC2's scores favor another zone:
    ``spread``, and ``auto`` if it pays     all usable offers
    ``migrate``                             the best zone; the workers follow
    otherwise                               wait
    ======================================  ===========================================
    """
    # A budget cannot be checked without a price, so a type without a price is not launched.
    has_budget = rules.max_hourly is not None or rules.max_total is not None
    found = usable(view.offers, state, lifecycle, view.now, must_know_price=has_budget)
    if not rules.is_single_zone or not found:
        return state, found
    zone = state.zone
    if not count.zones:
        zone = best_zone(view.offers, found, lifecycle)
    # The preferred zone is kept even if it has no machines. It changes before the wait below only
    # if it has neither machines nor offers.
    elif zone not in count.zones and not any(offer.zone == zone for offer in found):
        zone = count.main_zone
    here = [offer for offer in found if offer.zone == zone]
    short_s = view.now - (state.short_since or view.now)
    # Wait first: many back-offs end within a minute, and traffic between zones costs money.
    wait_s = zone_wait_s(
        score=max((one.score for one in view.offers if one.zone == zone), default=0),
        best_elsewhere=max((one.score for one in found if one.zone != zone), default=0),
    )
    if not here and short_s >= wait_s:
        if rules.on_shortage == "spread" or (
            rules.on_shortage == "auto" and _spread_pays(view, count, found, lifecycle)
        ):
            return state.with_(zone=zone), found
        if rules.on_shortage == "migrate":
            zone = best_zone(view.offers, found, lifecycle)
            here = [offer for offer in found if offer.zone == zone]
    return state.with_(zone=zone), here


def _spread_pays(view: View, count: Count, found: Sequence[Offer], lifecycle: str) -> bool:
    if not view.gradient_bytes:
        return False  # the traffic is unknown until the job has trained
    best = min(found, key=lambda one: (one.usd(lifecycle) or 0.0) / one.workers)
    more = max(1, view.wanted - count.num)
    traffic = traffic_usd_per_h(
        gradient_bytes=view.gradient_bytes,
        steps_per_s=view.steps_per_s,
        workers=count.num + more,
        zones=len(count.zones | {best.zone}),
    )
    return pays_to_spread(
        traffic_usd=traffic,
        # Weights, and usually two optimizer moments of the same size.
        state_bytes=3 * view.gradient_bytes,
        changes_per_h=more,
        num_more=more,
        spot_usd=(best.usd(lifecycle) or 0.0) / best.workers,
        on_demand_usd=(best.on_demand_usd or 0.0) / best.workers,
    )


def _room_usd(rules: Rules, view: View, count: Count) -> float | None:
    rooms = []
    if rules.max_hourly is not None:
        # The rate covers machines that EC2 lists. coming_usd covers those only acknowledged so far,
        # and unanswered requests at their highest price.
        rooms.append(rules.max_hourly - view.rate_usd - count.coming_usd)
    if rules.max_total is not None:
        rooms.append(_total_room_usd(rules.max_total, rules, view) - count.coming_usd)
    return max(0.0, min(rooms)) if rooms else None


def _total_room_usd(max_total: float, rules: Rules, view: View) -> float:
    #   left now  =  total - spent - (rate of current machines) * reserve
    #   New machines must satisfy  rate * (LEAST_S + reserve) <= left now, or they would trigger the
    #   stop that `decide` checks in the next tick.
    left_usd = max_total - view.spent_usd - view.rate_usd * rules.reserve_s / 3600
    return left_usd / ((LEAST_S + rules.reserve_s) / 3600)


def _is_spent(rules: Rules, view: View, offers: list[Offer], lifecycle: str) -> bool:
    """Return True if the rest of ``max_total`` is too small for a single machine."""
    if rules.max_total is None:
        return False
    room = max(0.0, _total_room_usd(rules.max_total, rules, view))
    return not within_budget(offers, lifecycle, 1, room, disk_usd=rules.disk_usd)[1]
