"""Test the number of spare workers of a pool."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etrain_jupyter.head.coordinator.nodes import JobProgress
from etrain_jupyter.plugins.ec2.head.spare_plan import (
    SparePlan,
    loss_rate_per_h,
    mean_missing,
    spare_workers,
)
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


MISSING = st.floats(0.0, 20.0)


def at_least(number: int, mean: float) -> float:
    """Return the probability of ``number`` or more, computed from the other side of the sum."""
    terms = (math.exp(-mean) * mean**k / math.factorial(k) for k in range(number, 120))
    return math.fsum(terms)


@given(missing=MISSING, stake=st.floats(1.0, 500.0), most=st.integers(0, 30))
def test_each_spare_avoids_a_larger_loss_than_it_costs(
    missing: float, stake: float, most: int
) -> None:
    number = spare_workers(missing=missing, stake=stake, most=most)

    assert 0 <= number <= most
    if number:
        assert stake * at_least(number, missing) > 1.0 - 1e-6
    if number < most:
        assert stake * at_least(number + 1, missing) <= 1.0 + 1e-6


@given(missing=MISSING, most=st.integers(0, 30))
def test_no_spare_pays_for_an_elastic_job(missing: float, most: int) -> None:
    assert spare_workers(missing=missing, stake=1.0, most=most) == 0


@given(missing=MISSING, more=st.floats(0.0, 5.0), stake=st.floats(1.0, 100.0))
def test_spares_grow_with_the_losses(missing: float, more: float, stake: float) -> None:
    few = spare_workers(missing=missing, stake=stake, most=50)
    assert few <= spare_workers(missing=missing + more, stake=stake, most=50)


def test_boots_that_end_before_the_interruption_leave_no_worker_missing() -> None:
    assert mean_missing(workers=64, losses_per_h=1.0, boot_s=100.0) == 0.0
    assert mean_missing(workers=60, losses_per_h=1.0, boot_s=170.0) == pytest.approx(1.0)


def test_loss_rate_starts_at_the_prior_and_follows_the_observations() -> None:
    assert loss_rate_per_h(0, 0.0) == pytest.approx(0.05)
    assert loss_rate_per_h(1000, 10_000.0) == pytest.approx(0.1, rel=0.01)
