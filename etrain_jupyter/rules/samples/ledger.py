"""Ledger: the samples that each step trains on.

The order of an epoch is a pure function of ``(seed, epoch, num_samples)``, and a committed step
advances one cursor over it. Neither depends on the world size, so no history of joins and losses
can lose or repeat a sample, and the durable log alone proves which samples were trained on.

The numbers that this module computes must never change, because a job resumed by a later version
continues in the same order. So it has its own hash instead of ``numpy.random``, whose shuffles may
change between versions. The hash is SplitMix64: Guy L. Steele Jr., Doug Lea, Christine H. Flood,
"Fast splittable pseudorandom number generators", OOPSLA 2014, as in their public ``splitmix64.c``
(whose constants are David Stafford's "Mix13").
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB
_CHECKSUM_KEY = 0x6574_7261_696E_3031
"""The bytes of ``etrain01``; they make the checksum's hash differ from that of the order."""


class StepRange(NamedTuple):
    """The samples of one step, as positions in the order of their epoch."""

    epoch: int
    """From 0."""
    first: int
    """Position of the step's first sample."""
    samples: int
    """Number of samples, at least 1."""

    def position(self, num_samples: int) -> int:
        """Return the number of samples before this step, counted over all epochs."""
        return self.epoch * num_samples + self.first


@dataclass(frozen=True, kw_only=True)
class Cursor:
    """Position of training in the data: everything before it is committed, nothing after it."""

    epoch: int
    """From 0."""
    first: int
    """Position of the next sample in the epoch's order, ``0 <= first < num_samples``."""

    def next_range(self, *, num_samples: int, global_batch_size: int) -> StepRange:
        """Return the samples of the next step: a full batch, or the rest of the epoch."""
        return StepRange(self.epoch, self.first, min(global_batch_size, num_samples - self.first))

    def advance(self, count: int, *, num_samples: int) -> Self:
        """Return the cursor after a step of ``count`` samples, at most the rest of the epoch.

        Raises:
            ValueError: If ``count`` crosses the end of the epoch, which no step may.
        """
        # A step within one epoch has one permutation, and each epoch visits every sample once.
        end = self.first + count
        if count < 0 or end > num_samples:
            raise ValueError(f"{count} samples from {self.first} exceed the epoch of {num_samples}")
        return type(self)(
            epoch=self.epoch + (end == num_samples), first=0 if end == num_samples else end
        )


def epoch_order(*, seed: int, epoch: int, num_samples: int) -> NDArray[np.int64]:
    """Return the order in which an epoch visits the data set.

    Args:
        seed: The job's seed; taken modulo 2**64.
        epoch: From 0.
        num_samples: Length of the training set.

    Returns:
        A permutation of ``range(num_samples)``, shape ``(num_samples,)``; every version returns the
        same one.

    >>> epoch_order(seed=0, epoch=0, num_samples=8).tolist()
    [0, 7, 2, 5, 4, 6, 3, 1]
    """
    # Each sample gets a hash of (seed, epoch, index), and samples are sorted by hash. Unlike a
    # shuffle, this needs no random number generator and no state.
    keys = hash_of(np.arange(num_samples, dtype=np.uint64), key_of(seed, epoch))
    # The mix is a bijection and the states differ, so there are no ties; with ``stable`` the
    # order would not depend on the sorting algorithm even if there were.
    return np.argsort(keys, kind="stable").astype(np.int64)


def checksum_of(indices: NDArray[np.int64]) -> int:
    """Return the sum of a 32-bit hash of each index: proof of which samples were trained on.

    The sum is additive over disjoint parts, so ranks sum their own shares. Each term is below
    2**32, so a float64 all-reduce over up to 2**20 samples is exact.

    >>> whole = np.arange(10)
    >>> checksum_of(whole) == checksum_of(whole[:3]) + checksum_of(whole[3:])
    True
    """
    return int(checksum_terms(indices).sum(dtype=np.uint64))


