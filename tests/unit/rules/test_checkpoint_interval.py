"""How often ``checkpoint.every: auto`` saves, and what the log tells of it."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etrain_jupyter.log import events as t
from etrain_jupyter.rules.checkpoint_interval import (
    Choice,
    Costs,
    Evidence,
    Interruptions,
    choose_interval,
    daly_interval,
    describe_choice,
    is_material,
    total_loss_rate,
)

HOUR, DAY = 3600.0, 86_400.0
costs_s = st.floats(1e-4, 1e4)
times_s = st.floats(1.0, 1e7)
counts = st.integers(0, 50)
seen = st.builds(
    Interruptions,
    num_holders=st.integers(1, 64),
    num_lost=counts,
    worker_s=st.floats(0, 1e8),
    num_all_lost=counts,
    job_s=st.floats(0, 1e7),
)


def test_cheap_checkpoint_gives_youngs_interval():
    assert daly_interval(0.01, 10 * HOUR) == pytest.approx(math.sqrt(2 * 0.01 * 36_000), rel=1e-3)


def test_very_expensive_checkpoint_gives_the_mean_time_between_losses():
    assert daly_interval(500.0, 200.0) == 200.0


def wasted(interval_s: float, cost_s: float, mean_time_s: float) -> float:
    """How much longer work takes than without checkpoints and losses, by Daly's equation 20."""
    lost = math.expm1((interval_s + cost_s) / mean_time_s) * mean_time_s
    return lost / interval_s


@given(cost_s=st.floats(0.01, 10.0), mean_time_s=st.floats(600.0, 1e6))
def test_no_other_interval_wastes_noticeably_less(cost_s, mean_time_s):
    best = wasted(daly_interval(cost_s, mean_time_s), cost_s, mean_time_s)
    for factor in (0.5, 0.8, 1.25, 2.0):
        other = wasted(factor * daly_interval(cost_s, mean_time_s), cost_s, mean_time_s)
        assert best <= other * (1 + 1e-6)


@given(cost_s=costs_s, more=costs_s, mean_time_s=times_s)
def test_more_expensive_checkpoints_are_less_frequent(cost_s, more, mean_time_s):
    rarer = daly_interval(cost_s + more, mean_time_s)
    assert rarer >= daly_interval(cost_s, mean_time_s) * (1 - 1e-9)


@given(cost_s=costs_s, mean_time_s=times_s, more=times_s)
def test_rarer_losses_need_fewer_checkpoints(cost_s, mean_time_s, more):
    rarer = daly_interval(cost_s, mean_time_s + more)
    assert rarer >= daly_interval(cost_s, mean_time_s) * (1 - 1e-9)


@given(cost_s=costs_s, duration_s=costs_s, seen=seen)
def test_interval_keeps_its_bounds_and_the_cost_limit_has_priority(cost_s, duration_s, seen):
    chosen = choose_interval(Costs(cost_s=cost_s, duration_s=duration_s), seen)
    assert chosen.interval_s >= 10
    assert cost_s <= 0.01 * chosen.interval_s * (1 + 1e-9)
    assert duration_s <= 0.5 * chosen.interval_s * (1 + 1e-9)
    assert chosen.interval_s <= max(600, 100 * cost_s, 2 * duration_s) * (1 + 1e-9)


@given(seen=seen, cost_s=costs_s)
def test_additional_loss_never_makes_checkpoints_less_frequent(seen, cost_s):
    costs = Costs(cost_s=cost_s)
    before = choose_interval(costs, seen).interval_s
    for name in ("num_lost", "num_all_lost"):
        more = Interruptions(**{**vars(seen), name: getattr(seen, name) + 1})
        assert choose_interval(costs, more).interval_s <= before * (1 + 1e-9)


def test_single_rank_has_a_higher_total_loss_rate_than_several():
    rates = [total_loss_rate(Interruptions(num_holders=n)) * DAY for n in (1, 2, 4)]
    assert rates == pytest.approx([2.0, 1.2, 1.4], rel=0.01)


def test_survivors_make_single_losses_cheap_but_not_free():
    """40 losses of one of four workers in 10 hours: everything is lost once in 3.4 hours."""
    spot = Interruptions(num_holders=4, num_lost=40, worker_s=40 * HOUR, job_s=10 * HOUR)
    assert 1 / total_loss_rate(spot) == pytest.approx(3.44 * HOUR, rel=0.02)


@pytest.mark.parametrize(
    ("costs", "interval_s", "limit"),
    [
        (Costs(cost_s=0.1), 111.3, ""),
        (Costs(cost_s=0.0001), 10.0, "shortest"),
        (Costs(cost_s=4.0), 600.0, "longest"),
        (Costs(cost_s=20.0), 2000.0, "cost"),
        (Costs(cost_s=0.1, duration_s=200.0), 400.0, "writing"),
    ],
)
def test_choice_names_the_bound_that_applies(costs, interval_s, limit):
    chosen = choose_interval(costs, Interruptions(num_holders=4))
    assert (chosen.interval_s, chosen.limit) == (pytest.approx(interval_s, rel=0.01), limit)


