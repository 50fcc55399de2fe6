"""Sources of ``write_shards``: anything that has rows, as Arrow tables from a given row on."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa

from etrain_jupyter.config.source_map import with_article
from etrain_jupyter.data.frames import table_of
from etrain_jupyter.data.kinds import is_frame
from etrain_jupyter.data.rows import SampleForm, column_from, form_of, names_of, tables_of
from etrain_jupyter.data.shards import Shards
from etrain_jupyter.errors import ShardError

_SLICE_ROWS = 4096

Tables = Callable[[int, int | None, pa.Schema | None], Iterator[pa.Table]]


@dataclass(frozen=True, kw_only=True)
class Source:
    """Rows to write."""

    tables: Tables
    """Returns the rows from a number on, up to another one (None for all), given the schema of the
    first rows of the source (None if unknown). A source without an index reads and drops the rows
    before the first one, and ignores the end."""
    num_rows: int | None
    """None if unknown."""
    sample: SampleForm
    is_described: bool = False
    """True if ``tables`` can be sent to other processes: it opens its rows there, and does not
    contain them."""


def source_of(source: Any, columns: Sequence[str] | None) -> Source:
    """Return the rows of a source of ``write_shards``.

    Raises:
        ShardError: If it has no rows of a known form.
    """
    if _is_path(source) or (
        isinstance(source, list | tuple) and source and all(map(_is_path, source))
    ):
        return _of_shards([Shards(p) for p in ([source] if _is_path(source) else source)], columns)
    if isinstance(source, Shards):
        return _of_shards([source], columns)
    if isinstance(source, pa.RecordBatchReader):
        batches = (_selected(pa.Table.from_batches([batch]), columns) for batch in source)
        return Source(tables=lambda first, *_: _drop(batches, first), num_rows=None, sample="dict")
    if is_frame(source):
        table = _selected(table_of(source), columns)
        return _of_slices(lambda begin, until: table.slice(begin, until - begin), len(table))
    if type(source).__module__.partition(".")[0] == "datasets":
        return _of_hugging_face(source, columns)
    if (arrays := _as_arrays(source)) is not None:
        return _of_arrays(arrays, columns)
    if hasattr(source, "__len__") and hasattr(source, "__getitem__"):
        return _of_items(source, columns)
    if isinstance(source, Iterable):
        return _of_iterable(source, columns)
    raise ShardError(
        f"{with_article(type(source).__name__)} has no rows to write. Give an iterable of "
        "dicts or tuples, a data set, a table, or the path of files."
    )


def _of_shards(sets: Sequence[Shards], columns: Sequence[str] | None) -> Source:
    num_rows = sum(map(len, sets))

    def tables(first: int, end: int | None, schema: pa.Schema | None) -> Iterator[pa.Table]:
        end, start = num_rows if end is None else end, 0
        for shards in sets:
            yield from _rows_of(shards, columns, first - start, end - start, start)
            start += len(shards)

    sample = sets[0].index.sample if sets else "dict"
    return Source(tables=tables, num_rows=num_rows, sample=sample, is_described=True)


def _rows_of(
    shards: Shards, columns: Sequence[str] | None, first: int, end: int, start: int
) -> Iterator[pa.Table]:
    """Yield rows of one set, whose first row has the number ``start`` in the source."""
    first, end = max(0, first), min(end, len(shards))
    if first >= end:
        return
    starts = shards.layout.starts
    block = int(starts.searchsorted(first, side="right")) - 1
    blocks = shards.tables(block)
    while first < end:
        begin, until = int(starts[block]), int(starts[block + 1])
        try:
            table = next(blocks)
        except (ShardError, pa.ArrowException, OSError) as exc:
            file = shards.index.files[shards.index.blocks[block].file].name
            raise ShardError(
                f"rows {start + begin} to {start + until - 1} of the source cannot be read from "
                f"{file} in {shards.path}: {exc}"
            ) from exc
        yield _selected(table, columns).slice(first - begin, min(until, end) - first)
        first, block = until, block + 1


def _of_slices(
    read: Callable[[int, int], pa.Table],
    num_rows: int,
    sample: SampleForm = "dict",
    *,
    is_described: bool = False,
) -> Source:
    def tables(first: int, end: int | None, schema: pa.Schema | None) -> Iterator[pa.Table]:
        end = num_rows if end is None else end
        for begin in range(first, end, _SLICE_ROWS):
            yield read(begin, min(begin + _SLICE_ROWS, end))

    return Source(tables=tables, num_rows=num_rows, sample=sample, is_described=is_described)


def _of_hugging_face(source: Any, columns: Sequence[str] | None) -> Source:
    if isinstance(source, Mapping):
        raise ShardError(
            f"a DatasetDict has the splits {', '.join(map(str, source))}. Write each one: "
            f"write_shards(dataset[{next(iter(source), 'train')!r}], to=...)."
        )
    if not hasattr(source, "__len__"):
        return _of_iterable(source, columns)
    # The pickle of the data set has the paths of its files, or its rows if it has no files.
    is_described = bool(source.cache_files)
    # A custom transform computes its columns from the rows; other formats only convert types.
    if getattr(source, "_format_type", None) == "custom":
        return replace(_of_items(source, columns), is_described=is_described)
    stored = source.with_format("arrow")

    def read(begin: int, until: int) -> pa.Table:
        try:
            return _selected(stored[begin:until], columns)
        except (pa.ArrowException, OSError) as exc:
            raise ShardError(
                f"rows {begin} to {until - 1} of the data set cannot be read: {exc}"
            ) from exc

    return _of_slices(read, len(stored), is_described=is_described)


def _of_arrays(arrays: Mapping[str, Any], columns: Sequence[str] | None) -> Source:
    sample: SampleForm = "tuple" if all(name.isdecimal() for name in arrays) else "dict"
    if sample == "tuple" and columns is not None:
        arrays = dict(zip(names_of(len(arrays), columns), arrays.values(), strict=True))
        sample = "dict"
    elif columns is not None:
        arrays = {name: arrays[name] for name in columns}
    lengths = {len(array) for array in arrays.values()}
    if len(lengths) > 1:
        raise ShardError(f"the arrays differ in length: {sorted(lengths)}.")

    def read(begin: int, until: int) -> pa.Table:
        parts = [column_from(list(array[begin:until])) for array in arrays.values()]
        return pa.Table.from_arrays(parts, names=list(arrays))

    return _of_slices(read, lengths.pop(), sample)


def _of_items(source: Any, columns: Sequence[str] | None) -> Source:
    num_rows = len(source)

    def tables(first: int, end: int | None, schema: pa.Schema | None) -> Iterator[pa.Table]:
        numbers = range(first, num_rows if end is None else end)
        rows = (_item_of(source, number) for number in numbers)
        return tables_of(rows, columns, first=first, schema=schema)

    form = form_of(_item_of(source, 0)) if num_rows and columns is None else "dict"
    # A list contains its rows.
    is_described = not isinstance(source, list | tuple)
    return Source(tables=tables, num_rows=num_rows, sample=form, is_described=is_described)


def _item_of(source: Any, number: int) -> Any:
    try:
        return source[number]
    except Exception as exc:  # code of the user, in which anything can fail
        raise ShardError(
            f"row {number} of the source cannot be read: {type(exc).__name__}: {exc}. The rows "
            "before it are kept. Fix it and run write_shards again with the same arguments."
        ) from exc


def _of_iterable(source: Iterable[Any], columns: Sequence[str] | None) -> Source:
    rows = iter(source)
    head = next(rows, None)
    rest = itertools.chain([head], rows) if head is not None else iter(())

    def tables(first: int, end: int | None, schema: pa.Schema | None) -> Iterator[pa.Table]:
        return tables_of(itertools.islice(rest, first, None), columns, first=first, schema=schema)

    form = form_of(head) if columns is None else "dict"
    return Source(tables=tables, num_rows=None, sample=form)


def _drop(tables: Iterable[pa.Table], skip: int) -> Iterator[pa.Table]:
    for table in tables:
        dropped = min(skip, len(table))
        skip -= dropped
        if dropped < len(table):
            yield table.slice(dropped)


def _selected(table: pa.Table, columns: Sequence[str] | None) -> pa.Table:
    if columns is None:
        return table
    missing = [name for name in columns if name not in table.column_names]
    if missing:
        raise ShardError(
            f"the source has no column {missing[0]!r}; its columns are "
            f"{', '.join(map(repr, table.column_names))}."
        )
    return table.select(list(columns))


def _as_arrays(source: Any) -> dict[str, Any] | None:
    # The forms that ``data.train`` accepts: a dict or a pair of arrays, and a TensorDataset.
    if type(source).__name__ == "TensorDataset" and hasattr(source, "tensors"):
        source = tuple(source.tensors)
    if isinstance(source, Mapping):
        pairs = {str(name): value for name, value in source.items()}
    elif isinstance(source, tuple):
        pairs = {str(number): value for number, value in enumerate(source)}
    else:
        return None
    is_arrays = pairs and all(getattr(value, "shape", ()) != () for value in pairs.values())
    return pairs if is_arrays else None


def _is_path(value: Any) -> bool:
    return isinstance(value, str | os.PathLike)
