"""Split the samples of one step across the ranks of a generation.

A step is equivalent at any world size, because gradients are summed over samples and never
averaged over ranks. The ranks' shares may therefore be unequal, and some may be empty on the last
step of an epoch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """The shares of one step, full or partial."""

    starts: tuple[int, ...]
    """Shape ``(world_size,)``: offset of each rank's first sample within the step."""
    counts: tuple[int, ...]
    """Shape ``(world_size,)``: samples of each rank; 0 only if ranks outnumber samples."""
    num_micro_steps: int
    """Forward passes that the largest share needs; at least 1."""


def plan_step(
    *,
    count: int,
    world_size: int,
    micro_batch_size: int | None,
    min_share: int = 1,
    num_passes: int = 1,
    speeds: Sequence[float] | None = None,
) -> StepPlan:
    """Share the ``count`` samples of one step; with few samples, the last ranks get none.

    Args:
        count: Samples of this step; see ``ledger.cursor_at``.
        world_size: Ranks in this generation.
        micro_batch_size: Maximum samples per forward pass on one rank; None for no limit.
        min_share: Smallest nonzero share of a rank. It does not apply to a step with fewer samples
            in total. With a value of 2, no rank gets a single sample, on which BatchNorm fails,
            in an epoch's small last step.
        num_passes: Minimum passes per rank, as long as each has ``min_share`` samples.
        speeds: Positive; each rank's share is proportional to its speed. Even shares if None, or if
            the step has too few samples to give each rank ``min_share``.

    >>> plan_step(count=5, world_size=3, micro_batch_size=1)
    StepPlan(starts=(0, 2, 4), counts=(2, 2, 1), num_micro_steps=2)
    >>> plan_step(count=5, world_size=3, micro_batch_size=None, min_share=2).counts
    (3, 2, 0)
    >>> plan_step(count=24, world_size=2, micro_batch_size=None, num_passes=4).num_micro_steps
    4
    """
    num_busy = min(world_size, max(1, count // min_share))
    if speeds is None or num_busy < world_size:
        counts = share_samples(count, num_busy) + (0,) * (world_size - num_busy)
    else:
        counts = share_by_speed(count, speeds, min_share=min_share)
    starts = tuple(accumulate(counts[:-1], initial=0))
    # The largest share determines the number of passes. Ranks with a smaller share have the same
    # number of smaller passes.
    num_micro_steps = count_passes(
        max(counts), micro_batch_size=micro_batch_size, min_share=min_share, num_passes=num_passes
    )
    return StepPlan(starts=starts, counts=counts, num_micro_steps=num_micro_steps)


def count_passes(
    share: int, *, micro_batch_size: int | None, min_share: int = 1, num_passes: int = 1
) -> int:
    """Return the number of forward passes for a share; the arguments are those of ``plan_step``.

    >>> count_passes(85, micro_batch_size=32)
    3
    """
    num_wanted = min(num_passes, max(1, share // min_share))
    return max(num_wanted, -(-share // (micro_batch_size or max(share, 1))))  # rounded up


def share_samples(count: int, world_size: int) -> tuple[int, ...]:
    """Return each rank's number of samples: as even as possible, more on the first ranks.

    >>> share_samples(2, 4)
    (1, 1, 0, 0)
    """
    share, left_over = divmod(count, world_size)
    return tuple(share + (rank < left_over) for rank in range(world_size))


def share_by_speed(count: int, speeds: Sequence[float], *, min_share: int) -> tuple[int, ...]:
    """Return each rank's number of samples: in proportion to its speed, at least ``min_share``.

    Args:
        count: Samples to share; at least ``min_share`` per rank.
        speeds: Positive speed of each rank, shape ``(world_size,)``.
        min_share: Smallest share.

    >>> share_by_speed(256, [1.0, 0.5], min_share=2)
    (171, 85)
    >>> share_by_speed(8, [1.0, 1.0, 0.01], min_share=2)
    (3, 3, 2)
    """
    # Ranks that are too slow for ``min_share`` get exactly that much. This leaves less for the
    # others, so that more of them may be too slow.
    too_slow: set[int] = set()
    while len(too_slow) < len(speeds):
        others = [rank for rank in range(len(speeds)) if rank not in too_slow]
        rest, total = count - min_share * len(too_slow), sum(speeds[rank] for rank in others)
        ideal = {rank: rest * speeds[rank] / total for rank in others}
        found = {rank for rank in others if ideal[rank] < min_share}
        if not found:
            break
        too_slow |= found
    else:
        ideal = {}
    shares = [int(ideal.get(rank, min_share)) for rank in range(len(speeds))]
    # After rounding down, fewer samples than ranks are left. The largest remainders get them.
    order = sorted(
        range(len(speeds)), key=lambda rank: shares[rank] - ideal.get(rank, float(min_share))
    )
    for rank in order[: count - sum(shares)]:
        shares[rank] += 1
    return tuple(shares)


def share_range(num_samples: int, rank: int, world_size: int) -> range:
    """Return the contiguous indices that ``rank`` evaluates; each sample goes to exactly one rank.

    >>> [share_range(7, rank, 3) for rank in range(3)]
    [range(0, 3), range(3, 5), range(5, 7)]
    """
    share, left_over = divmod(num_samples, world_size)
    first = rank * share + min(rank, left_over)
    return range(first, first + share + (rank < left_over))


class PassSamples(NamedTuple):
    """Samples that go through the model in one pass."""

    samples: range
    """Offsets within the step."""
    stream: int
    """The rank or shard that it belongs to and whose random numbers it uses."""
    number: int
    """Index within that rank's or shard's micro-batches, from 0."""


def split_share(share: range, num_parts: int, *, stream: int) -> list[PassSamples]:
    """Split a share into at most ``num_parts`` micro-batches, none of them empty."""
    parts, start = [], share.start
    for number, count in enumerate(share_samples(len(share), num_parts)):
        if count:
            parts.append(PassSamples(range(start, start + count), stream, number))
        start += count
    return parts
