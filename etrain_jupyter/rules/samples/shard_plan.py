"""Assign shards to ranks, and fix the order in which the sums of shards are added.

With ``reproducible``, a step's samples are split into V shards for any number of ranks, and the
shards' gradients are added along a binary tree over ``range(V)``: the root halves the range, with
the smaller part on the left, and so on down to single shards. Floating-point addition is not
associative, but the tree is the same for every number of ranks, and so is the sum, bit for bit.

A rank has a contiguous range of shards. It adds up the largest subtrees within that range; it
cannot add more without the other ranks' shards. ``trainer.gradients.tree_sum`` exchanges these
partial sums and adds them along the rest of the tree.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from etrain_jupyter.errors import ConfigError
from etrain_jupyter.rules.samples.batch_plan import share_range

Merge = tuple[int, int]
"""Indices of two sums: add the second to the first, in place."""


class Subtree(NamedTuple):
    """A node of the tree: the shards ``first`` to ``stop - 1``."""

    first: int
    stop: int

    @property
    def is_shard(self) -> bool:
        """True for a leaf: a single shard."""
        return self.stop - self.first == 1

    def halves(self) -> tuple[Subtree, Subtree]:
        """Return its two children."""
        middle = (self.first + self.stop) // 2
        return Subtree(self.first, middle), Subtree(middle, self.stop)


class ShardPass(NamedTuple):
    """One pass of a rank over one of its shards; sums are kept in slots."""

    shard: int
    slot: int
    """Slot of the shard's sum."""
    is_fresh: bool
    """True if the slot starts at zero; otherwise the shard is added to its content."""
    merges: tuple[Merge, ...]
    """Slots to add up afterwards."""


@dataclass(frozen=True, kw_only=True)
class ShardPlan:
    """Distribution of V shards over the ranks of one generation."""

    num_shards: int
    shards: tuple[range, ...]
    """Shape ``(world_size,)``: each rank's shards, at least one; counts differ by at most 1."""
    subtrees: tuple[tuple[Subtree, ...], ...]
    """Shape ``(world_size, K)``: the partial sums of each rank, from left to right."""
    merges: tuple[Merge, ...]
    """Order in which to add all ranks' partial sums; the first one holds the total."""


def plan_shards(*, num_shards: int, world_size: int) -> ShardPlan:
    """Share ``num_shards`` over ``world_size`` ranks in contiguous ranges, as evenly as possible.

    Raises:
        ConfigError: If a rank would get no shard.

    >>> plan = plan_shards(num_shards=4, world_size=3)
    >>> plan.shards
    (range(0, 2), range(2, 3), range(3, 4))
    >>> plan.merges
    ((1, 2), (0, 1))
    """
    if world_size > num_shards:
        raise ConfigError(
            f"{num_shards} shards leave {world_size - num_shards} of {world_size} workers without "
            "work. A reproducible job cannot change its number of shards: scale to at most "
            f"{num_shards} workers, or start a job with reproducible: {{shards: {world_size}}} "
            "or more.",
            path=("reproducible",),
        )
    shards = tuple(share_range(num_shards, rank, world_size) for rank in range(world_size))
    subtrees = tuple(subtrees_within(own, num_shards) for own in shards)
    return ShardPlan(
        num_shards=num_shards,
        shards=shards,
        subtrees=subtrees,
        merges=merge_order([tree for own in subtrees for tree in own], Subtree(0, num_shards)),
    )


def subtrees_within(shards: range, num_shards: int) -> tuple[Subtree, ...]:
    """Return the largest subtrees within ``shards``, in the tree over ``range(num_shards)``.

    >>> [tuple(tree) for tree in subtrees_within(range(1, 8), 8)]
    [(1, 2), (2, 4), (4, 8)]
    """

    def search(tree: Subtree) -> Iterator[Subtree]:
        if tree.stop <= shards.start or shards.stop <= tree.first:
            return
        if shards.start <= tree.first and tree.stop <= shards.stop:
            yield tree  # the whole subtree, so its halves are not yielded
            return
        for half in tree.halves():
            yield from search(half)

    return tuple(search(Subtree(0, num_shards)))


def merge_order(leaves: Sequence[Subtree], root: Subtree) -> tuple[Merge, ...]:
    """Return the order in which to add ``leaves``, which cover ``root``, into the first one."""
    index_of = {tree: index for index, tree in enumerate(leaves)}
    merges: list[Merge] = []

    # leaves [0] (0,2)   [1] (2,3)   [2] (3,4)      of the tree over range(4)
    # (2,4) = [1] + [2]: merge (1, 2)               children first, from left to right
    # (0,4) = [0] + (2,4): merge (0, 1)             the total is in slot 0
    def add_up(tree: Subtree) -> int:
        if tree in index_of:
            return index_of[tree]
        left, right = (add_up(half) for half in tree.halves())
        merges.append((left, right))
        return left

    add_up(root)
    return tuple(merges)


def shard_merges(tree: Subtree) -> tuple[Merge, ...]:
    """Return the order in which to add the values of all shards of ``tree`` into the first one.

    >>> shard_merges(Subtree(0, 4))
    ((0, 1), (2, 3), (0, 2))
    """
    leaves = [Subtree(shard, shard + 1) for shard in range(tree.first, tree.stop)]
    return merge_order(leaves, tree)


def plan_passes(subtrees: Sequence[Subtree], *, adds_in_place: bool) -> tuple[ShardPass, ...]:
    """Return a rank's passes in the order of its shards, keeping few sums in memory at any time.

    The sum of subtree ``k`` ends up in slot ``k``. Only the slots after it hold intermediate
    sums, so there are at most ``log2 V`` more slots than subtrees.

    Args:
        subtrees: The rank's subtrees, from left to right.
        adds_in_place: True if a shard's value may be added directly to its left neighbour's sum.
            This gives the same result only if the value is computed in one piece.

    >>> for p in plan_passes([Subtree(0, 4)], adds_in_place=True):
    ...     print(p.shard, p.slot, p.is_fresh, p.merges)
    0 0 True ()
    1 0 False ()
    2 1 True ()
    3 1 False ((0, 1),)
    """
    passes: list[ShardPass] = []

    # Depth first: a sum is added to its left neighbour as soon as it is complete. Over 8 shards,
    # slots 0 to 3 hold: 0 | 0+1 | 0+1, 2 | 0+1, 2+3 -> 0..3 | 0..3, 4 | ... | 0..3, 4+5, 6, 7.
    def descend(tree: Subtree, slot: int) -> None:
        if tree.is_shard:
            passes.append(ShardPass(tree.first, slot, True, ()))
            return
        left, right = tree.halves()
        descend(left, slot)
        if adds_in_place and right.is_shard:
            passes.append(ShardPass(right.first, slot, False, ()))
            return
        descend(right, slot + 1)
        # The last pass completes the right half. Merges that it already has come first.
        passes[-1] = passes[-1]._replace(merges=(*passes[-1].merges, (slot, slot + 1)))

    for slot, tree in enumerate(subtrees):
        descend(tree, slot)
    return tuple(passes)


def num_slots(passes: Sequence[ShardPass]) -> int:
    """Return the number of sums to keep at once."""
    return 1 + max(p.slot for p in passes)
