"""The pool's rules in virtual time: results that can be computed by hand, and invariants."""

from __future__ import annotations

import dataclasses
import json
import random
from pathlib import Path

import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etrain_jupyter.errors import ConfigError, TraceError
from etrain_jupyter.plugins.ec2.head.view import Rules
from etrain_jupyter.plugins.planner.simulation.job import SimulatedJob
from etrain_jupyter.plugins.planner.simulation.market import VirtualMarket
from etrain_jupyter.plugins.planner.simulation.policies import (
    POLICIES,
    Simulation,
    run_policy,
    simulate,
)
from etrain_jupyter.plugins.planner.simulation.table import rows_of, table_of, to_dict, write_json
from etrain_jupyter.plugins.planner.simulation.trace import Slot, SpotTrace
from etrain_jupyter.plugins.planner.simulation.trace_files import read_trace

HOUR = 3600.0
JOB = SimulatedJob(
    workers=4,
    duration_s=2 * HOUR,
    deadline_s=3 * HOUR,
    on_demand_usd=1.0,
    spot_usd=0.3,
    boot_s=(120.0, 120.0),
    stall_s=0.0,
)


def market(*spans: tuple[float, float], length_h: float = 24.0, zone: str = "a") -> SpotTrace:
    slots = [Slot(zone=zone, since_s=a * HOUR, until_s=b * HOUR) for a, b in sorted(spans)]
    return SpotTrace(name="hand-made", length_s=length_h * HOUR, slots=tuple(slots))


ALWAYS = market(*[(0.0, 24.0)] * 4)
NEVER_MORE_THAN_ONE = market((0.0, 24.0))


def result(trace: SpotTrace, policy: str, job: SimulatedJob = JOB, starts: int = 2) -> Simulation:
    return simulate(trace, job, policies=[policy], num_starts=starts)


@pytest.mark.parametrize("policy", POLICIES)
def test_undisturbed_job_takes_its_time_and_a_boot(policy: str) -> None:
    restart_s = JOB.gang_restart_s if policy.endswith("gang") else 0.0
    usd = 1.0 if policy == "on-demand" else 0.3
    done = result(ALWAYS, policy)

    for one in done.results[0].outcomes:
        assert one.finish_s == 2 * HOUR + 120.0 + restart_s
        # During the first boot, uniform progress falls behind, and launches on demand as well.
        if policy != "uniform":
            assert one.cost_usd == pytest.approx(4 * usd * one.finish_s / HOUR)
        assert one.goodput == pytest.approx(2 * HOUR / one.finish_s)
        assert not one.is_late


def test_job_without_spot_capacity_runs_on_demand_just_in_time() -> None:
    nothing = market((23.0, 24.0), length_h=1000.0)
    [one] = result(nothing, "lazy", starts=1).results[0].outcomes

    assert not one.is_late
    # The slack is used before on-demand machines start: 2 h of work end after almost 3 h.
    assert 2.7 * HOUR < one.finish_s <= 3 * HOUR
    assert one.on_demand_hours == pytest.approx(4 * 2.0, rel=0.06)


def test_spot_policy_misses_a_deadline_that_it_cannot_meet() -> None:
    [one] = result(NEVER_MORE_THAN_ONE, "spot", starts=1).results[0].outcomes

    assert one.is_late
    assert one.finish_s == 8 * HOUR + 120.0
    assert one.on_demand_hours == 0.0


def test_fallback_replaces_missing_spot_machines_after_its_wait() -> None:
    [one] = result(NEVER_MORE_THAN_ONE, "fallback", starts=1).results[0].outcomes

    assert not one.is_late
    assert one.on_demand_hours == pytest.approx(3 * (one.finish_s - 120.0) / HOUR, rel=0.02)


def test_run_that_is_given_up_has_no_end() -> None:
    rare = market((0.0, 0.5), length_h=50.0)
    [one] = simulate(rare, JOB, policies=["spot"], num_starts=1).results[0].outcomes

    assert one.finish_s == float("inf")
    assert one.is_late
    assert one.goodput < 0.1


def test_machine_reclaimed_in_its_first_hour_is_free_and_an_older_one_is_not() -> None:
    job = dataclasses.replace(JOB, workers=1, deadline_s=4 * HOUR)
    # The worker leaves at the notice, two minutes before the end.
    early, late = market((0.0, 0.5), (0.5, 24.0)), market((0.0, 1.5), (1.5, 24.0))
    rules = Rules(cluster_id="c", max_workers=1)

    first = run_policy(early, job, "spot", rules, seed="1")
    second = run_policy(late, job, "spot", rules, seed="1")

    assert first.waived_usd == pytest.approx(0.3 * 0.5)
    assert second.waived_usd == 0.0
    assert first.cost_usd == pytest.approx(0.3 * first.spot_hours - first.waived_usd)


