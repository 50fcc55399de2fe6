"""``capacity.policy: deadline``: separate targets for spot and on-demand machines."""

from __future__ import annotations

import dataclasses
from itertools import pairwise
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from etrain_jupyter.head.coordinator.nodes import JobProgress
from etrain_jupyter.plugins.ec2.deadline import DeadlineSchedule
from etrain_jupyter.plugins.ec2.fleet_state import FleetState
from etrain_jupyter.plugins.ec2.head.fleet import decide
from etrain_jupyter.plugins.ec2.head.view import Decision, Machine, Rules, View
from etrain_jupyter.plugins.ec2.placement import Offer
from etrain_jupyter.plugins.ec2.spec import AwsSpotSpec
from tests.unit.plugins.ec2.head.test_fleet import OFFERS, T, after, granted, machine, refused

RULES = Rules(cluster_id="c1", max_workers=4, policy="deadline", most_on_demand=4)
HOUR = 3600.0


def on_demand(number: int, **facts: Any) -> Machine:
    return machine(number, lifecycle="on-demand", **{"is_busy": True} | facts)


def look(
    *machines: Machine,
    wants: int,
    state: FleetState = FleetState(),  # noqa: B008
    rules: Rules = RULES,
    wanted: int = 4,
    now: float = T,
    **facts: Any,
) -> Decision:
    values = {"machines": machines, "offers": OFFERS, "on_demand": wants} | facts
    return decide(state, rules, View(now=now, wanted=wanted, **values))


def test_on_demand_machines_are_launched_first_and_without_waiting() -> None:
    first = look(machine(1), wants=2)
    then = look(machine(1), wants=2, state=after(first, granted(first.launches[0], "i-8", "i-9")))

    assert [(r.lifecycle, r.num_workers) for r in first.launches] == [("on-demand", 2)]
    assert [(r.lifecycle, r.num_workers) for r in then.launches] == [("spot", 3)]


def test_spot_machines_are_requested_if_on_demand_has_no_capacity() -> None:
    rules = dataclasses.replace(RULES, is_single_zone=False)
    first = look(wants=2, rules=rules)
    then = look(wants=2, rules=rules, state=after(first, refused(first.launches[0])))

    assert [r.lifecycle for r in then.launches] == ["spot"]


def test_spot_machine_boots_while_the_on_demand_machines_that_it_replaces_train() -> None:
    fleet = (machine(1), machine(2), on_demand(3), on_demand(4))

    decision = look(*fleet, wants=2)

    assert [(r.lifecycle, r.num_workers) for r in decision.launches] == [("spot", 2)]
    assert decision.releases == ()


def test_busy_on_demand_machine_that_is_not_needed_is_released_first_if_it_boots() -> None:
    fleet = (
        *(machine(n) for n in range(4)),
        on_demand(5),
        on_demand(6, is_ready=False, launched_at=T - 200),
        on_demand(7, launched_at=T + 1),
    )

    decision = look(*fleet, wants=1)

    assert [id for id, _ in decision.releases] == ["i-6", "i-7"]
    assert decision.launches == ()


def test_released_on_demand_machine_is_not_replaced_while_it_drains() -> None:
    # The coordinator wants two workers, and a replacement for the one that leaves.
    fleet = (machine(1), machine(2), on_demand(3, is_leaving=True))

    decision = look(*fleet, wants=0, wanted=3)

    assert (decision.launches, decision.releases) == ((), ())


def test_surplus_of_spot_machines_lingers_as_without_a_deadline() -> None:
    fleet = (machine(1), machine(2), machine(3))
    first = look(*fleet, wants=0, wanted=1)
    later = look(*fleet, wants=0, wanted=1, state=first.state, now=T + 130)

    assert first.releases == ()
    assert len(later.releases) == 2


def test_on_demand_machine_with_several_gpus_may_exceed_the_need() -> None:
    offers = (Offer(type="g5.12xlarge", zone="us-east-1a", workers=4, on_demand_usd=5.7),)

    decision = look(wants=1, offers=offers)

    assert [(r.lifecycle, r.num_workers) for r in decision.launches] == [("on-demand", 4)]
    big = on_demand(1, workers=4)
    assert look(big, wants=1, offers=offers).releases == ()
    assert [id for id, _ in look(big, wants=0, offers=offers).releases] == ["i-1"]


