"""Launching and ending machines: one rule at a time."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from etrain_jupyter.plugins.ec2.fleet_state import (
    Ack,
    FleetResult,
    FleetState,
    LaunchFailure,
    LaunchRequest,
)
from etrain_jupyter.plugins.ec2.head.fleet import decide
from etrain_jupyter.plugins.ec2.head.view import Decision, Machine, Rules, View
from etrain_jupyter.plugins.ec2.placement import Offer

A, B = "us-east-1a", "us-east-1b"
OFFERS = (
    Offer(type="g5.xlarge", zone=A, spot_usd=0.40, on_demand_usd=1.0),
    Offer(type="g6.xlarge", zone=A, spot_usd=0.38, on_demand_usd=0.8),
    Offer(type="g5.xlarge", zone=B, spot_usd=0.45, on_demand_usd=1.0),
)
RULES = Rules(cluster_id="c1", max_workers=4)
T = 1_000_000.0


def machine(number: int, **facts: Any) -> Machine:
    usual: dict[str, Any] = {"type": "g6.xlarge", "zone": A, "lifecycle": "spot", "workers": 1}
    usual |= {"launched_at": T, "is_ready": True}
    return Machine(id=f"i-{number}", **usual | facts)


def machines(num: int, **facts: Any) -> tuple[Machine, ...]:
    return tuple(machine(number, **facts) for number in range(num))


def look(
    state: FleetState = FleetState(),  # noqa: B008
    *,
    rules: Rules = RULES,
    wanted: int = 2,
    now: float = T,
    **facts: Any,
) -> Decision:
    return decide(state, rules, View(now=now, wanted=wanted, **{"offers": OFFERS} | facts))


def only(decision: Decision) -> LaunchRequest:
    assert len(decision.launches) == 1
    return decision.launches[0]


def refused(request: LaunchRequest, kind: str = "capacity") -> FleetResult:
    return FleetResult(
        refusals=tuple(
            LaunchFailure(type=type, zone=zone, code="ICE", message="", kind=kind)
            for type, zone in request.overrides
        )
    )


def granted(request: LaunchRequest, *ids: str, now: float = T) -> FleetResult:
    type, zone = request.overrides[0]
    life, workers = request.lifecycle, request.workers_each
    return FleetResult(
        acks=tuple(
            Ack(id=id, type=type, zone=zone, lifecycle=life, workers=workers, at=now) for id in ids
        )
    )


def after(decision: Decision, answer: FleetResult, now: float = T) -> FleetState:
    request = only(decision)
    return decision.state.sent(request, now).answered(request, answer, now)


def test_missing_workers_are_requested_in_one_zone_with_all_its_types() -> None:
    request = only(look(wanted=3))

    assert (request.num_nodes, request.lifecycle, request.token) == (3, "spot", "c1-1-1")
    assert request.overrides == (("g5.xlarge", A), ("g6.xlarge", A))


def test_unlisted_machines_count() -> None:
    first = look()
    state = after(first, granted(only(first), "i-1", "i-2"))

    assert look(state, now=T + 119).launches == ()
    assert look(state, now=T + 121).launches == ()
    assert look(state, now=T + 121).lookups == ("i-1", "i-2")
    assert only(look(state.looked_up([], ["i-1", "i-2"], T + 121), now=T + 121)).num_nodes == 2


def test_listed_machines_are_counted_once() -> None:
    first = look()
    state = after(first, granted(only(first), "i-0", "i-1")).listed(["i-0", "i-1"])

    assert look(state, machines=machines(2)).launches == ()
    assert only(look(state, machines=machines(1))).num_nodes == 1


def test_unanswered_request_is_retried_with_the_same_token() -> None:
    first = look()
    state = first.state.sent(only(first), T)

    again = look(state, now=T + 5)
    assert again.launches == first.launches
    # Also when its machines are listed meanwhile, and they are not taken for too many.
    later = look(state, now=T + 500, machines=machines(2))
    assert (later.launches, later.releases) == (first.launches, ())
    assert look(state, now=T + 121, wanted=0).state.unanswered == ()


def test_tokens_differ_between_requests_and_between_heads() -> None:
    first = look()
    state = after(first, granted(only(first), "i-1"))

    assert only(look(state)).token == "c1-1-2"
    assert only(look(FleetState(life=2))).token == "c1-2-1"


def test_pool_without_capacity_is_retried_with_back_off() -> None:
    state, waits, now = FleetState(), [], T
    for _ in range(20):
        first = look(state, now=now, offers=OFFERS[:1])
        state = after(first, refused(only(first)), now)
        until = state.back_offs["g5.xlarge", A, "spot"].until
        assert look(state, now=until - 1, offers=OFFERS[:1]).launches == ()
        waits.append(until - now)
        now = until
    expected = [5 * 1.25**number for number in range(11)] + [60] * 9
    assert all(0.8 * e <= wait <= e + 1e-6 for wait, e in zip(waits, expected, strict=True))
    assert len({wait / e for wait, e in zip(waits, expected, strict=True)}) > 10  # jitter

    first = look(state, now=now, offers=OFFERS[:1])
    assert after(first, granted(only(first), "i-1"), now).back_offs == {}


def test_unsupported_type_is_not_requested_again_within_the_hour() -> None:
    first = look(offers=OFFERS[:2])
    refusal = LaunchFailure(
        type="g5.xlarge", zone=A, code="Unsupported", message="", kind="unsupported"
    )
    state = after(first, FleetResult(refusals=(refusal,)))

    assert only(look(state, now=T + 3000, offers=OFFERS[:2])).overrides == (("g6.xlarge", A),)


def test_quota_error_backs_off_all_types_of_the_request() -> None:
    first = look()
    state = after(first, FleetResult(refusals=refused(only(first), "quota").refusals[:1]))

    assert {key[0] for key in state.back_offs} == {"g5.xlarge", "g6.xlarge"}


def test_three_permanent_refusals_halt_the_launches() -> None:
    state, now = FleetState(), T
    for number in range(1, 4):
        first = look(state, now=now)
        state = after(first, refused(only(first), "fatal"), now)
        assert bool(state.halted) == (number == 3)
        now += 400
    assert state.halted == "refused"
    assert look(state, now=now).launches == ()


def test_wanted_workers_are_bounded_by_max_except_for_machines_at_risk() -> None:
    assert only(look(wanted=9)).num_nodes == 4
    four = machines(4)
    assert look(wanted=9, machines=four).launches == ()
    at_risk = (*four[:3], machine(3, is_at_risk=True))
    assert only(look(wanted=9, machines=at_risk)).num_nodes == 1
    assert only(look(wanted=4, machines=(*four[:3], machine(3, is_leaving=True)))).num_nodes == 1


def test_surplus_is_released_after_a_while_new_and_idle_machines_first() -> None:
    three = (
        machine(1, launched_at=T - 100, is_busy=True),
        machine(2, launched_at=T - 50),
        machine(3, launched_at=T - 10, is_ready=False),
    )
    first = look(wanted=1, machines=three)
    assert first.releases == ()
    later = look(first.state, wanted=1, machines=three, now=T + 120)
    assert [id for id, _ in later.releases] == ["i-3", "i-2"]


def test_busy_machines_are_never_surplus() -> None:
    busy = machines(2, is_busy=True)
    first = look(wanted=0, machines=busy)
    assert look(first.state, wanted=0, machines=busy, now=T + 500).releases == ()


def test_zone_is_chosen_by_price_and_score() -> None:
    assert look().state.zone == A
    likely = [dataclasses.replace(one, score=10 if one.zone == B else 1) for one in OFFERS]
    assert look(offers=tuple(likely)).state.zone == B


def test_new_machines_stay_in_the_zone_of_the_workers() -> None:
    request = only(look(wanted=2, machines=(machine(1, zone=B, type="g5.xlarge"),)))

    assert request.overrides == (("g5.xlarge", B),)


def in_shortage(rules: Rules, **facts: Any) -> Decision:
    """One worker in zone a, one missing; zone a has no more for over a minute."""
    one = (machine(1),)
    first = look(rules=rules, machines=one, **facts)
    state = after(first, refused(only(first)))
    state = look(state, rules=rules, machines=one, **facts, now=T + 5).state
    first = look(state, rules=rules, machines=one, **facts, now=T + 63)
    state = after(first, refused(only(first)), T + 63)
    return look(state, rules=rules, machines=one, **facts, now=T + 65)


def test_shortage_shrinks_moves_or_spreads() -> None:
    shrink, migrate, spread = (
        in_shortage(dataclasses.replace(RULES, on_shortage=word))
        for word in ("shrink", "migrate", "spread")
    )
    assert shrink.launches == ()
    assert (only(migrate).overrides, migrate.state.zone) == ((("g5.xlarge", B),), B)
    assert (only(spread).overrides, spread.state.zone) == ((("g5.xlarge", B),), A)


@pytest.mark.parametrize(("score", "spreads"), [(2, True), (8, False)])
def test_zone_of_which_ec2_expects_no_capacity_is_left_sooner(score: int, spreads: bool) -> None:
    rules, one = dataclasses.replace(RULES, on_shortage="spread"), (machine(1),)
    offers = tuple(
        dataclasses.replace(offer, score=score if offer.zone == A else 9) for offer in OFFERS
    )
    first = look(rules=rules, machines=one, offers=offers)
    state = after(first, refused(only(first)))
    state = look(state, rules=rules, machines=one, offers=offers, now=T + 1).state
    first = look(state, rules=rules, machines=one, offers=offers, now=T + 17)
    if first.launches and first.launches[0].overrides[0][1] == A:
        state = after(first, refused(only(first)), T + 17)
        first = look(state, rules=rules, machines=one, offers=offers, now=T + 18)

    assert [r.overrides for r in first.launches] == ([(("g5.xlarge", B),)] if spreads else [])


def test_after_a_zone_change_the_other_machines_are_released() -> None:
    both = (machine(1), machine(2, zone=B))
    moved = FleetState(zone=B)

    assert look(moved, machines=both).releases == (("i-1", f"the others are in {B}"),)
    waiting = (machine(1), machine(2, zone=B, is_ready=False))
    assert look(moved, machines=waiting).releases == ()
    assert (
        look(
            FleetState(zone=A),
            machines=both,
            rules=dataclasses.replace(RULES, on_shortage="shrink"),
        ).releases
        == ()
    )


def test_spread_requests_all_zones() -> None:
    request = only(look(rules=dataclasses.replace(RULES, is_single_zone=False)))

    assert {zone for _, zone in request.overrides} == {A, B}


def test_machines_with_several_gpus_never_exceed_max_workers() -> None:
    big = (Offer(type="g5.12xlarge", zone=A, workers=4, spot_usd=1.0),)
    small = Offer(type="g5.xlarge", zone=A, workers=1, spot_usd=0.5)

    assert only(look(wanted=3, offers=big)).num_workers == 4
    assert only(look(wanted=4, offers=(*big, small))).workers_each == 4
    assert only(look(wanted=1, offers=(*big, small))).workers_each == 1
    assert look(wanted=2, offers=big, machines=machines(1)).launches == ()


def test_on_demand_base_is_launched_first() -> None:
    rules = dataclasses.replace(RULES, on_demand_base=1, most_on_demand=1)

    request = only(look(rules=rules, wanted=3))
    assert (request.lifecycle, request.num_nodes) == ("on-demand", 1)
    base = (machine(1, lifecycle="on-demand"),)
    request = only(look(rules=rules, wanted=3, machines=base))
    assert (request.lifecycle, request.num_nodes) == ("spot", 2)


def test_on_demand_is_used_after_a_shortage_up_to_its_max() -> None:
    rules = dataclasses.replace(RULES, most_on_demand=2, on_shortage="shrink")
    first = look(rules=rules, wanted=4, offers=OFFERS[:2])
    state, now = after(first, refused(only(first))), T
    while (first := look(state, rules=rules, wanted=4, offers=OFFERS[:2], now=now)) and not (
        first.launches and first.launches[0].lifecycle == "on-demand"
    ):
        state = after(first, refused(only(first)), now) if first.launches else first.state
        now += 5
        assert now < T + 300
    assert now - T >= 120
    assert only(first).num_nodes == 2


def test_without_a_max_on_demand_is_never_used() -> None:
    first = look(wanted=4)
    state = after(first, refused(only(first)))
    for seconds in range(0, 2000, 5):
        decision = look(state, wanted=4, now=T + seconds)
        state = decision.state
        for request in decision.launches:
            assert request.lifecycle == "spot"
            state = state.sent(request, T).answered(request, refused(request), T + seconds)
    assert "no capacity for 4 workers" in decision.warnings[0].text
    assert "capacity.on_demand.max" in decision.warnings[0].text


def test_missing_capacity_is_reported_at_once_with_the_attempt_and_the_next_one() -> None:
    first = look(wanted=4)
    rules = dataclasses.replace(RULES, on_shortage="shrink", on_demand_after_s=90.0)
    state = after(first, refused(only(first)))
    state = after(second := look(state, wanted=4, rules=rules), refused(only(second)))
    (warning,) = look(state, wanted=4, rules=rules, now=T + 2).warnings

    assert "EC2 has no capacity for 4 workers for 2 s" in warning.text
    assert "(g5.xlarge, g6.xlarge in us-east-1a, us-east-1b)" in warning.text
    assert "The next attempt is in 2 s" in warning.text
    assert "capacity.on_demand.max to pay the full price after 90 s" in warning.text


def test_warning_keeps_its_key_while_its_figures_change() -> None:
    """The key used to be parsed from the text, which contains the seconds: no limit applied."""
    rules = dataclasses.replace(RULES, on_demand_after_s=60.0, most_on_demand=4)
    first = look(wanted=4, rules=rules)
    state = after(first, refused(only(first)))
    texts: dict[str, set[str]] = {}
    for seconds in range(1, 400, 7):
        decision = look(state, wanted=4, rules=rules, now=T + seconds)
        state = decision.state
        for request in decision.launches:
            state = state.sent(request, T).answered(request, refused(request), T + seconds)
        for warning in decision.warnings:
            texts.setdefault(warning.key, set()).add(warning.text)

    assert set(texts) == {"no capacity", "full price"}
    assert all(len(those) > 1 for those in texts.values())


def test_max_hourly_counts_the_most_expensive_possible_machines() -> None:
    rules = dataclasses.replace(RULES, max_hourly=1.2)
    decision = look(rules=rules, wanted=4)

    assert only(decision).num_nodes == 3
    assert "allows 3 of 4 more nodes" in decision.warnings[0].text
    # At 0.85 both types let two in, and the cheap one alone no more than that.
    assert only(look(rules=dataclasses.replace(RULES, max_hourly=0.85), wanted=4)).num_nodes == 2
    # At 0.78 only the cheap one lets two in.
    cheap = only(look(rules=dataclasses.replace(RULES, max_hourly=0.78), wanted=4))
    assert (cheap.num_nodes, cheap.overrides) == (2, (("g6.xlarge", A),))
    assert look(rules=dataclasses.replace(RULES, max_hourly=0.3)).launches == ()


def test_pending_machines_count_toward_max_hourly() -> None:
    rules = dataclasses.replace(RULES, max_hourly=1.2)
    first = look(rules=rules, wanted=2)
    state = after(first, granted(only(first), "i-8", "i-9"))

    assert only(look(state, rules=rules, wanted=4)).num_nodes == 1


def test_rising_prices_release_the_most_expensive_machine() -> None:
    rules = dataclasses.replace(RULES, max_hourly=1.0)
    dear = (machine(1), machine(2, type="g5.xlarge"), machine(3))

    decision = look(rules=rules, wanted=3, machines=dear, rate_usd=1.16)
    assert decision.releases == (("i-2", "above budget.max_hourly"),)
    assert decision.launches == ()
    left = (dear[0], dataclasses.replace(dear[1], is_leaving=True), dear[2])
    assert look(rules=rules, wanted=2, machines=left, rate_usd=1.16).releases == ()


def test_no_node_is_launched_that_would_exhaust_the_budget_reserve() -> None:
    """It owes a minute at once, and then all must have the money to stop."""
    offers = (Offer(type="g6.xlarge", zone=A, spot_usd=60.0, on_demand_usd=60.0),)
    rules = dataclasses.replace(RULES, max_total=10.0, reserve_s=120.0)
    facts: dict[str, Any] = {"machines": machines(1), "rate_usd": 60.0, "offers": offers}

    decision = look(rules=rules, spent_usd=5.5, **facts)
    assert decision.launches == ()
    assert decision.state.halted == ""
    assert "The budget allows 0 of 1 more nodes" in decision.warnings[0].text
    assert only(look(rules=rules, spent_usd=4.5, **facts)).num_nodes == 1


def test_budget_too_small_for_any_node_halts_when_no_node_is_left() -> None:
    """Else a job would wait for ever."""
    offers = (Offer(type="g6.xlarge", zone=A, spot_usd=60.0, on_demand_usd=60.0),)
    rules = dataclasses.replace(RULES, max_total=10.0, reserve_s=120.0)

    broke = look(rules=rules, spent_usd=7.5, offers=offers)
    assert (broke.state.halted, broke.launches) == ("budget", ())
    assert look(rules=rules, spent_usd=6.5, offers=offers).state.halted == ""
    dear = dataclasses.replace(rules, max_hourly=50.0)
    assert look(rules=dear, spent_usd=0.0, offers=offers).state.halted == ""


def test_max_total_halts_before_the_reserve_for_stopping_is_spent() -> None:
    rules = dataclasses.replace(RULES, max_total=10.0, reserve_s=120.0)
    busy = machines(2, is_busy=True)

    fine = look(rules=rules, machines=busy, spent_usd=9.96, rate_usd=1.0)
    assert fine.state.halted == ""
    halted = look(rules=rules, machines=busy, spent_usd=9.967, rate_usd=1.0)
    assert (halted.state.halted, halted.terminations) == ("budget", ())
    later = look(halted.state, rules=rules, machines=busy, now=T + 120, wanted=9)
    assert [id for id, _ in later.terminations] == ["i-0", "i-1"]
    assert later.launches == ()
    idle = look(halted.state, rules=rules, machines=machines(2), now=T + 5, wanted=9)
    assert len(idle.releases) == 2


@pytest.mark.parametrize("max_total", [0.01, 0.015, 0.018, 0.03])
def test_machine_whose_first_minute_would_halt_the_cluster_is_not_launched(
    max_total: float,
) -> None:
    rules = dataclasses.replace(RULES, max_total=max_total, reserve_s=120.0)

    asked = look(rules=rules, wanted=1)

    # What is owed as soon as it is there: a minute, at the dearest price that may be taken.
    usd = 0.40 + rules.disk_usd
    listed = look(
        after(asked, granted(asked.launches[0], "i-0")) if asked.launches else asked.state,
        rules=rules,
        wanted=1,
        machines=machines(1, is_ready=False) if asked.launches else (),
        spent_usd=usd / 60 if asked.launches else 0.0,
        rate_usd=usd if asked.launches else 0.0,
    )
    assert bool(asked.launches) == (max_total > 0.025)
    # What pays for no machine at all says so at once.
    assert listed.state.halted == ("" if asked.launches else "budget")


def test_nodes_that_never_register_are_terminated_and_halt_the_launches() -> None:
    mute = machines(2, is_ready=False)
    decision = look(machines=mute, now=T + 901)
    assert [id for id, _ in decision.terminations] == ["i-0", "i-1"]
    assert decision.state.num_boot_failures == 2
    state = decision.state.failed_to_boot("i-0", 3, T)
    assert state.num_boot_failures == 2  # counted once
    state = state.failed_to_boot("i-7", 3, T)
    assert state.halted == "boot"
    assert look(state, now=T + 999).launches == ()


def test_successful_boot_resets_the_failure_count() -> None:
    state = FleetState().failed_to_boot("i-1", 3, T).failed_to_boot("i-2", 3, T).boot_succeeded()

    assert state.failed_to_boot("i-3", 3, T).halted == ""


def test_fleet_state_round_trips_through_json() -> None:
    first = look()
    state = after(first, refused(only(first))).failed_to_boot("i-3", 3, T)
    state = state.sent(only(first), T).with_(acks=granted(only(first), "i-1").acks)

    assert FleetState.from_dict(json.loads(json.dumps(state.to_dict()))) == state


@pytest.mark.parametrize("lifecycle", ["spot", "on-demand"])
def test_offers_without_a_price_are_not_bought_under_a_budget(lifecycle: str) -> None:
    unknown = (Offer(type="x9.huge", zone=A),)
    base = 2 if lifecycle == "on-demand" else 0
    rules = dataclasses.replace(RULES, on_demand_base=base, most_on_demand=base)

    assert look(rules=dataclasses.replace(rules, max_total=5.0), offers=unknown).launches == ()
    assert bool(look(rules=rules, offers=unknown).launches) == (lifecycle == "on-demand")


# --- types of unequal speed ---


MIXED = (
    Offer(type="g5.xlarge", zone=A, spot_usd=0.40),
    Offer(type="g6.xlarge", zone=A, spot_usd=0.38),
    Offer(type="g4dn.xlarge", zone=A, spot_usd=0.20),
    Offer(type="g5.12xlarge", zone=A, spot_usd=1.0, workers=8),
)


def test_without_measurements_all_types_are_requested() -> None:
    assert {type for type, _ in only(look(offers=MIXED[:3])).overrides} == {
        "g5.xlarge", "g6.xlarge", "g4dn.xlarge",
    }  # fmt: skip


def test_type_that_was_never_measured_is_tried_with_one_machine() -> None:
    rates = {"g6.xlarge": 10.0}
    request = only(look(offers=MIXED, machines=(machine(1),), wanted=4, type_rates=rates))
    assert (request.overrides, request.num_nodes) == ((("g4dn.xlarge", A),), 1)

    # It is present now: the next type is tried, and no machine of eight workers exceeds the limit.
    here = (machine(1), machine(2, type="g4dn.xlarge"))
    request = only(look(offers=MIXED, machines=here, wanted=4, type_rates=rates))
    assert (request.overrides, request.num_nodes) == ((("g5.xlarge", A),), 1)


def test_types_with_the_lowest_cost_per_sample_are_launched() -> None:
    # A thousand samples cost 0.0111, 0.0106 and 0.0139 USD: g4dn is cheap, but too slow.
    rates = {"g5.xlarge": 10.0, "g6.xlarge": 10.0, "g4dn.xlarge": 4.0}
    request = only(look(offers=MIXED[:3], machines=(machine(1),), wanted=4, type_rates=rates))
    assert request.num_nodes == 3
    assert {type for type, _ in request.overrides} == {"g5.xlarge", "g6.xlarge"}


def test_types_without_capacity_give_way_to_more_expensive_ones() -> None:
    rates = {"g5.xlarge": 10.0, "g6.xlarge": 10.0, "g4dn.xlarge": 4.0}
    facts: dict[str, Any] = {"offers": MIXED[:3], "machines": (machine(1),), "type_rates": rates}
    first = look(wanted=4, **facts)
    state = after(first, refused(only(first)))
    assert only(look(state, wanted=4, **facts)).overrides == (("g4dn.xlarge", A),)


# --- spare workers, and traffic between zones ---


def test_spare_workers_are_launched_within_the_maximum_and_are_no_surplus() -> None:
    assert only(look(wanted=2, spares=1)).num_nodes == 3
    assert only(look(wanted=4, spares=3)).num_nodes == 4
    assert look(wanted=0, spares=1).launches == ()
    three = machines(3, is_busy=False)
    state = look(machines=three, wanted=2).state
    late = {"machines": three, "wanted": 2, "now": T + RULES.linger_s}
    assert look(state, **late, spares=1).releases == ()
    assert len(look(state, **late).releases) == 1


def test_spare_workers_are_not_launched_on_demand() -> None:
    rules = dataclasses.replace(RULES, most_on_demand=4, on_demand_after_s=10.0)
    facts: dict[str, Any] = {"rules": rules, "machines": machines(2), "spares": 1}
    first = look(wanted=2, **facts)
    state = after(first, refused(only(first)))
    # Nothing is left but on-demand machines, and only the spare worker is missing.
    offers = tuple(dataclasses.replace(one, spot_usd=None) for one in OFFERS)
    state = dataclasses.replace(state, short_since=T - 60.0)
    assert look(state, wanted=2, **facts, offers=offers).launches == ()
    assert only(look(state, wanted=3, **facts, offers=offers)).num_nodes == 1


@pytest.mark.parametrize(("gradient_bytes", "spreads"), [(0.0, False), (1e5, True), (100e6, False)])
def test_zones_are_spread_only_if_the_traffic_pays(gradient_bytes: float, spreads: bool) -> None:
    rules = dataclasses.replace(RULES, on_shortage="auto")
    facts: dict[str, Any] = {"gradient_bytes": gradient_bytes, "steps_per_s": 4.0}
    decision = in_shortage(rules, **facts)
    assert [r.overrides for r in decision.launches] == ([(("g5.xlarge", B),)] if spreads else [])
    assert decision.state.zone == A
