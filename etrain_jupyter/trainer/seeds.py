"""Chance from counters: there is no generator's state to lose, to send or to save."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import random
from collections.abc import Callable, Iterator

import numpy as np
import torch


def seed_all(seed: int, *, step: int, rank: int) -> None:
    """Seed torch, numpy and random for what the model draws in a step.

    A step that is done again after a fault draws the same numbers, and no two ranks draw the same.

    Args:
        seed: The job's.
        step: The number of the step that is being made, from 1; 0 to build the model.
        rank: Of this trainer; with ``reproducible``, the number of the shard.
    """
    _seed_generators((seed * 1_000_003 + step) * 4_099 + rank)


def seed_of(seed: int, *names: str | int) -> int:
    """Return a seed of 63 bits for whatever has these names; any other name gives another."""
    text = "/".join(map(str, (seed, *names)))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) >> 1


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Draw from ``seed`` inside, and leave the generators as they were before."""
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
    # Without an accelerator torch.manual_seed spends nearly all of its 0.1 ms on noting down who
    # asked, for the case that one turns up.
    has_more = torch.accelerator.is_available()
    return torch.manual_seed if has_more else torch.default_generator.manual_seed


def _seed_generators(seed: int) -> None:
    _seeder()(seed % (1 << 63))
    np.random.seed(seed % (1 << 32))
    random.seed(seed)
