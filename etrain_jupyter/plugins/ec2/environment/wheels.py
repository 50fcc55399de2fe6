"""Make a wheel from the files of an installed package, and choose wheels for a platform.

A wheel that is made twice from the same files has the same bytes, so its digest identifies its
content.
"""

from __future__ import annotations

import base64
import hashlib
import re
import sys
import sysconfig
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import Distribution
from pathlib import Path, PurePosixPath

from packaging.tags import Tag, compatible_tags, cpython_tags, parse_tag
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename
from packaging.version import InvalidVersion, Version

from etrain_jupyter.errors import PoolError

ANYWHERE = "py3-none-any"
DATE = (2020, 1, 1, 0, 0, 0)
"""Date of all files in a wheel, so that it does not depend on the time of the installation."""
GLIBC = (2, 34)
"""Minor version of the C library up to which wheels are accepted: Amazon Linux 2023 has 2.34,
Ubuntu 22.04 has 2.35."""
# Written by installers. direct_url.json may contain a URL with credentials.
_NOT_PACKED = ("RECORD", "RECORD.jws", "INSTALLER", "REQUESTED", "direct_url.json")


class UnpackableError(PoolError):
    """The files of an installed package do not make a wheel."""


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


def pack_installed(distribution: Distribution, folder: Path) -> Path:
    """Make the wheel of an installed package from its files; return its path.

    Raises:
        UnpackableError: If files are missing, or outside of the environment.
    """
    name, version = distribution.metadata["Name"], distribution.version
    wheel = distribution.read_text("WHEEL") or ""
    files = dict(_installed_files(distribution))
    return _write(folder, name, version, wheel, files)


def pack_package(distribution: Distribution, package: Path, folder: Path) -> Path:
    """Make the wheel of a package of Python files that is imported from its sources.

    Args:
        distribution: Its metadata.
        package: The folder that is imported.
        folder: Where to write the wheel.
    """
    name, version = distribution.metadata["Name"], distribution.version
    info = f"{_escape(name)}-{_escape(version)}.dist-info"
    files: dict[str, Path | bytes] = {}
    for path in sorted(package.rglob("*")):
        inner = path.relative_to(package).parts
        # The front end's extension is installed elsewhere, and a node has no front end.
        if path.is_file() and "__pycache__" not in inner and inner[0] != "labextension":
            files[str(PurePosixPath(package.name, *inner))] = path
    for entry in ("METADATA", "entry_points.txt"):
        if text := distribution.read_text(entry):
            files[f"{info}/{entry}"] = text.encode()
    header = "Wheel-Version: 1.0\nGenerator: etrain\nRoot-Is-Purelib: true\n"
    return _write(folder, name, version, f"{header}Tag: {ANYWHERE}\n", files)


def pack_program(name: str, program: Path, platform: Platform, folder: Path) -> Path:
    """Make a wheel with one compiled program of this machine."""
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: 0\n"
    files: dict[str, Path | bytes] = {
        f"{name}-0.data/scripts/{name}": program,
        f"{name}-0.dist-info/METADATA": metadata.encode(),
    }
    tag = f"py3-none-linux_{platform.machine}"
    return _write(folder, name, "0", f"Wheel-Version: 1.0\nTag: {tag}\n", files)


def digest_of(wheel: Path) -> str:
    """Return the SHA-256 of a file."""
    with wheel.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def repacked(wheel: Path, folder: Path) -> Path:
    """Write a wheel's files into a new one that does not depend on the time of its build."""
    with zipfile.ZipFile(wheel) as source:
        files: dict[str, Path | bytes] = {
            one.filename: source.read(one)
            for one in source.infolist()
            if not one.is_dir() and not _is_metadata(one.filename, "RECORD", "RECORD.jws")
        }
        header = next(name for name in files if _is_metadata(name, "WHEEL"))
        text = bytes(files[header]).decode()
    name, version = wheel.name.split("-")[:2]
    return _write(folder, name, version, text, files)


