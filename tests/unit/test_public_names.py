from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import etrain_jupyter
from etrain_jupyter import api, plugin

HEAVY = ("torch", "IPython", "distributed", "dask", "boto3", "anywidget", "pydantic", "numpy")


def loaded_by(code: str) -> set[str]:
    """Run ``code`` in a fresh interpreter and return which heavy packages it loaded."""
    script = f"{code}\nimport sys\nprint(*[name for name in {HEAVY!r} if name in sys.modules])"
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60
    )
    return set(result.stdout.split())


def test_importing_the_package_loads_nothing_heavy() -> None:
    assert loaded_by("import etrain_jupyter") == set()


def test_errors_and_the_job_class_load_no_engine() -> None:
    code = "from etrain_jupyter import EtrainError, TrainingJob"

    assert loaded_by(code) & {"torch", "IPython", "distributed", "anywidget"} == set()


def test_the_terminal_loads_no_engine() -> None:
    code = "from etrain_jupyter.cli import main\nmain(['--help'])"

    loaded = loaded_by(code + "\nprint()") & {"torch", "IPython", "distributed", "anywidget"}

    assert loaded == set()


@pytest.mark.parametrize("name", etrain_jupyter.__all__)
def test_each_public_name_exists(name: str) -> None:
    assert getattr(etrain_jupyter, name) is not None
    assert name in dir(etrain_jupyter)


def test_all_is_sorted_and_complete() -> None:
    assert etrain_jupyter.__all__ == sorted(etrain_jupyter.__all__)
    assert set(api.__all__) | set(plugin.public_names()) < set(etrain_jupyter.__all__)


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'distribute'"):
        etrain_jupyter.distribute  # noqa: B018


def test_version_is_the_projects() -> None:
    project = Path(etrain_jupyter.__file__).parents[1] / "pyproject.toml"
    if not project.is_file():
        pytest.skip("platform: installed without its source tree")

    assert etrain_jupyter.__version__ == tomllib.loads(project.read_text())["project"]["version"]
