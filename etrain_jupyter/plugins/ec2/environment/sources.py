"""Get the wheel of each package: from a folder, from the installed files, by a build or a download.

The first source that has the wheel is used::

    image.environment.wheels      a folder of wheels, for packages that exist nowhere else
    sources of an editable one    built with `uv build` or `pip wheel`
    the installed files           if they run on the nodes' platform
    a package index               `pip download` of the same version, with pip's own settings
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from etrain_jupyter.errors import PoolError
from etrain_jupyter.plugins.ec2.environment.locked import Lock
from etrain_jupyter.plugins.ec2.environment.packages import ETRAIN, Package
from etrain_jupyter.plugins.ec2.environment.torch_builds import TOGETHER, TorchBuild
from etrain_jupyter.plugins.ec2.environment.wheels import (
    Platform,
    UnpackableError,
    choose_wheel,
    pack_installed,
    pack_package,
    repacked,
)

BUILD_S = 1800.0
DATE = "1577836800"
"""SOURCE_DATE_EPOCH of builds: 2020-01-01."""


@dataclass(frozen=True, kw_only=True)
class Missing:
    """A package of which no wheel was found."""

    package: Package
    reason: str

    def __str__(self) -> str:
        source = f" ({self.package.source})" if self.package.source else ""
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
    here: Platform | None = None
    """The platform of this machine; None if its compiled files never run on a node."""
    variables: Mapping[str, str] = field(default_factory=lambda: os.environ)

    def find(self, package: Package, target: Path) -> Path | None:
        """Return the wheel of a package; None if it must be downloaded.

        Raises:
            UnpackableError: If a build fails.
        """
        if self.is_replaced(package):
            return None
        if (known := self._in_folder(package)) is not None:
            return known
        if package.name == ETRAIN:
            assert package.project is not None
            assert package.distribution is not None
            return pack_package(package.distribution, package.project / "etrain_jupyter", target)
        if package.origin == "editable":
            return build_wheel(package, target, self.variables)
        if package.distribution is None or not self._runs_there(package):
            return None
        try:
            return pack_installed(package.distribution, target)
        except UnpackableError:
            return None

    def is_replaced(self, package: Package) -> bool:
        """Return whether the nodes get another build of a package."""
        return self.build is not None and package.name in TOGETHER

    def download(self, packages: Sequence[Package], target: Path) -> list[Path]:
        """Download the wheels of these versions from package indexes.

        Raises:
            MissingWheelsError: If an index does not have some of them.
        """
        if packages and (error := self._run_pip(packages, target)):
            # pip stops at the first package. Find all that are missing, for the message.
            each = [(one, self._run_pip([one], target)) for one in packages]
            missing = [Missing(package=one, reason=reason) for one, reason in each if reason]
            raise MissingWheelsError(missing or [Missing(package=packages[0], reason=error)])
        found = []
        for package in packages:
            names = [path.name for path in target.glob("*.whl")]
            wheel = choose_wheel(names, package.name, package.version, self.platform)
            if wheel is None:
                reason = f"pip downloaded no wheel for {self.platform}"
                raise MissingWheelsError([Missing(package=package, reason=reason)])
            found.append(target / wheel)
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
        error = self._pip(["--index-url", self.build.index, *wanted], folder, needs=True)
        if error:
            reason = f"the build {self.build.label} for the GPUs of the pool: {error}"
            raise MissingWheelsError([Missing(package=one, reason=reason) for one in packages])
        return sorted(folder.glob("*.whl"))

    def _run_pip(self, packages: Sequence[Package], target: Path) -> str:
        lines = []
        for package in packages:
            digests = self.lock.digests.get(package.name, ()) if self.lock else ()
            hashes = "".join(f" --hash=sha256:{one}" for one in sorted(digests))
            lines.append(package.requirement + hashes)
        # With --hash in one line, pip requires it in all lines of the file.
        hashed = [one for one in lines if "--hash" in one]
        for number, group in enumerate((hashed, [one for one in lines if one not in hashed])):
            if group:
                file = target / f"requirements-{number}.txt"
                file.write_text("\n".join(group))
                if error := self._pip(["-r", str(file)], target, needs=False):
                    return error
        return ""

    def _pip(self, arguments: Sequence[str], target: Path, *, needs: bool) -> str:
        """Run ``pip download`` for the nodes' platform; return its error."""
        pip = find_pip()
        if not pip:
            return "neither pip nor uv is installed here, so it cannot be downloaded"
        major, minor = self.platform.python
        command = [
            *(*pip, "download", "--quiet", "--disable-pip-version-check", "--no-input"),
            *("--only-binary", ":all:", "--dest", str(target)),
            *("--python-version", f"{major}.{minor}"),
            *(part for name in self.platform.platforms() for part in ("--platform", name)),
            *(() if needs else ("--no-deps",)),
            *arguments,
        ]
        return _error_of(command, self.variables)

    def _in_folder(self, package: Package) -> Path | None:
        if self.folder is None:
            return None
        names = [path.name for path in self.folder.glob("*.whl")]
        name = choose_wheel(names, package.name, package.version, self.platform)
        return self.folder / name if name is not None else None

    def _runs_there(self, package: Package) -> bool:
        """Return whether the installed files of a package run on the nodes."""
        if not self.platform.accepts(package.tags):
            return False
        is_pure = all(tag.endswith("-none-any") for tag in package.tags)
        # conda's libraries are outside of the package.
        return is_pure or (package.origin != "conda" and self.here == self.platform)


