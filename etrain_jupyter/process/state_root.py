"""Locate this user's state directory, and identify a cluster's Python environment."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import re
import stat
import sys
from pathlib import Path

from etrain_jupyter.errors import PoolError
from etrain_jupyter.untrusted import without_link

_INHERITED = re.compile(
    r"AWS_.*|.*(CUDA|NCCL).*|.*_(KEY|TOKEN|SECRET|PASSWORD|CREDENTIALS)|(LD_LIBRARY_|PYTHON)?PATH"
)
"""Environment variables whose values decide what the workers of a local cluster can do."""

_VARYING = re.compile(r"JPY_.*|JUPYTER.*|CUDA_MODULE_LOADING")
"""Variables that Jupyter sets in each kernel, or that torch sets in a kernel that uses a GPU."""


def open_state_root() -> Path:
    """Return the state directory, creating it if necessary.

    Raises:
        PoolError: If it belongs to another user or is writable by others.
    """
    root = state_root()
    # Parents may be shared with other programs, so they get the user's default mode.
    root.parent.mkdir(parents=True, exist_ok=True)
    root.mkdir(mode=0o700, exist_ok=True)
    status = root.stat()
    if status.st_uid != os.getuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PoolError(
            f"the state directory {root} (owner {status.st_uid}, "
            f"mode {stat.S_IMODE(status.st_mode):o}) is writable by other users, who could "
            "impersonate your cluster. Nothing was started. "
            f"Run `chmod 700 {root}`, or set ETRAIN_STATE to a folder of your own."
        )
    return root


def state_root() -> Path:
    """Return the path of the state directory, whether or not it exists."""
    if own := os.environ.get("ETRAIN_STATE"):
        return without_link(Path(own).expanduser().absolute())
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    # su and sudo may keep the previous user's variable.
    if os.path.isdir(runtime) and os.stat(runtime).st_uid == os.getuid():
        return without_link(Path(runtime) / "etrain")
    return without_link(Path.home() / ".local" / "state" / "etrain")


def local_prefix() -> str:
    """Return the id prefix of this Python environment's local clusters."""
    return f"local-{environment_key()}"


def environment_key() -> str:
    """Return a short fingerprint of this Python environment; its kernels share clusters."""
    # Kernels in another environment may have different package versions than a cluster's workers.
    text = f"{sys.executable}\n{package_version()}"
    return hashlib.sha256(text.encode()).hexdigest()[:6]


def environment_digests() -> dict[str, str]:
    """Return digests of the environment variables that a local cluster's workers depend on.

    A cluster keeps the variables of the process that started it, so a kernel uses only a cluster
    with equal digests. The values may be credentials and are not stored.
    """
    found = {}
    for name, value in os.environ.items():
        if _INHERITED.fullmatch(name) and not _VARYING.fullmatch(name):
            if name == "PATH":  # Jupyter repeats the folder of its own command
                value = os.pathsep.join(dict.fromkeys(value.split(os.pathsep)))
            found[name] = hashlib.sha256(os.fsencode(value)).hexdigest()[:16]
    return found


def package_version() -> str:
    """Return the installed version of etrain-jupyter."""
    try:
        return importlib.metadata.version("etrain-jupyter")
    except importlib.metadata.PackageNotFoundError:
        return "0+uninstalled"
