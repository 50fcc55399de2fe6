"""Get the wheel of each package: from a folder, from its sources, or from a package index.

The first place that has the package is used::

    image.environment.wheels      a folder of wheels, for packages that exist nowhere else
    a project of this machine     built with `uv build`, unless it is a wheel
    a package index, or a URL     `pip download` of the same version, with pip's own settings;
                                  sources are then built with `uv build`
"""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from packaging.utils import InvalidSdistFilename, canonicalize_name, parse_sdist_filename
from packaging.version import Version

from etrain_jupyter.errors import PoolError
from etrain_jupyter.plugins.ec2.environment.packages import (
    Lock,
    Package,
    find_uv,
    without_credentials,
)
from etrain_jupyter.plugins.ec2.environment.torch_builds import TOGETHER, TorchBuild
from etrain_jupyter.plugins.ec2.environment.wheels import Platform, choose_wheel

BUILD_S = 1800.0
VARIABLES = {"SOURCE_DATE_EPOCH": "1577836800", "ETRAIN_LABEXTENSION": "skip"}
"""Environment variables of builds. They set a constant date, so that the same sources give the same
bytes, and leave out the front end, which a node does not need."""
NOT_FOUND = re.compile(r"(?:the requirement|Cannot install) ([\w.-]+)")
"""pip's errors for a package that no index has; with the user's constraints, the second one."""


class NoWheelError(PoolError):
    """A package has no wheel for the nodes; the message is the reason."""


@dataclass(frozen=True, kw_only=True)
class Missing:
    """A package without a wheel."""

    package: Package
    reason: str

    def __str__(self) -> str:
        source = f" ({without_credentials(self.package.url)})" if self.package.url else ""
        return f"{self.package}{source}: {self.reason}"


class MissingWheelsError(PoolError):
    """Packages of the environment cannot be sent to the nodes."""

    def __init__(self, missing: Sequence[Missing]) -> None:
        self.missing = tuple(missing)
        names = ", ".join(one.package.name for one in missing)
        first = missing[0].package
        shown = "; ".join(map(str, missing))
        super().__init__(
            f"{len(missing)} packages of this kernel's environment cannot be sent to the nodes: "
            f"{shown}. Nothing was started. If the nodes do not need them, add to the pool in "
            f"pools.yaml: image: {{environment: {{exclude: [{names}]}}}}. If you have wheels, put "
            f"them into a folder ({first.name.replace('-', '_')}-{first.version}-...whl) and add "
            "image: {environment: {wheels: FOLDER}}. Otherwise, install a version from a package "
            "index here."
        )


