"""Faults of a plan are committed once, whoever may commit them."""

from __future__ import annotations

from etrain_jupyter.head.jobs.planned_faults import PlannedFaults
from etrain_jupyter.testing.fault_plan import FaultPlan


def ids(faults: list[dict]) -> list[int]:
    return [fault["id"] for fault in faults]


def test_fault_for_any_rank_is_assigned_to_exactly_one_rank():
    plan = FaultPlan().kill(rank=None, step=3).hang(rank=None, step=5).exit(rank=1, step=7)
    planned = PlannedFaults(plan.to_list())
    for world_size in range(1, 6):
        told = [ids(planned.of_rank(rank, world_size)) for rank in range(world_size)]
        for anyones in (1, 2):
            assert sum(anyones in mine for mine in told) == 1
        assert all(3 in mine for mine in told)  # its rank is told, each knows its own


def test_fault_for_any_newcomer_is_reassigned_after_the_first_one_ended():
    planned = PlannedFaults(FaultPlan().kill(rank=None, step=0, at="warm").to_list())
    assert ids(planned.of_newcomer("t1", among=["t1"])) == [1]
    assert ids(planned.of_newcomer("t2", among=["t1", "t2"])) == []
    assert ids(planned.of_newcomer("t3", among=["t2", "t3"])) == [1]
    assert planned.of_rank(0, 1) == []
    assert planned.fire(1) is not None
    assert planned.of_newcomer("t4", among=["t4"]) == []


def test_newcomers_get_no_fault_planned_for_any_rank():
    planned = PlannedFaults(FaultPlan().kill(rank=None, step=3).kill(rank=0, step=3).to_list())
    assert ids(planned.of_newcomer("t1", among=["t1"])) == [2]
