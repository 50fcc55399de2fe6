"""Which jobs are submitted and cancelled, and which workers are notified."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from etrain_jupyter.plugins.slurm.head.plan import Limits, Plan, Slot, decide

LIMITS = Limits(max_workers=4, notice_s=120.0, ahead_s=600.0)


def pending(worker: str) -> Slot:
    return Slot(worker=worker, left_s=float("inf"))


def running(worker: str, left_s: float = 3000.0, **facts: Any) -> Slot:
    facts = {"is_connected": True, "is_busy": True} | facts
    return Slot(worker=worker, left_s=left_s, is_running=True, **facts)


def plan(*slots: Slot, wanted: int, held: int = 0, shrinks: bool = False) -> Plan:
    return decide(slots, wanted=wanted, held=held, limits=LIMITS, shrinks=shrinks)


def test_missing_jobs_are_submitted_up_to_the_maximum() -> None:
    assert plan(wanted=2) == Plan(num_submits=2)
    assert plan(wanted=9) == Plan(num_submits=4)
    assert plan(wanted=0, held=1) == Plan(num_submits=1)
    assert plan(running("w1"), pending("w2"), wanted=3) == Plan(num_submits=1)


def test_leaving_job_is_replaced() -> None:
    assert plan(running("w1", is_leaving=True), running("w2"), wanted=2).num_submits == 1


def test_job_near_its_time_limit_is_replaced_before_it_leaves() -> None:
    near = running("w1", left_s=500.0)

    assert plan(near, running("w2"), wanted=2) == Plan(num_submits=1)
    assert plan(near, running("w2"), pending("w3"), wanted=2) == Plan()
    assert plan(near, running("w2"), running("w3"), wanted=2) == Plan(notices=("w1",))


def test_replacement_may_exceed_the_maximum() -> None:
    near = running("w4", left_s=500.0)
    others = [running(f"w{number}") for number in (1, 2, 3)]

    assert plan(near, *others, wanted=4).num_submits == 1


def test_soonest_of_several_leaves_when_one_replacement_has_connected() -> None:
    near = [running("w1", left_s=500.0), running("w2", left_s=400.0)]

    found = plan(*near, running("w3"), pending("w4"), wanted=2)

    assert found.notices == ("w2",)
    assert found.num_submits == 0


def test_worker_whose_time_is_up_is_notified_without_a_replacement() -> None:
    assert plan(running("w1", left_s=100.0), pending("w2"), wanted=1).notices == ("w1",)


def test_coordinator_counts_a_noticed_worker_and_its_replacement() -> None:
    # Two are wanted, and one more for the worker that has a notice.
    noticed = running("w1", is_noticed=True)

    assert plan(noticed, running("w2"), wanted=3) == Plan(num_submits=1)
    assert plan(noticed, running("w2"), pending("w3"), wanted=3) == Plan()


def test_surplus_is_cancelled_only_if_it_lasts() -> None:
    slots = (running("w1", is_busy=False), running("w2", is_busy=False), pending("w3"))

    assert plan(*slots, wanted=1) == Plan(has_surplus=True)
    assert plan(*slots, wanted=1, shrinks=True) == Plan(has_surplus=True, cancels=("w3", "w2"))


def test_busy_worker_is_never_surplus() -> None:
    assert plan(running("w1"), running("w2"), wanted=0, shrinks=True).cancels == ()


SLOTS = st.lists(
    st.builds(
        Slot,
        worker=st.uuids().map(str),
        left_s=st.floats(0, 5000),
        is_running=st.booleans(),
        is_connected=st.booleans(),
        is_busy=st.booleans(),
        is_noticed=st.booleans(),
        is_leaving=st.booleans(),
    ),
    max_size=8,
)


@given(SLOTS, st.integers(0, 8), st.integers(0, 4), st.booleans())
def test_plan_keeps_its_promises(slots: list[Slot], wanted: int, held: int, shrinks: bool) -> None:
    found = decide(slots, wanted=wanted, held=held, limits=LIMITS, shrinks=shrinks)

    by_name = {slot.worker: slot for slot in slots}
    lasting = [
        slot
        for slot in slots
        if not (slot.is_leaving or slot.is_noticed)
        and not (slot.is_running and slot.left_s <= LIMITS.ahead_s)
    ]
    assert len(lasting) + found.num_submits <= max(LIMITS.max_workers, len(lasting))
    assert not (found.num_submits and found.has_surplus)
    assert shrinks or not found.cancels
    for name in found.cancels:
        assert not by_name[name].is_busy
    for name in found.notices:
        assert by_name[name].is_connected
        assert by_name[name].is_running
