"""Order over blocks: a bijection, evenly spread, and split so that shares keep their blocks."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from etrain_jupyter.rules.samples import block_order
from etrain_jupyter.rules.samples.batch_plan import share_samples
from etrain_jupyter.rules.samples.block_order import (
    BlockLayout,
    BlockOrder,
    Positions,
    blocks_within,
    split_step,
)

LAYOUTS = st.builds(
    BlockLayout,
    st.lists(st.integers(1, 60), min_size=1, max_size=25).map(tuple),
    st.integers(1, 12),
)
SEEDS = st.integers(-(2**63), 2**64)


@given(LAYOUTS, SEEDS, st.integers(0, 5))
def test_epoch_visits_each_row_once(layout: BlockLayout, seed: int, epoch: int) -> None:
    order = BlockOrder(layout, seed=seed, epoch=epoch)

    samples = order.samples(0, layout.num_samples)

    assert np.array_equal(np.sort(samples), np.arange(layout.num_samples))


@given(LAYOUTS, SEEDS, st.data())
def test_any_run_of_positions_equals_that_of_a_fresh_object(
    layout: BlockLayout, seed: int, data: st.DataObject
) -> None:
    whole = BlockOrder(layout, seed=seed, epoch=1).samples(0, layout.num_samples)
    first = data.draw(st.integers(0, layout.num_samples))
    stop = data.draw(st.integers(first, layout.num_samples))

    assert BlockOrder(layout, seed=seed, epoch=1).samples(first, stop).tolist() == (
        whole[first:stop].tolist()
    )


@given(LAYOUTS, SEEDS, st.data())
def test_run_within_a_window_takes_its_share_of_each_block(
    layout: BlockLayout, seed: int, data: st.DataObject
) -> None:
    order = BlockOrder(layout, seed=seed, epoch=0)
    places = order.locate(0, layout.num_samples)
    window = data.draw(st.integers(0, int(places.windows[-1])))
    blocks = places.blocks[places.windows == window]
    first = data.draw(st.integers(0, len(blocks)))
    stop = data.draw(st.integers(first, len(blocks)))

    members = np.unique(blocks)
    assert len(members) <= layout.window
    for block in members.tolist():
        part = layout.rows[block] / len(blocks)
        taken = int((blocks[first:stop] == block).sum())
        assert abs(taken - (stop - first) * part) <= 2 + 2 * len(members) * part


@given(LAYOUTS, SEEDS, st.integers(1, 9), st.data())
def test_shares_partition_a_step_and_have_the_planned_sizes(
    layout: BlockLayout, seed: int, num_shares: int, data: st.DataObject
) -> None:
    order = BlockOrder(layout, seed=seed, epoch=0)
    first = data.draw(st.integers(0, layout.num_samples))
    stop = data.draw(st.integers(first, layout.num_samples))
    counts = share_samples(stop - first, num_shares)

    arranged = order.arrange(first, counts)

    assert sorted(arranged.tolist()) == sorted(order.samples(first, stop).tolist())
    assert max(counts) - min(counts) <= 1


@given(LAYOUTS, SEEDS, st.data())
def test_shares_of_a_step_with_uneven_counts_are_cut_in_proportion_in_each_window(
    layout: BlockLayout, seed: int, data: st.DataObject
) -> None:
    places = BlockOrder(layout, seed=seed, epoch=0).locate(0, layout.num_samples)
    some = data.draw(st.lists(st.integers(0, 20), min_size=1, max_size=6))
    total = min(sum(some), layout.num_samples)
    counts = [*share_samples(total, len(some)), layout.num_samples - total]

    order = split_step(places, counts)

    assert sorted(order.tolist()) == list(range(layout.num_samples))
    ends = np.cumsum(counts)
    for share, end in zip(counts, ends.tolist(), strict=True):
        own = places.windows[order[end - share : end]]
        assert (np.diff(own) >= 0).all()
        for window in np.unique(places.windows).tolist():
            due = share * (places.windows == window).mean()
            assert abs((own == window).sum() - due) <= 2 + len(np.unique(places.windows))


def test_step_across_two_windows_leaves_each_share_its_blocks() -> None:
    # Both windows have blocks 0 to 3 and 4 to 7; a single sorted run would give share 0 all of the
    # first window.
    blocks = np.array([0, 1, 2, 3, 4, 5, 6, 7])
    places = Positions(blocks // 4, blocks, np.zeros(8, np.int64))

    order = split_step(places, [4, 4])

    assert blocks[order].tolist() == [0, 1, 4, 5, 2, 3, 6, 7]


def test_order_never_changes() -> None:
    layout = BlockLayout((3, 5, 2, 4), 2)

    orders = [BlockOrder(layout, seed=7, epoch=epoch).samples(0, 14).tolist() for epoch in (0, 1)]

    assert orders == GOLDEN


GOLDEN = [
    [10, 6, 5, 11, 4, 12, 7, 3, 13, 2, 8, 9, 1, 0],
    [0, 4, 7, 5, 2, 3, 1, 6, 8, 10, 13, 12, 11, 9],
]
"""Resumed jobs depend on these numbers."""


def test_window_has_at_most_the_maximum_number_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_order, "MAX_WINDOW_ROWS", 10)

    places = BlockOrder(BlockLayout((4, 4, 4, 4, 25), 64), seed=0, epoch=0).locate(0, 41)

    sizes = np.bincount(places.windows).tolist()
    assert sorted(sizes) in ([8, 8, 25], [4, 4, 8, 25], [4, 8, 4, 25])
    assert len(set(places.blocks[places.windows == sizes.index(25)].tolist())) == 1


def test_window_in_bytes_fits_the_largest_blocks() -> None:
    assert blocks_within([10, 1, 1, 1, 1], window=3, max_bytes=12) == 3
    assert blocks_within([10, 10, 1], window=3, max_bytes=12) == 1
    assert blocks_within([100], window=64, max_bytes=12) == 1


@given(LAYOUTS)
def test_layout_survives_its_text(layout: BlockLayout) -> None:
    assert BlockLayout.decode(layout.encode()) == layout


@pytest.mark.parametrize("text", ["", "64", "64:", "0:5", "4:0", "4:5x0", "x:1", "4:a"])
def test_invalid_text_of_a_layout_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        BlockLayout.decode(text)
