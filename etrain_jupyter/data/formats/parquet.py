"""Parquet: a row group is a block, and is fetched as one range of the file."""

from __future__ import annotations

import hashlib
import io
import struct
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from etrain_jupyter.data.index import Block, ShardFile, ShardIndex
from etrain_jupyter.data.places import Place
from etrain_jupyter.data.schemas import check_same_schema
from etrain_jupyter.errors import ShardError

_MAGIC = b"PAR1"
_TAIL_BYTES = 64 << 10
"""Bytes to read from the end of a file: the footer of most files."""


def index_parquet(place: Place, files: Sequence[ShardFile]) -> ShardIndex:
    """Index the row groups of Parquet files by their footers.

    Raises:
        ShardError: If a file is truncated, or has another schema.
    """
    blocks: list[Block] = []
    known: list[ShardFile] = []
    schema: pa.Schema | None = None
    for number, file in enumerate(files):
        metadata, fingerprint = read_footer(place, file)
        known.append(file._replace(fingerprint=fingerprint))
        own = metadata.schema.to_arrow_schema().remove_metadata()
        if schema is None:
            schema = own
        check_same_schema(schema, own, place, files[0].name, file.name)
        for group in range(metadata.num_row_groups):
            if not metadata.row_group(group).num_rows:
                continue
            first, end = _range_of(metadata.row_group(group))
            blocks.append(
                Block(
                    file=number,
                    first=first,
                    size=end - first,
                    rows=metadata.row_group(group).num_rows,
                    num_bytes=metadata.row_group(group).total_byte_size,
                    sha256="",
                )
            )
    assert schema is not None
    return ShardIndex(
        format="parquet",
        schema=schema.serialize().to_pybytes(),
        files=tuple(known),
        blocks=tuple(blocks),
    )


def read_footer(place: Place, file: ShardFile) -> tuple[pq.FileMetaData, str]:
    """Return the metadata of a Parquet file, from the end of the file, and their SHA-256.

    The metadata contain the compressed size of each column chunk, and usually its minimum and
    maximum, so they differ between files of different content.

    Raises:
        ShardError: If the file has no footer.
    """

    def tail(size: int) -> bytes:
        size = min(size, file.size)
        return place.read(file.name, file.size - size, size, version=file.version, check=None)

    data = tail(_TAIL_BYTES)
    if len(data) < 12 or data[-4:] != _MAGIC:
        raise ShardError(
            f"{file.name} in {place} is not a complete Parquet file: it has no footer. Nothing was "
            "skipped. Restore it, or write the set again."
        )
    needed = struct.unpack("<I", data[-8:-4])[0] + 8
    if needed > len(data):
        data = tail(needed)
    try:
        metadata = pq.read_metadata(pa.BufferReader(data))
    except (pa.ArrowException, OSError) as exc:
        raise ShardError(f"the footer of {file.name} in {place} is invalid: {exc}.") from exc
    return metadata, hashlib.sha256(data[-needed:]).hexdigest()


def decode_parquet(
    data: bytes,
    *,
    first: int,
    size: int,
    footer: pq.FileMetaData,
    columns: Sequence[str] | None,
) -> pa.Table:
    """Return the rows of the row group that begins at byte ``first`` of a file of ``size`` bytes.

    ``data`` are the bytes of the row group only.
    """
    groups = range(footer.num_row_groups)
    group = next(
        g
        for g in groups
        if footer.row_group(g).num_rows and _range_of(footer.row_group(g))[0] == first
    )
    source = pa.PythonFile(_Part(data, first, size), mode="r")
    # Pages with a checksum are verified; most writers do not add one.
    file = pq.ParquetFile(source, metadata=footer, page_checksum_verification=True)
    wanted = list(columns) if columns is not None else None
    return file.read_row_group(group, columns=wanted, use_threads=False)


def _range_of(group: Any) -> tuple[int, int]:
    chunks = [group.column(number) for number in range(group.num_columns)]
    firsts = [
        min(offset for offset in (c.dictionary_page_offset, c.data_page_offset) if offset)
        for c in chunks
    ]
    ends = [
        first + chunk.total_compressed_size for first, chunk in zip(firsts, chunks, strict=True)
    ]
    return min(firsts), max(ends)


class _Part(io.RawIOBase):
    """A file of which one range is present, so that the offsets of the footer are valid."""

    def __init__(self, data: bytes, first: int, size: int) -> None:
        self._data, self._first, self._size = memoryview(data), first, size
        self._position = 0

    def readable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        self._position = base + offset
        return self._position

    def read(self, size: int = -1) -> bytes:
        begin = self._position - self._first
        end = len(self._data) if size < 0 else begin + size
        if begin < 0 or end > len(self._data):
            raise OSError(f"bytes {self._position} to {self._position + size} are not here")
        self._position = self._first + end
        return bytes(self._data[begin:end])
