"""Choose the wheel of a package that runs on the nodes."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from packaging.tags import Tag, compatible_tags, cpython_tags, parse_tag
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename
from packaging.version import InvalidVersion, Version

GLIBC = (2, 34)
"""Minor version of the C library up to which wheels are accepted: Amazon Linux 2023 has 2.34,
Ubuntu 22.04 has 2.35."""


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
        # pip accepts a wheel for linux_x86_64 too: a package that was compiled here.
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


def digest_of(wheel: Path) -> str:
    """Return the SHA-256 of a file."""
    with wheel.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
