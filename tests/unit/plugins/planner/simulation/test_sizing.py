"""Jobs that choose their size, alone and together on one pool, in virtual time."""

from __future__ import annotations

import dataclasses
import json
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etrain_jupyter.errors import ConfigError
from etrain_jupyter.plugins.planner.simulation.job import SimulatedJob
from etrain_jupyter.plugins.planner.simulation.policies import Simulation, simulate, simulate_sizes
from etrain_jupyter.plugins.planner.simulation.sizing import SIZINGS, VirtualSpeeds, ring_rates
from etrain_jupyter.plugins.planner.simulation.table import rows_of, table_of, to_dict
from etrain_jupyter.plugins.planner.simulation.trace import Slot, SpotTrace
from etrain_jupyter.rules.sizing.goodput import choose_size

HOUR = 3600.0


def job_of(efficiency: float, *, workers: int = 8, hours: float = 2.0) -> SimulatedJob:
    return SimulatedJob(
        workers=workers, duration_s=hours * HOUR, deadline_s=2 * hours * HOUR, on_demand_usd=1.0,
        spot_usd=0.3, boot_s=(120.0, 120.0), stall_s=1.0, efficiency=efficiency,
        own_rates=ring_rates(workers, efficiency),
    )  # fmt: skip


def market(*spans: tuple[float, float], length_h: float = 24.0) -> SpotTrace:
    slots = [Slot(zone="a", since_s=a * HOUR, until_s=b * HOUR) for a, b in sorted(spans)]
    return SpotTrace(name="hand-made", length_s=length_h * HOUR, slots=tuple(slots))


ALWAYS = market(*[(0.0, 24.0)] * 8)


def sized(trace: SpotTrace, *jobs: SimulatedJob, policy: str = "spot") -> Simulation:
    return simulate_sizes(trace, jobs, policies=[policy], num_starts=2)


def best_size(job: SimulatedJob) -> int:
    """Return the number of workers with the smallest product of time and cost."""
    return max(range(1, job.workers + 1), key=lambda workers: job.rates[workers] ** 2 / workers)


@pytest.mark.parametrize("efficiency", [0.95, 0.6, 0.4, 0.2])
def test_rule_finds_the_size_with_the_smallest_product_of_time_and_cost(efficiency: float) -> None:
    job, measured, sizes = job_of(efficiency, workers=16), set[int](), [0]
    speeds = VirtualSpeeds(job)

    while sizes[-1] not in measured:
        measured |= {sizes[-1]} - {0}
        sizes.append(choose_size(speeds.terms(measured, min_workers=1), current=sizes[-1]).workers)

    found, best = sizes[-1], best_size(job)
    value = {workers: job.rates[workers] ** 2 / workers for workers in (found, best)}
    # It keeps a size that is within 5 % of the best one.
    assert value[best] < 1.06 * value[found]
    # It starts on one worker, and at most doubles.
    assert sizes[1:3] == [1, 2]
    assert all(after <= 2 * before for before, after in pairwise(sizes[1:]))


def test_job_that_does_not_scale_costs_less_by_goodput_and_one_that_scales_is_as_fast() -> None:
    poor, good = sized(ALWAYS, job_of(0.25)), sized(ALWAYS, job_of(1.0))

    def time_times_cost(done: Simulation, sizing: str) -> float:
        result = done[f"spot {sizing}"]
        return result.mean_usd * result.mean(lambda one: one.finish_s)

    assert time_times_cost(poor, "goodput") < 0.75 * time_times_cost(poor, "greedy")
    assert poor["spot goodput"].mean_usd < 0.6 * poor["spot greedy"].mean_usd
    [fast, *_] = good["spot greedy"].outcomes
    [slow, *_] = good["spot goodput"].outcomes
    # The difference is the time in which it measures fewer workers, and the boots in between.
    assert fast.finish_s < slow.finish_s < fast.finish_s + 4 * 180.0


