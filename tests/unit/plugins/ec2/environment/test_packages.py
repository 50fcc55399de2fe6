"""The list of installed packages, their origins, and the project's lock."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import etrain_jupyter
from etrain_jupyter.plugins.ec2.environment.locked import find_lock, read_lock
from etrain_jupyter.plugins.ec2.environment.packages import Package, read_packages, without


def add(site: Path, name: str, version: str, **files: str) -> None:
    info = site / f"{name}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    for file, text in files.items():
        (info / file).write_text(text)


def test_packages_have_their_origins_without_credentials(tmp_path: Path) -> None:
    url = {"url": "https://me:secret@host/b.whl?token=1", "archive_info": {}}
    sources = {"url": tmp_path.as_uri(), "dir_info": {"editable": True}}
    add(tmp_path, "A_b.c", "1", RECORD="A_b.c.py,,\n", INSTALLER="uv\n")
    add(tmp_path, "b", "2", RECORD="b.py,,\n", **{"direct_url.json": json.dumps(url)})
    add(tmp_path, "c", "3", RECORD="c.pth,,\n", **{"direct_url.json": json.dumps(sources)})
    add(tmp_path, "d", "4", INSTALLER="debian\n")
    add(tmp_path, "e", "5", RECORD="e.py,,\n", INSTALLER="conda\n")
    found = {one.name: one for one in read_packages([str(tmp_path)])}
    assert {name: one.origin for name, one in found.items()} == {
        "a-b-c": "index", "b": "url", "c": "editable", "d": "unknown", "e": "conda"
    }  # fmt: skip
    assert found["b"].source == "https://host/b.whl"
    assert found["c"].project == tmp_path
    assert found["d"].source == f"{tmp_path}, installed by debian"
    # Only what cannot change has an identity.
    assert {name for name, one in found.items() if not one.identity} == {"c", "d"}


def test_first_of_two_versions_is_listed_as_python_imports_it(tmp_path: Path) -> None:
    for number in ("1", "2"):
        add(tmp_path / number, "a", number)
    found = read_packages([str(tmp_path / "2"), str(tmp_path / "1")])
    assert [str(one) for one in found] == ["a 2"]


def test_this_etrain_is_sent_even_if_another_checkout_is_installed() -> None:
    [etrain] = [one for one in read_packages() if one.name == "etrain-jupyter"]
    assert etrain.project == Path(etrain_jupyter.__file__).parents[1]


def test_patterns_exclude_packages() -> None:
    packages = [Package(name=name, version="1", origin="index") for name in ("a-b", "a-c", "b")]
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
    origin = "editable" if name == "mine" else "index"
    return Package(name=name, version=version, origin=origin)  # type: ignore[arg-type]


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
