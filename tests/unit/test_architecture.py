"""The rules of structure, as tests: who may import whom, and how long a function may be.

Every import counts, also one inside a function or under ``TYPE_CHECKING``: a lazy import hides a
dependency from the start-up time, not from the reader.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = "etrain_jupyter"
ROOT = Path(__file__).parents[2] / PACKAGE
MODULES = sorted(ROOT.rglob("*.py"))

# Read it from top (surface) to bottom (words).
# A package imports those below its own line, never its neighbours.
LAYERS: tuple[frozenset[str], ...] = (
    frozenset({"__main__"}),
    frozenset({"magics", "cli"}),
    frozenset({"editor"}),
    frozenset({"subcommands"}),
    frozenset({"__init__"}),
    frozenset({"launch", "doctor", "command_line", "log_lines", "nlp", "insight"}),
    frozenset({"surroundings"}),
    frozenset({"job", "dashboard"}),
    frozenset({"pools"}),
    frozenset({"cluster"}),
    frozenset({"node"}),
    frozenset({"ranks"}),
    frozenset({"runs"}),
    frozenset({"bundle", "checkpoints", "elastic"}),
    frozenset({"events", "config"}),
    frozenset({"errors", "__version__"}),
    frozenset({"untrusted"}),
)
# Stricter than its layer.
ONLY: dict[str, frozenset[str]] = {
    "dashboard": frozenset({"events", "config", "errors", "__version__", "untrusted"}),
}
# IPython looks for the extension's loader in the package itself.
ALSO: dict[str, frozenset[str]] = {"__init__": frozenset({"magics"})}

# Library -> prefixes of the modules (relative to the package) that may import it.
CONFINED: dict[str, tuple[str, ...]] = {
    "torch": ("ranks", "nlp"),
    "boto3": ("pools.aws_spot", "checkpoints.s3"),
    "botocore": ("pools.aws_spot", "checkpoints.s3"),
    "IPython": ("magics", "launch", "__init__", "editor.facts", "editor.hooks"),
    "anywidget": ("dashboard",),
    "ipywidgets": ("dashboard",),
    "distributed": ("cluster", "pools", "job"),
}

# What may be imported without loading the heavy libraries named beside it.
HEAVY = ("torch", "IPython", "distributed", "boto3", "anywidget", "pandas")
LIGHT_IMPORTS: dict[str, tuple[str, ...]] = {
    PACKAGE: HEAVY,
    f"{PACKAGE}.cli": ("torch", "IPython", "boto3", "anywidget", "pandas"),
    f"{PACKAGE}.config": HEAVY,
    f"{PACKAGE}.elastic": HEAVY,
    f"{PACKAGE}.events": HEAVY,
    f"{PACKAGE}.dashboard": ("torch", "distributed", "boto3"),
    f"{PACKAGE}.launch": ("torch", "boto3"),
    f"{PACKAGE}.cluster.coordinator": ("torch", "IPython", "boto3", "anywidget"),
    f"{PACKAGE}.cluster.supervisor": ("torch", "IPython", "boto3", "anywidget"),
}

# Where a function that does not fit on a screen is an error; elsewhere it only asks a question.
ENGINE = ("elastic", "cluster", "ranks")
MAX_LINES = 60


def module_name(path: Path) -> str:
    """``job/run_store.py`` -> ``job.run_store``; a package is called like its folder."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if len(parts) > 1 and parts[-1] == "__init__" else parts)


def imported_names(path: Path) -> Iterator[str]:
    """Yield the dotted names that a module imports anywhere in its text."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: write the import in full, without dots"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif is_import_call(node):
            assert isinstance(node, ast.Call)
            yield from (
                arg.value
                for arg in node.args
                if isinstance(arg, ast.Constant) and isinstance(arg.value, str)
            )


def is_import_call(node: ast.AST) -> bool:
    """Tell whether this is ``import_module(...)`` or ``importlib.import_module(...)``."""
    if not isinstance(node, ast.Call):
        return False
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    return name == "import_module"


def layer_of(package: str) -> int:
    """Place of a package in ``LAYERS``, 0 at the top."""
    for place, layer in enumerate(LAYERS):
        if package in layer:
            return place
    raise AssertionError(f"{package} has no place in LAYERS: give it one, and say so in the README")


def may_import(package: str) -> frozenset[str]:
    """The packages that this one may import."""
    below = frozenset().union(*LAYERS[layer_of(package) + 1 :])
    return ONLY.get(package, below) | ALSO.get(package, frozenset()) | {package}


def broken_rules(name: str, imported: str) -> Iterator[str]:
    """Say what is wrong with one import of the module ``name``, if anything is."""
    own = name.split(".")[0]
    head, *rest = imported.split(".")
    if head == PACKAGE and own != "testing":
        known = {package for layer in LAYERS for package in layer} | {"testing"}
        # What is no module is a public name, as in `from etrain_jupyter import distributed`; the
        # bare package tells its folder and its version.
        target = "__version__" if not rest else rest[0] if rest[0] in known else "__init__"
        if target not in may_import(own):
            yield f"{name} imports {imported}: {own} may import {sorted(may_import(own))}"
    elif head in CONFINED and not name.startswith(CONFINED[head]):
        yield f"{name} imports {imported}: {head} belongs to {', '.join(CONFINED[head])}"


@pytest.mark.parametrize("path", MODULES, ids=module_name)
def test_module_imports_only_what_its_package_may(path: Path) -> None:
    name = module_name(path)

    broken = [rule for imported in imported_names(path) for rule in broken_rules(name, imported)]

    assert broken == []


@pytest.mark.parametrize(
    ("name", "imported"),
    [
        ("elastic.ledger", f"{PACKAGE}.cluster.coordinator"),
        ("events.log", f"{PACKAGE}.config.schema"),
        ("dashboard.widget", f"{PACKAGE}.job"),
        ("job.handle", f"{PACKAGE}.testing"),
        ("cluster.coordinator", "torch.distributed"),
        ("job.handle", "IPython.display"),
        ("checkpoints.local", "boto3"),
    ],
)
def test_a_forbidden_import_is_seen(name: str, imported: str) -> None:
    assert list(broken_rules(name, imported)) != []


@pytest.mark.parametrize("module", LIGHT_IMPORTS)
def test_importing_loads_no_heavy_library(module: str) -> None:
    heavy = LIGHT_IMPORTS[module]
    code = f"import sys, {module}; print(*sorted(set({heavy!r}) & set(sys.modules)))"

    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT.parent
    )

    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []


def long_functions(text: str) -> Iterator[str]:
    """Name the functions of a module that take more than ``MAX_LINES``, ``def`` to last line."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            num_lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if num_lines > MAX_LINES:
                yield f"{node.name} in line {node.lineno} has {num_lines} lines"


@pytest.mark.parametrize(
    "path", [p for p in MODULES if p.relative_to(ROOT).parts[0] in ENGINE], ids=module_name
)
def test_function_of_the_engine_fits_on_a_screen(path: Path) -> None:
    assert list(long_functions(path.read_text(encoding="utf-8"))) == []


def test_a_long_function_is_seen() -> None:
    body = "    x = 1\n" * (MAX_LINES - 1)

    assert list(long_functions(f"def fits():\n{body}")) == []
    assert list(long_functions(f"class A:\n  async def f():\n{body}    pass\n")) == [
        f"f in line 2 has {MAX_LINES + 1} lines"
    ]
