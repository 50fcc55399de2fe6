"""The model of step times: its form, what a fit recovers, and its standard errors."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etrain_jupyter.rules.sizing.step_time import (
    Exchange,
    Placement,
    StepPoint,
    StepTimeModel,
    fit_step_times,
)

TWO_CORES = Placement(cores=2)
LINKS = Placement(workers_per_machine=1)
MLP_BYTES = 4 * 10_073_210.0
"""Gradients of the MLP of ``reference/prototypes/plan``, with 784, 2800, 2800 and 10 units."""
GIGABIT = Exchange(num_bytes=MLP_BYTES, s_per_byte=8e-9, is_known=True)


def model_of(
    placement: Placement,
    exchange: Exchange,
    *,
    fixed_s: float,
    sample_s: float,
    s_per_byte: float,
    latency_s: float = 2e-4,
) -> StepTimeModel:
    """Return a model with given parameters and an overlap of one half."""
    values = np.array([*map(math.log, (fixed_s, sample_s, latency_s, s_per_byte)), 0.0])
    return StepTimeModel(
        placement=placement, exchange=exchange, values=values, covariance=np.zeros((5, 5))
    )


def points_of(model: StepTimeModel, at: list[tuple[int, float]]) -> list[StepPoint]:
    """Return the exact durations at numbers of workers and samples per worker."""
    found = []
    for workers, batch in at:
        predicted = model.predict(workers, batch)
        found.append(
            StepPoint(
                workers=workers,
                batch=batch,
                step_s=predicted.step_s,
                exposed_s=predicted.exposed_s,
            )
        )
    return found


@pytest.mark.parametrize(("workers", "seconds"), [(2, 0.322), (3, 0.430), (4, 0.483)])
def test_exchange_over_links_is_the_ring_formula(workers: int, seconds: float) -> None:
    # The table of the prototype: MLP over 1 Gbit/s, from its bytes alone.
    model = model_of(LINKS, GIGABIT, fixed_s=1e-3, sample_s=1e-9, s_per_byte=8e-9, latency_s=1e-9)

    assert model.predict(workers, 16).exposed_s == pytest.approx(seconds, abs=1e-3)


@pytest.mark.parametrize(("workers", "factor"), [(1, 1.0), (2, 1.0), (3, 1.125), (4, 1.5)])
def test_exchange_on_one_machine_waits_for_its_cores(workers: int, factor: float) -> None:
    assert TWO_CORES.sending_contention(workers) == pytest.approx(factor)
    assert LINKS.sending_contention(workers) == 1.0


def test_exchange_of_small_gradients_doubles_the_ranks_in_each_round() -> None:
    small = replace(GIGABIT, num_bytes=125_000.0, num_buckets=1)
    model = model_of(LINKS, small, fixed_s=1e-3, sample_s=1e-9, s_per_byte=8e-9, latency_s=1e-3)

    found = [model.predict(workers, 16).exposed_s for workers in (2, 3, 4, 8)]

    # A message of 1 Mbit takes 1 ms plus its latency.
    assert found == pytest.approx([2e-3, 4e-3, 4e-3, 6e-3], rel=1e-4)


def test_workers_with_a_gpu_each_do_not_slow_each_other_down() -> None:
    own_gpus = Placement(workers_per_machine=4)

    assert [own_gpus.contention(workers) for workers in (1, 4, 16)] == [1.0, 1.0, 1.0]
    assert [TWO_CORES.contention(workers) for workers in (1, 2, 4)] == [1.0, 1.0, 2.0]


def test_one_worker_exchanges_nothing() -> None:
    model = model_of(TWO_CORES, GIGABIT, fixed_s=0.01, sample_s=0.001, s_per_byte=1e-9)

    assert model.predict(1, 30).step_s == pytest.approx(0.04)
    assert model.predict(1, 30).exposed_s == 0.0


def test_accumulated_passes_hide_less_of_the_exchange() -> None:
    one = model_of(LINKS, GIGABIT, fixed_s=0.001, sample_s=0.02, s_per_byte=8e-9)
    four = replace(one, exchange=replace(GIGABIT, passes=4))

    assert four.predict(2, 32).exposed_s > one.predict(2, 32).exposed_s


@pytest.mark.parametrize("placement", [TWO_CORES, LINKS], ids=["loopback", "links"])
@pytest.mark.parametrize(
    ("fixed_s", "sample_s", "num_bytes"),
    [(0.002, 0.001, 2.5e6), (0.012, 0.0009, MLP_BYTES), (0.015, 0.005, 2.3e7)],
    ids=["cnn", "mlp", "transformer"],
)
def test_four_points_at_one_and_two_workers_predict_eight(
    placement: Placement, fixed_s: float, sample_s: float, num_bytes: float
) -> None:
    exchange = Exchange(num_bytes=num_bytes, num_buckets=2)
    true = model_of(
        placement, exchange, fixed_s=fixed_s, sample_s=sample_s, s_per_byte=1 / 1.2e9
    )  # fmt: skip
    points = points_of(true, [(1, 4), (1, 32), (2, 4), (2, 32)])

    fitted = fit_step_times(points, placement, exchange)

    for workers in (3, 4, 8):
        for batch in (4.0, 16.0, 64.0):
            expected = true.predict(workers, batch).step_s
            assert fitted.predict(workers, batch).step_s == pytest.approx(expected, rel=0.05)


def test_phases_tell_computation_and_exchange_apart_where_only_one_number_of_workers_ran() -> None:
    true = model_of(
        LINKS, replace(GIGABIT, is_known=False), fixed_s=0.01, sample_s=0.002, s_per_byte=8e-9
    )
    at = [(2, 8.0), (2, 32.0)]

    fitted = fit_step_times(points_of(true, at), LINKS, true.exchange)

    expected = true.predict(8, 16).step_s
    assert fitted.predict(8, 16).step_s == pytest.approx(expected, rel=0.05)


def test_what_was_not_measured_is_unknown_and_has_a_large_error() -> None:
    point = StepPoint(workers=1, batch=32, step_s=0.1, exposed_s=0.0)
    alone = fit_step_times([point], TWO_CORES, GIGABIT)

    assert alone.unknown == {"batch", "exchange"}
    assert alone.predict(1, 32).step_s == pytest.approx(0.1, rel=0.02)
    assert alone.predict(1, 32).error < 0.1
    # Whether time is per step or per sample is open, so another batch may take much longer.
    assert alone.predict(1, 256).error > 0.2


def test_unknown_exchange_is_less_certain_than_one_over_a_known_network() -> None:
    points = [
        StepPoint(workers=1, batch=batch, step_s=0.002 * batch, exposed_s=0.0) for batch in (8, 32)
    ]

    guessed = fit_step_times(points, LINKS, replace(GIGABIT, is_known=False))
    known = fit_step_times(points, LINKS, GIGABIT)

    assert known.unknown == guessed.unknown == {"exchange"}
    assert known.predict(4, 8).error < 0.3 < guessed.predict(4, 8).error


def test_no_point_is_refused() -> None:
    with pytest.raises(ValueError, match="no measured step"):
        fit_step_times([], TWO_CORES, GIGABIT)


def test_moved_model_scales_only_the_time_of_a_sample() -> None:
    points = [
        StepPoint(workers=1, batch=batch, step_s=0.02 + 0.002 * batch, exposed_s=0.0)
        for batch in (8, 64)
    ]
    here = fit_step_times(points, LINKS, GIGABIT)

    there = here.moved_to(LINKS, replace(GIGABIT, s_per_byte=1e-9), speed=4.0)

    slope = there.predict(1, 1000).step_s - there.predict(1, 0).step_s
    assert slope == pytest.approx((here.predict(1, 1000).step_s - here.predict(1, 0).step_s) / 4)
    assert there.predict(1, 0).step_s == pytest.approx(here.predict(1, 0).step_s)
    assert "exchange" in there.unknown


positive = st.floats(1e-4, 1.0)


@settings(max_examples=25, deadline=None)
@given(
    fixed_s=positive, sample_s=st.floats(1e-5, 0.1), s_per_byte=st.floats(1e-11, 1e-7),
    num_bytes=st.floats(1e3, 1e9), cores=st.sampled_from([1.0, 2.0, 64.0, math.inf]),
    per_machine=st.sampled_from([0, 1, 8]),
)  # fmt: skip
def test_predictions_are_finite_and_grow_with_the_batch(
    fixed_s: float,
    sample_s: float,
    s_per_byte: float,
    num_bytes: float,
    cores: float,
    per_machine: int,
) -> None:
    placement = Placement(cores=cores, workers_per_machine=per_machine)
    exchange = Exchange(num_bytes=num_bytes, num_buckets=3)
    true = model_of(placement, exchange, fixed_s=fixed_s, sample_s=sample_s, s_per_byte=s_per_byte)
    points = points_of(true, [(1, 4), (2, 4), (2, 32)])

    fitted = fit_step_times(points, placement, exchange)

    assert max(map(abs, fitted.residuals(points))) < 0.2
    for workers in (1, 2, 16):
        small, large = fitted.predict(workers, 8), fitted.predict(workers, 16)
        assert 0 < small.step_s <= large.step_s * (1 + 1e-9) < math.inf
        assert small.error >= 0.05
        assert 0 <= small.exposed_s <= small.step_s
