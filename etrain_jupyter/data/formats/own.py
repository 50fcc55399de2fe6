"""The format of ``write_shards``: Arrow IPC files with a manifest.

::

    <place>/shards.json             the manifest, written last
    <place>/part-00000.arrow        an Arrow IPC file of up to 16 blocks
    <place>/writing.json            progress of an unfinished write

A block is a run of record batches of about 512 KiB. The manifest has its range, its number of rows
and its SHA-256, so a block is one request and one digest. Its record batches can be decoded one by
one, for the first batch of a job.
"""

from __future__ import annotations

import base64
import json
from typing import Any

import pyarrow as pa

from etrain_jupyter.data.index import MAX_BLOCK_BYTES, Block, ShardFile, ShardIndex
from etrain_jupyter.data.places import FileFacts, Place
from etrain_jupyter.errors import ShardError

MANIFEST = "shards.json"
PROGRESS = "writing.json"
VERSION = 1


def manifest_of(index: ShardIndex, about: dict[str, Any]) -> bytes:
    """Return the manifest of a set, with facts about it for the reader."""
    files: list[dict[str, Any]] = [
        {"name": file.name, "size": file.size, "blocks": []} for file in index.files
    ]
    for block in index.blocks:
        # first byte, bytes, rows, bytes in memory, SHA-256
        files[block.file]["blocks"].append(list(block[1:]))
    content = {
        "format": "etrain-shards",
        "version": VERSION,
        "num_samples": index.num_samples,
        "num_blocks": len(index.blocks),
        "sample": index.sample,
        "schema": base64.b64encode(index.schema).decode(),
        **about,
        "files": files,
    }
    return json.dumps(content, indent=1).encode()


def index_own(place: Place, listed: dict[str, FileFacts]) -> ShardIndex:
    """Return the index in the manifest, after a comparison with the files that exist.

    Raises:
        ShardError: If the manifest is invalid, or a file is missing or has another size.
    """
    facts = listed[MANIFEST]
    data = place.read(MANIFEST, 0, facts.size, version="", check=None)
    try:
        content = json.loads(data)
        if content["format"] != "etrain-shards":
            raise ValueError(f"format is {str(content['format'])[:50]!r}")
        if content["version"] != VERSION:
            raise ShardError(
                f"{MANIFEST} in {place} has version {content['version']}, and this version of "
                f"etrain-jupyter reads version {VERSION}. Upgrade etrain-jupyter."
            )
        files, blocks = [], []
        for number, file in enumerate(content["files"]):
            version = listed[file["name"]].version if file["name"] in listed else ""
            files.append(ShardFile(str(file["name"]), int(file["size"]), version))
            blocks += [_block_of(number, files[-1].size, *block) for block in file["blocks"]]
        if content["sample"] not in ("dict", "tuple"):
            raise ValueError("its samples are neither dicts nor tuples")
        index = ShardIndex(
            format="etrain",
            schema=base64.b64decode(content["schema"]),
            files=tuple(files),
            blocks=tuple(blocks),
            sample=content["sample"],
        )
        pa.ipc.read_schema(pa.py_buffer(index.schema))
    except (ValueError, LookupError, TypeError, OSError, RecursionError, pa.ArrowException) as exc:
        raise ShardError(f"{MANIFEST} in {place} is not a valid manifest ({exc}).") from exc
    _compare(index, listed, place)
    return index


def _block_of(
    number: int, file_size: int, first: int, size: int, rows: int, num_bytes: int, sha256: str
) -> Block:
    """Return a block of a manifest.

    Raises:
        ValueError: If it cannot be a part of its file.
    """
    numbers = (first, size, rows, num_bytes)
    # The size in memory is limited for every format, and a row has at least one bit.
    is_possible = (
        all(type(value) is int and value >= 0 for value in numbers)
        and first + size <= file_size
        and rows <= 8 * MAX_BLOCK_BYTES
        and isinstance(sha256, str)
    )
    if not is_possible:
        raise ValueError(f"file {number} has a block {[*numbers, sha256]}")
    return Block(number, *numbers, sha256)


def _compare(index: ShardIndex, listed: dict[str, FileFacts], place: Place) -> None:
    missing = [file.name for file in index.files if file.name not in listed]
    if missing:
        raise ShardError(
            f"{len(missing)} of {len(index.files)} shards are missing in {place}: "
            f"{', '.join(missing[:3])}{' ...' if len(missing) > 3 else ''}. Nothing was skipped. "
            "Restore them, or write the set again."
        )
    for file in index.files:
        if (size := listed[file.name].size) != file.size:
            raise ShardError(
                f"shard {file.name} in {place} has {size} bytes instead of {file.size}. Nothing "
                "was skipped. Restore it, or write the set again."
            )
