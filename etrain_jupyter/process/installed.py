"""Detect that packages were installed after a process imported them."""

from __future__ import annotations

import os
import site
import sysconfig

Installed = tuple[int, ...]


def read_installed() -> Installed:
    """Return a value that changes when a package is installed, updated or removed.

    It consists of the modification times of the folders of packages. An installer adds or removes
    entries there, at the very least the one whose name contains the version.
    """
    paths = sysconfig.get_paths()
    folders = {paths["purelib"], paths["platlib"], site.getusersitepackages()}
    return tuple(_modified_at(folder) for folder in sorted(folders))


def _modified_at(folder: str) -> int:
    try:
        return os.stat(folder).st_mtime_ns
    except OSError:
        return 0
