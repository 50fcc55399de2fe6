"""Index of a data set in shards: its files, and the blocks in which they are read."""

from __future__ import annotations

import base64
import hashlib
import json
import zlib
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple

from etrain_jupyter.errors import ShardError

Format = Literal["etrain", "arrow", "parquet", "json"]
"""``etrain`` is written by ``write_shards``; ``arrow`` are Arrow IPC files and streams."""

BLOCK_BYTES = 8 << 20
"""Target size of a block in memory."""
MAX_BLOCK_BYTES = 1 << 30
"""Maximum size of a block. Binary columns of 2 GiB or more do not fit Arrow's 32-bit offsets."""


class ShardFile(NamedTuple):
    """A file of the set."""

    name: str
    size: int
    """In bytes."""
    version: str
    """Its ETag in a bucket; modification time in nanoseconds in a folder."""
    fingerprint: str = ""
    """SHA-256 of its footer or first rows, hexadecimal; empty if its blocks have digests."""


class Block(NamedTuple):
    """Consecutive rows that are read together, in one range of one file."""

    file: int
    """Index of the file."""
    first: int
    """Offset of its first byte in the file."""
    size: int
    """Number of bytes in the file."""
    rows: int
    num_bytes: int
    """Estimated bytes in memory."""
    sha256: str
    """Digest of the bytes in the file, hexadecimal; empty if unknown."""


@dataclass(frozen=True, kw_only=True)
class ShardIndex:
    """Everything that is needed to read any row of a data set with one request."""

    format: Format
    schema: bytes
    """Arrow schema, as an IPC message."""
    files: tuple[ShardFile, ...]
    blocks: tuple[Block, ...]
    sample: Literal["dict", "tuple"] = "dict"
    """Form of a sample: a dict of its columns, or a tuple of their values."""

    @property
    def num_samples(self) -> int:
        """Number of rows in the set."""
        return sum(block.rows for block in self.blocks)

    @cached_property
    def digest(self) -> str:
        """Digest of the set's content, hexadecimal: equal for copies in different places.

        If the blocks have no digests, it is the digest of their sizes, followed by that of the
        files' fingerprints.
        """
        content = self._to_json()
        content["files"] = [file.size for file in self.files]
        sizes = hashlib.sha256(_encode(content)).hexdigest()
        fingerprints = "".join(file.fingerprint for file in self.files)
        return sizes + (hashlib.sha256(fingerprints.encode()).hexdigest() if fingerprints else "")

    def to_bytes(self) -> bytes:
        """Return the index in a compact form that ``from_bytes`` reads."""
        return zlib.compress(_encode(self._to_json()), 6)

    @classmethod
    def from_bytes(cls, data: bytes) -> ShardIndex:
        """Return the index in ``data``.

        Raises:
            ShardError: If it is not an index.
        """
        try:
            content = json.loads(zlib.decompress(data))
            return cls(
                format=content["format"],
                schema=base64.b64decode(content["schema"]),
                files=tuple(ShardFile(*file) for file in content["files"]),
                blocks=tuple(Block(*block) for block in content["blocks"]),
                sample=content["sample"],
            )
        except (zlib.error, ValueError, KeyError, TypeError) as exc:
            raise ShardError(f"the index of the shards is invalid ({exc}).") from exc

    def _to_json(self) -> dict[str, Any]:
        return {
            "format": self.format,
            "schema": base64.b64encode(self.schema).decode(),
            "files": self.files,
            "blocks": self.blocks,
            "sample": self.sample,
        }


def check_index(index: ShardIndex, where: str) -> ShardIndex:
    """Return an index that can be trained on.

    Raises:
        ShardError: If it has no rows, or a block is too large.
    """
    if not index.num_samples:
        raise ShardError(
            f"{where} has no rows ({len(index.files)} files). Check the code that wrote it."
        )
    for block in index.blocks:
        if block.num_bytes > MAX_BLOCK_BYTES:
            raise ShardError(
                f"a block of {index.files[block.file].name} in {where} has about "
                f"{block.num_bytes >> 20} MiB, and at most {MAX_BLOCK_BYTES >> 20} MiB can be read "
                "at once. Write the set again in blocks of 8 MiB: "
                f"write_shards({where!r}, to=...)."
            )
    return index


def _encode(content: dict[str, Any]) -> bytes:
    return json.dumps(content, sort_keys=True, separators=(",", ":")).encode()
