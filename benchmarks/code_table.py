"""Table of a package's code: sizes, comments, imports and error texts, computed from its source.

The rules are those of the reviews that compare this package with others, so figures of different
versions and projects are comparable:

- The lines of a module are all lines of its file. The lines of a function run from ``def`` to its
  end, including its docstring and excluding its decorators. Methods and nested functions count.
- Comments are counted in comment tokens. Docstrings are counted in lines, including the docstrings
  of fields and constants. Both are given as a share of the non-blank lines.
- Two-way imports are pairs of top-level units (packages and modules) that import each other.
- A circle is a strongly connected set of at least two files. Imports inside functions and under
  ``TYPE_CHECKING`` count. The imports of the package's own ``__init__.py`` do not: it contains only
  the version and the public names.
- An error text is the text of a ``raise`` statement. It has a value if it formats one. It has a
  remedy if it contains a word of ``REMEDIES``, which is an estimate; to check it, read a random
  sample (``--errors``).

``--sentences`` draws a random sample of sentences from docstrings, comments, error texts and
documentation.
"""

from __future__ import annotations

import argparse
import ast
import io
import statistics
import tokenize
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from benchmarks.code_samples import (
    Text,
    draw,
    error_texts,
    has_remedy,
    has_value,
    is_docstring,
    sentences,
)
from benchmarks.common import report

Graph = Mapping[str, set[str]]
"""The units that each unit imports, by name."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command-line options."""
    package = Path(__file__).parents[1] / "etrain_jupyter"
    parser.add_argument("--package", type=Path, default=package, help="folder of the package")
    parser.add_argument("--sentences", type=int, default=0, help="number of sentences to draw")
    parser.add_argument("--errors", type=int, default=0, help="number of error texts to draw")
    parser.add_argument("--seed", type=int, default=15, help="seed of both samples")


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Compute all figures and draw the samples."""
    package = options.package.resolve()
    modules = read_package(package)
    shipped = [module for module in modules if ".testing" not in module.name]
    return {
        "benchmark": "code",
        "all": figures(modules),
        "without testing": figures(shipped),
        "packages": weights(modules),
        "circles": circles(imports_of(modules)),
        "sentences": draw(sentences(package), options.sentences, options.seed),
        "errors": draw(
            [text for module in shipped for text in error_texts(module.path, package.parent)],
            options.errors,
            options.seed,
        ),
    }


def table_of(result: Mapping[str, Any]) -> str:
    """Format the figures as Markdown, followed by the samples."""
    columns = ["all", "without testing"]
    rows = [[key, *(result[column][key] for column in columns)] for key in result["all"]]
    weights_table = report.table(
        ["package", "modules", "lines"],
        [[name, str(count), f"{lines:,}"] for name, count, lines in result["packages"]],
    )
    found = [f"- {' '.join(circle)}" for circle in result["circles"]] or ["- none"]
    parts = [report.table(["", *columns], rows), "Circles of files:", "\n".join(found)]
    parts.append(weights_table)
    for kind in ("sentences", "errors"):
        if drawn := result[kind]:
            parts.append(f"{len(drawn)} {kind} drawn at random:")
            parts.append(
                "\n".join(f"{one['where']} [{one['kind']}] {one['text']}" for one in drawn)
            )
    return "\n\n".join(parts)


# --- modules --------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Module:
    """One source file."""

    name: str
    """Dotted name; for an ``__init__.py``, the name of its package."""
    path: Path
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        """Syntax tree of the module."""
        return ast.parse(self.text)

    @property
    def num_lines(self) -> int:
        """Number of lines, including blank lines."""
        return len(self.text.splitlines())

    @property
    def is_package(self) -> bool:
        """Whether the file is an ``__init__.py``."""
        return self.path.name == "__init__.py"


def read_package(package: Path) -> list[Module]:
    """Read all modules in a folder and its subfolders, sorted by name."""
    modules = []
    for path in package.rglob("*.py"):
        parts = path.relative_to(package.parent).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        modules.append(Module(name=name, path=path, text=path.read_text(encoding="utf-8")))
    return sorted(modules, key=lambda module: module.name)


def figures(modules: list[Module]) -> dict[str, str]:
    """Return the rows of the table for the given modules."""
    sizes = [module.num_lines for module in modules]
    functions = [size for module in modules for size in function_sizes(module.tree)]
    full = sum(bool(line.strip()) for module in modules for line in module.text.splitlines())
    num_comments = sum(count_comments(module.text) for module in modules)
    num_docstrings = sum(count_docstring_lines(module) for module in modules)
    texts = [text for module in modules for text in error_texts(module.path, module.path.parent)]
    graph = imports_of(modules)
    return {
        "packages": str(sum(module.is_package for module in modules)),
        "modules": f"{len(modules):,}",
        "lines (not blank)": f"{sum(sizes):,} ({full:,})",
        "functions": f"{len(functions):,}",
        "module lines: median/p90/max": spread(sizes, 0.9),
        "function lines: median/p95/max": spread(functions, 0.95),
        "comment %": f"{num_comments / full:.1%}",
        "docstring %": f"{num_docstrings / full:.1%}",
        "two-way imports": str(len(two_way(graph))),
        "circles of files": str(len(circles(graph))),
        "errors": f"{len(texts):,}",
        "errors: value/remedy %": f"{share(texts, has_value)}/{share(texts, has_remedy)}",
    }


def spread(values: list[int], high: float) -> str:
    """Format the median, a high percentile and the maximum."""
    percentile = report.percentile([float(value) for value in values], high)
    return f"{statistics.median(values):.0f}/{percentile:.0f}/{max(values)}"


def share(texts: list[Text], has: Callable[[Text], bool]) -> str:
    """Return the percentage of texts for which ``has`` is true."""
    return f"{sum(map(has, texts)) / max(1, len(texts)):.0%}".rstrip("%")


def function_sizes(tree: ast.Module) -> Iterator[int]:
    """Yield the number of lines of every function."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield (node.end_lineno or node.lineno) - node.lineno + 1