def test_greedy_job_alone_is_the_job_of_the_capacity_policies() -> None:
    trace = market((0.0, 3.0), (0.5, 24.0), (1.0, 2.0), (1.5, 9.0), *[(4.0, 24.0)] * 4)
    job = job_of(0.7)
    alone = simulate(trace, job, policies=["spot", "fallback"], num_starts=4)
    both = simulate_sizes(
        trace, [job], policies=["spot", "fallback"], sizings=["greedy"], num_starts=4
    )

    for policy in ("spot", "fallback"):
        for one, other in zip(
            alone[policy].outcomes, both[f"{policy} greedy"].outcomes, strict=True
        ):
            assert one.finish_s == pytest.approx(other.finish_s, rel=0.01)
            assert one.cost_usd == pytest.approx(other.cost_usd, rel=0.02)


def test_fixed_job_waits_for_its_last_worker_and_pays_for_the_others() -> None:
    hourly = [(hour, hour + 0.5) for hour in range(24)]  # an eighth machine half of the time
    trace = market(*[(0.0, 24.0)] * 7, *hourly)
    window = simulate_sizes(trace, [job_of(1.0)], sizings=["fixed", "greedy"], num_starts=4)

    assert window["spot fixed"].mean_usd > window["spot greedy"].mean_usd
    for fixed, greedy in zip(
        window["spot fixed"].outcomes, window["spot greedy"].outcomes, strict=True
    ):
        assert fixed.finish_s >= greedy.finish_s


def test_two_jobs_share_a_pool_by_goodput_so_that_a_worker_goes_where_it_helps_most() -> None:
    good, poor = job_of(0.95), job_of(0.2)

    done = sized(ALWAYS, poor, good)

    # Greedy serves the first job first: the second one has a single worker until it ends.
    first, second = done["spot greedy"].outcomes[0].job_finishes_s
    assert second > 1.8 * first
    shared = done["spot goodput"].outcomes[0]
    assert shared.job_finishes_s[1] < 0.7 * second
    assert shared.finish_s == max(shared.job_finishes_s)
    assert shared.goodput > done["spot greedy"].outcomes[0].goodput
    table = table_of(done)
    assert "2 jobs on one pool, each: 2 h on 8 workers (scaling efficiency 20% and 95%)" in table
    assert "JOB 1 h  JOB 2 h" in table
    assert {row["sizing"] for row in rows_of(done)} == set(SIZINGS)
    assert json.loads(json.dumps(to_dict(done), allow_nan=False))["other_jobs"]


def test_deadline_makes_a_job_larger_than_its_goodput_justifies() -> None:
    job = dataclasses.replace(job_of(0.25), deadline_s=2.2 * HOUR)

    done = simulate_sizes(ALWAYS, [job], policies=["spot", "deadline"], num_starts=2)

    assert done["spot goodput"].late_share == 1.0
    assert done["deadline goodput"].late_share == 0.0
    assert done["deadline goodput"].mean_usd > done["spot goodput"].mean_usd


def test_gang_has_no_size_to_choose() -> None:
    with pytest.raises(ConfigError, match="a gang always has all of its workers"):
        sized(ALWAYS, job_of(1.0), policy="greedy-gang")


@settings(max_examples=15, deadline=None)
@given(
    spans=st.lists(
        st.tuples(st.floats(0.0, 5.5), st.floats(0.2, 6.0)).filter(lambda s: s[0] < s[1]),
        min_size=1, max_size=8,
    ),
    efficiencies=st.lists(st.sampled_from([0.3, 0.6, 0.9]), min_size=1, max_size=3),
    policy=st.sampled_from(["spot", "fallback", "deadline"]),
)  # fmt: skip
def test_jobs_never_train_on_more_machines_than_are_billed_or_do_more_work_than_they_have(
    spans: list[tuple[float, float]], efficiencies: list[float], policy: str
) -> None:
    jobs = [job_of(one, workers=4, hours=0.5) for one in efficiencies]
    done = simulate_sizes(market(*spans, length_h=6.0), jobs, policies=[policy], num_starts=1)

    for result in done.results:
        [one] = result.outcomes
        until_h = min(one.finish_s, jobs[0].horizon_s) / HOUR
        assert one.mean_workers * until_h <= one.spot_hours + one.on_demand_hours + 1e-6
        assert one.mean_workers <= 4 + 1e-9
        assert all(finish >= 0.5 * HOUR for finish in one.job_finishes_s)
