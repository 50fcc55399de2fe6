"""Shares of a step: exact sizes, each sample once, and few blocks per share over a window."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from etrain_jupyter.rules.samples.batch_plan import share_samples
from etrain_jupyter.rules.samples.block_order import BlockLayout, BlockOrder
from etrain_jupyter.rules.samples.block_shares import WindowShares


def shares_of(rows: list[int], num_shares: int) -> WindowShares:
    return WindowShares(np.arange(len(rows)), rows, num_shares)


@given(st.integers(2, 6), st.data())
def test_every_share_gets_its_samples_and_every_sample_has_one_share(
    num_shares: int, data: st.DataObject
) -> None:
    num_blocks = data.draw(st.integers(4 * num_shares, 30))
    sizes = st.lists(st.integers(1, 50), min_size=num_blocks, max_size=num_blocks)
    counts = data.draw(st.lists(st.integers(0, 6), min_size=num_blocks, max_size=num_blocks))
    weights = data.draw(st.lists(st.integers(0, 5), min_size=num_shares, max_size=num_shares))
    cuts = np.cumsum([0, *weights]) * sum(counts) // max(1, sum(weights))
    targets = np.diff(cuts).tolist() if sum(weights) else [sum(counts)] + [0] * (num_shares - 1)

    parts = shares_of(data.draw(sizes), num_shares).split(counts, targets)

    assert parts.min() >= 0
    assert parts.sum(axis=1).tolist() == counts
    assert parts.sum(axis=0).tolist() == targets


def test_balanced_step_leaves_each_block_to_its_home() -> None:
    parts = shares_of([100] * 16, 4).split([2] * 16, [8] * 4)

    assert (parts > 0).sum(axis=1).tolist() == [1] * 16


def test_surplus_passes_along_the_ring_from_share_to_share() -> None:
    # Blocks are dealt out in turn: 0 and 4 to share 0, 1 and 5 to share 1, ...
    split = shares_of([100] * 16, 4).split
    counts = [2] * 16
    counts[4], counts[2] = 3, 1  # share 0 has one too many, share 2 one too few

    parts = split(counts, [8] * 4)

    # Share 1 gets a sample of block 0, and share 2 one of block 1: lanes of level 0.
    assert parts[0].tolist() == [1, 1, 0, 0]
    assert parts[1].tolist() == [0, 1, 1, 0]
    assert (parts > 0).sum() == 18


def test_samples_that_no_lane_can_move_are_moved_directly() -> None:
    counts = [0] * 16
    counts[3] = 16

    parts = shares_of([100] * 16, 4).split(counts, [4] * 4)

    assert parts[3].tolist() == [4] * 4


def test_arranged_samples_are_sorted_by_share_and_ascending_within_it() -> None:
    blocks = np.array([10, 10, 11, 12, 13, 14, 15, 16, 17, 17])
    shares = WindowShares(np.arange(10, 18), [5] * 8, 2)

    order = shares.arrange(blocks, [5, 5])

    assert sorted(order.tolist()) == list(range(10))
    assert order[:5].tolist() == sorted(order[:5].tolist())
    assert order[5:].tolist() == sorted(order[5:].tolist())


def read_blocks(layout: BlockLayout, num_shares: int, batch: int) -> float:
    """Return the blocks that all shares read in an epoch, per block of the set."""
    order = BlockOrder(layout, seed=0, epoch=0)
    known: list[set[int]] = [set() for _ in range(num_shares)]
    for first in range(0, layout.num_samples, batch):
        counts = share_samples(min(batch, layout.num_samples - first), num_shares)
        arranged, end = order.arrange(first, counts), 0
        for share, count in enumerate(counts):
            known[share].update(layout.blocks_of(arranged[end : end + count]).tolist())
            end += count
    return sum(map(len, known)) / len(layout.rows)


# The default window, and the default batch of the measurement.
@pytest.mark.parametrize("kind", ["equal", "almost equal", "unequal"])
def test_eight_shares_read_at_most_1_3_blocks_per_block_of_the_set(kind: str) -> None:
    rng = np.random.default_rng(1)
    rows = {
        "equal": [1000] * 63 + [341],
        "almost equal": rng.integers(970, 1030, 64).tolist(),
        "unequal": rng.integers(100, 2000, 64).tolist(),
    }[kind]

    assert read_blocks(BlockLayout(tuple(rows), 64), 8, 256) <= 1.3


def test_arrangement_never_changes() -> None:
    layout = BlockLayout((3, 5, 2, 4, 3, 3, 4, 2), 8)

    arranged = BlockOrder(layout, seed=7, epoch=0).arrange(0, [6, 6])

    assert arranged.tolist() == GOLDEN


GOLDEN = [0, 2, 3, 9, 14, 16, 4, 6, 10, 11, 17, 21]
"""The weights of reproducible jobs depend on these numbers."""
