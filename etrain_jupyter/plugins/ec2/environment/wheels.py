"""Wheels of an environment: which ones run on the nodes, and where they are in the bucket.

Wheels and manifests are content-addressed, so a wheel is stored once for all environments that
contain it::

    environments/<sha256 of the manifest>.json
    environments/wheels/<sha256 of the wheel>/numpy-2.4.6-cp311-cp311-manylinux_2_28_x86_64.whl
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass

from packaging.tags import Tag, compatible_tags, cpython_tags, parse_tag
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename
from packaging.version import InvalidVersion, Version

GLIBC = (2, 34)
"""A wheel may require at most this minor version of the C library. Amazon Linux 2023 has 2.34, and
Ubuntu 22.04 has 2.35."""
FOLDER = "environments"
WHEELS = f"{FOLDER}/wheels"
FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class Platform:
    """The interpreter and the operating system of the nodes."""

    python: tuple[int, int]
    machine: str = "x86_64"
    """``x86_64`` or ``aarch64``."""

    def __str__(self) -> str:
        return f"Linux on {self.machine} with Python {self.python[0]}.{self.python[1]}"

    def platforms(self) -> list[str]:
        """Return the tags of the operating system, best first."""
        newest = [f"manylinux_2_{minor}_{self.machine}" for minor in range(GLIBC[1], 4, -1)]
        old = [f"manylinux{name}_{self.machine}" for name in ("2014", "2010", "1")]
        # Like pip, also accept a wheel for linux_x86_64, such as a package that was compiled here.
        return [*newest, *old, f"linux_{self.machine}"]

    def tags(self) -> list[Tag]:
        """Return the tags of the wheels that can be installed, best first."""
        names = self.platforms()
        short = f"cp{self.python[0]}{self.python[1]}"
        return [
            *cpython_tags(self.python, platforms=names),
            *compatible_tags(self.python, short, names),
        ]

    def accepts(self, tags: Sequence[str]) -> bool:
        """Return whether a wheel with any of these tags can be installed."""
        known = set(self.tags())
        return any(known & parse_tag(tag) for tag in tags)


def choose_wheel(files: Sequence[str], name: str, version: str, platform: Platform) -> str | None:
    """Return the wheel of a package that fits the platform best; None if none fits.

    >>> node = Platform(python=(3, 11))
    >>> choose_wheel(["a-1-py3-none-any.whl", "a-1-cp311-cp311-win_amd64.whl"], "a", "1", node)
    'a-1-py3-none-any.whl'
    """
    ranks = {tag: rank for rank, tag in enumerate(platform.tags())}
    best: tuple[int, int, str] | None = None
    for file in files:
        try:
            its_name, its_version, build, tags = parse_wheel_filename(file)
            is_wanted = its_name == canonicalize_name(name) and its_version == Version(version)
        except (InvalidWheelFilename, InvalidVersion):
            continue
        fitting = [ranks[tag] for tag in tags if tag in ranks]
        if is_wanted and fitting:
            # A higher build number replaces a lower one.
            found = (min(fitting), -(build[0] if build else 0), file)
            best = found if best is None else min(best, found)
    return best[2] if best is not None else None


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
