"""What ``eval.predict`` may return, and what ``eval.score`` gets."""

from __future__ import annotations

import io
from collections import OrderedDict
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from etrain_jupyter.trainer.references import WorkloadError
from etrain_jupyter.trainer.scoring.records import pack_records, unpack_all

ROWS = torch.arange(6.0).reshape(3, 2)


class Boxes(NamedTuple):
    boxes: torch.Tensor
    count: int


def round_trip(*batches: Any) -> list[Any]:
    data, first = b"", 0
    for returned, size in batches:
        data += pack_records(returned, range(first, first + size))
        first += size
    return list(unpack_all(io.BytesIO(data), len(data)))


def test_a_list_has_one_record_per_sample() -> None:
    assert round_trip((["a", {"b": 1}], 2), ([None], 1)) == ["a", {"b": 1}, None]


def test_rows_of_a_tensor_are_records() -> None:
    records = round_trip((ROWS, 3), (ROWS[:1], 1))

    assert [record.tolist() for record in records] == [[0, 1], [2, 3], [4, 5], [0, 1]]


def test_columns_of_a_dict_and_of_a_tuple_are_split_by_sample() -> None:
    of_dict = round_trip((OrderedDict(logits=ROWS, row=np.arange(3)), 3))
    of_tuple = round_trip(((ROWS, torch.arange(3)), 3))

    assert [sorted(record) for record in of_dict] == [["logits", "row"]] * 3
    assert [(r["logits"].tolist(), int(r["row"])) for r in of_dict][2] == ([4, 5], 2)
    assert [(first.tolist(), int(second)) for first, second in of_tuple][1] == ([2, 3], 1)


def test_bfloat16_survives() -> None:
    [record] = round_trip((ROWS[:1].bfloat16(), 1))

    assert record.dtype == torch.bfloat16


def test_a_record_that_is_a_view_is_stored_with_its_own_elements_only() -> None:
    big = torch.zeros(1000, 100)
    data = pack_records([{"row": big[0], "pair": (big[1, :3],)}], range(1))

    assert len(data) < 4_000
    [record] = unpack_all(io.BytesIO(data), len(data))
    assert record["row"].shape == (100,)


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ([1, 2], r"2 records for a batch of 3 samples \(positions 6 to 8 of data.eval\)"),
        (ROWS[:2], "2 records for a batch of 3 samples"),
        ({"a": ROWS, "b": ROWS[:1]}, "1 records in 'b' for a batch of 3 samples"),
        (7, "returned a int. Return one record per sample"),
        (torch.tensor(1.0), "returned a Tensor"),
        ((ROWS, "text"), "returned a tuple"),
        ({}, "returned a dict"),
        (Boxes(ROWS, 1), "returned a Boxes"),
    ],
)
def test_anything_else_is_refused(returned: Any, message: str) -> None:
    with pytest.raises(WorkloadError, match=message):
        pack_records(returned, range(6, 9))
