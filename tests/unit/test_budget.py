"""The budgets in ``pyproject.toml``: lines of the core, the recipes, each plug-in and the tests.

Lower a budget in the commit that takes code out. A budget never goes up.
"""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "etrain_jupyter"
PLUGINS = PACKAGE / "plugins"
BUDGET = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["etrain"][
    "budget"
]
SLACK = 0.01
"""Share of a budget of lines that may be unused, so that it follows what was taken out."""


def count_lines(folder: Path) -> int:
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in folder.rglob("*.py"))


def lengths(*kinds: type[ast.ClassDef] | type[ast.FunctionDef]) -> Iterator[tuple[int, str]]:
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, kinds):
                name = f"{path.relative_to(PACKAGE)}:{node.name}"
                yield (node.end_lineno or node.lineno) - node.lineno + 1, name


def current_lines() -> dict[str, int]:
    plugins = {path.name: count_lines(path) for path in PLUGINS.iterdir() if path.is_dir()}
    plugins.pop("__pycache__", None)
    # Notebooks import the recipes; nothing else does, see ``test_architecture``.
    recipes = count_lines(PACKAGE / "recipes")
    core = count_lines(PACKAGE) - count_lines(PLUGINS) - recipes
    return {"core": core, "recipes": recipes, **plugins, "tests": count_lines(ROOT / "tests")}


@pytest.mark.parametrize("name", BUDGET["lines"])
def test_lines_are_within_the_budget_and_the_budget_follows_them(name: str) -> None:
    budget, lines = BUDGET["lines"][name], current_lines()[name]

    assert lines <= budget, f"{name} has {lines} lines: take out {lines - budget}"
    assert lines >= (1 - SLACK) * budget, f"lower the budget of {name} to {lines}"


def test_every_plug_in_has_a_budget() -> None:
    assert set(BUDGET["lines"]) == set(current_lines())


def test_classes_and_functions_are_within_the_budget() -> None:
    longest_class = max(lengths(ast.ClassDef))
    longest_function = max(lengths(ast.FunctionDef))

    assert longest_class[0] <= BUDGET["longest_class"], longest_class
    assert longest_function[0] <= BUDGET["longest_function"], longest_function
