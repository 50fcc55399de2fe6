from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from etrain_jupyter.data import BatchKey, batch_key
from etrain_jupyter.data.batch_key import EVALUATION, fetching


def numbers(key: BatchKey, purpose: int = 0) -> list[int]:
    return [int(generator.integers(1 << 62)) for generator in key.generators(purpose)]


@given(st.integers(-5, 1 << 63), st.integers(-1, 1000), st.permutations(range(6)))
def test_numbers_of_a_sample_do_not_depend_on_its_batch(
    seed: int, epoch: int, order: list[int]
) -> None:
    whole = numbers(BatchKey(seed=seed, epoch=epoch, samples=tuple(range(6))))

    assert numbers(BatchKey(seed=seed, epoch=epoch, samples=tuple(order))) == [
        whole[sample] for sample in order
    ]


def test_seed_epoch_sample_and_purpose_change_the_numbers() -> None:
    keys = [
        BatchKey(seed=seed, epoch=epoch, samples=(0, 1))
        for seed in (0, 1, -1)
        for epoch in (EVALUATION, 0, 1)
    ]

    found = [n for key in keys for purpose in (0, 1) for n in numbers(key, purpose)]

    assert len(set(found)) == len(found) == 36


def test_numbers_are_fixed() -> None:
    """A resumed job must continue with the masks of the version that started it."""
    key = BatchKey(seed=7, epoch=2, samples=(11,))

    [generator] = key.generators()

    assert generator.integers(1000, size=4).tolist() == [119, 231, 707, 674]
    assert isinstance(generator.bit_generator, np.random.Philox)


def test_key_is_set_only_while_a_batch_is_fetched() -> None:
    assert batch_key() is None
    with fetching(seed=1, epoch=0, samples=np.arange(3).tolist()):
        assert batch_key() == BatchKey(seed=1, epoch=0, samples=(0, 1, 2))
        with fetching(seed=1, epoch=0, samples=[7]):
            assert batch_key() == BatchKey(seed=1, epoch=0, samples=(7,))
        assert batch_key() == BatchKey(seed=1, epoch=0, samples=(0, 1, 2))
    assert batch_key() is None
