"""Python rows as Arrow tables."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from etrain_jupyter.config.source_map import with_article
from etrain_jupyter.errors import ShardError

_CHUNK_ROWS = 1024
_CHUNK_BYTES = 16 << 20

SampleForm = Literal["dict", "tuple"]


def tables_of(
    rows: Iterable[Any],
    columns: Sequence[str] | None,
    *,
    first: int = 0,
    schema: pa.Schema | None = None,
) -> Iterator[pa.Table]:
    """Yield tables of consecutive rows.

    Args:
        rows: Dicts, or tuples of equal length.
        columns: Keys to write, or names for the elements of tuples; None for all.
        first: Number of the first row in the source, for messages.
        schema: Types of the columns; None for those of the first rows.

    Raises:
        ShardError: If a row is neither a dict nor a tuple, or has other types than the first rows.
    """
    chunk: list[dict[str, Any]] = []
    num_rows, num_bytes = first, 0
    for row in rows:
        named = _named(row, columns, num_rows)
        chunk.append(named)
        num_rows += 1
        num_bytes += sum(map(_size_of, named.values()))
        if len(chunk) == _CHUNK_ROWS or num_bytes >= _CHUNK_BYTES:
            table = _table_of(chunk, schema, num_rows - len(chunk))
            schema, chunk, num_bytes = table.schema, [], 0
            yield table
    if chunk:
        yield _table_of(chunk, schema, num_rows - len(chunk))


def form_of(row: Any) -> SampleForm:
    """Return the form in which a row's samples are read again."""
    return "tuple" if isinstance(row, tuple | list) else "dict"


def names_of(size: int, columns: Sequence[str] | None) -> list[str]:
    """Return the column names of a tuple.

    Raises:
        ShardError: If ``columns`` has another length.
    """
    names = list(columns) if columns is not None else [str(number) for number in range(size)]
    if len(names) != size:
        raise ShardError(f"columns={names} names {len(names)} columns, and a row has {size}.")
    return names


def column_from(values: Sequence[Any]) -> pa.Array:
    """Return the values of one column as an Arrow array.

    Tensors and arrays of two or more dimensions become fixed-shape tensors; those of one dimension
    become lists, whose lengths may differ.
    """
    plain = [_plain(value) for value in values]
    first = next((value for value in plain if value is not None), None)
    if isinstance(first, np.ndarray) and first.ndim >= 2:
        shapes = {value.shape if isinstance(value, np.ndarray) else None for value in plain}
        if len(shapes) > 1:
            raise ValueError(
                f"tensors of different shapes {sorted(map(str, shapes))[:3]}: resize them, or "
                "store them as bytes"
            )
        return pa.FixedShapeTensorArray.from_numpy_ndarray(np.ascontiguousarray(np.stack(plain)))
    if isinstance(first, np.generic):
        return pa.array(plain, pa.from_numpy_dtype(first.dtype))
    return pa.array(plain)


def _named(row: Any, columns: Sequence[str] | None, number: int) -> dict[str, Any]:
    if isinstance(row, Mapping):
        missing = [name for name in columns or () if name not in row]
        if missing:
            raise ShardError(
                f"row {number} has no {missing[0]!r}; its keys are {', '.join(map(repr, row))}."
            )
        return {name: row[name] for name in columns} if columns is not None else dict(row)
    if isinstance(row, tuple | list):
        return dict(zip(names_of(len(row), columns), row, strict=True))
    raise ShardError(
        f"row {number} is {with_article(type(row).__name__)}. Give dicts or tuples, for example "
        "write_shards(({'text': line} for line in lines), to=...)."
    )


def _table_of(rows: list[dict[str, Any]], schema: pa.Schema | None, first: int) -> pa.Table:
    names = schema.names if schema is not None else list(rows[0])
    where = f"rows {first} to {first + len(rows) - 1}"
    for number, row in enumerate(rows, first):
        if row.keys() != set(names):
            raise ShardError(
                f"row {number} has the columns {', '.join(map(repr, row))}, and the first row "
                f"{', '.join(map(repr, names))}. Give every row the same columns."
            )
    arrays = []
    for name in names:
        try:
            array = column_from([row[name] for row in rows])
            kind = schema.field(name).type if schema is not None else array.type
            arrays.append(array if array.type == kind else array.cast(kind))
        except (pa.ArrowException, ValueError, TypeError, OverflowError) as exc:
            expected = f" as {schema.field(name).type}" if schema is not None else ""
            raise ShardError(
                f"column {name!r} of {where} cannot be stored{expected}: "
                f"{str(exc).partition(chr(10))[0]}. Give every row the same types; encode images "
                "and other objects as bytes."
            ) from exc
    return pa.Table.from_arrays(arrays, names=names)


def _plain(value: Any) -> Any:
    # Without importing torch: a tensor has ``detach``.
    if hasattr(value, "detach") and hasattr(value, "numpy"):
        value = value.detach().cpu().numpy()
    if isinstance(value, np.ndarray) and value.ndim == 0:
        return value[()]
    return value


def _size_of(value: Any) -> int:
    if isinstance(value, str | bytes | list | tuple):
        return len(value)
    return int(getattr(value, "nbytes", sys.getsizeof(0)))