def count_comments(text: str) -> int:
    """Return the number of comment tokens."""
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return sum(token.type == tokenize.COMMENT for token in tokens)


def count_docstring_lines(module: Module) -> int:
    """Return the number of non-blank lines in a module's docstrings."""
    lines = module.text.splitlines()
    total = 0
    for node in ast.walk(module.tree):
        if is_docstring(node):
            total += sum(bool(line.strip()) for line in lines[node.lineno - 1 : node.end_lineno])
    return total


def weights(modules: list[Module]) -> list[tuple[str, int, int]]:
    """Return name, module count and line count of each top-level unit, largest first."""
    counts: dict[str, list[int]] = defaultdict(list)
    for module in modules:
        is_file = module.name.count(".") < 2 and not module.is_package
        unit = "(top-level files)" if is_file or "." not in module.name else unit_of(module.name)
        counts[unit].append(module.num_lines)
    rows = [(name, len(sizes), sum(sizes)) for name, sizes in counts.items()]
    return sorted(rows, key=lambda row: -row[2])


def unit_of(name: str) -> str:
    """Return the top-level unit of a module: the part after the package's name.

    >>> unit_of("etrain_jupyter.pools.local")
    'pools'
    """
    return name.partition(".")[2].partition(".")[0] or name


# --- imports --------------------------------------------------------------------------------------


def imports_of(modules: list[Module]) -> Graph:
    """Return which of the given modules each module imports, anywhere in its file.

    The package's own ``__init__.py`` is excluded.
    """
    names = {module.name for module in modules if "." in module.name}
    graph: dict[str, set[str]] = {}
    for module in modules:
        if module.name not in names:
            continue
        targets = set()
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Import):
                targets |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                for alias in node.names:
                    inner = f"{node.module}.{alias.name}"
                    targets.add(inner if inner in names else node.module)
        graph[module.name] = targets & names - {module.name}
    return graph


def two_way(graph: Graph) -> list[tuple[str, str]]:
    """Return the pairs of top-level units that import each other."""
    arrows = {
        (unit_of(source), unit_of(target))
        for source, targets in graph.items()
        for target in targets
    }
    return sorted((a, b) for a, b in arrows if a < b and (b, a) in arrows)


def circles(graph: Graph) -> list[list[str]]:
    """Return the strongly connected components of at least two modules (Tarjan's algorithm)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for target in sorted(graph[name]):
            if target not in index:
                visit(target)
                low[name] = min(low[name], low[target])
            elif target in stack:
                low[name] = min(low[name], index[target])
        if low[name] == index[name]:
            first = stack.index(name)
            component = sorted(stack[first:])
            del stack[first:]
            if len(component) > 1:
                found.append(component)

    for name in graph:
        if name not in index:
            visit(name)
    return sorted(found)
