"""Counter-based random numbers, so that no RNG state has to be saved or transferred."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import random
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import torch


def seed_all(seed: int, *, step: int, rank: int) -> None:
    """Seed torch, numpy and random for one step of the model.

    A step repeated after a fault draws the same numbers, and no two ranks draw the same numbers.

    Args:
        seed: The job's seed.
        step: Number of the step in progress, from 1; 0 to build the model.
        rank: This trainer's rank; with ``reproducible``, the number of the shard.
    """
    _seed_generators((seed * 1_000_003 + step) * 4_099 + rank)


def seed_of(seed: int, *names: str | int) -> int:
    """Return a 63-bit seed that differs for each sequence of names."""
    text = "/".join(map(str, (seed, *names)))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) >> 1


class BatchSeeds(NamedTuple):
    """Seeds of the random numbers that are drawn while a batch is fetched."""

    fetch: int
    """Seed of torch, numpy and random in the process that fetches the batch."""
    job: int = 0
    """Seed of the job, for numbers that are drawn per sample."""
    epoch: int = 0
    """Epoch of the samples, for the same purpose."""


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed the generators within the context, and restore their state afterwards."""
    state = torch.get_rng_state(), np.random.get_state(), random.getstate()
    _seed_generators(seed)
    try:
        yield
    finally:
        torch.set_rng_state(state[0])
        np.random.set_state(state[1])
        random.setstate(state[2])


@functools.cache
def _seeder() -> Callable[[int], object]:
    # Without an accelerator, torch.manual_seed spends nearly all of its 0.1 ms recording the
    # caller's stack for a later initialization.
    has_more = torch.accelerator.is_available()
    return torch.manual_seed if has_more else torch.default_generator.manual_seed


def _seed_generators(seed: int) -> None:
    _seeder()(seed % (1 << 63))
    np.random.seed(seed % (1 << 32))
    random.seed(seed)
