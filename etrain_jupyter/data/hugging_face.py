"""Hugging Face data sets as values, for machines that do not have their files."""

from __future__ import annotations

import hashlib
import io
from typing import Any

import pyarrow as pa

_SLACK = 1.1
"""Buffers may exceed the rows that refer to them by this factor before they are copied."""


def num_bytes_of(dataset: Any) -> int:
    """Return the size of the rows of a data set in memory, estimated if only some are selected."""
    table = dataset.data
    return int(table.nbytes * len(dataset) / max(1, len(table)))


def reduce_dataset(dataset: Any) -> tuple[Any, ...]:
    """Return the reduction of a data set with its rows, for pickle.

    Its own reduction has the paths of its files instead, and all rows of its table even if only
    some are selected. Other machines do not have these files.
    """
    form = dataset.format
    if form["columns"] == dataset.column_names:
        form["columns"] = None  # all columns, also those that are added later
    state = (dataset.info, dataset.split, dataset._fingerprint, form)
    return rebuild_dataset, (_rows_of(dataset), *state)


def rebuild_dataset(
    table: pa.Table, info: Any, split: Any, fingerprint: str, form: dict[str, Any]
) -> Any:
    """Return a data set in memory.

    Do not move or rename this function: bundles refer to it by name.
    """
    import datasets
    from datasets.table import InMemoryTable

    dataset = datasets.Dataset(
        InMemoryTable(table), info=info, split=split, fingerprint=fingerprint
    )
    dataset.set_format(
        form["type"],
        columns=form["columns"],
        output_all_columns=form["output_all_columns"],
        **form["format_kwargs"],
    )
    return dataset


def digest_of_dataset(dataset: Any) -> str:
    """Return the SHA-256 of the rows and their types, hexadecimal.

    It does not depend on the files, or on the fingerprint, which may be random.
    """
    # The metadata of the schema may contain a fingerprint.
    table = _rows_of(dataset).replace_schema_metadata(None)
    sink = _Hash()
    with pa.ipc.new_stream(pa.PythonFile(sink, mode="w"), table.schema) as writer:
        writer.write_table(table)
    return sink.digest.hexdigest()


def _rows_of(dataset: Any) -> pa.Table:
    # One chunk per column: large buffers are not copied into the pickle.
    table = dataset.with_format("arrow")[:].combine_chunks()
    if table.get_total_buffer_size() <= _SLACK * table.nbytes:
        return table
    # Arrow pickles the whole buffers of a slice, but writes only its rows.
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return pa.ipc.open_stream(sink.getvalue()).read_all()


class _Hash(io.RawIOBase):
    """A file that computes a digest of the bytes that are written to it."""

    def __init__(self) -> None:
        self.digest = hashlib.sha256()

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self.digest.update(data)
        return len(data)