def build_wheel(package: Package, target: Path, variables: Mapping[str, str]) -> Path:
    """Build the wheel of an editable package; return its path.

    Raises:
        UnpackableError: If the sources are gone, or their build fails.
    """
    project = package.project
    if project is None or not project.is_dir():
        raise UnpackableError(f"its sources {project} do not exist")
    with tempfile.TemporaryDirectory() as folder:
        environment = {**variables, "SOURCE_DATE_EPOCH": DATE}
        errors = []
        for command in _build_commands(project, Path(folder)):
            error = _error_of(command, environment)
            if not error and (made := sorted(Path(folder).glob("*.whl"))):
                # Builds record their time, which would make each build a new wheel.
                return repacked(made[0], target)
            errors.append(error)
    reason = errors[0] if errors else "neither uv nor pip is installed here"
    raise UnpackableError(f"the wheel of {project} cannot be built: {reason}")


def _build_commands(project: Path, folder: Path) -> list[list[str]]:
    """Return the commands to try: in isolation, then with the tools that are installed here."""
    commands = []
    if uv := find_uv():
        build = [uv, "build", "--quiet", "--wheel", "--out-dir", str(folder), str(project)]
        commands += [build, [*build, "--no-build-isolation", "--python", sys.executable]]
    if importlib.util.find_spec("pip"):
        pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir"]
        pip += [str(folder), str(project)]
        commands += [pip, [*pip, "--no-build-isolation"]]
    return commands


def find_uv() -> str:
    """Return the path of uv; empty if it is not installed."""
    # The package's program is not on PATH if the environment is not activated.
    installed = Path(sys.executable).parent / "uv"
    return str(installed) if installed.exists() else shutil.which("uv") or ""


def find_pip() -> list[str]:
    """Return the command that runs pip; empty if there is none."""
    if importlib.util.find_spec("pip"):
        return [sys.executable, "-m", "pip"]
    # Environments made by uv have no pip.
    uv = find_uv()
    return [uv, "tool", "run", "--quiet", "pip"] if uv else []


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
    errors = [line for line in lines if line.startswith(("ERROR:", "error:"))]
    reason = (errors or lines or [f"exit code {done.returncode}"])[-1][:300]
    # The URLs of private indexes contain passwords.
    return re.sub(r"(https?://)[^/@\s]+@", r"\1", reason)
