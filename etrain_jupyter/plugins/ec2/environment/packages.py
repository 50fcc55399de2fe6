"""List the packages that are installed here, with their origin and identity."""

from __future__ import annotations

import fnmatch
import hashlib
import importlib.metadata
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from importlib.metadata import Distribution
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit, urlunsplit
from urllib.request import url2pathname

from packaging.utils import canonicalize_name

import etrain_jupyter

ETRAIN = "etrain-jupyter"

Origin = Literal["index", "editable", "folder", "url", "conda", "unknown"]
"""Origin of a package; an ``unknown`` one has no record of its files."""


@dataclass(frozen=True, kw_only=True)
class Package:
    """One installed package."""

    name: str
    """Normalized name."""
    version: str
    origin: Origin
    source: str = ""
    """Where it came from, for messages: an installer, or a URL without credentials."""
    project: Path | None = None
    """Folder of the sources of an editable package."""
    tags: tuple[str, ...] = ()
    """Tags of the wheel that it was installed from, such as ``py3-none-any``."""
    identity: str = ""
    """Digest of the list of its files; empty if unknown or if the files may change."""
    distribution: Distribution | None = field(default=None, compare=False, repr=False)

    def __str__(self) -> str:
        return f"{self.name} {self.version}"

    @property
    def requirement(self) -> str:
        """The exact version, as pip writes it."""
        return f"{self.name}=={self.version}"


def read_packages(paths: Sequence[str] | None = None) -> list[Package]:
    """Return all packages on ``sys.path``, or on these paths, by name.

    If several versions of a package are installed, Python imports the first one, which is listed.
    """
    found: dict[str, Package] = {}
    many = (
        importlib.metadata.distributions()
        if paths is None
        else importlib.metadata.distributions(path=list(paths))
    )
    for distribution in many:
        # Broken installations leave folders without metadata.
        name = distribution.metadata["Name"] if distribution.metadata else None
        if name and canonicalize_name(name) not in found:
            found[canonicalize_name(name)] = describe(distribution)
    return [found[name] for name in sorted(found)]


def describe(distribution: Distribution) -> Package:
    """Describe one installed package."""
    name = canonicalize_name(distribution.metadata["Name"])
    record = distribution.read_text("RECORD")
    installer = (distribution.read_text("INSTALLER") or "").strip()
    wheel = distribution.read_text("WHEEL") or ""
    tags = tuple(re.findall(r"^Tag: *(\S+)", wheel, re.MULTILINE))
    origin, source, project = _origin_of(distribution, installer, has_record=record is not None)
    if name == ETRAIN:
        # The code that runs here is sent, even if another checkout is first on sys.path.
        project, origin = Path(etrain_jupyter.__file__).parents[1], "editable"
    is_fixed = record is not None and origin != "editable"
    return Package(
        name=name,
        version=distribution.version,
        origin=origin,
        source=source,
        project=project,
        tags=tags,
        identity=hashlib.sha256((record or "").encode()).hexdigest() if is_fixed else "",
        distribution=distribution,
    )


def _origin_of(
    distribution: Distribution, installer: str, *, has_record: bool
) -> tuple[Origin, str, Path | None]:
    try:
        direct = json.loads(distribution.read_text("direct_url.json") or "{}")
    except ValueError:
        direct = {}
    url = str(direct.get("url", ""))
    if url:
        shown = without_credentials(url)
        folder = Path(url2pathname(urlsplit(url).path)) if url.startswith("file:") else None
        if direct.get("dir_info", {}).get("editable"):
            return "editable", shown, folder
        if "dir_info" in direct:
            return ("folder" if has_record else "editable"), shown, folder
        return "url", shown, None
    # `setup.py develop` leaves an .egg-info in the sources.
    place = Path(str(distribution.locate_file("")))
    if not has_record and any((place / one).exists() for one in ("pyproject.toml", "setup.py")):
        return "editable", place.as_uri(), place
    if installer == "conda":
        return "conda", "conda", None
    if not has_record:
        return "unknown", f"{place}" + (f", installed by {installer}" if installer else ""), None
    return "index", f"installed by {installer}" if installer else str(place), None


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
