"""Rules for the tests themselves: every skip has a reason, and no assertion limits elapsed time."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
FILES = sorted(TESTS.rglob("*.py"))

WALL_CLOCKS = {"monotonic", "monotonic_ns", "perf_counter", "perf_counter_ns", "time", "time_ns"}
"""Functions of ``time`` whose differences include the CPU time of other processes."""


def skips_without_a_reason(source: str) -> Iterator[int]:
    """Yield the lines of ``skip``, ``skipif`` and ``xfail`` without a reason."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and is_skip(node.func):
            kind = ast.unparse(node.func).rpartition(".")[2]
            given = [word.value for word in node.keywords if word.arg == "reason"]
            if kind == "skip":
                given += node.args[:1]
            if not given or (isinstance(given[0], ast.Constant) and not given[0].value):
                yield node.lineno
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield from (mark.lineno for mark in node.decorator_list if is_skip(mark))


def is_skip(node: ast.AST) -> bool:
    """Return whether a node is ``skip``, ``skipif`` or ``xfail`` of pytest."""
    if not isinstance(node, ast.Attribute) or node.attr not in ("skip", "skipif", "xfail"):
        return False
    return ast.unparse(node.value) in ("pytest", "pytest.mark")


def bounds_of_elapsed_time(source: str) -> Iterator[int]:
    """Yield the lines with an assertion that limits elapsed wall-clock time."""
    for function in ast.walk(ast.parse(source)):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        names = {
            target.id
            for node in ast.walk(function)
            if isinstance(node, ast.Assign) and is_elapsed(node.value)
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        for node in ast.walk(function):
            if isinstance(node, ast.Assert):
                parts = (part for part in ast.walk(node.test) if isinstance(part, ast.Compare))
                yield from (node.lineno for part in parts if is_bound(part, names))


def is_elapsed(node: ast.AST) -> bool:
    """Return whether a node is ``time.monotonic() - start``, with any wall clock."""
    return (
        isinstance(node, ast.BinOp)
        and isinstance(node.op, ast.Sub)
        and isinstance(node.left, ast.Call)
        and ast.unparse(node.left.func) in {f"time.{name}" for name in WALL_CLOCKS}
    )


def is_bound(compare: ast.Compare, names: set[str]) -> bool:
    """Return whether a comparison limits elapsed time, directly or through one of ``names``."""
    sides = [compare.left, *compare.comparators]
    for left, operator, right in zip(sides, compare.ops, sides[1:], strict=False):
        if isinstance(operator, ast.Lt | ast.LtE):
            less = left
        elif isinstance(operator, ast.Gt | ast.GtE):
            less = right
        else:
            continue
        if is_elapsed(less) or (isinstance(less, ast.Name) and less.id in names):
            return True
    return False


def places(check: object) -> list[str]:
    return [
        f"{path.relative_to(TESTS)}:{line}"
        for path in FILES
        for line in check(path.read_text(encoding="utf-8"))  # type: ignore[operator]
    ]


def test_every_skip_has_a_reason() -> None:
    assert places(skips_without_a_reason) == []


def test_no_assertion_limits_elapsed_time() -> None:
    """Shared machines are slow at times, so tests wait for an event with a long timeout.

    To test that an operation is cheap, measure CPU time (``time.process_time``) or count calls.
    """
    assert places(bounds_of_elapsed_time) == []


@pytest.mark.parametrize(
    "source",
    [
        "pytest.skip()",
        "pytest.skip('')",
        "@pytest.mark.skip\ndef test_it(): ...",
        "@pytest.mark.skip()\ndef test_it(): ...",
        "@pytest.mark.skipif(True)\ndef test_it(): ...",
        "@pytest.mark.xfail\ndef test_it(): ...",
    ],
)
def test_skip_without_a_reason_is_found(source: str) -> None:
    assert len(list(skips_without_a_reason(source))) == 1


@pytest.mark.parametrize(
    "source",
    [
        "pytest.skip('data: it is not here')",
        "pytest.skip(reason=why)",
        "@pytest.mark.skipif(True, reason=why)\ndef test_it(): ...",
    ],
)
def test_skip_with_a_reason_is_accepted(source: str) -> None:
    assert list(skips_without_a_reason(source)) == []


@pytest.mark.parametrize(
    "body",
    [
        "assert time.monotonic() - start < 2",
        "assert 2 >= time.time() - start",
        "took_s = time.perf_counter() - start\n    assert 0 < took_s < 2, 'slow'",
    ],
)
def test_limit_of_elapsed_time_is_found(body: str) -> None:
    assert len(list(bounds_of_elapsed_time(f"def test_it():\n    {body}"))) == 1


@pytest.mark.parametrize(
    "body",
    [
        "assert time.monotonic() < deadline, 'it did not happen'",
        "assert time.monotonic() - start >= 2",
        "assert time.process_time() - start < 2",
        "left_s = deadline - time.monotonic()\n    assert left_s > 0",
    ],
)
def test_timeouts_lower_limits_and_cpu_time_are_accepted(body: str) -> None:
    assert list(bounds_of_elapsed_time(f"def test_it():\n    {body}")) == []
