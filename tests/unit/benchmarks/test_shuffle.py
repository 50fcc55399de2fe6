"""Figures of the benchmark of the block order."""

from __future__ import annotations

import numpy as np

from benchmarks.storage.shuffle import (
    EPOCHS,
    FULL,
    ROWS,
    batch_variance,
    neighbor_correlation,
    orders_of,
)

NUM_BLOCKS = 16


def test_each_order_contains_every_row_once_per_epoch() -> None:
    for window in (1, 4, FULL):
        orders = list(orders_of(window, NUM_BLOCKS, seed=3))
        assert len(orders) == EPOCHS
        for order in orders:
            assert sorted(order) == list(range(NUM_BLOCKS * ROWS))


def test_order_of_the_disk_has_the_largest_figures() -> None:
    in_order = np.arange(NUM_BLOCKS * ROWS)
    [shuffled, _] = orders_of(FULL, NUM_BLOCKS, seed=3)

    assert neighbor_correlation(in_order) > 0.999
    assert abs(neighbor_correlation(shuffled)) < 0.05
    assert batch_variance(in_order) > 100
    assert 0.3 < batch_variance(shuffled) < 3
