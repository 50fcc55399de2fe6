"""Divide weights by rows, as FSDP2 does: each shard is on two ranks.

Rank ``i`` of ``W`` owns the ``i``-th of ``W`` blocks of rows of every tensor. Its copy is on the
next rank, so that the loss of any ranks of which no two are neighbors loses no weights::

    rows of each tensor    0      1      2      3
    rank 0                 own                  copy
    rank 1                 copy   own
    rank 2                        copy   own
    rank 3                               copy   own

So the same ranks have a shard between them as with ``optimizer_shards``, whose ``is_covered`` and
``choose_leavers`` apply. This module only computes ranges of the common index of all tensors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from etrain_jupyter.rules.sharding.optimizer_shards import Range


def padded_rows(num_rows: int, world_size: int) -> int:
    """Return the number of rows of each block, of which the last ones may be shorter or empty."""
    return -(-num_rows // world_size)


def rows_of(rank: int, world_size: int, shape: Sequence[int]) -> Range:
    """Return the elements of one tensor that a rank owns; the range may be empty.

    >>> rows_of(1, 3, [4, 10])
    (20, 40)
    >>> rows_of(2, 3, [4, 10])
    (40, 40)
    """
    count = padded_rows(shape[0], world_size)
    width = math.prod(shape[1:])
    first, stop = (min(block * count, shape[0]) for block in (rank, rank + 1))
    return first * width, stop * width


def row_shards(
    rank: int, world_size: int, starts: Sequence[int], shapes: Sequence[Sequence[int]]
) -> list[tuple[Range, ...]]:
    """Return the ranges of both shards of a rank: its own, then the copy of the previous rank's.

    A single rank has one shard, which is everything.

    Args:
        rank: The rank.
        world_size: Number of ranks.
        starts: First element of each tensor in the common index, and the end of the last tensor.
        shapes: Shape of each tensor, with at least one dimension.
    """
    if world_size == 1:
        return [((0, starts[-1]),)]
    shards = []
    for owner in (rank, (rank - 1) % world_size):
        rows = [rows_of(owner, world_size, shape) for shape in shapes]
        shards.append(
            tuple(
                (start + first, start + stop)
                for start, (first, stop) in zip(starts, rows, strict=False)
                if first < stop
            )
        )
    return shards
