"""Test the number of spare workers of a pool."""

from __future__ import annotations

from typing import Any

from etrain_jupyter.head.coordinator.nodes import JobProgress
from etrain_jupyter.plugins.ec2.head.spare_plan import SparePlan
from etrain_jupyter.plugins.ec2.head.view import Machine
from etrain_jupyter.plugins.ec2.ledger import Row

T = 1_000_000.0


def job(least: int, most: int, **facts: Any) -> JobProgress:
    values: dict[str, Any] = {
        "job_id": "j", "attempt_at": T, "first_step": 0, "step": 5, "total_steps": 100,
        "num_workers": most, "min_workers": least, "max_workers": most,
    }  # fmt: skip
    return JobProgress(**values | facts)


def machine(number: int, *, is_ready: bool) -> Machine:
    return Machine(
        id=f"i-{number}", type="g6.xlarge", zone="a", lifecycle="spot", workers=1,
        launched_at=T, is_ready=is_ready,
    )  # fmt: skip


def rows(num: int, *, hours: float, reason: str = "Server.SpotInstanceTermination") -> list[Row]:
    """Return machines that EC2 reclaimed after this time."""
    return [
        Row(
            id=f"i-{number}", type="g6.xlarge", zone="a", lifecycle="spot", reason=reason,
            launched_at=T - 3600 * hours, ended_at=T,
        )
        for number in range(num)
    ]  # fmt: skip


def test_given_number_is_kept_within_the_maximum() -> None:
    plan = SparePlan(spares=2, max_workers=8)
    assert [plan.num([], [], [], wanted, T) for wanted in (4, 7, 8, 9)] == [2, 1, 0, 0]


def test_only_jobs_of_fixed_size_get_spare_workers() -> None:
    plan, lost = SparePlan(max_workers=40), rows(200, hours=1.0)
    assert plan.num([job(1, 32)], [], lost, 32, T) == 0
    assert plan.num([job(32, 32)], [], lost, 32, T) > 0
    assert plan.num([job(32, 32, num_workers=0)], [], lost, 32, T) == 0  # has not started yet


def test_spare_workers_follow_the_observed_losses_and_boots() -> None:
    fixed = [job(16, 16)]
    plan = SparePlan(max_workers=40)
    # Few losses, and machines that boot within the notice period: nothing is missing.
    plan.num(fixed, [machine(1, is_ready=False)], [], 16, T)
    assert plan.num(fixed, [machine(1, is_ready=True)], rows(100, hours=1.0), 16, T + 90.0) == 0

    slow = SparePlan(max_workers=40)
    assert slow.num(fixed, [], rows(10, hours=200.0), 16, T) == 0
    assert slow.num(fixed, [], rows(100, hours=1.0), 16, T) >= 1
    own = rows(100, hours=1.0, reason="Client.UserInitiatedShutdown")
    assert slow.num(fixed, [], own, 16, T) == 0
