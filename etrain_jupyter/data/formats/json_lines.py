"""JSON lines: whole lines of about 8 MiB form a block."""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Iterator, Sequence

import pyarrow as pa
import pyarrow.json

from etrain_jupyter.data.index import BLOCK_BYTES, Block, ShardFile, ShardIndex
from etrain_jupyter.data.places import Place
from etrain_jupyter.errors import ShardError


def index_json_lines(place: Place, files: Sequence[ShardFile]) -> ShardIndex:
    """Index JSON lines: read every file once, and record the digest of every block.

    The schema is that of the first block of each file; integers and floats in the same column
    become floats.

    Raises:
        ShardError: If a line is not a JSON object, or files have incompatible types.
    """
    blocks: list[Block] = []
    schemas: list[pa.Schema] = []
    for number, file in enumerate(files):
        is_first = True
        for first, data in _blocks_of(place, file):
            rows = count_rows(data)
            if rows and is_first:
                _check_last_line(place, file)
                schemas.append(_schema_of(data, place, file))
                is_first = False
            digest = hashlib.sha256(data).hexdigest()
            blocks.append(Block(number, first, len(data), rows, len(data), digest))
    if not schemas:
        schemas.append(pa.schema([]))
    try:
        schema = pa.unify_schemas(schemas, promote_options="permissive")
    except pa.ArrowInvalid as exc:
        raise ShardError(
            f"the files in {place} have different schemas: {exc}. Write all of them with the same "
            "types."
        ) from exc
    return ShardIndex(
        format="json",
        schema=schema.serialize().to_pybytes(),
        files=tuple(files),
        blocks=tuple(block for block in blocks if block.rows),
    )


def decode_json_lines(data: bytes, schema: pa.Schema, *, ignores_others: bool) -> pa.Table:
    """Return the columns of ``schema`` in whole lines.

    Raises:
        pa.ArrowInvalid: If a line does not fit the schema, or has other keys that are not ignored.
    """
    behavior = "ignore" if ignores_others else "error"
    return _read_json(
        data,
        pyarrow.json.ParseOptions(explicit_schema=schema, unexpected_field_behavior=behavior),
    )


def _read_json(data: bytes, options: pyarrow.json.ParseOptions | None = None) -> pa.Table:
    whole = pyarrow.json.ReadOptions(use_threads=False, block_size=len(data) + 1)
    return pyarrow.json.read_json(io.BytesIO(data), read_options=whole, parse_options=options)


def count_rows(data: bytes) -> int:
    """Return the number of lines that are not blank."""
    return sum(1 for line in data.split(b"\n") if line.strip())


def _blocks_of(place: Place, file: ShardFile) -> Iterator[tuple[int, bytes]]:
    """Yield the offset and the bytes of each block; a block ends at the end of a line."""
    first = end = 0
    rest = b""
    while end < file.size or rest:
        size = min(BLOCK_BYTES, file.size - end)
        if size:
            data = place.read(file.name, end, size, version=file.version, check=None)
            rest, end = rest + data, end + size
        cut = rest.rfind(b"\n") + 1 if end < file.size else len(rest)
        if cut:  # otherwise one line is longer than a block
            yield first, rest[:cut]
            first, rest = first + cut, rest[cut:]


def _check_last_line(place: Place, file: ShardFile) -> None:
    size = min(1 << 20, file.size)
    tail = place.read(file.name, file.size - size, size, version=file.version, check=None)
    lines = [line for line in tail.split(b"\n") if line.strip()]
    # A single line may begin before the part that was read.
    if len(lines) < 2 and size < file.size:
        return
    try:
        json.loads(lines[-1])
    except (ValueError, RecursionError) as exc:
        raise ShardError(
            f"{file.name} in {place} ends within a line: it is truncated. Nothing was skipped. "
            "Restore it, or remove the incomplete line."
        ) from exc


def _schema_of(data: bytes, place: Place, file: ShardFile) -> pa.Schema:
    try:
        return _read_json(data).schema
    except pa.ArrowInvalid as exc:
        raise ShardError(f"{file.name} in {place} is not JSON lines: {exc}.") from exc
