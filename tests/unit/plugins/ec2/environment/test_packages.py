"""The list of installed packages, and the project's lock."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

import etrain_jupyter
from etrain_jupyter.errors import PoolError
from etrain_jupyter.plugins.ec2.environment.packages import (
    Package,
    find_lock,
    read_lock,
    read_packages,
    run_uv,
    without,
)


def add(site: Path, name: str, version: str, **files: str) -> None:
    info = site / f"{name}-{version}.dist-info"
    info.mkdir(parents=True)
    files |= {"METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"}
    for file, text in files.items():
        (info / file).write_text(text)


def test_packages_have_their_urls_and_projects(tmp_path: Path) -> None:
    run_uv("venv", "--quiet", "--python", sys.executable, str(tmp_path / "env"))
    python = tmp_path / "env" / "bin" / "python"
    site = next((tmp_path / "env" / "lib").iterdir()) / "site-packages"
    url = {"url": "https://host/b.whl", "archive_info": {}}
    folder = {"url": tmp_path.as_uri(), "dir_info": {}}
    sources = {"url": tmp_path.as_uri(), "dir_info": {"editable": True}}
    add(site, "A_b.c", "1", RECORD="A_b.c.py,,\n", INSTALLER="uv\n")
    add(site, "b", "2", RECORD="b.py,,\n", **{"direct_url.json": json.dumps(url)})
    add(site, "c", "3", RECORD="c.pth,,\n", **{"direct_url.json": json.dumps(sources)})
    add(site, "d", "4", RECORD="d.py,,\n", **{"direct_url.json": json.dumps(folder)})

    found = {one.name: one for one in read_packages(str(python))}

    assert [str(one) for one in found.values()] == ["a-b-c 1", "b 2", "c 3", "d 4"]
    assert found["a-b-c"].requirement == "a-b-c==1"
    assert found["b"].requirement == "b @ https://host/b.whl"
    assert {one.name: one.project for one in found.values()} == {
        "a-b-c": None, "b": None, "c": tmp_path, "d": tmp_path
    }  # fmt: skip


def test_this_etrain_is_sent_even_if_another_checkout_is_installed() -> None:
    [etrain] = [one for one in read_packages() if one.name == "etrain-jupyter"]
    assert etrain.project == Path(etrain_jupyter.__file__).parents[1]


def test_missing_uv_is_named_with_what_to_type(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(PoolError, match=r"uv is not installed here.*%pip install uv"):
        read_packages()


def test_patterns_exclude_packages() -> None:
    packages = [Package(name=name, version="1") for name in ("a-b", "a-c", "b")]
    assert [one.name for one in without(packages, ["A_*"])] == ["b"]


LOCK = """
version = 1
[[package]]
name = "a"
version = "1.0"
wheels = [{ url = "https://host/a.whl", hash = "sha256:aa" }, { url = "https://host/b.whl" }]
[[package]]
name = "mine"
version = "0.1"
source = { editable = "." }
"""


def installed(name: str, version: str) -> Package:
    return Package(name=name, version=version, project=Path() if name == "mine" else None)


def test_satisfied_lock_is_found_above_the_notebook(tmp_path: Path) -> None:
    (tmp_path / "uv.lock").write_text(LOCK)
    folder = tmp_path / "notebooks"
    folder.mkdir()
    lock, why_not = find_lock(folder, [installed("a", "1.0"), installed("b", "3")])
    assert why_not == ""
    assert lock is not None
    assert lock.digests == {"a": {"aa"}}
    (folder / ".git").mkdir()
    assert find_lock(folder, []) == (None, "")


@pytest.mark.parametrize(
    ("text", "version", "reason"),
    [
        (LOCK, "1.1", "a 1.1 is installed, the lock has 1.0"),
        ("package = 3", "1.0", "it cannot be read"),
        ("[[", "1.0", "it cannot be read"),
    ],
)
def test_lock_that_does_not_fit_is_not_used(
    tmp_path: Path, text: str, version: str, reason: str
) -> None:
    (tmp_path / "uv.lock").write_text(text)
    packages = [installed("a", version), installed("mine", "9")]
    lock, why_not = read_lock(tmp_path / "uv.lock", packages)
    assert lock is None
    assert reason in why_not
