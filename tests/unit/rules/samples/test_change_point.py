from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etrain_jupyter.rules.samples.change_point import LIMIT, ChangeDetector


def feed(detector: ChangeDetector, values: list[float]) -> list[int]:
    return [detector.add(value) for value in values]


@given(sign=st.sampled_from([1, -1]), size=st.floats(3.0, 1e9), num_before=st.integers(0, 50))
def test_large_change_is_found_after_three_values_and_dated(
    sign: int, size: float, num_before: int
) -> None:
    detector = ChangeDetector()

    found = feed(detector, [0.0] * num_before + [sign * size] * 3)

    assert found == [0] * (num_before + 2) + [3]


@pytest.mark.parametrize("spike", [5.0, -5.0, 1e6])
def test_single_outliers_are_no_change(spike: float) -> None:
    detector = ChangeDetector()

    assert not any(feed(detector, [0.0, 0.0, 0.0, spike] * 50))
    assert not any(feed(detector, [0.0, 0.0, spike, spike, 0.0, 0.0] * 5))


def test_noise_rarely_looks_like_a_change() -> None:
    rng, detector, num_found = random.Random(1), ChangeDetector(), 0
    for _ in range(20_000):
        if detector.add(rng.gauss(0, 1)):
            num_found += 1
            detector.reset()

    assert num_found <= 1


@given(st.lists(st.floats(-10, 10), max_size=60))
def test_detector_treats_both_directions_alike(values: list[float]) -> None:
    one, other = ChangeDetector(), ChangeDetector()

    assert feed(one, values) == feed(other, [-value for value in values])


@given(st.lists(st.floats(-0.9, 0.9), max_size=200))
def test_values_within_the_allowance_raise_no_suspicion(values: list[float]) -> None:
    detector = ChangeDetector()

    assert not any(feed(detector, values))
    assert detector.num_suspect == 0


def test_slow_drift_is_found() -> None:
    detector = ChangeDetector()

    found = feed(detector, [0.05 * n for n in range(100)])

    # The drift exceeds the allowance from value 21 on, and the excess adds up to the limit.
    assert next(n for n, count in enumerate(found) if count) == pytest.approx(36, abs=2)
    assert LIMIT == 6.0


def test_reset_forgets_the_previous_values() -> None:
    detector = ChangeDetector()
    feed(detector, [3.0, 3.0])
    detector.reset()

    assert detector.num_suspect == 0
    assert feed(detector, [3.0, 3.0, 3.0]) == [0, 0, 3]
