"""Sizes of rows that add up."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from etrain_jupyter.data.spill import num_bytes_of

COLUMNS: dict[str, pa.Array] = {
    "int64": pa.array([1, None, 3, 4]),
    "bool": pa.array([True, None, False, True]),
    "text": pa.array(["a", None, "ccc", ""]),
    "large text": pa.array(["a", None, "ccc", ""], pa.large_string()),
    "bytes": pa.array([b"ab", b"", None, b"c"]),
    "fixed bytes": pa.array([b"ab", b"cd", None, b"ef"], pa.binary(2)),
    "list": pa.array([[1], None, [2, 3], []]),
    "list of texts": pa.array([["a"], [], None, ["b", "cc"]]),
    "fixed list": pa.array([[1, 2], None, [3, 4], [5, 6]], pa.list_(pa.int32(), 2)),
    "struct": pa.array([{"a": 1, "b": "x"}, None, {"a": 3, "b": None}, {"a": 4, "b": "yy"}]),
    "map": pa.array([[("a", 1)], None, [("b", 2), ("c", 3)], []], pa.map_(pa.string(), pa.int64())),
    "decimal": pa.array([1, 2, None, 4], pa.decimal128(10)),
    "null": pa.nulls(4),
    "tensor": pa.ExtensionArray.from_storage(
        pa.fixed_shape_tensor(pa.int8(), (2,)),
        pa.array([[1, 2], [3, 4], [5, 6], [7, 8]], pa.list_(pa.int8(), 2)),
    ),
}


@pytest.mark.parametrize("name", COLUMNS)
def test_size_of_rows_is_the_sum_of_the_sizes_of_its_parts(name: str) -> None:
    table = pa.table({name: COLUMNS[name]})

    singles = [num_bytes_of(table.slice(row, 1)) for row in range(4)]

    assert num_bytes_of(table) == sum(singles)
    assert num_bytes_of(table.slice(1)) == sum(singles[1:])
    assert num_bytes_of(pa.concat_tables([table.slice(2), table.slice(0, 2)])) == sum(singles)
    assert num_bytes_of(table.take(pa.array([3, 1]))) == singles[3] + singles[1]


def test_size_is_that_of_the_values() -> None:
    table = pa.table({"id": pa.array([1, 2]), "text": ["a", "bcd"], "tokens": [[1], [2, 3]]})

    assert num_bytes_of(table) == 2 * 8 + (2 * 4 + 4) + (2 * 4 + 3 * 8)


@given(
    rows=st.lists(
        st.fixed_dictionaries(
            {"text": st.none() | st.text(max_size=5), "tokens": st.none() | st.lists(st.booleans())}
        ),
        min_size=1,
    ),
    cut=st.floats(0, 1),
)
def test_any_cut_adds_up(rows: list[dict[str, Any]], cut: float) -> None:
    table = pa.table(
        {name: [row[name] for row in rows] for name in ("text", "tokens")},
        schema=pa.schema({"text": pa.string(), "tokens": pa.list_(pa.bool_())}),
    )
    at = round(cut * len(rows))

    assert num_bytes_of(table) == num_bytes_of(table[:at]) + num_bytes_of(table[at:])
