"""Arrow columns become arrays that may be written to."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from etrain_jupyter.data.columns import Column, columns_of, join_parts, rows_of, view_of
from etrain_jupyter.data.rows import column_from
from etrain_jupyter.errors import ShardError


def column(array: pa.Array) -> Column:
    return columns_of(pa.table({"x": array}))["x"]


@pytest.mark.parametrize(
    "array",
    [
        pa.array([1, 2, 3], pa.int16()),
        pa.array([0.5, 1.5, 2.5], pa.float32()),
        pa.array([True, False, True]),
        pa.array([[1, 2], [3, 4], [5, 6]], pa.list_(pa.int32())),
        pa.array([[1, 2], [3, 4], [5, 6]], pa.large_list(pa.int64())),
        pa.array([[1, 2], [3, 4], [5, 6]], pa.list_(pa.float64(), 2)),
    ],
)
def test_numbers_become_a_writable_array(array: pa.Array) -> None:
    for part in (array, array.slice(1)):
        found = column(part)

        assert isinstance(found, np.ndarray)
        assert found.tolist() == part.to_pylist()
        assert found.flags.writeable
        assert found.flags.owndata or found.base.flags.owndata


def test_tensors_keep_their_shape_and_type() -> None:
    values = [np.full((2, 3), i, np.uint8) for i in range(4)]
    array = column_from(values)

    found = column(array)

    assert isinstance(found, np.ndarray)
    assert (found.shape, found.dtype) == ((4, 2, 3), np.uint8)
    assert found[2].tolist() == values[2].tolist()


def test_lists_of_different_lengths_become_a_list_of_arrays() -> None:
    found = column(pa.array([[1, 2], [], [3]]))

    assert [value.tolist() for value in found] == [[1, 2], [], [3]]


@pytest.mark.parametrize(
    "values", [["a", None], [b"a", b"b"], [{"a": 1}, {"a": 2}], [[1, 2], None], [["a"], ["b"]]]
)
def test_other_values_become_python_values(values: list[object]) -> None:
    assert column(pa.array(values)) == values


def test_dictionary_encoded_column_is_decoded() -> None:
    assert column(pa.array(["a", "b", "a"]).dictionary_encode()) == ["a", "b", "a"]


@pytest.mark.parametrize("array", [pa.array([1, None]), pa.array([[1, None], [2, 3]])])
def test_null_number_is_an_error_that_names_the_column(array: pa.Array) -> None:
    with pytest.raises(ShardError, match="column 'x' has 1 nulls"):
        column(array)


def test_rows_have_one_value_per_column() -> None:
    table = pa.table({"x": [1, 2], "t": ["a", "b"]})

    assert rows_of(columns_of(table), 2) == [{"x": 1, "t": "a"}, {"x": 2, "t": "b"}]


@pytest.mark.parametrize(
    "array",
    [
        pa.array([1, 2, 3], pa.int16()),
        pa.array([[1, 2], [3, 4], [5, 6]], pa.list_(pa.int32())),
        pa.array([[1, 2], [3, 4], [5, 6]], pa.list_(pa.float64(), 2)),
        column_from([np.full((2, 2), i) for i in range(3)]),
    ],
)
def test_view_has_the_rows_of_the_column(array: pa.Array) -> None:
    for part in (array, array.slice(1)):
        view = view_of(pa.chunked_array([part]))

        assert view is not None
        assert np.array_equal(view, np.asarray(column(part)))


@pytest.mark.parametrize("kind", [pa.binary(), pa.large_binary(), pa.string(), pa.large_string()])
@given(values=st.lists(st.text(), min_size=1), data=st.data())
def test_view_of_texts_and_bytes_has_the_rows_of_the_column(
    kind: pa.DataType, values: list[str], data: st.DataObject
) -> None:
    array = pa.array([value.encode() for value in values]).cast(kind)
    first = data.draw(st.integers(0, len(values) - 1))
    rows = data.draw(st.lists(st.integers(0, len(values) - first - 1)))

    view = view_of(pa.chunked_array([array.slice(first)]))

    assert view is not None
    expected = [array.to_pylist()[first + row] for row in rows]
    assert view[np.array(rows, np.int64)] == expected


@pytest.mark.parametrize(
    "values",
    [[1, None], [True, False], [[1], [1, 2]], [[1, None]], ["a", None], [[], []], [["a"]]],
)
def test_other_columns_have_no_view(values: list[object]) -> None:
    assert view_of(pa.chunked_array([pa.array(values)])) is None


def test_parts_are_joined_in_the_order_of_the_rows() -> None:
    equal, ragged = np.array([[1, 2], [3, 4]]), pa.chunked_array([[[5], [6, 7, 8]]])
    order = np.array([3, 0, 2])

    assert join_parts("x", [equal, equal + 4], order).tolist() == [[7, 8], [1, 2], [5, 6]]
    joined = join_parts("x", [equal, ragged], order)
    assert [value.tolist() for value in joined] == [[6, 7, 8], [1, 2], [5]]
    joined = join_parts("x", [equal, equal[:, :1]], order)
    assert [value.tolist() for value in joined] == [[3], [1, 2], [1]]
    assert join_parts("x", [["a", "b"], pa.chunked_array([["c", None]])], order) == [None, "a", "c"]
    assert join_parts("x", [["a"], ["b"]], None) == ["a", "b"]
    assert join_parts("x", [equal, equal], None).tolist() == [[1, 2], [3, 4], [1, 2], [3, 4]]
    assert join_parts(
        "x", [pa.chunked_array([["a", "b"]]), pa.chunked_array([["c", "d"]])], order
    ) == [
        "d",
        "a",
        "c",
    ]
