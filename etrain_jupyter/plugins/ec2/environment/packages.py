"""List the packages of the kernel's environment with uv, and the digests in its ``uv.lock``."""

from __future__ import annotations

import fnmatch
import json
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit
from urllib.request import url2pathname

from packaging.utils import canonicalize_name

import etrain_jupyter
from etrain_jupyter.errors import PoolError

ETRAIN = "etrain-jupyter"
LOCK_FILE = "uv.lock"


@dataclass(frozen=True, kw_only=True)
class Package:
    """One installed package."""

    name: str
    """Normalized name."""
    version: str
    url: str = ""
    """Where it was installed from, if not from a package index."""
    project: Path | None = None
    """Folder, archive or wheel on this machine that it was installed from."""

    def __str__(self) -> str:
        return f"{self.name} {self.version}"

    @property
    def requirement(self) -> str:
        """The exact version, or the URL, as pip writes it."""
        return f"{self.name} @ {self.url}" if self.url else f"{self.name}=={self.version}"


def read_packages(python: str = sys.executable) -> list[Package]:
    """Return the packages of an interpreter's environment, by name.

    Raises:
        PoolError: If uv is not installed, or cannot read the environment.
    """
    listed = json.loads(run_uv("pip", "list", "--format", "json", "--python", python))
    frozen = run_uv("pip", "freeze", "--exclude-editable", "--python", python)
    urls = dict(re.findall(r"^(\S+) @ (\S+)$", frozen, re.MULTILINE))
    found = []
    for one in listed:
        name, url = canonicalize_name(one["name"]), urls.get(one["name"], "")
        folder = one.get("editable_project_location")
        if url.startswith("file:"):
            folder = url2pathname(urlsplit(url).path)
        checkout = Path(etrain_jupyter.__file__).parents[1]
        if name == ETRAIN and (checkout / "pyproject.toml").exists():
            folder = checkout  # the code that runs here, even if another checkout is installed
        project = Path(folder) if folder else None
        found.append(Package(name=name, version=one["version"], url=url, project=project))
    return sorted(found, key=lambda one: one.name)


def run_uv(*arguments: str) -> str:
    """Return the output of a command of uv.

    Raises:
        PoolError: If uv is not installed, or the command fails.
    """
    command = [find_uv(), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise PoolError(
            f"`uv {' '.join(arguments)}` failed: {done.stderr.strip()}. Nothing was started. To "
            "use an interpreter of the image instead, set image.python."
        )
    return done.stdout


def find_uv() -> str:
    """Return the path of uv.

    Raises:
        PoolError: If it is not installed.
    """
    # The package's program is not on PATH if the environment is not activated.
    installed = Path(sys.executable).parent / "uv"
    found = str(installed) if installed.exists() else shutil.which("uv")
    if not found:
        raise PoolError(
            "uv is not installed here, and the nodes get this kernel's environment with it. "
            "Nothing was started. Run %pip install uv, or set image.python to use an interpreter "
            "of the image instead."
        )
    return found


def without_credentials(url: str) -> str:
    """Remove user, password and query from a URL: they may be secrets.

    >>> without_credentials("https://ann:secret@host/simple?token=1")
    'https://host/simple'
    """
    parts = urlsplit(url)
    host = parts.netloc.rpartition("@")[2]
    return urlunsplit((parts.scheme, host, parts.path, "", ""))


def without(packages: Iterable[Package], patterns: Sequence[str]) -> list[Package]:
    """Return the packages whose names match none of the patterns, such as ``jupyter*``."""
    wanted = [canonicalize_name(pattern) for pattern in patterns]
    return [
        one for one in packages if not any(fnmatch.fnmatchcase(one.name, name) for name in wanted)
    ]


@dataclass(frozen=True, kw_only=True)
class Lock:
    """A lock file that the environment satisfies."""

    path: Path
    digests: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """SHA-256 of the wheels of each package."""


def find_lock(folder: Path, packages: Iterable[Package]) -> tuple[Lock | None, str]:
    """Return the lock of the project that contains a folder, or None and why it is not used.

    A lock is used if every installed package that it contains has the locked version.
    """
    for place in (folder, *folder.parents):
        path = place / LOCK_FILE
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
