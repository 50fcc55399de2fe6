"""Divide the optimizer's state among the ranks: each shard is on two ranks.

The elements of all trained tensors share one index, which counts through one tensor after another.
Shard ``i`` of ``W`` is a range of that index. Rank ``i`` holds shards ``i`` and ``i + 1``, so state
is lost only if two neighboring ranks are lost::

    shard    0      1      2      3
    rank 0   own    copy
    rank 1          own    copy
    rank 2                 own    copy
    rank 3   copy                 own

This module only computes ranges; ``trainer.sharding`` moves the state.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

ALIGN = 64
"""Shards begin at a multiple of this many elements from the start of a tensor. Fused kernels round
the last few elements of a vector differently, so other borders would change the result."""

Range = tuple[int, int]
"""A range of elements: the first one, and the one after the last."""


class Move(NamedTuple):
    """A range that one rank sends to another."""

    source: int
    target: int
    span: Range


def borders_of(world_size: int, starts: Sequence[int]) -> list[int]:
    """Return the first element of each shard, and the end of the last shard.

    Args:
        world_size: Number of shards.
        starts: First element of each tensor in the common index, and the end of the last tensor.

    >>> borders_of(3, [0, 100, 1000])
    [0, 292, 612, 1000]
    """
    size = starts[-1]
    found = []
    for number in range(world_size):
        at = size * number // world_size
        start = starts[bisect_right(starts, at) - 1]
        found.append(start + (at - start) // ALIGN * ALIGN)
    return [*found, size]


def shards_of(rank: int, world_size: int, starts: Sequence[int]) -> tuple[Range, ...]:
    """Return the ranges that a rank holds: its own shard, then the copy of the next rank's.

    A single rank has one shard, which is everything. A shard may be empty.
    """
    borders = borders_of(world_size, starts)
    held = [(rank + offset) % world_size for offset in range(min(2, world_size))]
    return tuple((borders[number], borders[number + 1]) for number in held)


def overlap(one: Range, other: Range) -> Range | None:
    """Return the elements that two ranges have in common; None if there are none."""
    first, stop = max(one[0], other[0]), min(one[1], other[1])
    return (first, stop) if first < stop else None


def subtract(spans: Iterable[Range], held: Iterable[Range]) -> list[Range]:
    """Return the parts of ``spans`` that no range in ``held`` contains."""
    missing = [span for span in spans if span[0] < span[1]]
    for first, stop in held:
        parts = []
        for span in missing:
            parts += [(span[0], min(span[1], first)), (max(span[0], stop), span[1])]
        missing = [part for part in parts if part[0] < part[1]] if first < stop else missing
    return missing


def find_lost(held: Iterable[Iterable[Range]], size: int) -> list[Range]:
    """Return the ranges of ``size`` elements that no rank holds, in order."""
    everything = [span for spans in held for span in spans]
    return sorted(subtract([(0, size)], everything))


def plan_moves(
    held: Mapping[int, Sequence[Range]], wanted: Mapping[int, Sequence[Range]]
) -> list[Move]:
    """Return what must be sent so that each rank holds what it wants; nothing is sent twice.

    Deterministic: all ranks compute the same plan. Each move is within one range of its source and
    one range of its target.

    Args:
        held: Ranges that each rank has; together they contain all that is wanted.
        wanted: Ranges that each rank must have, which do not overlap.

    Raises:
        ValueError: If no rank has some element.
    """
    moves: list[Move] = []
    sent = dict.fromkeys(held, 0)
    for target in sorted(wanted):
        for first, stop in _split(wanted[target], held.get(target, ())):
            at = first
            while at < stop:
                # Of several holders, choose the one that has sent the least so far.
                offers = [
                    (sent[rank], rank, span[1])
                    for rank, spans in held.items()
                    for span in spans
                    if span[0] <= at < span[1]
                ]
                if not offers:
                    raise ValueError(f"no rank holds element {at}")
                _, source, end = min(offers, key=lambda offer: offer[:2])
                end = min(end, stop)
                moves.append(Move(source, target, (at, end)))
                sent[source] += end - at
                at = end
    return moves


def _split(wanted: Iterable[Range], held: Iterable[Range]) -> list[Range]:
    # Handle one wanted range after another, so that each result is within one of them.
    return [part for span in wanted for part in sorted(subtract([span], held))]


def is_covered(ring: Sequence[str], present: Collection[str]) -> bool:
    """Return whether the present holders have all shards together.

    Args:
        ring: The holders in rank order, as the shards were last divided.
        present: The holders that are still there; others are ignored.

    >>> is_covered(["a", "b", "c", "d"], {"a", "c"})
    True
    >>> is_covered(["a", "b", "c", "d"], {"a", "b"})
    False
    """
    # Shard i is on holders i - 1 and i. With one holder, both are the same.
    return all(
        ring[number] in present or ring[number - 1] in present for number in range(len(ring))
    )


def choose_leavers(
    ring: Sequence[str], present: Collection[str], leaving: Sequence[str]
) -> list[str]:
    """Return the holders that can leave now without taking the only copy of a shard with them.

    The others leave after the next generation has divided the state among those that stay.

    Args:
        ring: The holders in rank order, as the shards were last divided.
        present: The holders that are still there.
        leaving: The holders that should leave; those that are not in the ring can always leave.

    >>> choose_leavers(["a", "b", "c", "d"], ["a", "b", "c", "d"], ["c", "d"])
    ['c']
    """
    left, found = set(present), []
    for name in leaving:
        # If some shard is lost already, nothing is gained by waiting.
        if name not in ring or is_covered(ring, left - {name}) or not is_covered(ring, left):
            left.discard(name)
            found.append(name)
    return found
