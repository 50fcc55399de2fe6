"""Compare the installed versions with those of the notebook, and define the wire version.

The notebook's objects are sent by value: functions as bytecode, which is specific to a minor
version of Python, and modules in torch's pickle format.
"""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Mapping
from dataclasses import dataclass

from etrain_jupyter import __version__

WIRE_VERSION = 12
"""Version of the messages in ``wire.messages`` and ``wire.requests``, and of the step header, which
the ranks sum. Increment it with each change that is incompatible with older versions."""

PROTOCOL_KEY = "protocol"
NAMES = {
    PROTOCOL_KEY: "protocol",
    "etrain": "etrain-jupyter",
    "python": "Python",
    "torch": "torch",
    "numpy": "numpy",
    "cloudpickle": "cloudpickle",
    "distributed": "distributed",
}
MUST_FIT = (PROTOCOL_KEY, "etrain", "python", "torch")
"""Packages whose minor version must match; for the others, a difference is only a warning."""

Fingerprint = Mapping[str, str]
"""Versions keyed as in ``NAMES``; empty if a package is not installed."""


@dataclass(frozen=True, kw_only=True)
class VersionComparison:
    """Differences between two environments, as text."""

    wrong: tuple[str, ...] = ()
    """Incompatible versions."""
    notes: tuple[str, ...] = ()
    """Different but compatible versions."""
    remedies: tuple[str, ...] = ()
    """Versions to install on the worker, one for each entry of ``wrong``."""

    @property
    def fits(self) -> bool:
        """True if the environments are compatible."""
        return not self.wrong


def read_fingerprint() -> dict[str, str]:
    """Return the installed versions without importing the packages."""
    known = {
        PROTOCOL_KEY: str(WIRE_VERSION),
        "etrain": __version__,
        "python": platform.python_version(),
    }
    return known | {name: _version_of(name) for name in NAMES if name not in known}


def compare(theirs: Fingerprint, ours: Fingerprint, *, at: str, here: str) -> VersionComparison:
    """Compare a worker's versions with a notebook's; skip versions that one side does not report.

    Args:
        theirs: Versions of the worker.
        ours: Versions of the notebook.
        at: How messages refer to the worker.
        here: How messages refer to the notebook.

    >>> compare({"python": "3.11.2"}, {"python": "3.12.4"}, at="w1", here="this notebook").wrong
    ('Python 3.11.2 on w1, 3.12.4 in this notebook',)
    """
    wrong, notes, remedies = [], [], []
    for key, name in NAMES.items():
        one, other = theirs.get(key), ours.get(key)
        # None: the version was not reported. "": the package is not installed there.
        if one is None or not other or _release(one) == _release(other):
            continue
        difference = f"{name} {one} on {at}, {other} in {here}"
        if not one:
            difference = f"no {name} on {at}, {other} in {here}"
        if key in MUST_FIT and _minor(one) != _minor(other):
            wrong.append(difference)
            remedies.append(_remedy(key, other))
        else:
            notes.append(difference)
    return VersionComparison(wrong=tuple(wrong), notes=tuple(notes), remedies=tuple(remedies))


def _remedy(key: str, version: str) -> str:
    if key == PROTOCOL_KEY:
        return "the same version of etrain-jupyter"
    if key == "python":
        return f"Python {'.'.join(_minor(version))}"
    return f"{NAMES[key]}=={_release(version)}"


def _release(version: str) -> str:
    # "2.6.0+cu124" and "2.6.0+cpu" are compatible, so drop the build tag.
    return version.partition("+")[0]


def _minor(version: str) -> tuple[str, ...]:
    return tuple(_release(version).split(".")[:2])


def _version_of(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""
