"""Test throughput and cost by machine type."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etrain_jupyter.log.job_record import TypeWork
from etrain_jupyter.rules.policy.type_rates import (
    LEAST_BUSY_S,
    rates_by_type,
    samples_by_type,
    usd_per_1k_samples,
)

WORK = st.dictionaries(
    st.sampled_from(["", "g5.xlarge", "g6.xlarge", "p3.2xlarge"]),
    st.builds(TypeWork, samples=st.integers(0, 10_000), busy_s=st.floats(0.0, 500.0)),
)


@given(work=WORK)
def test_only_types_with_enough_measurements_have_a_rate(work: dict[str, TypeWork]) -> None:
    rates = rates_by_type(work)

    measured = {
        type for type, one in work.items() if type and one.samples and one.busy_s >= LEAST_BUSY_S
    }
    assert set(rates) == measured
    assert all(rate * work[type].busy_s == pytest.approx(work[type].samples)
               for type, rate in rates.items())  # fmt: skip


@given(work=WORK, total=st.integers(0, 100_000))
def test_samples_of_the_types_add_up_to_all_samples(work: dict[str, TypeWork], total: int) -> None:
    shares = samples_by_type(work, total)

    reported = sum(one.samples for one in work.values())
    assert sum(shares.values()) == pytest.approx(total if reported else 0)
    assert all(share >= 0 for share in shares.values())


def test_work_adds_up_and_never_counts_negative_times() -> None:
    work = TypeWork().plus(10, 2.0).plus(5, -0.1)
    assert work == TypeWork(samples=15, busy_s=2.0)


def test_cost_of_a_thousand_samples() -> None:
    assert usd_per_1k_samples(3.6, 2.0) == 0.5
