"""The manifest of an environment: its wheels, and where they are in the bucket.

Both are content-addressed, so a wheel is stored once for all environments that contain it::

    environments/<sha256 of the manifest>.json
    environments/wheels/<sha256 of the wheel>/numpy-2.4.6-cp311-cp311-manylinux_2_28_x86_64.whl
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass

FOLDER = "environments"
WHEELS = f"{FOLDER}/wheels"
FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class Wheel:
    """One wheel in the bucket."""

    name: str
    version: str
    file: str
    sha256: str
    size: int
    """Bytes."""

    @property
    def key(self) -> str:
        """Its key, below the pool's prefix."""
        return f"{WHEELS}/{self.sha256}/{self.file}"


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """One environment."""

    python: str
    """The kernel's version, such as ``3.11.7``; nodes may have another patch version."""
    machine: str
    wheels: tuple[Wheel, ...]
    """Sorted by name."""
    installer: Wheel
    """The wheel of uv."""

    def to_json(self) -> bytes:
        """Return the object's bytes."""
        return json.dumps({"format": FORMAT, **dataclasses.asdict(self)}, indent=1).encode()

    @property
    def digest(self) -> str:
        """SHA-256 of the object, from which its key is made."""
        return hashlib.sha256(self.to_json()).hexdigest()


def key_of(digest: str) -> str:
    """Return the key of a manifest, below the pool's prefix."""
    return f"{FOLDER}/{digest}.json"
