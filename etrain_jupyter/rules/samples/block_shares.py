"""Split a step over shares so that, over a whole window, each share needs few blocks.

Each block has a *home*, the share that reads it before any other. Every share gets its number of
samples, but the blocks do not contribute equally to every step, so some shares have too many
samples at home and others too few. The surplus moves along *lanes*: a lane is a block that a second
share may read, too. Lanes are used in levels. The lanes of level 0 form a ring over all shares, and
a surplus passes along it from share to share. The next level is used only if that is not enough::

    home samples     share 0: 34    1: 31    2: 30    3: 33     (32 each)
    level 0          0 ─1─> 1       3 ─1─> 0 ─1─> 1 ─...        share 1 reads one block of share 0

A share then reads its own blocks, and one to three of the other shares'. Contiguous runs of the
samples sorted by block would have the same sizes, but their borders would wander over several
blocks in the course of a window, because each border adds up the surplus of all shares before it.

The split is a pure function of the window's blocks and the step, so a rank that joins in mid-window
computes the same one. It determines the order of summation of a reproducible job, so it must not
change.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

MIN_BLOCKS_PER_SHARE = 4
"""With fewer blocks, a share has too few lanes, and a contiguous run is better."""


@dataclass
class _Lane:
    """Samples of one block in one step, at its home and at the second share."""

    block: int
    home: int
    second: int
    at_home: int
    at_second: int = 0

    def held_by(self, share: int) -> int:
        return self.at_home if share == self.home else self.at_second

    def move(self, count: int, sender: int) -> None:
        moved = count if sender == self.home else -count
        self.at_home -= moved
        self.at_second += moved


class WindowShares:
    """Homes and lanes of the blocks of one window.

    Args:
        blocks: Numbers of the blocks, ascending, at least ``MIN_BLOCKS_PER_SHARE`` per share.
        rows: Number of rows in each block.
        num_shares: Number of shares, at least 2.
    """

    def __init__(self, blocks: NDArray[np.int64], rows: Sequence[int], num_shares: int) -> None:
        self._blocks = blocks
        self._num_shares = num_shares
        self._homes: list[list[int]] = [[] for _ in range(num_shares)]
        """Blocks of each share; a block's index in the list is its level."""
        # Large blocks first, each to the share with the fewest rows.
        loads = [0] * num_shares
        for block in np.argsort(-np.asarray(rows, np.int64), kind="stable").tolist():
            home = loads.index(min(loads))
            loads[home] += int(rows[block])
            self._homes[home].append(block)
        # Level 0 connects neighbors; the other levels are shortcuts across the ring.
        self._offsets = (1, max(1, (num_shares - 1) // 2), max(1, num_shares // 2))

    def arrange(self, blocks: NDArray[np.int64], targets: Sequence[int]) -> NDArray[np.int64]:
        """Return the order of a step's samples by share.

        Args:
            blocks: Block of each sample, ascending.
            targets: Samples of each share, shape ``(num_shares,)``; they add up to all samples.

        Returns:
            Indices into ``blocks``: those of share 0, then those of share 1, ...; each ascending.
        """
        counts = np.bincount(
            np.searchsorted(self._blocks, blocks), minlength=len(self._blocks)
        ).tolist()
        parts = self.split(counts, targets)
        owners = np.tile(np.arange(self._num_shares), len(self._blocks))
        return np.argsort(np.repeat(owners, parts.ravel()), kind="stable")

    def split(self, counts: Sequence[int], targets: Sequence[int]) -> NDArray[np.int64]:
        """Return the samples of each block that each share gets.

        Args:
            counts: Samples of each block in the step, shape ``(num_blocks,)``.
            targets: Samples of each share, shape ``(num_shares,)``, with the same sum.

        Returns:
            Shape ``(num_blocks, num_shares)``.
        """
        levels = self._lanes_of(counts)
        surplus = [-target for target in targets]
        lanes = [lane for level in levels for lane in level]
        for lane in lanes:
            surplus[lane.home] += lane.at_home
        self._move_along_lanes(levels, surplus)
        result = np.zeros((len(self._blocks), self._num_shares), np.int64)
        for lane in lanes:
            result[lane.block, lane.home] = lane.at_home
            result[lane.block, lane.second] = lane.at_second
        _move_directly(result, surplus)
        return result

    def _lanes_of(self, counts: Sequence[int]) -> list[list[_Lane]]:
        levels: list[list[_Lane]] = [[] for _ in range(max(map(len, self._homes)))]
        for home, blocks in enumerate(self._homes):
            for level, block in enumerate(blocks):
                offset = self._offsets[level % len(self._offsets)]
                second = (home + offset) % self._num_shares
                levels[level].append(_Lane(block, home, second, int(counts[block])))
        return levels

    def _move_along_lanes(self, levels: list[list[_Lane]], surplus: list[int]) -> None:
        lanes: list[list[tuple[_Lane, int]]] = [[] for _ in surplus]
        """Open lanes of each share, and the share at their other end."""
        unopened = deque(levels)
        for share in range(len(surplus)):
            while surplus[share] > 0:
                path = _find_path(lanes, surplus, share)
                if path:
                    end = path[-1][2]
                    held = (lane.held_by(sender) for lane, sender, _ in path)
                    count = min(surplus[share], -surplus[end], *held)
                    for lane, sender, _ in path:
                        lane.move(count, sender)
                    surplus[share] -= count
                    surplus[end] += count
                elif unopened:
                    for lane in unopened.popleft():
                        lanes[lane.home].append((lane, lane.second))
                        lanes[lane.second].append((lane, lane.home))
                else:
                    break


def _find_path(
    lanes: Sequence[Sequence[tuple[_Lane, int]]], surplus: Sequence[int], start: int
) -> list[tuple[_Lane, int, int]]:
    """Return the shortest path to a share with too few samples: lane, sender, receiver."""
    previous: dict[int, tuple[_Lane, int, int] | None] = {start: None}
    queue = deque([start])
    while queue:
        share = queue.popleft()
        if surplus[share] < 0:
            path = []
            while (step := previous[share]) is not None:
                path.append(step)
                share = step[1]
            return path[::-1]
        for lane, other in lanes[share]:
            if other not in previous and lane.held_by(share):
                previous[other] = (lane, share, other)
                queue.append(other)
    return []


def _move_directly(result: NDArray[np.int64], surplus: list[int]) -> None:
    # Move samples that no lane can move. This happens only in steps with few samples per block.
    senders = [share for share, count in enumerate(surplus) if count > 0]
    receivers = [share for share, count in enumerate(surplus) if count < 0]
    for receiver, sender in itertools.product(receivers, senders):
        for block in np.flatnonzero(result[:, sender]).tolist():
            count = min(surplus[sender], -surplus[receiver], int(result[block, sender]))
            result[block, sender] -= count
            result[block, receiver] += count
            surplus[sender] -= count
            surplus[receiver] += count
