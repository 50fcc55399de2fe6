"""Whose money the nodes cost: ranks pay for their own, idle time is shared, refunds go back."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etrain_jupyter.log.job_record import TypeWork
from etrain_jupyter.rules.costs import (
    LEAST_BUSY_S,
    JobCosts,
    RunningCost,
    rates_by_type,
    samples_by_type,
    usd_per_1k_samples,
)


@dataclass(frozen=True)
class Node:
    node_id: str
    spent_usd: float
    on_demand_usd: float = 0.0
    machine: str = "g5.xlarge"

    @property
    def workers(self) -> tuple[str, ...]:
        return (self.node_id,)


def begun() -> JobCosts:
    costs = JobCosts()
    costs.take([], ranks={}, active=["a"])
    return costs


def test_a_rank_pays_for_its_node() -> None:
    costs = begun()
    costs.take([Node("i", 1.0, 3.0)], ranks={"i": "a"}, active=["a", "b"])
    costs.take([Node("i", 1.5, 4.5)], ranks={"i": "b"}, active=["a", "b"])

    assert costs.of("a") == RunningCost(spent_usd=1.0, on_demand_usd=3.0)
    assert costs.of("b") == RunningCost(spent_usd=0.5, on_demand_usd=1.5)


def test_boot_cost_is_waste_only_after_the_first_step() -> None:
    costs = begun()
    costs.take([Node("i", 1.0)], ranks={}, active=["a"])
    costs.take([Node("i", 2.0)], ranks={"i": "a"}, active=["a"])
    costs.take([Node("i", 3.0), Node("j", 0.5)], ranks={"i": "a"}, active=["a"])

    assert costs.of("a") == RunningCost(spent_usd=3.5, wasted_usd=0.5)


def test_a_refund_goes_back_to_the_jobs_that_paid() -> None:
    costs = begun()
    costs.take([Node("i", 3.0, 9.0)], ranks={"i": "a"}, active=["a", "b"])
    costs.take([Node("i", 4.0, 12.0)], ranks={"i": "b"}, active=["a", "b"])
    costs.take([Node("i", 0.0, 12.0)], ranks={}, active=["b"])

    assert costs.of("a") == RunningCost(on_demand_usd=9.0)
    assert costs.of("b") == RunningCost(on_demand_usd=3.0)


def test_costs_are_divided_by_machine_type_and_refunds_are_considered() -> None:
    costs = JobCosts()
    costs.begin("a", RunningCost(spent_usd=2.0), has_trained=True, usd_by_type={"g6.xlarge": 1.5})
    costs.take([], ranks={}, active=["a"])
    first, second = Node("i", 1.0), Node("j", 3.0, machine="g6.xlarge")
    costs.take([first, second], ranks={"i": "a", "j": "a"}, active=["a"])
    assert costs.by_type("a") == {"g5.xlarge": 1.0, "g6.xlarge": 4.5}

    costs.take([Node("i", 0.0), second], ranks={"j": "a"}, active=["a"])
    assert costs.by_type("a") == {"g5.xlarge": 0.0, "g6.xlarge": 4.5}
    assert costs.by_type("b") == {}


def test_cost_under_an_earlier_scheduler_is_carried_over() -> None:
    costs = JobCosts()
    costs.begin("a", RunningCost(spent_usd=7.0), has_trained=True)
    costs.take([Node("i", 5.0)], ranks={"i": "a"}, active=["a"])
    assert costs.of("a") == RunningCost(spent_usd=7.0)

    costs.take([Node("i", 6.0)], ranks={}, active=["a"])
    assert costs.of("a") == RunningCost(spent_usd=8.0, wasted_usd=1.0)


def test_without_a_job_no_cost_is_charged_and_an_ended_job_is_forgotten() -> None:
    costs = begun()
    costs.take([Node("i", 1.0)], ranks={}, active=[])
    costs.take([Node("i", 2.0)], ranks={"i": "a"}, active=["a"])
    assert costs.of("a").spent_usd == 1.0

    costs.forget("a")
    assert costs.of("a") == RunningCost()


@given(
    st.lists(
        st.tuples(
            st.sampled_from("ij"),
            st.floats(-2.0, 5.0),
            st.sampled_from([None, "a", "b"]),
        ),
        max_size=30,
    )
)
def test_costs_of_the_jobs_add_up_to_those_of_the_nodes(
    changes: list[tuple[str, float, str | None]],
) -> None:
    costs, spent = begun(), {"i": 0.0, "j": 0.0}
    for node, change, user in changes:
        spent[node] = max(0.0, spent[node] + change)
        nodes = [Node(name, usd) for name, usd in spent.items()]
        costs.take(nodes, ranks={node: user} if user else {}, active=["a", "b"])

    total = costs.of("a").plus(costs.of("b"))
    assert total.spent_usd == pytest.approx(sum(spent.values()), abs=1e-9)
    assert -1e-9 <= total.wasted_usd <= total.spent_usd + 1e-9


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
