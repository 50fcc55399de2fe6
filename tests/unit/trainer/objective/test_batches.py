"""Batches of all kinds are split into the model's arguments and the target."""

from __future__ import annotations

from collections import UserDict

import pytest

from etrain_jupyter.trainer.objective.batches import split_batch
from etrain_jupyter.trainer.references import DataError, WorkloadError


def forward(input_ids, labels=None, *, mask=None): ...


def takes_all(**kwargs): ...


def takes_batch(batch): ...


def takes_two(a, b): ...


def test_last_element_of_a_tuple_is_the_target():
    assert split_batch((1, 2, 3), forward, has_loss=True) == ((1, 2), {}, 3)


def test_model_that_computes_the_loss_gets_the_target_of_a_tuple_too():
    assert split_batch([1, 2, 3], forward, has_loss=False) == ((1, 2, 3), {}, 3)


@pytest.mark.parametrize("key", ["labels", "label", "target", "targets"])
def test_target_of_a_dict_has_one_of_four_names(key):
    batch = {"input_ids": 1, key: 2}
    assert split_batch(batch, forward, has_loss=True) == ((), {"input_ids": 1}, 2)
    assert split_batch(batch, takes_all, has_loss=True) == ((), {"input_ids": 1}, 2)


def test_model_gets_the_keys_of_a_dict_that_it_takes():
    batch = UserDict({"input_ids": 1, "row": 5, "mask": 3, "labels": 2})
    given = {"input_ids": 1, "mask": 3}
    assert split_batch(batch, forward, has_loss=True) == ((), given, 2)
    assert split_batch(batch, forward, has_loss=False) == ((), {**given, "labels": 2}, 2)
    assert split_batch(batch, takes_all, has_loss=False) == ((), dict(batch), 2)


def test_model_that_computes_the_loss_needs_no_target():
    assert split_batch({"a": 1, "b": 2}, takes_two, has_loss=False) == ((), {"a": 1, "b": 2}, None)
    two = {"label": 1, "target": 2}
    assert split_batch(two, takes_all, has_loss=False) == ((), two, None)


@pytest.mark.parametrize(
    ("batch", "function", "text"),
    [
        ({"input_ids": 1}, forward, "no target: its keys are 'input_ids', and loss needs exactly"),
        ({"label": 1, "target": 2}, forward, "more than one target: its keys are 'label', 'target"),
        ({"a": 1, "labels": 2}, takes_two, "forward takes a, b, .* keys 'a' .*missing: 'b'"),
        ({"x": 1, "labels": 2}, takes_batch, "forward takes batch, .* 'x' .* set step to a funct"),
    ],
)
def test_dict_that_does_not_fit_is_named_by_its_keys(batch, function, text):
    with pytest.raises(WorkloadError, match=text):
        split_batch(batch, function, has_loss=True)


@pytest.mark.parametrize("batch", [7, (7,), "ab"])
def test_batch_of_another_kind_is_named(batch):
    with pytest.raises(DataError, match=f"a batch is a {type(batch).__name__}, not"):
        split_batch(batch, forward, has_loss=True)
