"""Batches by index from all kinds of data sets."""

from __future__ import annotations

import random
import traceback

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

from etrain_jupyter.data import batch_key
from etrain_jupyter.data.batch_key import EVALUATION
from etrain_jupyter.trainer.data import Share, evaluation_share, open_samples
from etrain_jupyter.trainer.references import DataError

X = torch.arange(12.0).reshape(6, 2)
Y = torch.arange(6)


class Augmented:
    """Draws from all global generators."""

    def __len__(self):
        return 5

    def __getitem__(self, index):
        drawn = [torch.rand(()).item(), float(np.random.rand()), random.random()]
        return index, torch.tensor(drawn, dtype=torch.float64)


class Squares:
    def __len__(self):
        return 5

    def __getitem__(self, index):
        return torch.tensor([float(index)]), index * index


def rows(data, share, **options):
    options = {"name": "data.train", "collate": None, "num_workers": 0, **options}
    source = open_samples(data, **options)
    try:
        indices, batch = next(iter(source.batches([Share(share)])))
        assert list(indices) == list(share)
        return batch
    finally:
        source.close()


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(TensorDataset(X, Y), id="TensorDataset"),
        pytest.param((X, Y), id="pair of tensors"),
        pytest.param((X.numpy(), Y.numpy()), id="pair of arrays"),
        pytest.param(lambda: (X, Y), id="function"),
    ],
)
def test_columns_are_indexed_in_the_order_asked_for(data):
    inputs, target = rows(data, np.array([4, 1]))
    assert inputs.tolist() == [[8.0, 9.0], [2.0, 3.0]]
    assert target.tolist() == [4, 1]


def test_items_are_collated():
    inputs, target = rows(Squares, [3, 2])
    assert inputs.tolist() == [[3.0], [2.0]]
    assert target.tolist() == [9, 4]


def test_samples_that_cannot_be_collated_are_named():
    ragged = [(torch.zeros(2), 0), (torch.zeros(2), 0), (torch.zeros(3), 0)]
    with pytest.raises(RuntimeError) as caught:
        rows(ragged, [1, 2])
    first, second = caught.value.__notes__
    assert first == "while collating samples [1, 2] into a batch"
    assert "Write data: {train: train_set, collate: collate}" in second


class Truncated(Squares):
    def __getitem__(self, index):
        if index == 3:
            raise OSError("image file is truncated")
        return super().__getitem__(index)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_sample_that_cannot_be_read_is_named(num_workers):
    source = open_samples(Truncated(), name="data.train", collate=None, num_workers=num_workers)
    try:
        with pytest.raises(OSError, match="image file is truncated") as caught:
            list(source.batches([Share([2, 3])]))
    finally:
        source.close()
    shown = "".join(traceback.format_exception(caught.value))
    assert "while reading sample 3 from the data set" in shown


def test_items_come_in_the_same_order_from_loader_processes():
    source = open_samples(
        Squares(), name="data.train", collate=lambda items: [y for _, y in items], num_workers=1
    )
    try:
        assert [batch for _, batch in source.batches([Share([1, 2]), Share([3])])] == [[1, 4], [9]]
        # The next generation starts again; samples loaded ahead are dropped.
        next(iter(source.batches([Share([0]), Share([1]), Share([2])])))
        [(indices, batch)] = source.batches([Share([4])])
        assert (indices.tolist(), batch) == ([4], [16])
    finally:
        source.close()


def drawn(*shares, num_workers=0):
    source = open_samples(Augmented(), name="data.train", collate=None, num_workers=num_workers)
    try:
        return [batch[1].tolist() for _, batch in source.batches(shares)]
    finally:
        source.close()


def test_random_numbers_of_a_share_depend_on_its_seed_alone():
    shares = [Share([1, 2], seed=5), Share([3], seed=6), Share([1, 2], seed=5)]
    here = drawn(*shares)
    assert here[0] == here[2]
    assert here[0][0] != here[1][0]
    assert here[1] == drawn(shares[1])[0]
    assert drawn(*shares, num_workers=1) == here


def test_fetching_does_not_change_the_state_of_the_generators():
    expected = [torch.rand(1).item() for _ in range(2) if torch.manual_seed(3)]
    torch.manual_seed(3)
    np.random.seed(3)
    random.seed(3)
    drawn(Share([1], seed=5))
    assert torch.rand(1).item() == expected[0]
    after = float(np.random.rand()), random.random()
    np.random.seed(3)
    random.seed(3)
    assert after == (float(np.random.rand()), random.random())


def test_list_of_samples_is_not_a_pair_of_columns():
    data = [(torch.tensor([1.0]), 0), (torch.tensor([2.0]), 1)]
    inputs, target = rows(data, [1])
    assert inputs.tolist() == [[2.0]]
    assert target.tolist() == [1]


@pytest.mark.parametrize(
    ("data", "text"),
    [
        ((X[:0], Y[:0]), r"data.train is empty \(0 samples\)"),
        ((X, Y[:5]), r"different lengths \[5, 6\]"),
        (iter([1]), r"is a list_iterator\. A stream has no index"),
        (lambda: None, "NoneType without len"),
    ],
)
def test_data_that_cannot_be_used_is_named(data, text):
    with pytest.raises(DataError, match=text):
        rows(data, [0])


class Keyed:
    """Returns the key of the batch in which a sample is fetched."""

    def __len__(self):
        return 8

    def __getitem__(self, index):
        key = batch_key()
        return key.seed, key.epoch, key.samples.index(index)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_data_set_and_collate_know_the_samples_of_their_batch(num_workers):
    def collate(samples):
        return batch_key().samples, samples

    source = open_samples(Keyed(), name="data.train", collate=collate, num_workers=num_workers)
    shares = [Share([4, 2], 9, job_seed=5, epoch=1), evaluation_share(range(2), job_seed=5, step=3)]

    batches = [batch for _, batch in source.batches(shares)]
    source.close()

    assert batches == [
        ((4, 2), [(5, 1, 0), (5, 1, 1)]),
        ((0, 1), [(5, EVALUATION, 0), (5, EVALUATION, 1)]),
    ]
    assert batch_key() is None
