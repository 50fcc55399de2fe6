"""Sizes of Arrow rows that add up: the size of a table is the sum of the sizes of its rows.

``Table.nbytes`` does not add up: it rounds validity bitmaps and counts one more offset per array,
so the same rows have another size after they were divided differently.
"""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc

_OFFSET_BYTES = 4
_UNKNOWN_BYTES = 16
"""Size of a value of a type without a known size, such as a union."""


def num_bytes_of(table: pa.Table) -> int:
    """Return the size of the rows of a table.

    It is close to the memory that they use, and depends only on the values, not on the chunks.
    """
    return sum(_size_of(chunk) for column in table.columns for chunk in column.chunks)


def _size_of(array: pa.Array) -> int:
    if isinstance(array, pa.ExtensionArray):
        return _size_of(array.storage)
    kind = array.type
    if pa.types.is_boolean(kind):
        return len(array)
    if pa.types.is_null(kind):
        return 0
    if _is_variable(kind):
        total: int | None = pc.sum(pc.binary_length(array)).as_py()
        return _OFFSET_BYTES * len(array) + (total or 0)
    if _is_list(kind):
        return _OFFSET_BYTES * len(array) + _size_of(array.flatten())
    if pa.types.is_struct(kind):
        return sum(map(_size_of, array.flatten()))
    if pa.types.is_map(kind):
        # Unlike those of a list, the entries of a slice must be cut out.
        first, end = array.offsets[0].as_py(), array.offsets[len(array)].as_py()
        inner = (part.slice(first, end - first) for part in (array.keys, array.items))
        return _OFFSET_BYTES * len(array) + sum(map(_size_of, inner))
    try:
        return int(kind.bit_width) // 8 * len(array)
    except ValueError:
        return _UNKNOWN_BYTES * len(array)


def _is_variable(kind: pa.DataType) -> bool:
    return bool(
        pa.types.is_binary(kind)
        or pa.types.is_string(kind)
        or pa.types.is_large_binary(kind)
        or pa.types.is_large_string(kind)
    )


def _is_list(kind: pa.DataType) -> bool:
    return bool(
        pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    )
