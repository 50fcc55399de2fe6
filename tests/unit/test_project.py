"""Repository-wide rules: clean files and notebooks, and a README without dead links."""

from __future__ import annotations

import re
import shutil
import subprocess
import tomllib
from itertools import chain
from pathlib import Path
from typing import Any

import nbformat
import pytest

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
MAX_CELLS = 14

# Split into parts, so that this file does not violate the rule that it checks.
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
    """Return every file that is tracked by git or would be added to it."""
    git = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    done = subprocess.run(git, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"platform: not a git checkout: {done.stderr.strip()}")
    return [ROOT / name for name in done.stdout.split("\0") if name and (ROOT / name).is_file()]


def lines_matching(pattern: re.Pattern[str]) -> list[str]:
    """Return ``file:line: text`` for every matching line of the project."""
    found = []
    for path in project_files():
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except UnicodeDecodeError:
            continue  # binary file
        found += [
            f"{path.relative_to(ROOT)}:{number}: {line[:120]}"
            for number, line in enumerate(lines, 1)
            if pattern.search(line)
        ]
    return found


def test_no_file_contains_a_machine_specific_path() -> None:
    assert lines_matching(MACHINE_PATH) == []


def test_no_file_contains_a_registry_host() -> None:
    assert lines_matching(REGISTRY_HOST) == []


@pytest.mark.parametrize("text", ["/{}/main/x.py", "open('/{}/.cache')"])
def test_machine_path_is_found(text: str) -> None:
    assert MACHINE_PATH.search(text.format("work")) is not None


def test_registry_host_is_found() -> None:
    assert REGISTRY_HOST.search("https://pypi.org/" + "simple/") is not None


@pytest.mark.parametrize("name", LOCK_FILES)
def test_lock_file_contains_no_urls(name: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")

    assert re.findall(r"\w+://\S*|^.* @ .*$", text, flags=re.MULTILINE) == []


def test_constraints_pin_every_direct_dependency() -> None:
    project = pyproject()["project"]
    extras = project["optional-dependencies"]
    del extras["bench"]  # the peers are not pinned
    wanted = {requirement_name(r) for r in chain(project["dependencies"], *extras.values())}
    wanted.remove(project["name"])  # an extra that includes other extras
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = {requirement_name(line) for line in lines if "==" in line}

    assert wanted - pinned == set()


@pytest.mark.parametrize(
    ("target", "extras"),
    [("demo", "demo"), ("lab", "lab,notebooks"), ("test", "test"), ("docs", "docs")],
)
def test_each_target_installs_only_what_it_needs(target: str, extras: str, tmp_path: Path) -> None:
    if shutil.which("make") is None:
        pytest.skip("platform: make is not installed")
    command = ["make", "--dry-run", target, f"VENV={tmp_path}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)

    assert set(re.findall(r'-e "\.\[(.*?)\]"', done.stdout)) == {extras}
    assert re.findall(r"pip install .*-c constraints.txt (\w+ \w+)$", done.stdout, re.M) == [
        "torch uv"
    ]


def requirement_name(requirement: str) -> str:
    """Return the normalized package name: ``types-PyYAML>=6`` gives ``types-pyyaml``."""
    name = re.split(r"[^A-Za-z0-9._-]", requirement, maxsplit=1)[0]
    return re.sub(r"[-_.]+", "-", name).lower()


def pyproject() -> dict[str, Any]:
    """Return the parsed ``pyproject.toml``."""
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

    assert ran == [], f"clear the outputs: jupyter nbconvert --clear-output --inplace {path.name}"
    assert len(notebook.cells) <= MAX_CELLS
    assert set(notebook.metadata) <= {"kernelspec", "language_info"}


def test_notebooks_are_found() -> None:
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


def test_every_make_target_in_the_readme_exists_and_has_a_help_text() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    explained = set(re.findall(r"^([a-z]+):.*## \S", makefile, flags=re.MULTILINE))
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    shown = set(re.findall(r"\bmake ([a-z]+)", "\n".join(code_of(readme))))

    assert {"demo", "test", "lab", "bench", "lint"} <= shown
    assert shown - explained == set()


def test_every_file_linked_from_the_readme_exists() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    links = re.findall(r"\]\((?!https?://|#)([^)#\s]+)", readme)

    assert [link for link in links if not (ROOT / link).exists()] == []


def code_of(markdown: str) -> list[str]:
    """Return the fenced blocks and the `inline code` of a Markdown text."""
    fenced = re.findall(r"```.*?\n(.*?)```", markdown, flags=re.DOTALL)
    rest = re.sub(r"```.*?```", "", markdown, flags=re.DOTALL)
    return [*fenced, *re.findall(r"`([^`]+)`", rest)]