def _installed_files(distribution: Distribution) -> Iterator[tuple[str, Path | bytes]]:
    """Yield name in the wheel and content of each file."""
    name, version = distribution.metadata["Name"], distribution.version
    site = Path(str(distribution.locate_file(""))).resolve()
    info = _info_folder(distribution)
    data = f"{info.removesuffix('.dist-info')}.data"
    prefix, scripts = _places_around(site)
    made = {
        entry.name
        for entry in distribution.entry_points
        if entry.group in ("console_scripts", "gui_scripts")
    }
    for file in distribution.files or ():
        if file.suffix == ".pyc" or (file.parent.name == info and file.name in _NOT_PACKED):
            continue
        path = Path(str(distribution.locate_file(file)))
        if not path.is_file():
            raise UnpackableError(f"{name} {version}: the file {path} is missing")
        real = path.parent.resolve() / path.name
        if real.is_relative_to(site):
            yield real.relative_to(site).as_posix(), path
        elif real.parent == scripts:
            # Installers write those of the entry points themselves.
            if real.name not in made:
                yield f"{data}/scripts/{real.name}", _script(path)
        elif prefix is not None and real.is_relative_to(prefix):
            yield f"{data}/data/{real.relative_to(prefix).as_posix()}", path
        else:
            raise UnpackableError(f"{name} {version}: the file {real} is outside of {prefix}")


def _info_folder(distribution: Distribution) -> str:
    for file in distribution.files or ():
        if _is_metadata(file.as_posix(), "METADATA"):
            return file.parent.name
    raise UnpackableError(f"{distribution.metadata['Name']} has no list of its files")


def _places_around(site: Path) -> tuple[Path | None, Path | None]:
    """Return the prefix and the folder of scripts of an environment with this site-packages."""
    for known in {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}:
        if Path(known).resolve() == site:
            return Path(sys.prefix).resolve(), Path(sysconfig.get_path("scripts")).resolve()
    # lib/python3.11/site-packages of another environment.
    prefix = site.parents[2] if site.name == "site-packages" else None
    return prefix, prefix / "bin" if prefix is not None else None


def _script(path: Path) -> bytes:
    """Return a script; installers replace ``#!python`` by the environment's interpreter."""
    text = path.read_bytes()
    return re.sub(rb"\A#![^\n]*python[^\n]*", b"#!python", text)


def _write(
    folder: Path, name: str, version: str, wheel: str, files: dict[str, Path | bytes]
) -> Path:
    """Write a wheel with these files."""
    tags = re.findall(r"^Tag: *(\S+)", wheel, re.MULTILINE)
    if not tags:
        raise UnpackableError(f"{name} {version} does not say for which platform it is")
    build = re.search(r"^Build: *(\S+)", wheel, re.MULTILINE)
    info = next(
        (path.partition("/")[0] for path in files if _is_metadata(path, "METADATA")),
        f"{_escape(name)}-{_escape(version)}.dist-info",
    )
    parts = info.removesuffix(".dist-info") + (f"-{build[1]}" if build else "")
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / f"{parts}-{_compressed(tags)}.whl"
    files = {**files, f"{info}/WHEEL": wheel.encode()}
    record = []
    with zipfile.ZipFile(target, "w") as archive:
        # Readers look for the metadata at the end.
        for path in sorted(files, key=lambda one: (one.startswith(info), one)):
            source = files[path]
            content = source if isinstance(source, bytes) else source.read_bytes()
            mode = 0o644 if isinstance(source, bytes) else source.stat().st_mode & 0o777
            digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=")
            record.append(f"{_quoted(path)},sha256={digest.decode()},{len(content)}")
            _add(archive, path, content, 0o755 if mode & 0o111 or "/scripts/" in path else 0o644)
        record.append(f"{_quoted(f'{info}/RECORD')},,")
        _add(archive, f"{info}/RECORD", "\n".join([*record, ""]).encode(), 0o644)
    return target


def _is_metadata(path: str, *names: str) -> bool:
    """Return whether a file is one of these of the package itself, not of one that it contains."""
    folder, _, name = path.partition("/")
    return folder.endswith(".dist-info") and name in names


def _add(archive: zipfile.ZipFile, path: str, content: bytes, mode: int) -> None:
    entry = zipfile.ZipInfo(path, DATE)
    entry.external_attr = (0o100000 | mode) << 16
    entry.compress_type = zipfile.ZIP_DEFLATED
    # Level 1: packing torch takes seconds instead of a minute, for a tenth more bytes.
    archive.writestr(entry, content, compresslevel=1)


def _compressed(tags: Sequence[str]) -> str:
    """Return the tags as in the name of a wheel.

    >>> _compressed(["py2-none-any", "py3-none-any"])
    'py2.py3-none-any'
    """
    parts = zip(*(tag.split("-") for tag in tags), strict=True)
    return "-".join(".".join(dict.fromkeys(part)) for part in parts)


def _escape(text: str) -> str:
    return re.sub(r"[^\w.+!]+", "_", text).replace("-", "_")


def _quoted(path: str) -> str:
    return f'"{path}"' if "," in path else path
