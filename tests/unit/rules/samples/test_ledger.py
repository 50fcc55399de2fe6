"""The order of an epoch, the cursor over it, and the checksum that proves what was trained."""

from __future__ import annotations

from math import ceil

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from etrain_jupyter.rules.samples import ledger
from etrain_jupyter.rules.samples.batch_plan import plan_step
from etrain_jupyter.rules.samples.ledger import (
    Cursor,
    checksum_of,
    checksum_terms,
    cursor_at,
    epoch_order,
    steps_per_epoch,
    total_steps,
)

SEEDS = st.integers(-(2**70), 2**70)
SIZES = st.integers(1, 300)
BATCHES = st.integers(1, 400)


def test_hash_is_the_published_splitmix64() -> None:
    # The first outputs of the reference implementation for the seed 0.
    states = [(i * ledger._GAMMA) % 2**64 for i in (1, 2, 3)]
    expected = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert [ledger._mix_int(state) for state in states] == expected
    assert ledger._mix(np.array(states, dtype=np.uint64)).tolist() == expected


def test_order_matches_recorded_values() -> None:
    # A job resumed by a later version goes on in this order: never adapt these numbers.
    assert epoch_order(seed=0, epoch=0, num_samples=8).tolist() == [0, 7, 2, 5, 4, 6, 3, 1]
    assert epoch_order(seed=0, epoch=1, num_samples=8).tolist() == [6, 0, 4, 5, 2, 7, 1, 3]
    assert epoch_order(seed=-1, epoch=0, num_samples=8).tolist() == [6, 1, 7, 3, 2, 5, 4, 0]
    assert checksum_of(np.arange(1797)) == 3959864283647


@given(seed=SEEDS, epoch=st.integers(0, 10**6), num_samples=st.integers(0, 500))
def test_order_is_a_permutation_and_a_function_of_its_arguments(
    seed: int, epoch: int, num_samples: int
) -> None:
    order = epoch_order(seed=seed, epoch=epoch, num_samples=num_samples)
    assert order.dtype == np.int64
    assert np.array_equal(np.sort(order), np.arange(num_samples))
    assert np.array_equal(order, epoch_order(seed=seed, epoch=epoch, num_samples=num_samples))


def test_orders_of_epochs_and_seeds_are_uncorrelated() -> None:
    orders = [
        epoch_order(seed=seed, epoch=epoch, num_samples=2000)
        for seed in range(3)
        for epoch in range(3)
    ]
    orders.append(np.arange(2000))
    correlations = np.corrcoef(orders) - np.eye(len(orders))
    assert np.abs(correlations).max() < 0.1


@given(indices=st.lists(st.integers(0, 2**40)), cut=st.integers(0, 50))
def test_checksum_is_additive_over_parts(indices: list[int], cut: int) -> None:
    array = np.array(indices, dtype=np.int64)
    assert checksum_of(array) == checksum_of(array[:cut]) + checksum_of(array[cut:])
    assert checksum_of(array) == checksum_of(array[::-1])


def test_checksum_is_exact_in_float64() -> None:
    terms = checksum_terms(np.arange(1 << 20))
    assert int(terms.max()) < 2**32
    assert float(terms.astype(np.float64).sum()) == checksum_of(np.arange(1 << 20)) < 2**53


def test_checksum_detects_lost_repeated_and_replaced_samples() -> None:
    right = np.arange(100)
    lost, repeated, exchanged = right[1:], np.append(right, 5), np.append(right[1:], 5)
    assert len({checksum_of(part) for part in (right, lost, repeated, exchanged)}) == 4
    assert checksum_of(np.array([0])) != 0


@given(num_samples=SIZES, batch=BATCHES, num_epochs=st.integers(1, 3))
def test_steps_of_an_epoch_cover_it_once_in_order(
    num_samples: int, batch: int, num_epochs: int
) -> None:
    steps = steps_per_epoch(num_samples, batch)
    ranges = [cursor_at(step, num_samples, batch) for step in range(steps * num_epochs)]
    for epoch in range(num_epochs):
        positions = [
            position
            for got in ranges
            if got.epoch == epoch
            for position in range(got.first, got.first + got.samples)
        ]
        assert positions == list(range(num_samples))
    assert all(1 <= got.samples <= batch for got in ranges)


@given(num_samples=SIZES, batch=BATCHES, num_steps=st.integers(0, 40))
def test_cursor_advanced_step_by_step_agrees_with_cursor_at(
    num_samples: int, batch: int, num_steps: int
) -> None:
    cursor = Cursor(epoch=0, first=0)
    for step in range(num_steps):
        due = cursor.next_range(num_samples=num_samples, global_batch_size=batch)
        assert due == cursor_at(step, num_samples, batch)
        cursor = cursor.advance(due.samples, num_samples=num_samples)


def test_cursor_does_not_leave_the_epoch() -> None:
    with pytest.raises(ValueError, match="5 samples from 6 exceed the epoch of 10"):
        Cursor(epoch=0, first=6).advance(5, num_samples=10)


@given(
    data=st.data(),
    seed=SEEDS,
    num_samples=st.integers(1, 120),
    batch=st.integers(1, 50),
)
def test_any_history_of_world_sizes_trains_each_sample_once(
    data: st.DataObject, seed: int, num_samples: int, batch: int
) -> None:
    """Invariant I2, in the arithmetic: the plan of each step covers what the ledger orders."""
    order = epoch_order(seed=seed, epoch=0, num_samples=num_samples)
    trained: list[int] = []
    checksums = 0
    for step in range(steps_per_epoch(num_samples, batch)):
        _, first, count = cursor_at(step, num_samples, batch)
        world_size = data.draw(st.integers(1, 9))
        plan = plan_step(count=count, world_size=world_size, micro_batch_size=4)
        for start, share in zip(plan.starts, plan.counts, strict=True):
            mine = order[first + start : first + start + share]
            trained += mine.tolist()
            checksums += checksum_of(mine)
    assert trained == order.tolist()
    assert checksums == checksum_of(np.arange(num_samples))


@pytest.mark.parametrize(
    ("epochs", "steps", "expected"),
    [
        (1, None, 4),
        (3, None, 12),
        (0.5, None, 2),
        (0.01, None, 1),
        (2.1, None, 9),
        (2.32, None, 9),
        (2.33, None, 10),
        (None, 7, 7),
        (5, 7, 7),
    ],
)
def test_total_steps_rounds_fractions_of_an_epoch_up(
    epochs: float | None, steps: int | None, expected: int
) -> None:
    assert total_steps(epochs, steps, 100, 32) == expected


def test_total_steps_needs_epochs_or_steps() -> None:
    with pytest.raises(ValueError, match="either epochs or steps"):
        total_steps(None, None, 100, 32)


@given(tenths=st.integers(1, 50), num_samples=SIZES, batch=BATCHES)
def test_fraction_of_an_epoch_trains_at_least_that_much(
    tenths: int, num_samples: int, batch: int
) -> None:
    total = total_steps(tenths / 10, None, num_samples, batch)
    end = cursor_at(total, num_samples, batch)
    due = ceil(tenths * num_samples / 10)
    assert end.epoch * num_samples + end.first >= due
    before = cursor_at(total - 1, num_samples, batch)
    assert before.epoch * num_samples + before.first < due
