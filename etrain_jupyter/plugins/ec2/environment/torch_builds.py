"""Choose the CUDA build of torch for the GPUs of the nodes.

The notebook's machine often has a CPU build, with which a node would not use its GPU.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from packaging.version import Version

from etrain_jupyter.errors import PoolError

INDEX = "https://download.pytorch.org/whl"
FAMILIES: Mapping[str, tuple[int, int]] = {
    "p3": (7, 0),
    "p3dn": (7, 0),
    "g4dn": (7, 5),
    "g5g": (7, 5),
    "p4d": (8, 0),
    "p4de": (8, 0),
    "g5": (8, 6),
    "g6": (8, 9),
    "gr6": (8, 9),
    "g6e": (8, 9),
    "g6f": (8, 9),
    "p5": (9, 0),
    "p5e": (9, 0),
    "p5en": (9, 0),
    "p6-b200": (10, 0),
    "p6-b300": (10, 3),
    "g7e": (12, 0),
}
"""Compute capability of the GPUs of EC2's families."""
BUILDS: Mapping[tuple[int, int], Sequence[str]] = {
    (2, 6): ("cu126", "cu124", "cu118"),
    (2, 7): ("cu128", "cu126", "cu118"),
    (2, 8): ("cu128", "cu126", "cu129"),
    (2, 9): ("cu128", "cu126", "cu130"),
    (2, 10): ("cu128", "cu126", "cu130"),
    (2, 11): ("cu128", "cu126", "cu130"),
    (2, 12): ("cu126", "cu130", "cu132"),
    (2, 13): ("cu126", "cu130", "cu132"),
}
"""Builds of each release, best first. CUDA 12 comes first: it runs with drivers since 525, CUDA 13
only with drivers since 580."""
VOLTA, HOPPER = (7, 0), (9, 0)
TOGETHER = ("torch", "torchvision", "torchaudio")
"""Packages that are released in the same builds."""


@dataclass(frozen=True, kw_only=True)
class TorchBuild:
    """The build of torch to install instead of the one here."""

    label: str
    """Such as ``cu128``."""

    @property
    def index(self) -> str:
        """Package index with this build."""
        return f"{INDEX}/{self.label}"

    def version(self, version: str) -> str:
        """Return a version with this build.

        >>> TorchBuild(label="cu128").version("2.9.1+cpu")
        '2.9.1+cu128'
        """
        return f"{Version(version).public}+{self.label}"


def capabilities_of(types: Iterable[str]) -> list[tuple[int, int]]:
    """Return the compute capabilities of machine types; unknown families are left out.

    >>> capabilities_of(["g5.xlarge", "m5.large"])
    [(8, 6)]
    """
    families = {name.partition(".")[0] for name in types}
    return sorted({FAMILIES[family] for family in families if family in FAMILIES})


def supports(label: str, capability: tuple[int, int]) -> bool:
    """Return whether a build contains code for a GPU.

    >>> supports("cu126", (7, 0)), supports("cu126", (10, 0)), supports("cu130", (7, 0))
    (True, False, False)
    """
    cuda = int(label.removeprefix("cu"))
    # Builds since CUDA 12.8 leave out Volta, and only they support Blackwell.
    if capability <= VOLTA:
        return cuda < 128
    return capability <= HOPPER or cuda >= 128


def choose_build(
    version: str, installed: str, capabilities: Sequence[tuple[int, int]]
) -> TorchBuild | None:
    """Return the build to install; None to keep the installed one.

    Args:
        version: The release of torch that is installed here.
        installed: The CUDA version of its build, such as ``12.8``; empty for a CPU build.
        capabilities: Compute capabilities of the nodes' GPUs; empty for nodes without GPUs.

    Raises:
        PoolError: If no build of this release has code for all GPUs.
    """
    here = "cu" + "".join(installed.split(".")[:2]) if installed else ""
    if not capabilities or (here and all(supports(here, one) for one in capabilities)):
        return None
    release = Version(version)
    known = BUILDS.get((release.major, release.minor)) or BUILDS[max(BUILDS)]
    for label in known:
        if all(supports(label, one) for one in capabilities):
            return TorchBuild(label=label)
    shown = ", ".join(f"{major}.{minor}" for major, minor in capabilities)
    raise PoolError(
        f"no build of torch {release.public} ({', '.join(known)}) has code for all GPUs of the "
        f"pool (compute capability {shown}). Nothing was started. Set capacity.types to machines "
        "of fewer generations, or set image.python to an interpreter of the image."
    )


def installed_cuda(torch: Path) -> str:
    """Return the CUDA version of the torch in a folder, without importing it; empty for CPU."""
    try:
        text = (torch / "version.py").read_text(encoding="utf-8")
    except OSError:
        return ""
    found = re.search(r"^cuda(?:: [^=]+)? = ['\"]([\d.]+)['\"]", text, re.MULTILINE)
    return found[1] if found else ""
