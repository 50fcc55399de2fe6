"""Order of an epoch over blocks of rows, and the split of a step over shares.

A data set on disk is a sequence of blocks, such as the row groups of Parquet files. An epoch
permutes the blocks, groups them into windows, and shuffles the rows within each window. A rank then
needs only the blocks of one window at a time.

::

    blocks          0 1 2 3 4 5 6 7
    permuted        5 2 7 0 | 3 6 1 4            windows of 4 blocks
    rows            5.8 2.0 0.3 7.1 5.2 ...      each run takes its share of each block

Like ``ledger.epoch_order``, the order is a pure function of ``(seed, epoch, layout)`` and must
never change, because a job resumed by a later version continues in the same order. The index of a
sample in the ledger and in the audit is its row number, counted over all blocks.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from etrain_jupyter.rules.samples.block_shares import MIN_BLOCKS_PER_SHARE, WindowShares
from etrain_jupyter.rules.samples.ledger import hash_of, key_of

Int64s = NDArray[np.int64]

MAX_WINDOW_ROWS = 1 << 18
"""Maximum number of rows in a window of more than one block: sorting them takes about 0.2 s. The
order depends on this value, so it must never change."""

_NUM_KEPT = 2
"""Number of sorted windows to keep. A step may end one window and begin the next."""


@dataclass(frozen=True)
class BlockLayout:
    """Everything in a data set on which the order of its samples depends.

    Args:
        rows: Number of rows in each block, at least 1.
        window: Maximum number of blocks in a window, at least 1.
    """

    rows: tuple[int, ...]
    window: int

    def __post_init__(self) -> None:
        if self.window < 1 or not self.rows or min(self.rows) < 1:
            raise ValueError("a layout needs a window of at least 1, and blocks with rows")

    @cached_property
    def starts(self) -> Int64s:
        """Row number of each block's first row, and the total: shape ``(num_blocks + 1,)``."""
        return np.concatenate(([0], np.cumsum(np.asarray(self.rows, np.int64))))

    @property
    def num_samples(self) -> int:
        """Number of rows in all blocks."""
        return int(self.starts[-1])

    def blocks_of(self, samples: Int64s) -> Int64s:
        """Return the block of each row number."""
        return np.searchsorted(self.starts, samples, side="right") - 1

    def encode(self) -> str:
        """Return the layout as text, for the log: the window, then runs of blocks of equal size.

        >>> BlockLayout((2048, 2048, 2048, 700), 64).encode()
        '64:2048x3,700'
        """
        runs = []
        for rows, same in itertools.groupby(self.rows):
            count = sum(1 for _ in same)
            runs.append(f"{rows}x{count}" if count > 1 else f"{rows}")
        return f"{self.window}:{','.join(runs)}"

    @classmethod
    def decode(cls, text: str) -> BlockLayout:
        """Return the layout that ``encode`` turned into ``text``.

        Raises:
            ValueError: If it is not such a text.

        >>> BlockLayout.decode("64:2048x3,700").rows
        (2048, 2048, 2048, 700)
        """
        window, _, runs = text.partition(":")
        rows: list[int] = []
        for run in runs.split(","):
            size, _, count = run.partition("x")
            if len(rows) + int(count or 1) > _MAX_BLOCKS:
                raise ValueError(f"the layout has more than {_MAX_BLOCKS:,} blocks")
            rows += [int(size)] * int(count or 1)
        return cls(tuple(rows), int(window))


_MAX_BLOCKS = 1 << 26
"""Maximum number of blocks in a text, which may come from another user; enough for 512 TiB in
blocks of 8 MiB."""


class Positions(NamedTuple):
    """Where some samples are located; arrays of equal shape."""

    windows: Int64s
    blocks: Int64s
    rows: Int64s
    """Row within the block."""


