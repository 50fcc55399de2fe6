"""Manifest of a checkpoint, and the names of all objects in a store.

::

    checkpoints/step_00001200/model.safetensors     parts, under keys that are never reused
    checkpoints/step_00001200.1/model.safetensors   ... a second attempt gets another folder
    manifests/step_00001200.json                    written last: now the checkpoint exists
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from etrain_jupyter.errors import CheckpointError
from etrain_jupyter.untrusted import open_regular
from etrain_jupyter.wire.codec import decode_fields

PARTS_FOLDER = "checkpoints"
MANIFESTS_FOLDER = "manifests"
FORMAT_VERSION = 2
MAX_BYTES = 1 << 60
"""Maximum size of a part in a manifest, which another user may have written."""
BLOCK_BYTES = 16 << 20
"""Largest part that is one block. Readers hold one block in memory at a time."""

_FOLDER_NAME = re.compile(r"step_(\d{8,})(?:\.(\d+))?")
_MANIFEST_NAME = re.compile(r"step_(\d{8,})\.json")


@dataclass(frozen=True, kw_only=True)
class Part:
    """One file of a checkpoint, as it was read back after writing."""

    key: str
    """Relative path from the store's root, with ``/``."""
    sha256: str
    """SHA-256 of the bytes, as 64 hexadecimal digits."""
    size: int
    """Size in bytes."""
    block_bytes: int = 0
    """Size of each block but the last; 0 if the part is one block."""
    blocks: tuple[str, ...] = ()
    """SHA-256 of each block, to verify a range without reading the rest. Empty if the part is one
    block."""

    def __post_init__(self) -> None:
        if not 0 <= self.size < MAX_BYTES:
            raise ValueError(f"{self.key} has an impossible size")
        if self.blocks and (
            self.block_bytes <= 0 or len(self.blocks) != -(-self.size // self.block_bytes)
        ):
            raise ValueError(f"{self.key} has {len(self.blocks)} digests of blocks")

    @property
    def num_blocks(self) -> int:
        """Number of blocks, at least one."""
        return len(self.blocks) or 1

    def block_range(self, number: int) -> tuple[int, int]:
        """Return the offset of a block's first byte, and that of the byte after its last one."""
        if not self.blocks:
            return 0, self.size
        first = number * self.block_bytes
        return first, min(first + self.block_bytes, self.size)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Part:
        """Return the part with the fields in ``values``.

        Raises:
            ValueError: If a value is missing, unknown or invalid, or if the blocks do not cover the
                part.
        """
        part: Part = decode_fields(cls, values)
        return part


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The list of a checkpoint's parts; a checkpoint exists once its manifest is written."""

    step: int
    """Number of committed steps in the checkpoint."""
    job_id: str
    generation: int
    """The generation that wrote the checkpoint."""
    config_digest: str
    """Digest of the job's configuration, to detect changes on resume."""
    created: float
    """Seconds since the epoch."""
    parts: dict[str, Part]
    """Parts by file name, for example ``model.safetensors``."""

    @property
    def size_bytes(self) -> int:
        """Size of all parts together."""
        return sum(part.size for part in self.parts.values())

    def to_json(self) -> str:
        """Return the JSON text; it contains a digest of the rest, to detect corruption."""
        body = {"version": FORMAT_VERSION} | asdict(self)
        return json.dumps(body | {"digest": _digest_of(body)}, indent=1) + "\n"


class AlteredError(CheckpointError):
    """A part has the expected size, but not the expected SHA-256."""


def parse_manifest(text: str | bytes, *, step: int) -> Manifest:
    """Parse the manifest of ``step``.

    Raises:
        CheckpointError: If it is truncated or corrupt, for another step or in a newer format, or
            if it refers to a key outside of the folder of parts.
    """
    name = step_name(step)
    try:
        body: dict[str, Any] = json.loads(text)
        digest = body.pop("digest")
        version = body.pop("version")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as exc:
        raise CheckpointError(f"{name}: its manifest is truncated or not a manifest") from exc
    # Check the format before the digest, which a later format may compute in a different way.
    if version != FORMAT_VERSION:
        raise CheckpointError(
            f"{name}: its manifest has format {version}, this version reads {FORMAT_VERSION}"
        )
    if digest != _digest_of({"version": version} | body):
        raise CheckpointError(f"{name}: its manifest was modified after it was written")
    # The digest does not protect against a hostile writer, who can compute it, too.
    try:
        manifest: Manifest = decode_fields(Manifest, body)
    except ValueError as exc:
        raise CheckpointError(f"{name}: its manifest has invalid values ({exc})") from exc
    for part in manifest.parts.values():
        check_key(part.key)
    if manifest.step != step:
        raise CheckpointError(f"{name}: its manifest is for step {manifest.step}")
    return manifest


def check_key(key: str) -> PurePosixPath:
    """Return the key of a part as a path, if it is inside the folder of parts.

    A manifest is untrusted input: a key such as ``../../.ssh/id_rsa`` or ``/etc/passwd`` must not
    make a reader open that file.

    Raises:
        CheckpointError: If the key points outside of the folder of parts.
    """
    # PurePosixPath normalizes "a//b" and "a/./b": keys that it changes are refused, because to
    # S3 they are different objects.
    path = PurePosixPath(key)
    is_plain = str(path) == key and ".." not in path.parts and "\\" not in key
    is_plain = is_plain and key.isascii() and key.isprintable()
    if not is_plain or len(path.parts) != 3 or path.parts[0] != PARTS_FOLDER:
        raise CheckpointError(f"key {key!r} points outside of {PARTS_FOLDER}/ and is refused")
    return path


def check_file(part: Part, path: Path) -> None:
    """Compare a file with the part's entry in the manifest.

    Raises:
        CheckpointError: If it is missing, or its size or SHA-256 differs.
    """
    try:
        # Compare the size first, because this detects a truncated file without reading gigabytes.
        size = path.stat().st_size
        if size != part.size:
            raise CheckpointError(f"{part.key} has {size} bytes instead of {part.size}")
        with open_regular(path, follow=True) as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except FileNotFoundError as exc:
        raise CheckpointError(f"{part.key} is missing") from exc
    except OSError as exc:
        raise CheckpointError(f"{part.key} cannot be read ({exc.strerror})") from exc
    if digest != part.sha256:
        raise AlteredError(
            f"{part.key} was altered: SHA-256 {digest[:12]}… instead of {part.sha256[:12]}…"
        )


def check_block(part: Part, number: int, data: bytes) -> None:
    """Compare the bytes of a block with its entry in the manifest.

    Raises:
        CheckpointError: If bytes are missing, or the SHA-256 differs.
    """
    first, stop = part.block_range(number)
    if len(data) != stop - first:
        raise CheckpointError(f"{part.key} has {first + len(data)} bytes instead of {part.size}")
    expected = part.blocks[number] if part.blocks else part.sha256
    if hashlib.sha256(data).hexdigest() != expected:
        raise AlteredError(f"{part.key} was altered in bytes {first} to {stop}")


def step_name(step: int) -> str:
    """Return a step's name, for example ``step_00001200``."""
    return f"step_{step:08d}"


def folder_key(step: int, attempt: int = 0) -> str:
    """Return the folder for the parts of one attempt at saving a step."""
    return f"{PARTS_FOLDER}/{step_name(step)}" + (f".{attempt}" if attempt else "")


def manifest_key(step: int) -> str:
    """Return the key of a step's manifest."""
    return f"{MANIFESTS_FOLDER}/{step_name(step)}.json"


def step_of_folder(name: str) -> int | None:
    """Return the step in a folder's name; None if the name is not one of ours."""
    match = _FOLDER_NAME.fullmatch(name)
    return int(match[1]) if match else None


def step_of_manifest(name: str) -> int | None:
    """Return the step in a manifest's file name; None if it is not a manifest."""
    match = _MANIFEST_NAME.fullmatch(name)
    return int(match[1]) if match else None


def _digest_of(body: Mapping[str, Any]) -> str:
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
