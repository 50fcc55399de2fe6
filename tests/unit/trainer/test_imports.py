"""Imports of a job: the modules that the fork server imports in advance."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from etrain_jupyter.trainer import imports
from etrain_jupyter.trainer.imports import ImportRecord, import_modules


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Provide a folder of packages, and a folder of the notebook."""
    for folder, name in (("site", "installed_abc"), ("site", "broken_abc"), ("nb", "local_abc")):
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / f"{name}.py").write_text("import sys\n")
        monkeypatch.syspath_prepend(str(tmp_path / folder))
    (tmp_path / "site" / "broken_abc.py").write_text("raise SystemExit(3)\n")
    paths = {"purelib": str(tmp_path / "site"), "platlib": str(tmp_path / "site")}
    monkeypatch.setattr(imports.sysconfig, "get_paths", lambda: paths)
    for name in ("installed_abc", "broken_abc", "local_abc"):
        monkeypatch.delitem(sys.modules, name, raising=False)


@pytest.mark.usefixtures("packages")
def test_modules_of_installed_packages_are_recorded_but_not_those_of_the_notebook() -> None:
    record = ImportRecord()

    __import__("local_abc")
    __import__("installed_abc")

    assert record.new_modules() == ("installed_abc",)
    assert ImportRecord().new_modules() == ()


@pytest.mark.usefixtures("packages")
def test_nothing_is_recorded_if_the_job_changes_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    record = ImportRecord()
    __import__("installed_abc")

    monkeypatch.setenv("KMP_INIT_AT_FORK", "FALSE")
    assert record.new_modules() == ("installed_abc",), "scikit-learn sets it"
    monkeypatch.setenv("HF_HOME", "elsewhere")
    assert record.new_modules() == ()


@pytest.mark.usefixtures("packages")
def test_modules_are_imported_except_those_that_fail() -> None:
    before = dict(os.environ)

    import_modules(["no_such_module_abc", "broken_abc", "installed_abc"])

    assert dict(os.environ) == before
    assert "installed_abc" in sys.modules
    assert "broken_abc" not in sys.modules
