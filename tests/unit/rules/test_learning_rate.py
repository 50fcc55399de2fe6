"""The learning rate's factor when the batch grows and shrinks with the workers."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from etrain_jupyter.rules.learning_rate import (
    GradientNoise,
    LrSchedule,
    Ramp,
    factor_of,
    ramp_length,
)

SCALES = st.floats(0.1, 64.0)
MOMENTA = st.floats(0.5, 0.99)


def factors(ramp: Ramp, steps: int) -> list[float]:
    found = []
    for _ in range(steps):
        found.append(ramp.factor)
        ramp = ramp.advance()
    return found


@given(growth=st.floats(1.01, 64.0), momentum=MOMENTA)
def test_old_momentum_is_never_amplified_and_a_much_shorter_ramp_would(growth, momentum):
    length = ramp_length(growth, momentum)
    weights = [f * momentum**j for j, f in enumerate(factors(Ramp().aim(growth, momentum), 200))]
    assert max(weights) <= 1.0 + 1e-9
    if length > 4:
        short = factors(Ramp().aim(growth, momentum, length=length // 2), 200)
        assert max(f * momentum**j for j, f in enumerate(short)) > 1.0


def test_growth_ramps_linearly_and_shrinkage_is_immediate():
    ramp = Ramp().aim(4.0, 0.9, length=3)
    assert factors(ramp, 5) == [1.0, 2.0, 3.0, 4.0, 4.0]
    ramp = ramp.advance().advance()
    assert factors(ramp.aim(1.0, 0.9), 2) == [1.0, 1.0]


def test_nested_change_starts_from_the_current_factor():
    ramp = Ramp().aim(4.0, 0.9, length=3).advance()
    higher = ramp.aim(8.0, 0.9, length=3)
    assert factors(higher, 4) == [2.0, 4.0, 6.0, 8.0]
    assert ramp.aim(1.5, 0.9).factor == 1.5


def test_same_target_continues_the_ramp():
    ramp = Ramp().aim(4.0, 0.9, length=3).advance()
    assert ramp.aim(4.0, 0.9) is ramp


@given(targets=st.lists(st.tuples(SCALES, st.integers(0, 30)), min_size=1, max_size=8))
def test_factor_stays_between_its_start_and_its_target(targets):
    ramp = Ramp()
    for target, steps in targets:
        before = ramp.factor
        ramp = ramp.aim(target, 0.9)
        low, high = min(before, target), max(before, target)
        for _ in range(steps):
            assert low - 1e-9 <= ramp.factor <= high + 1e-9
            ramp = ramp.advance()


@given(scale=SCALES, most=st.floats(1.0, 16.0))
def test_rules_are_capped(scale, most):
    assert factor_of("none", scale) == 1.0
    assert factor_of("linear", scale, most) == min(scale, most)
    assert factor_of("sqrt", scale) == math.sqrt(scale)


SIZES = st.floats(0.0, 1e6)
WORKERS = st.integers(1, 64)


def measured(gradients: np.ndarray) -> dict[str, float]:
    """What the ranks measure; gradients have shape (W, N)."""
    return {
        "mean_of_squares": float((gradients**2).sum(axis=1).mean()),
        "square_of_mean": float((gradients.mean(axis=0) ** 2).sum()),
        "world_size": len(gradients),
    }


@pytest.mark.parametrize("world_size", [2, 3, 12])
def test_estimates_match_the_noise_that_generated_the_gradients(world_size):
    rng = np.random.default_rng(0)
    true = np.array([3.0, -1.0, 0.5])
    noise = GradientNoise()
    for _ in range(4000):
        gradients = true + rng.normal(scale=2.0, size=(world_size, 3))
        noise = noise.take(**measured(gradients))
    assert noise.variance == pytest.approx(3 * 4.0, rel=0.15)
    assert noise.square_norm == pytest.approx(float(true @ true), rel=0.25)
    exact = (12.0 + true @ true) / (12.0 / world_size + true @ true)
    found = noise.gain(world_size=world_size, base_workers=1)
    assert found == pytest.approx(exact, rel=0.12)


@given(variance=SIZES, square=SIZES, world_size=WORKERS, base=WORKERS)
def test_gain_is_between_one_and_linear(variance, square, world_size, base):
    noise = GradientNoise(variance=variance, square_norm=square, num_estimates=5)
    scale = world_size / base
    gain = noise.gain(world_size=world_size, base_workers=base)
    low, high = sorted((1.0, scale))
    assert low * (1 - 1e-9) <= gain <= high * (1 + 1e-9)


@given(variance=st.floats(1e-3, 1e3), square=st.floats(1e-3, 1e3))
def test_gain_grows_with_the_workers_and_is_one_at_the_base(variance, square):
    noise = GradientNoise(variance=variance, square_norm=square, num_estimates=1)
    gains = [noise.gain(world_size=w, base_workers=4) for w in range(1, 20)]
    assert gains == sorted(gains)
    assert gains[3] == 1.0


def test_pure_noise_scales_linearly_and_a_noiseless_gradient_not_at_all():
    alone = GradientNoise(variance=7.0, square_norm=-0.1, num_estimates=1)
    sure = GradientNoise(variance=-0.1, square_norm=7.0, num_estimates=1)
    assert alone.gain(world_size=8, base_workers=2) == 4.0
    assert sure.gain(world_size=8, base_workers=2) == 1.0


def test_without_estimates_a_larger_batch_keeps_its_rate_and_a_smaller_one_is_cut():
    assert GradientNoise().gain(world_size=8, base_workers=2) == 1.0
    assert GradientNoise().gain(world_size=1, base_workers=4) == 0.25


def test_one_rank_or_infinite_gradients_do_not_change_the_estimate():
    noise = GradientNoise(variance=1.0, square_norm=2.0, num_estimates=3)
    one = noise.take(mean_of_squares=3.0, square_of_mean=3.0, world_size=1)
    infinite = noise.take(mean_of_squares=math.inf, square_of_mean=math.inf, world_size=2)
    assert one == infinite == noise


def test_means_are_plain_at_first_and_decay_faster_with_more_ranks():
    noise = GradientNoise()
    for value in (2.0, 4.0, 6.0):
        noise = noise.take(mean_of_squares=value, square_of_mean=0.0, world_size=2)
    assert noise.variance == pytest.approx(8.0)  # of 4, 8, 12
    old = GradientNoise(variance=0.0, square_norm=0.0, num_estimates=10_000)
    few = old.take(mean_of_squares=1.0, square_of_mean=0.0, world_size=2).variance
    many = old.take(mean_of_squares=1.0, square_of_mean=0.0, world_size=500).variance
    assert few == pytest.approx(2.0 * 0.002)
    assert many == pytest.approx(500 / 499 * 0.5)


WARM, TOTAL = 4, 20


@pytest.mark.parametrize("batch", [1, 32])
@pytest.mark.parametrize("decay", ["none", "linear", "cosine"])
def test_constant_batch_gives_the_usual_formula(batch, decay):
    schedule = LrSchedule(warmup=WARM * batch, decay=decay, end=TOTAL * batch)
    for step in range(TOTAL):
        passed = (step - WARM) / (TOTAL - WARM)
        usual = {
            "none": 1.0,
            "linear": 1.0 - passed,
            "cosine": 0.5 * (1.0 + math.cos(math.pi * passed)),
        }[decay]
        expected = (step + 1) / WARM if step < WARM else usual
        assert schedule.factor(step * batch, batch) == pytest.approx(expected)


@given(
    st.lists(st.integers(1, 50), min_size=1, max_size=40),
    st.sampled_from(["none", "linear", "cosine"]),
)
def test_factor_is_between_zero_and_one_for_any_batches(counts, decay):
    schedule = LrSchedule(warmup=sum(counts) // 3, decay=decay, end=sum(counts))
    position, factors = 0, []
    for count in counts:
        factors.append(schedule.factor(position, count))
        position += count
    assert all(0.0 < factor <= 1.0 for factor in factors)
    top = factors.index(max(factors))
    assert factors[: top + 1] == sorted(factors[: top + 1])


def test_without_a_warm_up_the_factor_starts_at_one():
    assert LrSchedule(end=10).factor(0, 1) == 1.0


def test_factor_stays_constant_after_the_end():
    assert LrSchedule(decay="linear", end=10).factor(15, 1) == 0.0
