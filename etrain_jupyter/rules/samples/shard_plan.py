"""Which rank computes which shard, and in which order shards are added up.

With ``reproducible`` a step's samples are cut into V shards, whatever the number of ranks, and what
shards give is added along one binary tree over ``range(V)``: its root halves the range, its left
part being the smaller one, and so on down to single shards. Addition of floats is not associative;
but the tree is the same for every number of ranks, and so is the sum, to the last bit.

A rank has a contiguous range of shards. It adds up the largest subtrees within that range; nobody
could add more without the others' shards. The rest of the tree is added where these partial sums
meet (``ranks.gradients.tree_sum``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from etrain_jupyter.errors import ConfigError
from etrain_jupyter.rules.samples.batch_plan import share_range

Merge = tuple[int, int]
"""Add the second to the first, in place: indices into what is summed."""


class Subtree(NamedTuple):
    """A node of the tree: the shards from ``first`` up to and without ``stop``."""

    first: int
    stop: int

    @property
    def is_shard(self) -> bool:
        """Whether it is a single shard, a leaf."""
        return self.stop - self.first == 1

    def halves(self) -> tuple[Subtree, Subtree]:
        """Return its two children."""
        middle = (self.first + self.stop) // 2
        return Subtree(self.first, middle), Subtree(middle, self.stop)


class ShardPass(NamedTuple):
    """What a rank does with one of its shards; sums are kept in slots."""

    shard: int
    slot: int
    """Where the shard's sum goes."""
    is_fresh: bool
    """Whether the slot begins at zero; else the shard is added to what is there."""
    merges: tuple[Merge, ...]
    """Slots to add up afterwards."""


@dataclass(frozen=True, kw_only=True)
class ShardPlan:
    """How V shards lie on the ranks of one generation."""

    num_shards: int
    shards: tuple[range, ...]
    """Shape ``(world_size,)``: each rank's shards, at least one; no two differ by more than 1."""
    subtrees: tuple[tuple[Subtree, ...], ...]
    """Shape ``(world_size, K)``: the partial sums that each rank can make, from left to right."""
    merges: tuple[Merge, ...]
    """How all ranks' partial sums, from left to right, are added up; the first holds the total."""


def plan_shards(*, num_shards: int, world_size: int) -> ShardPlan:
    """Share ``num_shards`` over ``world_size`` ranks in contiguous ranges, as even as possible.

    Raises:
        ConfigError: If some rank would get no shard.

    >>> plan = plan_shards(num_shards=4, world_size=3)
    >>> plan.shards
    (range(0, 2), range(2, 3), range(3, 4))
    >>> plan.merges
    ((1, 2), (0, 1))
    """
    if world_size > num_shards:
        raise ConfigError(
            f"{num_shards} shards leave {world_size - num_shards} of {world_size} workers without "
            f"work. A reproducible job keeps its shards for ever: scale to at most {num_shards} "
            f"workers, or start a job with reproducible: {{shards: {world_size}}} or more.",
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
    """Return the largest subtrees of the tree over ``range(num_shards)`` that lie in ``shards``.

    >>> [tuple(tree) for tree in subtrees_within(range(1, 8), 8)]
    [(1, 2), (2, 4), (4, 8)]
    """

    def search(tree: Subtree) -> Iterator[Subtree]:
        if tree.stop <= shards.start or shards.stop <= tree.first:
            return
        if shards.start <= tree.first and tree.stop <= shards.stop:
            yield tree
            return
        for half in tree.halves():
            yield from search(half)

    return tuple(search(Subtree(0, num_shards)))


def merge_order(leaves: Sequence[Subtree], root: Subtree) -> tuple[Merge, ...]:
    """Return how to add up ``leaves``, which cover ``root``, so that the first holds the total."""
    index_of = {tree: index for index, tree in enumerate(leaves)}
    merges: list[Merge] = []

    def add_up(tree: Subtree) -> int:
        if tree in index_of:
            return index_of[tree]
        left, right = (add_up(half) for half in tree.halves())
        merges.append((left, right))
        return left

    add_up(root)
    return tuple(merges)


def shard_merges(tree: Subtree) -> tuple[Merge, ...]:
    """Return how to add up a value of each shard of ``tree``, so that the first holds the total.

    >>> shard_merges(Subtree(0, 4))
    ((0, 1), (2, 3), (0, 2))
    """
    leaves = [Subtree(shard, shard + 1) for shard in range(tree.first, tree.stop)]
    return merge_order(leaves, tree)


def plan_passes(subtrees: Sequence[Subtree], *, adds_in_place: bool) -> tuple[ShardPass, ...]:
    """Return a rank's passes in the order of its shards; few sums are alive at any time.

    The sum of subtree ``k`` ends up in slot ``k``. Only the slots behind it hold sums on the way,
    so that there are at most ``log2 V`` slots more than subtrees.

    Args:
        subtrees: The rank's, from left to right.
        adds_in_place: Whether a shard's value may be made by adding to its left neighbour's. That
            is the same sum only if the value comes in one piece.

    >>> for p in plan_passes([Subtree(0, 4)], adds_in_place=True):
    ...     print(p.shard, p.slot, p.is_fresh, p.merges)
    0 0 True ()
    1 0 False ()
    2 1 True ()
    3 1 False ((0, 1),)
    """
    passes: list[ShardPass] = []

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
        passes[-1] = passes[-1]._replace(merges=(*passes[-1].merges, (slot, slot + 1)))

    for slot, tree in enumerate(subtrees):
        descend(tree, slot)
    return tuple(passes)


def num_slots(passes: Sequence[ShardPass]) -> int:
    """Return how many sums must be kept at a time."""
    return 1 + max(p.slot for p in passes)
