"""The gain of AdaScale: estimates without a bias, between one and linear."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from etrain_jupyter.rules.policy.adascale import GradientNoise

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
