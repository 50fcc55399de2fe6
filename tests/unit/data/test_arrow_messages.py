"""Messages of Arrow files are found by their headers, at the offsets where pyarrow reads them."""

from __future__ import annotations

from collections.abc import Callable

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from etrain_jupyter.data.formats.arrow_messages import (
    InvalidMessageError,
    Message,
    walk_messages,
)

TABLE = pa.table({"x": range(100), "text": [f"row {i}" for i in range(100)]})


def stored(*, is_file: bool, table: pa.Table = TABLE, rows: int = 30) -> bytes:
    sink = pa.BufferOutputStream()
    new = pa.ipc.new_file if is_file else pa.ipc.new_stream
    with new(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=rows)
    return sink.getvalue().to_pybytes()


def reader(data: bytes) -> Callable[[int, int], bytes]:
    return lambda first, size: data[first : first + size]


def walk(data: bytes) -> list[Message]:
    return list(walk_messages(reader(data), len(data)))


@pytest.mark.parametrize("is_file", [True, False])
@given(sizes=st.lists(st.integers(1, 50), max_size=5), columns=st.integers(1, 60))
def test_each_record_batch_is_complete_in_its_range(
    is_file: bool, sizes: list[int], columns: int
) -> None:
    schema = pa.schema([(f"column {i}", pa.int32()) for i in range(columns)])
    sink = pa.BufferOutputStream()
    new = pa.ipc.new_file if is_file else pa.ipc.new_stream
    with new(sink, schema) as writer:
        for size in sizes:
            arrays = [pa.array([i] * size, pa.int32()) for i in range(columns)]
            writer.write_batch(pa.record_batch(arrays, schema=schema))
    data = sink.getvalue().to_pybytes()

    first, *batches = walk(data)

    assert first.kind == "schema"
    assert [batch.rows for batch in batches] == sizes
    for batch in batches:
        part = pa.py_buffer(data[batch.first : batch.first + batch.size])
        assert pa.ipc.read_record_batch(part, schema).num_rows == batch.rows


@pytest.mark.parametrize("is_file", [True, False])
def test_truncated_data_are_invalid(is_file: bool) -> None:
    data = stored(is_file=is_file)
    last = walk(data)[-1]
    whole = {m.first + m.size for m in walk(data)}

    for end in range(1, last.first + last.size):
        # A stream without its end is valid if it ends between two messages.
        if is_file or end not in whole:
            with pytest.raises(InvalidMessageError):
                walk(data[:end])


def test_dictionaries_are_reported() -> None:
    table = pa.table({"x": pa.array(["a", "b", "a"]).dictionary_encode()})

    assert [m.kind for m in walk(stored(is_file=False, table=table))] == [
        "schema",
        "dictionary",
        "batch",
    ]


@given(st.binary(max_size=200))
def test_other_bytes_are_invalid_and_never_a_crash(data: bytes) -> None:
    for prefix in (b"", b"\xff\xff\xff\xff\x40\x00\x00\x00"):
        try:
            found = walk(prefix + data)
        except InvalidMessageError:
            continue
        assert not any(m.size > len(prefix + data) for m in found)
