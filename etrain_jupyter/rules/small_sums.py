"""Choice between two ways of summing over the ranks, and the number of messages of each.

::

    doubling   ceil(log2(W)) messages per rank, one after another, each of the whole tensor
    ring       2 (W - 1)                                          ... of 1 / W of it
"""

from __future__ import annotations

MAX_BYTES = 2 << 20
"""Maximum number of bytes that a rank sends by doubling. For larger tensors, the bandwidth counts
more than the number of messages (``docs/benchmarks/steps.md``, ``sums``)."""


def num_rounds(num_bytes: float, world_size: int) -> int:
    """Return the number of messages that a rank sends one after another in a sum.

    >>> num_rounds(1e3, 8), num_rounds(1e8, 8)
    (3, 14)
    """
    return doublings(world_size) if is_small(num_bytes, world_size) else 2 * (world_size - 1)


def num_sent(num_bytes: float, world_size: int) -> float:
    """Return how much data a rank sends, as a multiple of the tensor's size.

    >>> num_sent(1e3, 8), num_sent(1e8, 8)
    (3.0, 1.75)
    """
    if is_small(num_bytes, world_size):
        return float(doublings(world_size))
    return 2 * (world_size - 1) / world_size


def is_small(num_bytes: float, world_size: int) -> bool:
    """Return whether the ranks sum a tensor by doubling."""
    return num_bytes * doublings(world_size) <= MAX_BYTES


def doublings(world_size: int) -> int:
    """Return ``ceil(log2(world_size))``."""
    return (world_size - 1).bit_length()
