"""Simulated searches: samples that ASHA saves."""

from __future__ import annotations

import pytest

from benchmarks.models.search_simulated import simulate_asha


def test_trials_that_are_poorer_than_the_first_end_at_the_first_rung() -> None:
    curves = [[0.9] * 16, [0.5] * 16, [0.4] * 16, [0.3] * 16]

    ratio, lost = simulate_asha(curves, divisor=4)

    assert lost == 0.0
    # One whole trial; the others end 0.7 epochs after the rung at the first of 16 epochs.
    assert ratio == pytest.approx((16 + 3 * 1.7) / (4 * 16))


def test_trials_that_get_better_and_better_all_complete() -> None:
    assert simulate_asha([[n / 10] * 16 for n in range(1, 5)], divisor=4) == (1.0, 0.0)
