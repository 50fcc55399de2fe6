"""The options of a plan: types, numbers of machines, prices, and the Pareto front."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etrain_jupyter.plugins.planner.planning.measured import MeasuredJob, read_measured
from etrain_jupyter.plugins.planner.planning.offers import MachineOffer, Market
from etrain_jupyter.plugins.planner.planning.options import (
    counts_up_to,
    derate_on_spot,
    estimates_of,
    mark_front,
    options_of,
)
from tests.unit.plugins.planner.planning.measured_jobs import CPU, GPUS, measured_job, option

G5 = MachineOffer(machine="g5.xlarge", on_demand_usd=1.0, spot_usd=0.3, boot_s=360.0)


def on_gpus(*, samples: int = 1_000_000, batch: int = 64, per_worker: bool = False) -> MeasuredJob:
    """Return a job that was measured on one and two g5.xlarge."""
    at = [(1, batch), (2, 2 * batch if per_worker else batch)]
    return read_measured(
        measured_job(GPUS, at, machine="g5.xlarge", lifecycle="spot", usd_per_h=0.3,
                     total_samples=samples, per_worker=per_worker)
    )  # fmt: skip


def test_hours_and_dollars_are_those_of_the_steps_left() -> None:
    measured = replace(on_gpus(), samples_left=64 * 10_000)
    estimates, skipped = estimates_of(measured, Market(offers=(G5,)), cores=2)

    options = options_of(measured, estimates, max_workers=2, head_usd=0.1)

    assert skipped == []
    one = next(o for o in options if (o.workers, o.lifecycle) == (1, "on-demand"))
    train_h = 10_000 * GPUS.predict(1, 64).step_s / 3600
    assert one.hours == pytest.approx(train_h + 0.1, rel=0.02)
    assert one.usd == pytest.approx(one.hours * 1.1)
    assert (one.batch, one.is_measured, one.efficiency) == (64, True, pytest.approx(1.0))
    spot = next(o for o in options if (o.workers, o.lifecycle) == (1, "spot"))
    share = 1 - derate_on_spot(measured, 1, 360.0)
    assert (spot.hours - 0.1) * share == pytest.approx(one.hours - 0.1)
    assert spot.usd == pytest.approx(spot.hours * 0.4)


def test_evaluations_and_checkpoints_prolong_the_job_but_not_its_steps() -> None:
    measured = on_gpus()
    estimates, _ = estimates_of(measured, Market(offers=(replace(G5, boot_s=0.0),)), cores=2)

    plain = options_of(measured, estimates, max_workers=1)
    longer = options_of(replace(measured, outside_share=0.5), estimates, max_workers=1)

    assert [o.hours for o in longer] == [pytest.approx(1.5 * o.hours) for o in plain]
    assert [o.step_s for o in longer] == [o.step_s for o in plain]


def test_batch_grows_with_the_workers_only_if_it_is_set_per_worker() -> None:
    market = Market(offers=(G5,))
    fixed, growing = on_gpus(), on_gpus(per_worker=True)

    of_fixed = options_of(fixed, estimates_of(fixed, market, cores=2)[0], max_workers=4)
    of_growing = options_of(growing, estimates_of(growing, market, cores=2)[0], max_workers=4)

    assert {o.workers: o.batch for o in of_fixed} == {1: 64, 2: 64, 3: 64, 4: 64}
    assert {o.workers: o.batch for o in of_growing} == {1: 64, 2: 128, 3: 192, 4: 256}


def test_no_worker_is_without_a_sample() -> None:
    measured = on_gpus()
    measured = replace(measured, plan=replace(measured.plan, global_batch_size=3))
    estimates, _ = estimates_of(measured, Market(offers=(G5,)), cores=2)

    options = options_of(measured, estimates, max_workers=8)

    assert max(o.workers for o in options) == 3


def test_machines_are_filled_with_workers() -> None:
    measured = on_gpus()
    offer = MachineOffer(machine="g5.12xlarge", workers=4, on_demand_usd=5.0)
    estimates, _ = estimates_of(measured, Market(offers=(offer,)), cores=2)

    options = options_of(measured, estimates, max_workers=10)

    assert sorted((o.machines, o.workers) for o in options) == [(1, 4), (2, 8)]
    assert not any(o.is_measured for o in options)
    assert "on 2 x g5.12xlarge on demand" in options[0].describe() + options[1].describe()


def test_other_gpu_is_scaled_by_its_peak_and_is_less_certain() -> None:
    measured = on_gpus()
    t4 = MachineOffer(machine="g4dn.xlarge", on_demand_usd=0.5)

    [here, there], _ = estimates_of(measured, Market(offers=(G5, t4)), cores=2)

    # 31.2 and 8.1 TFLOP/s, of a step that is nearly all arithmetic.
    ratio = there.model.predict(1, 64).step_s / here.model.predict(1, 64).step_s
    assert ratio == pytest.approx(31.2 / 8.1, rel=0.05)
    assert there.model.predict(1, 64).error >= 0.25 > here.model.predict(1, 64).error
    assert "g4dn.xlarge has not run the job. A sample takes 3.9 times" in there.notes[0]


def test_half_precision_is_scaled_by_the_peak_in_it() -> None:
    measured = replace(on_gpus(), precision="bf16")
    l4 = MachineOffer(machine="g6.xlarge", on_demand_usd=0.8)

    [there], _ = estimates_of(measured, Market(offers=(l4,)), cores=2)

    assert "A sample takes 0.58 times" in there.notes[0]


def test_type_is_left_out_if_its_speed_cannot_be_predicted() -> None:
    measured = read_measured(measured_job(CPU, [(1, 64)]))

    estimates, skipped = estimates_of(measured, Market(offers=(G5,)), cores=2)

    assert estimates == []
    [note] = skipped
    assert "g5.xlarge is left out: the job has only run on cpu" in note


def test_one_number_of_workers_and_one_batch_are_flagged_as_guesses() -> None:
    measured = read_measured(measured_job(CPU, [(1, 64)], config={"compression": "powersgd"}))

    [estimate], _ = estimates_of(measured, Market(offers=(MachineOffer(machine="cpu"),)), cores=2)

    said = " ".join(estimate.notes)
    assert "the job never ran on two workers of cpu" in said
    assert "only one number of samples per worker" in said
    assert "PowerSGD sends 5 %" in said


@pytest.mark.parametrize(
    ("most", "counts"), [(0, []), (1, [1]), (5, [1, 2, 3, 4, 5]), (16, [1, 2, 3, 4, 6, 8, 12, 16])]
)
def test_numbers_of_machines(most: int, counts: list[int]) -> None:
    assert counts_up_to(most) == counts


amounts = st.floats(0.01, 1e4)


@given(st.lists(st.tuples(amounts, amounts), min_size=1, max_size=20))
def test_front_has_exactly_the_options_that_no_other_one_beats(
    values: list[tuple[float, float]],
) -> None:
    marked = mark_front([option(1, hours, usd) for hours, usd in values])

    assert sorted((o.hours, o.usd) for o in marked) == sorted(values)
    for one in marked:
        is_beaten = any(
            o.hours <= one.hours and o.usd <= one.usd and (o.hours, o.usd) != (one.hours, one.usd)
            for o in marked
        )
        assert not (one.is_on_front and is_beaten)
        # Of equal options, one is enough.
        equal = [o for o in marked if (o.hours, o.usd) == (one.hours, one.usd)]
        assert is_beaten or sum(o.is_on_front for o in equal) == 1


def test_front_of_options_without_prices_is_by_worker_hours() -> None:
    marked = mark_front([option(*one, math.nan) for one in ((1, 4.0), (2, 3.0), (1, 3.5))])

    assert [(o.hours, o.is_on_front) for o in marked] == [(3.0, True), (3.5, True), (4.0, False)]


def test_option_without_a_price_is_not_on_the_front_of_those_with_one() -> None:
    marked = mark_front([option(1, 1.0, math.nan), option(1, 2.0, 5.0)])

    assert [o.is_on_front for o in marked] == [False, True]