def choice(interval_s: float, limit: str = "") -> Choice:
    return Choice(interval_s=interval_s, cost_s=0.012, loss_rate_per_h=0.25, limit=limit)


def test_only_a_change_by_a_quarter_is_logged():
    assert is_material(choice(100), None)
    assert not is_material(choice(120), choice(100))
    assert is_material(choice(125), choice(100))
    assert is_material(choice(80), choice(100))


def test_description_has_the_interval_and_its_reasons():
    assert describe_choice(choice(10, "shortest")) == (
        "every 10 s, the minimum: each costs 12 ms of training, and the loss of all ranks with the "
        "state is expected once in 4.0 h"
    )


# --- what the log tells ---


def at(kind: type[t.Event], time: float, **values) -> t.Event:
    return kind(job_id="j", time=time, **values)


def formed(time: float, num: int) -> t.Event:
    ranks = [f"w{number}" for number in range(num)]
    values = {"why": "start", "world_size": num, "ranks": ranks, "behind": [], "step": 0}
    return at(t.GenerationFormed, time, **values, backend="gloo")


def saved(time: float, *, stall_s: float = 0.1, slowed_s: float = 0.2) -> t.Event:
    values = {"step": 1, "manifest": "m", "size_bytes": 1, "duration_s": 5.0}
    return at(t.CheckpointCommitted, time, stall_s=stall_s, slowed_s=slowed_s, **values)


def restored(time: float) -> t.Event:
    return at(t.JobRestored, time, step=0, num_undone=1)


def resumed(time: float, status: str) -> t.Event:
    values = {"step": 1, "min_workers": 1, "max_workers": 2}
    return at(t.JobResumed, time, from_status=status, **values)


def evidence_of(*events: t.Event) -> Evidence:
    evidence = Evidence()
    for event in events:
        evidence.fold(event)
    return evidence


def test_time_of_workers_counts_while_they_train():
    evidence = evidence_of(
        formed(100, 2),
        formed(110, 3),
        at(t.JobStatusChanged, 120, status="paused"),
        formed(200, 1),
    )
    seen = evidence.seen(205)
    assert (seen.worker_s, seen.job_s, seen.num_holders) == (2 * 10 + 3 * 10 + 5, 25, 1)


def test_losses_and_preemptions_count_and_scaled_down_workers_do_not():
    evidence = evidence_of(
        at(t.WorkerLost, 1, worker="a", cause="SIGKILL"),
        at(t.WorkerLeft, 2, worker="b", reason="preempted"),
        at(t.WorkerLeft, 3, worker="c", reason="scaled down"),
        restored(4),
    )
    seen = evidence.seen(5)
    assert (seen.num_lost, seen.num_all_lost) == (2, 1)


@pytest.mark.parametrize(("status", "count"), [("running", 1), ("stopped", 0), ("finished", 0)])
def test_resumed_job_counts_a_total_loss_only_if_it_had_not_ended(status, count):
    evidence = evidence_of(formed(1, 2), resumed(50, status), formed(60, 2), restored(61))
    assert evidence.seen(61).num_all_lost == count


def test_time_between_the_death_of_a_coordinator_and_its_resumption_does_not_count():
    evidence = evidence_of(formed(100, 2), saved(130), resumed(10_000, "running"))
    assert evidence.seen(20_000).job_s == 30


def test_cost_is_the_stall_and_the_slow_down_of_the_median_checkpoint():
    events = [saved(n, stall_s=s) for n, s in enumerate((9.0, 0.1, 0.2, 0.3, 0.2, 0.1))]
    costs = evidence_of(*events).costs()
    assert costs == Costs(cost_s=pytest.approx(0.4), duration_s=5.0)


def test_nothing_is_chosen_before_the_first_checkpoint_measures_the_cost():
    evidence = evidence_of(formed(0, 2))
    assert evidence.review(100) is None
    evidence.fold(saved(100))
    assert evidence.review(100) is not None
    assert evidence.review(101) is None  # it is the same


def test_resumed_job_continues_with_the_interval_that_was_chosen():
    chosen = {"interval_s": 42.0, "cost_s": 0.3, "loss_rate_per_h": 0.1, "limit": ""}
    evidence = evidence_of(saved(1), at(t.CheckpointIntervalChosen, 2, **chosen), resumed(9, "x"))
    assert evidence.choice is not None
    assert evidence.choice.interval_s == 42.0


def test_age_counts_from_the_state_and_not_from_the_end_of_writing():
    evidence = evidence_of(formed(100, 1))
    assert evidence.age_s(130) == 30
    evidence.fold(saved(150))
    assert evidence.age_s(160) == 15