def test_elastic_policy_is_cheaper_than_a_gang_that_never_fits() -> None:
    trace = market(*[(0.0, 24.0)] * 3)
    done = simulate(trace, JOB, policies=["uniform-gang", "deadline"], num_starts=2)

    assert done["deadline"].mean_usd < 0.7 * done["uniform-gang"].mean_usd
    assert done["deadline"].late_share == done["uniform-gang"].late_share == 0.0
    assert done.best.policy == "deadline"


def test_lazy_policy_misses_the_deadline_if_on_demand_is_short_and_uniform_does_not() -> None:
    # No spot machine for hours, and nine of ten requests for on-demand machines are refused.
    trace = market((0.0, 1.0), *[(20.0, 24.0)] * 4)
    job = dataclasses.replace(JOB, duration_s=HOUR, deadline_s=6 * HOUR, shortage=0.97)
    rules = Rules(cluster_id="c", max_workers=4)
    runs = [str(seed) for seed in range(12)]

    late = {
        policy: sum(run_policy(trace, job, policy, rules, seed=seed).is_late for seed in runs)
        for policy in ("lazy", "uniform")
    }

    assert late["uniform"] < late["lazy"]


def test_same_seed_gives_the_same_result() -> None:
    trace = market((0.0, 3.0), (1.0, 2.0), (2.0, 9.0), (5.0, 24.0))

    assert result(trace, "deadline").results == result(trace, "deadline").results


def test_price_of_the_trace_takes_precedence() -> None:
    trace = dataclasses.replace(ALWAYS, prices={"a": ((0.0, 0.6),)})
    [one] = result(trace, "spot", starts=1).results[0].outcomes

    assert one.cost_usd == pytest.approx(4 * 0.6 * one.finish_s / HOUR)


def test_fleet_migrates_to_the_zone_with_capacity() -> None:
    slots = (
        Slot(zone="a", since_s=0.0, until_s=HOUR),
        Slot(zone="b", since_s=0.0, until_s=86400.0),
    )
    trace = SpotTrace(name="two zones", length_s=86400.0, slots=slots)
    job = dataclasses.replace(JOB, workers=1)
    one = run_policy(trace, job, "spot", Rules(cluster_id="c", max_workers=1), seed="1")

    assert one.finish_s < 2.2 * HOUR


def test_infeasible_deadline_names_what_is_missing_and_what_would_do() -> None:
    job = dataclasses.replace(JOB, workers=10, deadline_s=2 * HOUR)

    with pytest.raises(ConfigError, match=r"2 h on 10 workers, .* 0.12 h too many") as error:
        simulate(ALWAYS, job, num_starts=1)

    assert error.value.hint == "write --deadline 2.2h or more, or --workers 11 or more"


def test_infeasible_deadline_of_a_job_that_does_not_scale_has_no_number_of_workers() -> None:
    job = dataclasses.replace(JOB, workers=10, efficiency=0.11, deadline_s=2 * HOUR)

    with pytest.raises(ConfigError) as error:
        simulate(ALWAYS, job, num_starts=1)

    assert error.value.hint.endswith("no number of workers would be enough")


def test_results_are_available_as_table_frame_and_json(tmp_path: Path) -> None:
    done = simulate(NEVER_MORE_THAN_ONE, JOB, policies=["spot", "deadline"], num_starts=3)
    frame = pd.DataFrame(rows_of(done))
    write_json(done, tmp_path / "runs.json")

    assert list(frame.groupby("policy")["run"].count()) == [3, 3]
    assert frame[frame.policy == "spot"]["is_late"].all()
    assert json.loads((tmp_path / "runs.json").read_text()) == json.loads(json.dumps(to_dict(done)))
    table = table_of(done)
    assert "The trace never has 4 machines" in table
    assert "Cheapest with the fewest missed deadlines (0%): deadline" in table
    with pytest.raises(TraceError, match="cannot be written"):
        write_json(done, tmp_path)


def test_unfinished_runs_are_shown_as_never(tmp_path: Path) -> None:
    done = simulate(market((0.0, 0.5), length_h=50.0), JOB, policies=["spot"], num_starts=1)

    assert "never" in table_of(done)
    assert to_dict(done)["runs"][0]["finish_s"] is None
    json.dumps(to_dict(done), allow_nan=False)