class BlockOrder:
    """Order of one epoch.

    It keeps a few integers per block, and the rows of the newest windows.

    Args:
        layout: The blocks.
        seed: The job's seed; taken modulo 2**64.
        epoch: From 0.
    """

    def __init__(self, layout: BlockLayout, *, seed: int, epoch: int) -> None:
        self.layout = layout
        self._key = key_of(seed, epoch)
        sizes = np.asarray(layout.rows, np.int64)
        states = hash_of(np.arange(len(sizes), dtype=np.uint64), self._key)
        self._blocks = np.argsort(states, kind="stable").astype(np.int64)
        """The blocks, permuted; a *slot* is an index into this array."""
        self._sizes = sizes[self._blocks]
        self._ends = np.cumsum(self._sizes)
        self._slots = _first_slots(self._sizes.tolist(), layout.window)
        """First slot of each window, and the number of blocks."""
        self._bounds = np.concatenate(([0], self._ends))[self._slots]
        """First position of each window, and the number of samples."""
        self._sorted: dict[int, Positions] = {}
        self._shares: dict[tuple[int, int], WindowShares | None] = {}
        """By window and number of shares."""

    def locate(self, first: int, stop: int) -> Positions:
        """Return the samples at the positions ``first`` to ``stop - 1``, in their order."""
        if not 0 <= first <= stop <= self.layout.num_samples:
            raise ValueError(f"positions {first} to {stop} leave {self.layout.num_samples} samples")
        begin = int(np.searchsorted(self._bounds, first, side="right")) - 1
        end = int(np.searchsorted(self._bounds, stop, side="left"))
        parts = []
        for window in range(begin, end):
            base = int(self._bounds[window])
            inside = slice(max(0, first - base), stop - base)
            parts.append(Positions(*(column[inside] for column in self._window(window))))
        if not parts:
            return Positions(*(np.empty(0, np.int64) for _ in range(3)))
        return Positions(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))

    def samples(self, first: int, stop: int) -> Int64s:
        """Return the row numbers of the samples at the positions ``first`` to ``stop - 1``."""
        return self._samples_at(self.locate(first, stop))

    def arrange(self, first: int, counts: Sequence[int]) -> Int64s:
        """Return the samples of a step, sorted so that each share needs few blocks.

        Args:
            first: Position of the step's first sample.
            counts: Number of samples of each share.

        Returns:
            Row numbers, shape ``(sum(counts),)``: those of share 0, then those of share 1, ...
        """
        places = self.locate(first, first + sum(counts))
        order = split_step(places, counts, lambda window: self._shares_of(window, len(counts)))
        return self._samples_at(places)[order]

    def _samples_at(self, places: Positions) -> Int64s:
        samples: Int64s = self.layout.starts[places.blocks] + places.rows
        return samples

    def _shares_of(self, window: int, num_shares: int) -> WindowShares | None:
        key = window, num_shares
        if key not in self._shares:
            while len(self._shares) >= _NUM_KEPT:
                del self._shares[next(iter(self._shares))]
            blocks = np.sort(self._blocks[self._slots[window] : self._slots[window + 1]])
            rows = [self.layout.rows[block] for block in blocks.tolist()]
            has_lanes = num_shares > 1 and len(blocks) >= MIN_BLOCKS_PER_SHARE * num_shares
            self._shares[key] = WindowShares(blocks, rows, num_shares) if has_lanes else None
        return self._shares[key]

    def _window(self, window: int) -> Positions:
        if window not in self._sorted:
            while len(self._sorted) >= _NUM_KEPT:
                del self._sorted[next(iter(self._sorted))]
            self._sorted[window] = self._sort(window)
        return self._sorted[window]

    def _sort(self, window: int) -> Positions:
        # Row r of a shuffled block of n rows is due at (r + u) / n, with u from a hash, and rows
        # are sorted by due time. A block of any size is thus spread evenly over the window, and
        # ranks that split a step by block stay with the same blocks until the window ends.
        #
        #   block of 2   |     0       |        1     |
        #   block of 4   |  0   |   1  | 2    |    3  |
        #   order          0'   0   1'   2'  1     3'
        slots = np.arange(self._slots[window], self._slots[window + 1])
        sizes = self._sizes[slots]
        slot = np.repeat(slots, sizes)
        position = np.arange(self._bounds[window], self._bounds[window + 1])
        start = (self._ends - self._sizes)[slot]
        key = key_of(self._key, window)
        shuffled = np.lexsort((hash_of(position.astype(np.uint64), key), slot))
        rows = (position - start)[shuffled]
        # As integers, which are the same on every machine: below 2**32, because r < n.
        u = hash_of(position.astype(np.uint64), key_of(key, 0)) >> np.uint64(32)
        number = (position - start).astype(np.uint64)
        due = (number << np.uint64(32) | u) // self._sizes[slot].astype(np.uint64)
        by_due = np.argsort(due, kind="stable")
        return Positions(
            np.full(len(slot), window, np.int64), self._blocks[slot[by_due]], rows[by_due]
        )


