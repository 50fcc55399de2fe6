"""Convert Arrow columns to NumPy arrays and Python values, always as writable copies."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from etrain_jupyter.errors import ShardError

Column = NDArray[Any] | list[Any]
"""An array whose first dimension is rows, or one Python value per row."""


def columns_of(table: pa.Table) -> dict[str, Column]:
    """Return each column: an array if its rows have one shape, otherwise a list of values.

    Args:
        table: A batch.

    Returns:
        Numbers as shape ``(B,)``, lists of equal length as ``(B, L)``, tensors as ``(B, ...)``;
        lists of unequal length as a list of arrays; text, bytes and nested values as a list.

    Raises:
        ShardError: If a numeric column has nulls.
    """
    return {
        name: column_of(name, table.column(name).combine_chunks()) for name in table.column_names
    }


class ValueView:
    """Texts or byte strings of a column without nulls, whose offsets have 32 or 64 bits."""

    def __init__(self, chunk: pa.Array) -> None:
        kind = chunk.type
        is_large = pa.types.is_large_binary(kind) or pa.types.is_large_string(kind)
        self._is_text = pa.types.is_string(kind) or pa.types.is_large_string(kind)
        _, offsets, values = chunk.buffers()
        # The buffers are those of the whole array, of which the chunk may be a slice.
        self._offsets: NDArray[Any] = np.frombuffer(offsets, np.int64 if is_large else np.int32)[
            chunk.offset : chunk.offset + len(chunk) + 1
        ]
        self._values = memoryview(values if values is not None else b"")

    def __getitem__(self, rows: NDArray[np.int64]) -> list[Any]:
        """Return copies of some rows."""
        values = self._values
        # Python integers are faster slice bounds than NumPy integers.
        bounds = zip(self._offsets[rows].tolist(), self._offsets[rows + 1].tolist(), strict=True)
        if self._is_text:
            return [str(values[first:end], "utf-8") for first, end in bounds]
        return [bytes(values[first:end]) for first, end in bounds]


View = NDArray[Any] | ValueView
"""Rows of a block that are gathered by their numbers, without Arrow."""


def view_of(array: pa.ChunkedArray) -> View | None:
    """Return a read-only view of a column; None if its rows must be gathered by Arrow.

    Numbers of one shape, texts and byte strings have a view. Gathering rows from it is about ten
    times faster than from the Arrow array.
    """
    if array.num_chunks != 1 or array.null_count:
        return None
    chunk = array.chunk(0)
    kind = chunk.type
    if has_offsets(kind):
        return ValueView(chunk)
    if isinstance(kind, pa.FixedShapeTensorType):
        tensors: NDArray[Any] = chunk.to_numpy_ndarray()
        return tensors
    has_lists = is_list(kind)
    values = chunk.flatten() if has_lists else chunk
    if not _is_number(values.type) or pa.types.is_boolean(values.type) or values.null_count:
        return None
    flat: NDArray[Any] = values.to_numpy(zero_copy_only=True)
    if not has_lists:
        return flat
    if not pa.types.is_fixed_size_list(kind):
        lengths = np.asarray(chunk.value_lengths())
        if not len(flat) or (lengths != lengths[0]).any():
            return None
    return flat.reshape(len(chunk), -1)


def num_missing(column: pa.ChunkedArray) -> int:
    """Return the number of nulls in a column of numbers or of lists of numbers; 0 for others."""
    chunks, kind = column.chunks, column.type
    if isinstance(kind, pa.BaseExtensionType):
        chunks, kind = [chunk.storage for chunk in chunks], kind.storage_type
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    if _is_number(kind):
        return int(column.null_count)
    if is_list(kind) and _is_number(kind.value_type):
        inner = (int(chunk.flatten().null_count) for chunk in chunks)
        return int(column.null_count) + sum(inner)
    return 0


def join_parts(
    name: str,
    parts: Sequence[Column | pa.ChunkedArray],
    order: NDArray[np.int64] | None,
) -> Column:
    """Return one column from parts, such as rows of several blocks.

    ``order`` has the number of each row of the result in the joined parts; None if they are in
    order. ``name`` is for messages.
    """
    arrays = [part for part in parts if isinstance(part, np.ndarray)]
    chunked = [part for part in parts if isinstance(part, pa.ChunkedArray)]
    joined: Column
    if len(arrays) == len(parts) and len({array.shape[1:] for array in arrays}) == 1:
        joined = np.concatenate(arrays)
    elif len(chunked) == len(parts):
        joined = column_of(name, pa.chunked_array([c for part in chunked for c in part.chunks]))
    else:  # for example, lists that have one length in some blocks only
        columns = [column_of(name, p) if isinstance(p, pa.ChunkedArray) else p for p in parts]
        joined = list(itertools.chain.from_iterable(columns))
    if order is None:
        return joined
    return joined[order] if isinstance(joined, np.ndarray) else [joined[i] for i in order.tolist()]


def rows_of(columns: Mapping[str, Column], num_rows: int) -> list[dict[str, Any]]:
    """Return one dict per row; arrays are views of the columns."""
    return [{name: column[row] for name, column in columns.items()} for row in range(num_rows)]


def column_of(name: str, array: pa.Array | pa.ChunkedArray) -> Column:
    """Return one column; see ``columns_of``."""
    if isinstance(array, pa.ChunkedArray):
        array = pa.concat_arrays(array.chunks) if array.num_chunks else pa.array([], array.type)
    kind = array.type
    if isinstance(kind, pa.FixedShapeTensorType):
        _check_nulls(name, array)
        return np.array(array.to_numpy_ndarray())
    if isinstance(kind, pa.BaseExtensionType):
        array, kind = array.storage, array.type.storage_type
    if pa.types.is_dictionary(kind):
        array = array.dictionary_decode()
        kind = array.type
    if _is_number(kind):
        _check_nulls(name, array)
        return np.array(array.to_numpy(zero_copy_only=False))
    if is_list(kind) and _is_number(kind.value_type) and not array.null_count:
        return _lists(name, array)
    values: list[Any] = array.to_pylist()
    return values


def _lists(name: str, array: pa.Array) -> Column:
    # ``flatten`` honours the offset of a slice, which the raw buffers do not.
    values = array.flatten()
    _check_nulls(name, values)
    flat = np.array(values.to_numpy(zero_copy_only=False))
    if pa.types.is_fixed_size_list(array.type):
        return flat.reshape(len(array), array.type.list_size)
    lengths = np.asarray(array.value_lengths())
    if not len(lengths) or (lengths == lengths[0]).all():
        return flat.reshape(len(array), -1) if len(flat) else flat.reshape(len(array), 0)
    return np.split(flat, np.cumsum(lengths)[:-1])


def _check_nulls(name: str, array: pa.Array) -> None:
    if array.null_count:
        raise ShardError(
            f"column {name!r} has {array.null_count} nulls in a batch of {len(array)} rows, and "
            "numbers in a batch cannot be null. Fill them when you write the set, leave the column "
            "out with Shards(..., columns=[...]), or change its type to text."
        )


def _is_number(kind: pa.DataType) -> bool:
    return bool(
        pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)
    )


def has_offsets(kind: pa.DataType) -> bool:
    """Return True for texts and byte strings."""
    return bool(
        pa.types.is_binary(kind)
        or pa.types.is_large_binary(kind)
        or pa.types.is_string(kind)
        or pa.types.is_large_string(kind)
    )


def is_list(kind: pa.DataType) -> bool:
    """Return True for lists, including those of a fixed size."""
    return bool(
        pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    )