spans = st.lists(
    st.tuples(st.floats(0.0, 5.5), st.floats(0.2, 6.0)).filter(lambda s: s[0] < s[1]),
    min_size=1,
    max_size=6,
)


@settings(max_examples=12, deadline=None)
@given(
    spans=spans,
    policy=st.sampled_from(["spot", "fallback", "lazy", "deadline", "uniform"]),
    seed=st.integers(0, 99),
    shortage=st.sampled_from([0.0, 0.5]),
)
def test_skipped_decisions_do_not_change_the_result(
    spans: list[tuple[float, float]], policy: str, seed: int, shortage: float
) -> None:
    trace = market(*spans, length_h=6.0)
    job = dataclasses.replace(JOB, boot_s=(60.0, 300.0), shortage=shortage)
    window = trace.from_time(seed * 60.0, job.horizon_s)
    rules = Rules(cluster_id="c", max_workers=4)

    skipping, all = (
        run_policy(window, job, policy, rules, seed=str(seed), skips=skips)
        for skips in (True, False)
    )

    assert skipping == all


@settings(max_examples=40, deadline=None)
@given(spans=spans, seed=st.integers(0, 99))
def test_market_never_grants_more_than_its_capacity(
    spans: list[tuple[float, float]], seed: int
) -> None:
    trace = market(*spans, length_h=6.0)
    virtual = VirtualMarket(trace, rng=random.Random(seed), boot_s=(60.0, 60.0))
    for step in range(72):
        now = step * 300.0
        virtual.advance(now)
        virtual.launch("spot", ["a"], seed % 4, now)
        if step % 5 == seed % 5 and virtual.nodes:
            virtual.end(next(iter(virtual.nodes)), now)
        in_trace = sum(slot.since_s <= now < slot.until_s for slot in trace.slots)

        assert len(virtual.nodes) <= virtual.capacity(now) <= in_trace


@pytest.mark.parametrize(
    ("text", "has_losses"),
    [("seconds,capacity\n0,4\n1800,2\n7200,2\n", False), ("0,4\n1800000,2\n7200000,2\n", True)],
    ids=["capacity", "interruptions"],
)
def test_less_capacity_interrupts_only_machines_beyond_it(
    tmp_path: Path, text: str, has_losses: bool
) -> None:
    (tmp_path / "market.csv").write_text(text)
    trace = read_trace(tmp_path / "market.csv")
    job = dataclasses.replace(JOB, workers=2, duration_s=HOUR)
    rules = Rules(cluster_id="c", max_workers=2)

    runs = [run_policy(trace, job, "spot", rules, seed=str(seed)) for seed in range(5)]

    assert any(run.num_changes for run in runs) == has_losses


# --- rebalance recommendations, and losses without a notice ---


def lost_once(*, risk_s: float, notice_s: float | None = None) -> SpotTrace:
    """Return a market that has a machine too many, and reclaims one after an hour."""
    kept = tuple(Slot(zone="a", since_s=0.0, until_s=24 * HOUR, rank=n) for n in range(1, 5))
    # Of the lowest rank, so that a machine starts there.
    lost = Slot(zone="a", since_s=0.0, until_s=HOUR, rank=0, risk_s=risk_s, notice_s=notice_s)
    return SpotTrace(name="hand-made", length_s=24 * HOUR, slots=(lost, *kept))


@pytest.mark.parametrize(
    ("risk_s", "notice_s", "missing_s"),
    [
        (0.0, None, 0.0),  # replaced at the notice: the boot takes as long as the notice
        (0.0, 0.0, 120.0),  # lost without a notice: the same, two minutes later
        (0.0, 60.0, 60.0),  # a shorter notice: the boot has half elapsed at the end
        (60.0, 60.0, 0.0),  # recommended a minute before
        (600.0, None, 0.0),  # the replacement is ready before the notice
    ],
)
def test_recommendation_replaces_a_machine_before_its_notice(
    risk_s: float, notice_s: float | None, missing_s: float
) -> None:
    job = dataclasses.replace(JOB, duration_s=2 * HOUR, deadline_s=3 * HOUR)
    window = lost_once(risk_s=risk_s, notice_s=notice_s).from_time(0.0, job.horizon_s)
    rules = Rules(cluster_id="simulated", max_workers=4)

    done = run_policy(window, job, "spot", rules, seed="0")

    # A quarter of the workers is missing for this time.
    assert done.finish_s == pytest.approx(2 * HOUR + 120.0 + missing_s / 4)
