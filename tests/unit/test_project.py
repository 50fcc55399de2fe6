"""Rules for the repository as a whole: clean files and notebooks, a README without dead links."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import nbformat
import pytest

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
MAX_CELLS = 12

# Assembled from pieces, so that this file does not break the rule that it checks.
MACHINE_FOLDERS = ("work", "root", "farm", "Users", "home/[a-z]+")
MACHINE_PATH = re.compile(rf"(?<![\w.}}~])/(?:{'|'.join(MACHINE_FOLDERS)})/")
REGISTRY_HOST = re.compile(
    "|".join(
        rf"{host}\.{domain}"
        for host, domain in (
            ("files.pythonhosted", "org"),
            (r"pypi\.org/simple", ""),
            ("registry.npmjs", "org"),
            ("registry.yarnpkg", "com"),
            ("deb.debian", "org"),
        )
    ).replace(r"simple\.", "simple")
)
LOCK_FILES = ("constraints.txt", "labextension/yarn.lock")


def project_files() -> list[Path]:
    """Every file that is, or would be, in the repository."""
    git = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    done = subprocess.run(git, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"platform: not a git checkout: {done.stderr.strip()}")
    return [ROOT / name for name in done.stdout.split("\0") if name and (ROOT / name).is_file()]


def lines_matching(pattern: re.Pattern[str]) -> list[str]:
    """``file:line: text`` of every line of the project that matches."""
    found = []
    for path in project_files():
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except UnicodeDecodeError:
            continue  # a picture
        found += [
            f"{path.relative_to(ROOT)}:{number}: {line[:120]}"
            for number, line in enumerate(lines, 1)
            if pattern.search(line)
        ]
    return found


def test_no_file_names_a_path_of_somebodys_machine() -> None:
    assert lines_matching(MACHINE_PATH) == []


def test_no_file_names_a_registry_host() -> None:
    assert lines_matching(REGISTRY_HOST) == []


@pytest.mark.parametrize("text", ["/{}/main/x.py", "open('/{}/.cache')"])
def test_the_search_for_machine_paths_finds_them(text: str) -> None:
    assert MACHINE_PATH.search(text.format("work")) is not None


def test_the_search_for_registry_hosts_finds_them() -> None:
    assert REGISTRY_HOST.search("https://pypi.org/" + "simple/") is not None


@pytest.mark.parametrize("name", LOCK_FILES)
def test_lock_file_records_versions_and_no_addresses(name: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")

    assert re.findall(r"\w+://\S*|^.* @ .*$", text, flags=re.MULTILINE) == []


def test_constraints_pin_every_direct_dependency() -> None:
    project = pyproject()["project"]
    extras = project["optional-dependencies"]
    wanted = {
        requirement_name(r) for r in [*project["dependencies"], *extras["test"], *extras["docs"]]
    }
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = {requirement_name(line) for line in lines if "==" in line}

    assert wanted - pinned == set()


def requirement_name(requirement: str) -> str:
    """``types-PyYAML>=6`` -> ``types-pyyaml``, as package indexes compare names."""
    name = re.split(r"[^A-Za-z0-9._-]", requirement, maxsplit=1)[0]
    return re.sub(r"[-_.]+", "-", name).lower()


def pyproject() -> dict[str, Any]:
    """The parsed ``pyproject.toml``."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_notebook_has_no_outputs_and_few_cells(path: Path) -> None:
    notebook = nbformat.read(path, as_version=nbformat.NO_CONVERT)
    nbformat.validate(notebook)
    ran = [
        cell["id"]
        for cell in notebook.cells
        if cell.get("outputs") or cell.get("execution_count") is not None
    ]

    assert ran == [], f"clear it: jupyter nbconvert --clear-output --inplace {path.name}"
    assert len(notebook.cells) <= MAX_CELLS
    assert set(notebook.metadata) <= {"kernelspec", "language_info"}


def test_there_are_notebooks_to_check() -> None:
    assert [path.name for path in NOTEBOOKS][:1] == ["01_quickstart.ipynb"]


def test_every_marker_is_registered() -> None:
    registered = {
        line.split(":")[0] for line in pyproject()["tool"]["pytest"]["ini_options"]["markers"]
    }
    built_in = {"parametrize", "skip", "skipif", "xfail", "usefixtures", "filterwarnings"}
    plugins = {"asyncio", "timeout"}
    used = {
        name
        for path in (ROOT / "tests").rglob("*.py")
        for name in re.findall(r"pytest\.mark\.(\w+)", path.read_text(encoding="utf-8"))
    }

    assert used - registered - built_in - plugins == set()


def test_every_make_target_of_the_readme_exists_and_is_explained() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    explained = set(re.findall(r"^([a-z]+):.*## \S", makefile, flags=re.MULTILINE))
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    shown = set(re.findall(r"\bmake ([a-z]+)", "\n".join(code_of(readme))))

    assert {"demo", "test", "lab", "bench", "lint"} <= shown
    assert shown - explained == set()


def test_every_file_that_the_readme_links_to_exists() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    links = re.findall(r"\]\((?!https?://|#)([^)#\s]+)", readme)

    assert [link for link in links if not (ROOT / link).exists()] == []


def code_of(markdown: str) -> list[str]:
    """The fenced blocks and the `inline code` of a Markdown text."""
    fenced = re.findall(r"```.*?\n(.*?)```", markdown, flags=re.DOTALL)
    rest = re.sub(r"```.*?```", "", markdown, flags=re.DOTALL)
    return [*fenced, *re.findall(r"`([^`]+)`", rest)]
