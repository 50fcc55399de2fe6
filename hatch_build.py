"""Build the front end (``labextension/``) into the package if Node.js is installed.

A package that is built without Node.js still works: cells, jobs and the HTML output need no front
end. Only the live dashboard and the JupyterLab extension need it. The environment variable
``ETRAIN_LABEXTENSION`` sets the behavior if the front end cannot be built: ``auto`` (the default)
warns, ``require`` fails, and ``skip`` does not attempt the build.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SOURCES = "labextension"
SOURCE_PARTS = ("src", "style", "schema", "package.json", "yarn.lock", "tsconfig.json")
OUTPUTS = ("etrain_jupyter/labextension/package.json", "etrain_jupyter/static/widget.js")
DESTINATION = "share/jupyter/labextensions/etrain-jupyter"


class FrontEndHook(BuildHookInterface[Any]):
    """Build stale assets and add them to the wheel."""

    def dependencies(self) -> list[str]:
        """Return the build requirements: jupyter-builder provides jlpm, for a build only."""
        return ["jupyter-builder>=1.3,<2"] if needs_build(Path(self.root)) else []

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Build the assets if they are stale. Hatchling calls this before it collects files."""
        root = Path(self.root)
        if needs_build(root):
            self.build(root, strict=read_mode() == "require" or self.target_name == "sdist")
        if self.target_name == "wheel" and (root / OUTPUTS[0]).exists():
            shared = build_data["shared_data"]
            shared["etrain_jupyter/labextension"] = DESTINATION
            shared[f"{SOURCES}/install.json"] = f"{DESTINATION}/install.json"

    def build(self, root: Path, *, strict: bool) -> None:
        """Run the production build. If it fails, raise if ``strict``, otherwise warn."""
        try:
            run_jlpm(root / SOURCES, "install", "--immutable")
            run_jlpm(root / SOURCES, "run", "build:prod")
        except (OSError, subprocess.CalledProcessError) as error:
            if strict:
                raise
            self.app.display_warning(
                f"etrain-jupyter: the front end was not built ({error}). Cells and their HTML "
                "output work; the live dashboard and the JupyterLab extension do not. Install "
                "Node.js 20 or newer and repeat the installation."
            )


def read_mode() -> str:
    """Return the value of ``ETRAIN_LABEXTENSION``."""
    mode = os.environ.get("ETRAIN_LABEXTENSION", "auto")
    if mode not in ("auto", "require", "skip"):
        raise ValueError(f"ETRAIN_LABEXTENSION={mode!r} is invalid. Use auto, require or skip.")
    return mode


def needs_build(root: Path) -> bool:
    """Return whether this installation builds the front end."""
    return read_mode() != "skip" and not is_fresh(root)


def is_fresh(root: Path) -> bool:
    """Return whether every output is at least as new as the newest source."""
    outputs = [root / name for name in OUTPUTS]
    if not all(path.exists() for path in outputs):
        return False
    sources = [path for part in SOURCE_PARTS for path in files_of(root / SOURCES / part)]
    newest = max((path.stat().st_mtime for path in sources), default=0.0)
    return newest <= min(path.stat().st_mtime for path in outputs)


def files_of(path: Path) -> list[Path]:
    """Return the files below ``path``, or ``path`` itself if it is a file."""
    return [path] if path.is_file() else [p for p in path.rglob("*") if p.is_file()]


def run_jlpm(folder: Path, *arguments: str) -> None:
    """Run jlpm, JupyterLab's version of yarn, which is part of jupyter-builder."""
    if not (shutil.which("node") or shutil.which("nodejs")):
        raise OSError("node is not on PATH")
    jlpm = [sys.executable, "-c", "from jupyter_builder.jlpm import main; main()"]
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    subprocess.run([*jlpm, *arguments], cwd=folder, check=True, env={**os.environ, "PATH": path})