def checksum_terms(indices: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Return the term of each sample in the checksum, below 2**32, in the shape of ``indices``."""
    return hash_of(np.asarray(indices).astype(np.uint64), _CHECKSUM_KEY) >> np.uint64(32)


def steps_per_epoch(num_samples: int, global_batch_size: int) -> int:
    """Return the number of steps in an epoch; the last may be smaller, but no sample is dropped."""
    return -(-num_samples // global_batch_size)


def cursor_at(step: int, num_samples: int, global_batch_size: int) -> StepRange:
    """Return the samples of the update after ``step`` committed ones, at a constant batch size.

    >>> cursor_at(0, 100, 32)
    StepRange(epoch=0, first=0, samples=32)
    >>> cursor_at(3, 100, 32)
    StepRange(epoch=0, first=96, samples=4)
    >>> cursor_at(4, 100, 32)
    StepRange(epoch=1, first=0, samples=32)
    """
    epoch, step_of_epoch = divmod(step, steps_per_epoch(num_samples, global_batch_size))
    cursor = Cursor(epoch=epoch, first=step_of_epoch * global_batch_size)
    return cursor.next_range(num_samples=num_samples, global_batch_size=global_batch_size)


def position_after(step: int, num_samples: int, global_batch_size: int) -> int:
    """Return the number of samples in the first ``step`` updates, at a constant batch size.

    >>> [position_after(step, 100, 32) for step in (0, 3, 4, 5)]
    [0, 96, 100, 132]
    """
    return cursor_at(step, num_samples, global_batch_size).position(num_samples)


def range_at(
    position: int, *, num_samples: int, global_batch_size: int, end: int | None = None
) -> StepRange:
    """Return the samples of an update: a batch, or the rest of its epoch or of the job.

    Args:
        position: Samples trained on before it, over all epochs.
        num_samples: Length of the training set.
        global_batch_size: Samples of a full step, which may change from step to step.
        end: Samples that the job trains on, over all epochs; None if unlimited.

    >>> range_at(130, num_samples=100, global_batch_size=32)
    StepRange(epoch=1, first=30, samples=32)
    >>> range_at(130, num_samples=100, global_batch_size=32, end=140)
    StepRange(epoch=1, first=30, samples=10)
    """
    epoch, first = divmod(position, num_samples)
    cursor = Cursor(epoch=epoch, first=first)
    due = cursor.next_range(num_samples=num_samples, global_batch_size=global_batch_size)
    return due if end is None else due._replace(samples=min(due.samples, end - position))


def total_steps(
    epochs: float | None, steps: int | None, num_samples: int, global_batch_size: int
) -> int:
    """Return the number of updates of a job: ``steps`` if given, otherwise from ``epochs``.

    A fraction of an epoch is rounded up to whole steps, so that the job trains on at least that
    many samples.

    >>> total_steps(3, None, 100, 32), total_steps(0.5, None, 100, 32)
    (12, 2)
    >>> total_steps(None, 7, 100, 32)
    7
    """
    if steps is not None:
        return steps
    if epochs is None:
        raise ValueError("either epochs or steps must be given")
    whole = math.floor(epochs)
    # Rounded, because 2.1 - 2 is a little more than 0.1 and must not cause an extra step.
    samples_over = round((epochs - whole) * num_samples, 6)
    return whole * steps_per_epoch(num_samples, global_batch_size) + math.ceil(
        samples_over / global_batch_size
    )


def key_of(seed: int, number: int) -> int:
    """Return the key for a number, such as an epoch, of a seed; both are taken modulo 2**64."""
    return _mix_int(_mix_int(seed + _GAMMA) + (number + 1) * _GAMMA)


def hash_of(indices: NDArray[np.uint64], key: int) -> NDArray[np.uint64]:
    """Return a 64-bit hash of each index; for one key, different indices have different hashes."""
    # SplitMix64 advances its state by gamma for each number, so any state can be computed directly.
    return _mix((indices + np.uint64(1)) * np.uint64(_GAMMA) + np.uint64(key))


def _mix(states: NDArray[np.uint64]) -> NDArray[np.uint64]:
    # Arrays wrap around silently, as intended.
    z = (states ^ (states >> np.uint64(30))) * np.uint64(_MIX_1)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(_MIX_2)
    return z ^ (z >> np.uint64(31))


def _mix_int(state: int) -> int:
    # The same as ``_mix`` for one Python integer, because numpy warns when a scalar wraps around.
    z = state & _MASK
    z = ((z ^ (z >> 30)) * _MIX_1) & _MASK
    z = ((z ^ (z >> 27)) * _MIX_2) & _MASK
    return z ^ (z >> 31)