def test_budget_limits_on_demand_machines() -> None:
    rules = dataclasses.replace(RULES, max_hourly=1.7)

    decision = look(wants=4, rules=rules)

    # One of g5.xlarge and g6.xlarge costs 1.0 or 0.8: two of the cheaper type fit.
    assert [(r.lifecycle, r.num_nodes) for r in decision.launches] == [("on-demand", 2)]
    assert [warning.key for warning in decision.warnings] == ["budget too small"]


def test_missing_spot_capacity_is_reported_without_advice_to_buy_on_demand() -> None:
    first = look(wants=0, offers=OFFERS[:2])
    state = after(first, refused(first.launches[0]))
    second = look(wants=0, offers=OFFERS[:2], state=state, now=T + 1)

    [warning] = second.warnings
    assert "only if a job falls behind schedule" in warning.text
    assert "on_demand.max" not in warning.text


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_each_lifecycle_stays_within_the_maximum(data: st.DataObject) -> None:
    state, fleet, now, number = FleetState(), list[Machine](), T, 0
    for _ in range(25):
        wants = data.draw(st.integers(0, 4))
        decision = look(*fleet, wants=wants, state=state, wanted=4, now=now)
        state = decision.state
        for request in decision.launches:
            count = data.draw(st.integers(0, request.num_nodes))
            ids = [f"i-{number + n}" for n in range(count)]
            number += count
            answer = granted(request, *ids, now=now) if ids else refused(request)
            state = state.sent(request, now).answered(request, answer, now)
            fleet += [
                machine(0, lifecycle=request.lifecycle, launched_at=now, is_ready=False)
                for _ in ids
            ]
            fleet[len(fleet) - count :] = [
                dataclasses.replace(one, id=id)
                for one, id in zip(fleet[len(fleet) - count :], ids, strict=True)
            ]
        gone = {id for id, _ in decision.releases}
        fleet = [
            dataclasses.replace(one, is_ready=True, is_busy=True)
            for one in fleet
            if one.id not in gone
        ]
        state = state.listed(one.id for one in fleet)
        for lifecycle in ("spot", "on-demand"):
            assert sum(one.lifecycle == lifecycle for one in fleet) <= RULES.max_workers
        now += data.draw(st.sampled_from([5.0, 60.0, 400.0]))


# --- the schedule, which measures jobs and machines ---


def schedule(**capacity: Any) -> DeadlineSchedule:
    spec = AwsSpotSpec.parse(
        {
            "region": "us-east-1",
            "bucket": "my-bucket",
            "workers": {"max": 4},
            "capacity": {"policy": "deadline", "finish_by": "2 h"} | capacity,
        }
    )
    made = DeadlineSchedule.of(spec)
    assert made is not None
    return made


def progress(step: int, *, workers: int = 2, **facts: Any) -> JobProgress:
    values = {"attempt_at": T, "first_step": 0, "total_steps": 1000, "min_workers": 1}
    return JobProgress(
        job_id="digits-1", step=step, num_workers=workers, max_workers=4, **values | facts
    )


