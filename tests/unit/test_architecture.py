"""The structure of the package: who may import whom, and how long a function may be.

Every import counts, also one inside a function or under ``TYPE_CHECKING``: a lazy import hides a
dependency from the start-up time, not from the reader.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = "etrain_jupyter"
ROOT = Path(__file__).parents[2] / PACKAGE
MODULES = sorted(ROOT.rglob("*.py"))

# The floors of the README's picture. A package imports from lower floors, never from a higher
# one; from its own floor only where it says so below.
FLOORS = (
    # Nothing imports the recipes, so the core works without them.
    {"magics", "cli", "api", "__main__", "__init__", "recipes"},
    {"plugins"},
    {"launch"},
    {"notebook"},
    {"insight"},
    {"pools"},
    {"head", "worker", "trainer"},
    {"rules", "wire", "storage", "log", "config", "bundle", "data", "display", "process"},
    {"errors", "untrusted", "plugin"},
)
# The processes never import each other: they exchange messages, which `wire` defines.
# The ground floor's packages may use each other, as long as none of them closes a circle.
SHARE_A_FLOOR = FLOORS[7]
# For tests only: nothing of the package imports it, and it imports what it needs.
SHIPPED_TEST_HELPERS = "testing"

# Library -> prefixes of the modules (relative to the package) that may import it.
CONFINED: dict[str, tuple[str, ...]] = {
    "torch": ("trainer", "recipes"),
    "pyarrow": ("data",),
    "boto3": ("plugins.ec2", "storage.objects"),
    "botocore": ("plugins.ec2", "storage.objects"),
    "IPython": ("magics", "launch", "__init__", "notebook.editor"),
    "anywidget": ("notebook.dashboard",),
    "ipywidgets": ("notebook.dashboard",),
    "distributed": ("head", "worker", "pools", "plugins", "notebook.job", "process"),
    "optuna": ("plugins.search",),
    "mlflow": ("plugins.trackers",),
    "wandb": ("plugins.trackers",),
}

# The core knows no plug-in, not even by name. A plug-in may use another one only as listed here.
PLUGINS = "plugins"
USES = {"plugins.planner": "plugins.ec2"}
PLUGIN_WORDS = re.compile(r"ec2|(?<!r)aws(?!k)|slurm|boto3|optuna|mlflow|wandb", re.IGNORECASE)
# Modules of the core that still contain such words; the list only becomes shorter.
STILL_NAMED = (
    # S3, whose client is boto3
    "storage.objects", "storage.bucket_log.objects", "storage.checkpoints", "config.store_url",
    "data.places", "testing.s3_server",
    "config.schema",  # loggers in the help of log.to
    "process.state_root",  # environment variables that a local pool's workers inherit
    "testing.fakeaws",  # for notebooks, which import the simulator from here
)  # fmt: skip

# What may be imported without loading the heavy libraries named here.
HEAVY = ("torch", "IPython", "distributed", "boto3", "anywidget", "optuna", "pandas", "pyarrow")
LIGHT_IMPORTS: dict[str, tuple[str, ...]] = {
    PACKAGE: HEAVY,
    f"{PACKAGE}.cli": ("torch", "IPython", "boto3", "anywidget", "pandas"),
    f"{PACKAGE}.config": HEAVY,
    f"{PACKAGE}.data": HEAVY,
    f"{PACKAGE}.recipes": HEAVY,
    f"{PACKAGE}.insight.comparison": (*HEAVY, "matplotlib"),
    f"{PACKAGE}.rules.membership.state_machine": HEAVY,
    f"{PACKAGE}.log.events": HEAVY,
    f"{PACKAGE}.notebook.dashboard": ("torch", "distributed", "boto3"),
    f"{PACKAGE}.launch": ("torch", "boto3"),
    f"{PACKAGE}.head.coordinator.coordinator": ("torch", "IPython", "boto3", "anywidget", "optuna"),
    f"{PACKAGE}.worker.supervisor": ("torch", "IPython", "boto3", "anywidget"),
}

# Where a function that does not fit on a screen is an error; elsewhere it only asks a question.
ENGINE = ("rules", "head", "worker", "trainer")
MAX_LINES = 60


def module_name(path: Path) -> str:
    """``notebook/job/link.py`` -> ``notebook.job.link``; a package is called like its folder."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if len(parts) > 1 and parts[-1] == "__init__" else parts)


NAMES = {module_name(path) for path in MODULES}


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
    """Return whether this is ``import_module(...)`` or ``importlib.import_module(...)``."""
    if not isinstance(node, ast.Call):
        return False
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    return name == "import_module"


def floor_of(package: str) -> int:
    """Return the floor of a package, 0 at the top."""
    for number, floor in enumerate(FLOORS):
        if package in floor:
            return number
    raise AssertionError(f"{package} is on no floor: add it to FLOORS and to the README's picture")