@dataclass(frozen=True, kw_only=True)
class Sources:
    """Where wheels may come from."""

    platform: Platform
    build: TorchBuild | None = None
    """Build of torch for the nodes; None for the installed one."""
    folder: Path | None = None
    """Folder with wheels."""
    lock: Lock | None = None
    variables: Mapping[str, str] = field(default_factory=lambda: os.environ)

    def find_here(self, package: Package, target: Path) -> Path | None:
        """Return the wheel of a package from this machine; None if it must be downloaded.

        Raises:
            NoWheelError: If its sources are gone, or their build fails.
        """
        if self.is_replaced(package):
            return None
        if (known := self._chosen(package, self.folder)) is not None:
            return known
        if package.project is None:
            return None
        return self._build(package.project, target)

    def is_replaced(self, package: Package) -> bool:
        """Return whether the nodes get a different build of a package."""
        return self.build is not None and package.name in TOGETHER

    def download(self, packages: Sequence[Package], target: Path) -> dict[str, Path]:
        """Download these packages, and build those that exist only as sources; return them by name.

        Raises:
            MissingWheelsError: If some of them have neither a wheel nor sources.
            PoolError: If a package index cannot be used.
        """
        wanted, found, missing = list(packages), dict[str, Path](), list[Missing]()
        while wanted and (error := self._run_pip(wanted, target)):
            # pip stops at the first package that is missing. Find all of them, for the message.
            name = NOT_FOUND.search(error)
            lost = [one for one in wanted if name and one.name == canonicalize_name(name[1])]
            if not lost:
                raise PoolError(
                    f"the packages of this kernel's environment cannot be downloaded: {error}. "
                    "Nothing was started. Retry, or set image.python to use an interpreter of the "
                    "image instead."
                )
            wanted.remove(lost[0])
            if not self._download_labelled(lost[0], target):
                missing.append(Missing(package=lost[0], reason=error))
        for package in packages:
            if any(one.package is package for one in missing):
                continue
            try:
                found[package.name] = self._downloaded(package, target)
            except NoWheelError as exc:
                missing.append(Missing(package=package, reason=str(exc)))
        if missing:
            raise MissingWheelsError(missing)
        return found

    def download_build(self, packages: Sequence[Package], target: Path) -> list[Path]:
        """Download another build of torch, with the CUDA libraries that it needs.

        Raises:
            MissingWheelsError: If its index does not have it.
        """
        if self.build is None or not packages:
            return []
        folder = Path(tempfile.mkdtemp(dir=target))
        wanted = [f"{one.name}=={self.build.version(one.version)}" for one in packages]
        index = ["--only-binary", ":all:", "--index-url", self.build.index]
        if error := self._pip([*index, *wanted], folder):
            reason = f"the build {self.build.label} for the GPUs of the pool: {error}"
            raise MissingWheelsError([Missing(package=one, reason=reason) for one in packages])
        return sorted(folder.glob("*.whl"))

    def _download_labelled(self, package: Package, target: Path) -> bool:
        """Download the locally installed build of torch from PyTorch's own index."""
        label = Version(package.version).local
        if package.name not in TOGETHER or not label:
            return False
        index = ["--no-deps", "--extra-index-url", TorchBuild(label=label).index]
        return not self._pip([*index, package.requirement], target)

    def _downloaded(self, package: Package, target: Path) -> Path:
        if (wheel := self._chosen(package, target)) is not None:
            return wheel
        for file in sorted(target.iterdir()):
            try:
                name, _ = parse_sdist_filename(file.name)
            except InvalidSdistFilename:
                continue
            if name == package.name:
                return self._build(file, target)
        raise NoWheelError(
            f"there is neither a wheel for {self.platform} nor an archive of sources"
        )

    def _chosen(self, package: Package, folder: Path | None) -> Path | None:
        """Return the wheel of a package, among those in a folder, that fits the nodes best."""
        if folder is None:
            return None
        names = [path.name for path in folder.glob("*.whl")]
        name = choose_wheel(names, package.name, package.version, self.platform)
        return folder / name if name is not None else None

    def _build(self, source: Path, target: Path) -> Path:
        """Build the wheel of a project or source archive; return its path."""
        if not source.exists():
            raise NoWheelError(f"{source} does not exist any more")
        if source.suffix == ".whl":
            return self._checked(source)
        folder = Path(tempfile.mkdtemp(dir=target))
        build = [find_uv(), "build", "--quiet", "--wheel", "--python", sys.executable]
        build += ["--out-dir", str(folder), str(source)]
        wheel = ["wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), str(source)]
        # Build in isolation first. If that fails, use the tools installed here, for machines
        # without an index, and finally pip's settings, which uv does not read.
        errors = []
        for command in (build, [*build, "--no-build-isolation"], [*find_pip(), *wheel]):
            error = _error_of(command, {**self.variables, **VARIABLES})
            if not error and (made := sorted(folder.glob("*.whl"))):
                return self._checked(made[0])
            errors.append(error)
        raise NoWheelError(f"the wheel of {source} cannot be built: {errors[0]}")

    def _checked(self, wheel: Path) -> Path:
        if not self.platform.accepts(["-".join(wheel.stem.split("-")[-3:])]):
            raise NoWheelError(f"its wheel {wheel.name} is not for {self.platform}")
        return wheel

    def _run_pip(self, packages: Sequence[Package], target: Path) -> str:
        """Download wheels or sources of packages; return pip's error."""
        lines = []
        for package in packages:
            digests = self.lock.digests.get(package.name, ()) if self.lock else ()
            hashes = "".join(f" --hash=sha256:{one}" for one in sorted(digests))
            lines.append(package.requirement + ("" if package.url else hashes))
        # If one line has --hash, pip requires it in all lines of the file.
        hashed = [one for one in lines if "--hash" in one]
        for number, group in enumerate((hashed, [one for one in lines if one not in hashed])):
            if group:
                file = target / f"requirements-{number}.txt"
                file.write_text("\n".join(group))
                if error := self._pip(["--no-deps", "-r", str(file)], target):
                    return error
        return ""

    def _pip(self, arguments: Sequence[str], target: Path) -> str:
        """Run ``pip download`` for the nodes' platform; return its error."""
        command = [
            *(*find_pip(), "download", "--quiet", "--disable-pip-version-check", "--no-input"),
            # Include the patch version, because some packages require, for example, 3.11.5.
            *("--dest", str(target), "--python-version", platform.python_version()),
            *(part for name in self.platform.platforms() for part in ("--platform", name)),
            *arguments,
        ]
        return _error_of(command, self.variables)


def find_pip() -> list[str]:
    """Return the command that runs pip."""
    if importlib.util.find_spec("pip"):
        return [sys.executable, "-m", "pip"]
    # Environments made by uv have no pip.
    return [find_uv(), "tool", "run", "--quiet", "--python", sys.executable, "pip"]


def _error_of(command: Sequence[str], variables: Mapping[str, str]) -> str:
    """Run a command; return the reason of its failure, or an empty string."""
    try:
        done = subprocess.run(
            command,
            env=dict(variables),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=BUILD_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as exc:
        return str(exc)
    if not done.returncode:
        return ""
    lines = [line.strip() for line in (done.stderr or done.stdout).splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"(?i)error: (?!Ignored the following)", line)]
    reason = [*errors, *lines[-1:], f"exit code {done.returncode}"][0]
    reason = re.sub(r" \(from versions: .*", "", reason)[:300]  # may list hundreds
    # The URLs of private indexes contain passwords.
    return re.sub(r"(https?://)[^/@\s]+@", r"\1", reason)