def split_step(
    places: Positions,
    counts: Sequence[int],
    shares_of: Callable[[int], WindowShares | None] = lambda window: None,
) -> Int64s:
    """Return the order of a step's samples by share: those of share 0, then of share 1, ...

    Within a window, ``shares_of`` splits the samples so that each share needs few blocks. Where it
    returns None, a share is a contiguous run of the samples sorted by block and row.

    A step that straddles windows is cut in the same proportion in each of them. A single cut would
    give each share different blocks than in the previous and the next step, and a rank would read
    these blocks for this step only::

        step in window 3          a a b b | c c d d
        step in windows 3 and 4   a b | c d,  e f | g h       cut in each window
                                  a b c d | e f g h           a single cut: share 0 needs c and d
        step in window 4          e e f f | g g h h

    Args:
        places: The step's samples, in any order.
        counts: Number of samples of each share; their sum is the number of samples.
        shares_of: Returns the split of a window's samples.
    """
    order = np.lexsort((places.rows, places.blocks, places.windows))
    left = len(order)
    if sum(counts) != left:
        raise ValueError(f"shares of {sum(counts)} samples do not fit a step of {left}")
    bounds = np.concatenate(([0], np.cumsum(np.asarray(counts, np.int64))))
    shares: list[list[Int64s]] = [[] for _ in counts]
    done = 0
    windows, sizes = np.unique(places.windows, return_counts=True)
    for window, count in zip(windows.tolist(), sizes.tolist(), strict=True):
        # In the last window count == left, so each share gets exactly what it still lacks.
        cuts = bounds * count // left
        members = order[done : done + count]
        if (split := shares_of(window)) is not None:
            members = members[split.arrange(places.blocks[members], np.diff(cuts).tolist())]
        for share, (begin, end) in zip(shares, itertools.pairwise(cuts.tolist()), strict=True):
            share.append(members[begin:end])
        bounds, done, left = bounds - cuts, done + count, left - count
    parts = [part for share in shares for part in share]
    return np.concatenate(parts) if parts else order.astype(np.int64)


def blocks_within(sizes: Sequence[int], window: int, max_bytes: int) -> int:
    """Return the number of blocks per window so that no window exceeds ``max_bytes``; at least 1.

    Args:
        sizes: Bytes of each block in memory.
        window: Maximum number of blocks.
        max_bytes: Maximum bytes of a window, if it has more than one block.

    >>> blocks_within([8, 8, 8, 8], window=64, max_bytes=24)
    3
    """
    # Any of the blocks may end up in the same window, so the largest ones must fit together.
    largest = np.cumsum(np.sort(np.asarray(sizes, np.int64))[::-1][:window])
    return max(1, int(np.searchsorted(largest, max_bytes, side="right")))


def _first_slots(sizes: Sequence[int], window: int) -> Int64s:
    firsts, rows = [0], 0
    for slot, size in enumerate(sizes):
        is_full = slot - firsts[-1] == window or rows + size > MAX_WINDOW_ROWS
        if is_full and slot > firsts[-1]:
            firsts.append(slot)
            rows = 0
        rows += size
    return np.array([*firsts, len(sizes)], np.int64)
