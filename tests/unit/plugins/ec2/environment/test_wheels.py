"""Wheels made from installed files, and the choice of a wheel."""

from __future__ import annotations

import zipfile
from importlib.metadata import PathDistribution
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from packaging.tags import Tag

from etrain_jupyter.plugins.ec2.environment.wheels import (
    Platform,
    UnpackableError,
    choose_wheel,
    digest_of,
    pack_installed,
    repacked,
)

NODE = Platform(python=(3, 11))
HEADER = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """Provide an environment with the package alpha, which has files of each kind."""
    site = tmp_path / "env" / "lib" / "python3.11" / "site-packages"
    files = {
        "alpha/__init__.py": "VERSION = 1\n",
        "alpha/__pycache__/__init__.cpython-311.pyc": "",
        "alpha/vendored-1.dist-info/METADATA": "Name: vendored\n",
        "alpha-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: Alpha\nVersion: 1.0\n",
        "alpha-1.0.dist-info/WHEEL": HEADER,
        "alpha-1.0.dist-info/INSTALLER": "pip\n",
        "alpha-1.0.dist-info/direct_url.json": '{"url": "https://me:secret@host/a.whl"}',
        "alpha-1.0.dist-info/entry_points.txt": "[console_scripts]\nalpha = alpha:main\n",
        "../../../bin/alpha": "#!/env/bin/python\nfrom the entry point\n",
        "../../../bin/tool": "#!/env/bin/python3.11\nprint(1)\n",
        "../../../share/alpha/notes.txt": "notes\n",
    }
    for name, text in files.items():
        path = site / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    record = "\n".join(f"{name},," for name in (*files, "alpha-1.0.dist-info/RECORD"))
    (site / "alpha-1.0.dist-info" / "RECORD").write_text(record)
    return site


def distribution(site: Path) -> PathDistribution:
    return PathDistribution(site / "alpha-1.0.dist-info")


def test_wheel_of_installed_files_has_those_and_no_secret(site: Path, tmp_path: Path) -> None:
    wheel = pack_installed(distribution(site), tmp_path)
    assert wheel.name == "alpha-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        assert sorted(archive.namelist()) == [
            "alpha-1.0.data/data/share/alpha/notes.txt",
            "alpha-1.0.data/scripts/tool",
            "alpha-1.0.dist-info/METADATA",
            "alpha-1.0.dist-info/RECORD",
            "alpha-1.0.dist-info/WHEEL",
            "alpha-1.0.dist-info/entry_points.txt",
            "alpha/__init__.py",
            "alpha/vendored-1.dist-info/METADATA",
        ]
        assert archive.read("alpha-1.0.data/scripts/tool") == b"#!python\nprint(1)\n"
        record = archive.read("alpha-1.0.dist-info/RECORD").decode()
    assert "alpha/__init__.py,sha256=" in record
    assert record.count("\n") == 8


def test_same_files_give_the_same_bytes(site: Path, tmp_path: Path) -> None:
    first = pack_installed(distribution(site), tmp_path / "a")
    for path in site.rglob("*"):
        path.touch()
    second = pack_installed(distribution(site), tmp_path / "b")
    assert digest_of(first) == digest_of(second)
    assert digest_of(repacked(first, tmp_path / "c")) == digest_of(first)


def test_package_without_one_of_its_files_is_not_packed(site: Path, tmp_path: Path) -> None:
    (site / "alpha" / "__init__.py").unlink()
    with pytest.raises(UnpackableError, match=r"Alpha 1\.0: the file .*__init__\.py is missing"):
        pack_installed(distribution(site), tmp_path)


@pytest.mark.parametrize(
    ("tags", "is_accepted"),
    [
        (["py3-none-any"], True),
        (["py2.py3-none-any"], True),
        (["cp311-cp311-manylinux_2_28_x86_64"], True),
        (["cp39-abi3-manylinux2014_x86_64"], True),
        (["cp311-cp311-linux_x86_64"], True),
        (["cp310-cp310-manylinux_2_28_x86_64"], False),
        (["cp311-cp311-manylinux_2_39_x86_64"], False),
        (["cp311-cp311-manylinux_2_28_aarch64"], False),
        (["cp311-cp311-macosx_14_0_arm64"], False),
        ([], False),
    ],
)
def test_platform_accepts_what_runs_there(tags: list[str], is_accepted: bool) -> None:
    assert NODE.accepts(tags) is is_accepted


def test_best_wheel_is_chosen() -> None:
    files = [
        "a-1-py3-none-any.whl",
        "a-1-cp311-cp311-manylinux2014_x86_64.whl",
        "a-1-cp311-cp311-manylinux_2_28_x86_64.whl",
        "a-1-cp312-cp312-manylinux_2_28_x86_64.whl",
        "a-2-cp311-cp311-manylinux_2_28_x86_64.whl",
        "a-1.tar.gz",
    ]
    assert choose_wheel(files, "A", "1.0", NODE) == files[2]
    assert choose_wheel(files[3:], "a", "1", NODE) is None


PARTS = st.sampled_from(["cp310", "cp311", "cp39", "py3"])
ABIS = st.sampled_from(["cp311", "abi3", "none"])
PLATFORMS = st.sampled_from(["any", "linux_x86_64", "manylinux_2_17_x86_64", "win_amd64"])


@given(st.lists(st.tuples(PARTS, ABIS, PLATFORMS), unique=True))
def test_chosen_wheel_fits_and_does_not_depend_on_the_order(
    tags: list[tuple[str, str, str]],
) -> None:
    files = [f"a-1-{'-'.join(tag)}.whl" for tag in tags]
    chosen = choose_wheel(files, "a", "1", NODE)
    assert choose_wheel(files[::-1], "a", "1", NODE) == chosen
    fitting = [tag for tag in tags if Tag(*tag) in NODE.tags()]
    assert (chosen is None) == (not fitting)
    if chosen is not None:
        assert NODE.accepts([chosen.removeprefix("a-1-").removesuffix(".whl")])
