from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).parents[3]

# Imports the recipe with another version of torch, and without the installed torchvision.
IMPORT = """
import importlib.metadata, sys, torch
torch.__version__ = torch.__version__.__class__("{torch}")
from etrain_jupyter.errors import RecipeError
if {is_missing}:
    sys.modules["torchvision"] = None
    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)
    importlib.metadata.version = missing
try:
    import etrain_jupyter.recipes.vision
except RecipeError as exc:
    print(exc)
"""


def import_error(*folders: Path, torch: str, is_missing: bool = False) -> str:
    """Import the recipe in a process of its own, and return its error."""
    paths = [*map(str, folders), str(ROOT)]
    done = subprocess.run(
        [sys.executable, "-c", IMPORT.format(torch=torch, is_missing=is_missing)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


def test_missing_torchvision_names_the_release_to_install() -> None:
    assert import_error(torch="2.13.0+cpu", is_missing=True) == (
        "the vision recipe needs torchvision, which is not installed. Install the release for "
        "torch 2.13.0+cpu: pip install --force-reinstall --no-deps torchvision==0.28.* "
        "--index-url https://download.pytorch.org/whl/cpu"
    )


def test_torchvision_of_another_build_names_both_versions(tmp_path: Path) -> None:
    package = tmp_path / "torchvision"
    package.mkdir()
    failure = 'raise RuntimeError("operator torchvision::nms does not exist")'
    (package / "__init__.py").write_text(failure)
    installed = tmp_path / "torchvision-0.21.0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text(
        "Name: torchvision\nVersion: 0.21.0\nRequires-Dist: numpy\nRequires-Dist: torch==2.6.0\n"
    )

    error = import_error(tmp_path, torch=torch.__version__)

    version = re.escape(torch.__version__)
    assert re.search(
        rf"torchvision 0\.21\.0 \(which requires torch==2\.6\.0\) cannot be imported next to torch "
        rf"{version}: operator torchvision::nms does not exist\. .* from the same package index",
        error,
    )
    assert "torchvision==0." in error.partition("Install this one: ")[2]