def broken_rules(name: str, imported: str) -> Iterator[str]:
    """Say which rule one import of the module ``name`` breaks, if any."""
    own = name.split(".")[0]
    head, *rest = imported.split(".")
    if head in CONFINED and not name.startswith(CONFINED[head]):
        yield f"{name} imports {imported}: {head} belongs to {', '.join(CONFINED[head])}"
    # A name that is no module is public, as in `from etrain_jupyter import __version__`.
    if imported.startswith(f"{PACKAGE}.{PLUGINS}."):
        mine = ".".join(name.split(".")[:2])
        theirs = ".".join(imported.split(".")[1:3])
        if name != "testing.fakeaws" and theirs not in (mine, USES.get(mine)):
            yield f"{name} imports {imported}: only the plug-in itself may"
        return
    if head != PACKAGE or own == SHIPPED_TEST_HELPERS or not rest or rest[0] not in TOP:
        return
    package = rest[0]
    if package == own or (own == "__init__" and package in ("magics", "api")):
        return  # IPython looks for the extension's loader in the package itself
    if package == SHIPPED_TEST_HELPERS and ".simulator." in name:
        return
    if {own, package} <= SHARE_A_FLOOR:
        return
    if package == SHIPPED_TEST_HELPERS or floor_of(package) <= floor_of(own):
        yield f"{name} imports {imported}: {package} is not on a floor below {own}"


TOP = {name.split(".")[0] for name in NAMES}


@pytest.mark.parametrize("path", MODULES, ids=module_name)
def test_module_imports_only_from_lower_layers(path: Path) -> None:
    name = module_name(path)

    broken = [rule for imported in imported_names(path) for rule in broken_rules(name, imported)]

    assert broken == []


@pytest.mark.parametrize("path", MODULES, ids=module_name)
def test_core_contains_no_word_of_a_plug_in(path: Path) -> None:
    name = module_name(path)
    is_plugin = name.split(".")[0] == PLUGINS

    words = set() if is_plugin else set(PLUGIN_WORDS.findall(path.read_text(encoding="utf-8")))

    assert not words or name.startswith(STILL_NAMED)


def test_list_of_modules_with_words_of_plug_ins_is_not_too_long() -> None:
    texts = {module_name(path): path.read_text(encoding="utf-8") for path in MODULES}

    assert [
        prefix
        for prefix in STILL_NAMED
        if not any(n.startswith(prefix) and PLUGIN_WORDS.search(t) for n, t in texts.items())
    ] == []


@pytest.mark.parametrize(
    ("name", "imported"),
    [
        ("pools.registry", f"{PACKAGE}.plugins.slurm.pool"),
        ("plugins.slurm.pool", f"{PACKAGE}.plugins.ec2.spec"),
        ("rules.samples.ledger", f"{PACKAGE}.head.coordinator.coordinator"),
        ("head.main", f"{PACKAGE}.worker.supervisor"),
        ("worker.supervisor", f"{PACKAGE}.trainer.main"),
        ("log.event_log", f"{PACKAGE}.pools.base"),
        ("notebook.job.link", f"{PACKAGE}.launch"),
        ("launch", f"{PACKAGE}.recipes.squad"),
        ("magics", f"{PACKAGE}.recipes.probe"),
        ("notebook.job.link", f"{PACKAGE}.testing"),
        ("head.coordinator.coordinator", "torch.distributed"),
        ("notebook.job.link", "IPython.display"),
        ("storage.checkpoints.local", "boto3"),
    ],
)
def test_forbidden_import_is_detected(name: str, imported: str) -> None:
    assert list(broken_rules(name, imported)) != []


def circles(arrows: dict[str, set[str]]) -> list[list[str]]:
    """Return the strongly connected components of more than one module, by Tarjan's algorithm."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(module: str) -> None:
        index[module] = low[module] = len(index)
        stack.append(module)
        for other in arrows[module]:
            if other not in index:
                visit(other)
                low[module] = min(low[module], low[other])
            elif other in stack:
                low[module] = min(low[module], index[other])
        if low[module] == index[module]:
            circle = [stack.pop()]
            while circle[-1] != module:
                circle.append(stack.pop())
            if len(circle) > 1:
                found.append(sorted(circle))

    for module in arrows:
        if module not in index:
            visit(module)
    return found


def module_arrows() -> dict[str, set[str]]:
    """Return which modules of the package each one imports.

    The package itself is left out: its names are loaded when they are first used.
    """
    arrows: dict[str, set[str]] = {}
    for path in MODULES:
        module = module_name(path)
        arrows[module] = set()
        for imported in imported_names(path):
            target = imported.removeprefix(f"{PACKAGE}.")
            while target and target not in NAMES:
                target = target.rpartition(".")[0]
            if target not in ("", module):
                arrows[module].add(target)
    return arrows


KNOWN_CIRCLES: list[list[str]] = []
"""Circles that are still to be broken; never add one."""


def test_there_are_no_unknown_import_cycles() -> None:
    assert [found for found in circles(module_arrows()) if found not in KNOWN_CIRCLES] == []


def test_import_cycle_is_detected() -> None:
    arrows = {"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}

    assert circles(arrows) == [["b", "c"]]


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


def test_long_function_is_detected() -> None:
    body = "    x = 1\n" * (MAX_LINES - 1)

    assert list(long_functions(f"def fits():\n{body}")) == []
    assert list(long_functions(f"class A:\n  async def f():\n{body}    pass\n")) == [
        f"f in line 2 has {MAX_LINES + 1} lines"
    ]
