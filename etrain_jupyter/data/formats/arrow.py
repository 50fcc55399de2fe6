"""Arrow IPC: files (Feather), streams (saved Hugging Face data sets), and our own shards."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import partial

import pyarrow as pa

from etrain_jupyter.data.formats.arrow_messages import (
    InvalidMessageError,
    Message,
    walk_messages,
)
from etrain_jupyter.data.index import BLOCK_BYTES, Block, ShardFile, ShardIndex
from etrain_jupyter.data.places import Place
from etrain_jupyter.data.schemas import check_same_schema
from etrain_jupyter.errors import ShardError


def index_arrow(place: Place, files: Sequence[ShardFile]) -> ShardIndex:
    """Index Arrow IPC files or streams; neighbouring small record batches form one block.

    Raises:
        ShardError: If a file is truncated, has another schema, or uses dictionaries.
    """
    blocks: list[Block] = []
    known: list[ShardFile] = []
    schema: pa.Schema | None = None
    for number, file in enumerate(files):
        read = partial(_read, place, file)
        messages = _messages_of(place, file)
        try:
            own = pa.ipc.read_schema(pa.py_buffer(read(messages[0].first, messages[0].size)))
        except (pa.ArrowException, OSError, ValueError) as exc:
            raise _undecodable("the schema", place, file, exc) from exc
        if schema is None:
            schema = own
        check_same_schema(schema, own, place, files[0].name, file.name)
        batches = [message for message in messages if message.kind == "batch"]
        if not batches:
            known.append(file)
            continue
        # Compressed bodies need more memory than their size. The ratio of the first batch is the
        # estimate for all.
        first = read(batches[0].first, batches[0].size)
        known.append(file._replace(fingerprint=hashlib.sha256(first).hexdigest()))
        try:
            table = decode_arrow(first, own)
            table.validate(full=True)
        except (pa.ArrowException, OSError, ValueError) as exc:
            raise _undecodable("the first record batch", place, file, exc) from exc
        ratio = max(1.0, table.nbytes / batches[0].size)
        blocks += _join(batches, number, ratio)
    assert schema is not None
    return ShardIndex(
        format="arrow",
        schema=schema.serialize().to_pybytes(),
        files=tuple(known),
        blocks=tuple(block for block in blocks if block.rows),
    )


def first_batch_digest(place: Place, file: ShardFile) -> str:
    """Return the SHA-256 of the first record batch of a file; empty if it has none.

    Raises:
        ShardError: If the file is truncated.
    """
    try:
        for message in walk_messages(partial(_read, place, file), file.size):
            if message.kind == "batch":
                data = _read(place, file, message.first, message.size)
                return hashlib.sha256(data).hexdigest()
    except InvalidMessageError:
        return ""
    return ""


def decode_arrow(data: bytes, schema: pa.Schema) -> pa.Table:
    """Return the rows of one or more record batch messages, not validated."""
    source = pa.BufferReader(data)
    batches = []
    while source.tell() < len(data):
        batches.append(pa.ipc.read_record_batch(pa.ipc.read_message(source), schema))
    return pa.Table.from_batches(batches, schema)


def batches_of(data: bytes) -> list[Message]:
    """Return the record batches of a block, with their offsets in it.

    Raises:
        InvalidMessageError: If the bytes are not record batches.
    """

    def read(first: int, size: int) -> bytes:
        return data[first : first + size]

    return list(walk_messages(read, len(data)))


def _read(place: Place, file: ShardFile, first: int, size: int) -> bytes:
    return place.read(file.name, first, size, version=file.version, check=None)


def _undecodable(part: str, place: Place, file: ShardFile, exc: Exception) -> ShardError:
    return ShardError(
        f"{part} of {file.name} in {place} cannot be decoded: {str(exc).partition(chr(10))[0]}. "
        "Nothing was skipped. Restore it, or write the set again."
    )


def _messages_of(place: Place, file: ShardFile) -> list[Message]:
    try:
        messages = list(walk_messages(partial(_read, place, file), file.size))
    except InvalidMessageError as exc:
        raise ShardError(
            f"{file.name} in {place} is not a complete Arrow IPC file or stream: {exc}. Nothing "
            "was skipped. Restore it, or write the set again."
        ) from exc
    if not messages or messages[0].kind != "schema":
        raise ShardError(f"{file.name} in {place} is not an Arrow IPC file: it has no schema.")
    if any(message.kind == "dictionary" for message in messages):
        raise ShardError(
            f"{file.name} in {place} has dictionary-encoded columns, whose batches cannot be read "
            "separately. Convert them, for example with table.unify_dictionaries() and "
            "pyarrow.compute.cast, or use Parquet."
        )
    return messages


def _join(batches: Sequence[Message], file: int, ratio: float) -> list[Block]:
    groups: list[list[Message]] = [[]]
    for batch in batches:
        size = sum(message.size for message in groups[-1])
        if groups[-1] and (size + batch.size) * ratio > BLOCK_BYTES:
            groups.append([])
        groups[-1].append(batch)
    return [
        Block(
            file=file,
            first=group[0].first,
            size=(size := group[-1].first + group[-1].size - group[0].first),
            rows=sum(message.rows for message in group),
            num_bytes=int(size * ratio),
            sha256="",
        )
        for group in groups
    ]
