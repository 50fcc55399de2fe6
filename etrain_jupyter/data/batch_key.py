"""Identify the samples of a batch while it is fetched.

A data set, a ``transform`` or a ``collate`` that draws random numbers from these keys gives a
sample the same numbers on any worker, in any batch, and after a restart.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass

import numpy as np

EVALUATION = -1
"""Epoch of the samples of an evaluation, so that each evaluation gives them the same numbers."""


@dataclass(frozen=True, kw_only=True)
class BatchKey:
    """The samples of a batch."""

    seed: int
    """The job's seed."""
    epoch: int
    """From 0; ``EVALUATION`` for samples of ``data.eval``."""
    samples: tuple[int, ...]
    """The samples' numbers in the data set, in the order of the batch."""

    def generators(self, purpose: int = 0) -> Iterator[np.random.Generator]:
        """Yield a random generator for each sample: a function of seed, epoch and sample.

        Args:
            purpose: Number that separates two uses of the same sample, at least 0.
        """
        for sample in self.samples:
            # Entropy must not be negative: seeds may be, and an evaluation's epoch is.
            entropy = (self.seed % (1 << 64), self.epoch + 1, sample, purpose)
            yield np.random.Generator(np.random.Philox(np.random.SeedSequence(entropy)))


_current: ContextVar[BatchKey | None] = ContextVar("etrain_batch_key", default=None)


def batch_key() -> BatchKey | None:
    """Return the key of the batch that a job is fetching in this thread; None outside a job."""
    return _current.get()


@contextlib.contextmanager
def fetching(*, seed: int, epoch: int, samples: Sequence[int]) -> Iterator[None]:
    """Set the key of the batch that is fetched within the context."""
    token = _current.set(
        BatchKey(seed=seed, epoch=epoch, samples=tuple(int(sample) for sample in samples))
    )
    try:
        yield
    finally:
        _current.reset(token)
