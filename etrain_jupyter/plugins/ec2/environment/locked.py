"""Digests of the wheels in a project's ``uv.lock``."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from packaging.utils import canonicalize_name

from etrain_jupyter.plugins.ec2.environment.packages import Package

FILE = "uv.lock"


@dataclass(frozen=True, kw_only=True)
class Lock:
    """A lock file that the environment satisfies."""

    path: Path
    digests: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """SHA-256 of the wheels of each package."""


def find_lock(folder: Path, packages: Iterable[Package]) -> tuple[Lock | None, str]:
    """Return the lock of the project that contains a folder, and why it is not used.

    A lock is used if every installed package that it names has the version that it names.
    """
    for place in (folder, *folder.parents):
        path = place / FILE
        if path.is_file():
            return read_lock(path, packages)
        if (place / ".git").exists():
            break
    return None, ""


def read_lock(path: Path, packages: Iterable[Package]) -> tuple[Lock | None, str]:
    """Read a lock file; see ``find_lock``."""
    try:
        entries = tomllib.loads(path.read_text(encoding="utf-8")).get("package", [])
        versions: dict[str, set[str]] = {}
        digests: dict[str, set[str]] = {}
        for entry in entries:
            name = canonicalize_name(entry["name"])
            # A lock for several platforms may have several versions of a package.
            versions.setdefault(name, set()).add(str(entry.get("version", "")))
            for wheel in entry.get("wheels", ()):
                kind, _, digest = str(wheel.get("hash", "")).partition(":")
                if kind == "sha256":
                    digests.setdefault(name, set()).add(digest)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as exc:
        return None, f"{path} is not used: it cannot be read ({exc})"
    for package in packages:
        known = versions.get(package.name, set()) - {""}
        if known and package.project is None and package.version not in known:
            return None, (
                f"{path} is not used: {package} is installed, the lock has "
                f"{' and '.join(sorted(known))}. `uv sync` would change the environment"
            )
    return Lock(path=path, digests={name: frozenset(one) for name, one in digests.items()}), ""