def measured(own: DeadlineSchedule, *, step: int, at: float) -> None:
    """Let two workers make a step in ten seconds, until ``step`` at the time ``at``."""
    for back in (60, 30, 0):
        own.plan([progress(step - back // 10)], [machine(1), machine(2)], 4, at - back)


def test_job_is_measured_before_on_demand_workers_are_used() -> None:
    own = schedule()

    assert own.plan([progress(0)], [machine(1)], 4, T + 10).on_demand == 0


def test_unmeasured_job_without_spot_capacity_starts_on_demand() -> None:
    own = schedule(on_demand={"after": "60 s"})
    waiting = progress(0, workers=0, min_workers=2, total_steps=0)

    assert own.plan([waiting], [], 4, T + 50).on_demand == 0
    assert own.plan([waiting], [], 4, T + 70).on_demand == 2


def test_job_behind_schedule_gets_on_demand_workers_and_the_log_says_why() -> None:
    own = schedule()
    # 1000 steps at a step in 5 s on 4 workers are 83 min; 70 min in, 550 steps are left.
    measured(own, step=450, at=T + 4200)

    plan = own.plan([progress(450)], [machine(1), machine(2)], 4, T + 4205)

    assert plan.on_demand == 2
    assert [warning.key for warning in plan.warnings] == ["behind digits-1"]
    assert "step 450 of 1000: 2 workers on demand" in plan.warnings[0].text


def test_job_that_cannot_finish_in_time_is_reported_with_what_would_do() -> None:
    own = schedule()
    measured(own, step=100, at=T + 6000)

    plan = own.plan([progress(100)], [machine(1), machine(2)], 4, T + 6000)

    # 900 steps need 75 min, and 20 min are left: 55 min are missing.
    assert plan.on_demand == 2
    assert "4 workers need 1.25 h" in plan.warnings[0].text
    assert "0.33 h are left" in plan.warnings[0].text
    assert "finish_by to 3.0 h" in plan.warnings[0].text


def test_machine_with_a_notice_is_replaced_if_the_schedule_needs_it() -> None:
    own = schedule()
    measured(own, step=400, at=T + 4200)

    plan = own.plan([progress(400)], [machine(1), machine(2, is_at_risk=True)], 4, T + 4200)

    assert plan.on_demand == 3


def test_job_on_schedule_needs_no_on_demand_workers() -> None:
    own = schedule()
    measured(own, step=700, at=T + 3600)

    plan = own.plan([progress(700)], [machine(1), machine(2), on_demand(3)], 4, T + 3600)

    assert (plan.on_demand, plan.warnings) == (0, ())


def test_paused_job_keeps_its_workers() -> None:
    own = schedule()
    measured(own, step=100, at=T + 3000)

    plan = own.plan([progress(100, is_paused=True)], [machine(1), on_demand(2)], 4, T + 3000)

    assert plan.on_demand == 1


def test_limits_of_the_pool_apply() -> None:
    capped, based = schedule(on_demand={"max": 1}), schedule(on_demand={"base": 1})
    measured(capped, step=100, at=T + 6000)

    assert capped.plan([progress(100)], [machine(1)], 4, T + 6000).on_demand == 1
    assert based.plan([], [], 0, T).on_demand == 0
    assert based.plan([], [], 2, T).on_demand == 1


def test_two_jobs_share_the_spot_workers_in_order_of_submission() -> None:
    own = schedule()
    jobs = [progress(1), dataclasses.replace(progress(1), job_id="b-2")]
    for at in (0.0, 40.0, 80.0):
        moved = [dataclasses.replace(job, step=1 + int(at / 10)) for job in jobs]
        own.plan(moved, [machine(n) for n in range(3)], 8, T + 6000 + at)

    plan = own.plan(jobs, [machine(n) for n in range(3)], 8, T + 6100)

    # Both are late: the first one misses one worker, the second one all four; the pool has four.
    assert plan.on_demand == 4


def test_boot_time_is_measured() -> None:
    own = schedule()
    own.plan([], [machine(1, is_ready=False)], 4, T + 5)
    own.plan([], [machine(1), machine(2, launched_at=T - 9000)], 4, T + 500)

    assert own.boot_s == 500.0


def test_pool_without_the_policy_has_no_schedule() -> None:
    spec = AwsSpotSpec.parse({"region": "us-east-1", "bucket": "my-bucket"})

    assert DeadlineSchedule.of(spec) is None


def test_refused_on_demand_request_is_retried_within_half_a_minute_and_spot_backs_off() -> None:
    offers = OFFERS[:2]
    state, now, waits = FleetState(), T, dict[str, list[float]](spot=[], **{"on-demand": []})
    for _ in range(100):
        decision = look(wants=1, offers=offers, state=state, now=now)
        state = decision.state
        for request in decision.launches:
            waits[request.lifecycle].append(now)
            state = state.sent(request, now).answered(request, refused(request), now)
        now += 5.0

    assert max(b - a for a, b in pairwise(waits["on-demand"])) == 30.0
    assert 40.0 < max(b - a for a, b in pairwise(waits["spot"])) <= 60.0
