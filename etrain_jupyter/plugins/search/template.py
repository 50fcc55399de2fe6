"""Configuration of one trial: the cell with the values of the space inserted.

The scheduler builds it after the kernel may have ended, and never runs the notebook's code. An
expression such as ``Net(width=width)`` therefore becomes ``Net(width=64)``, which the trial's ranks
evaluate, and a value such as ``!py lr * 2`` is computed by arithmetic over numbers only.
"""

from __future__ import annotations

import ast
import copy
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from etrain_jupyter.config.cell import parse_section
from etrain_jupyter.config.references import import_path
from etrain_jupyter.config.schema import TrainConfig
from etrain_jupyter.errors import ConfigError
from etrain_jupyter.plugins.search.schema import Value

_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_UNARY: dict[type[ast.unaryop], Callable[[Any], Any]] = {
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
    ast.Not: operator.not_,
}
_COMPARE: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
FUNCTIONS: dict[str, Callable[..., Any]] = {
    function.__name__: function for function in (abs, bool, float, int, max, min, round, str)
}
"""Functions that a ``!py`` value with a name of the space may call."""

MAX_BITS = 4096
"""Limit for the bits of a power, which could otherwise need hours and all memory."""


class ArithmeticOnlyError(ValueError):
    """An expression contains more than arithmetic; the message names the part."""


@dataclass(frozen=True, kw_only=True)
class TrialTemplate:
    """The cell of a search, from which the configuration of each trial is built."""

    data: dict[str, Any]
    """The cell as plain data, with the values of one example trial."""
    names: tuple[str, ...]
    """Names of the space."""
    computed: dict[str, str] = field(default_factory=dict)
    """Arithmetic expressions by JSON pointer, such as ``/optimizer/lr``."""
    constants: dict[str, Any] = field(default_factory=dict)
    """Values of the notebook's names in ``computed``."""
    fixed: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Keys that the kernel has set for all trials, by group: ``checkpoint.to`` and ``log``."""

    def build(self, values: Mapping[str, Value]) -> TrainConfig:
        """Return the configuration of a trial.

        Raises:
            ConfigError: If it is not a valid one; the message has the key and the value.
        """
        data = copy.deepcopy(self.data)
        for pointer, expression in self.computed.items():
            *groups, key = (part_of(part) for part in pointer.split("/")[1:])
            group: Any = data
            for part in groups:
                group = group[part]
            try:
                group[key] = compute(expression, {**self.constants, **values})
            except (ArithmeticError, TypeError, ValueError) as exc:
                raise ConfigError(f"!py {expression} raised {type(exc).__name__}: {exc}") from exc
        config = parse_section(data, TrainConfig)
        dump = config.model_dump(mode="json")
        for key in config.references():
            *names, last = key.split(".", 1)
            group = dump[_GROUPS.get(names[0], names[0])] if names else dump
            if key == "optimizer":
                group, last = dump["optimizer"], "reference"
            group[last] = insert_values(group[last], values)
        for key, fixed in self.fixed.items():
            dump[key] = {**dump[key], **fixed}
        return TrainConfig.model_validate(dump)


_GROUPS = {"eval": "eval_every"}
"""Names of groups in the JSON form that differ from those of the cell."""


def pointer_of(path: tuple[str | int, ...]) -> str:
    """Return a path as JSON pointer.

    >>> pointer_of(("optimizer", "betas", 0))
    '/optimizer/betas/#0'
    """
    return "".join(f"/#{part}" if isinstance(part, int) else f"/{part}" for part in path)


def part_of(text: str) -> str | int:
    """Return a part of a pointer: a key, or the index of a list."""
    return int(text[1:]) if text.startswith("#") else text


def used_names(expression: str, names: tuple[str, ...]) -> set[str]:
    """Return the names of the space that an expression uses.

    >>> used_names("Net(width, depth=2)", ("width", "lr"))
    {'width'}
    """
    if import_path(expression):
        return set()
    try:
        tree = ast.parse(expression.strip(), mode="eval")
    except (SyntaxError, ValueError, RecursionError):
        return set()  # reported by ``check_references``
    return {n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and n.id in names}


def rebound_names(expression: str, names: tuple[str, ...]) -> set[str]:
    """Return the names of the space that an expression itself defines, as in ``lambda lr: lr``."""
    if not used_names(expression, names):
        return set()
    tree = ast.parse(expression.strip(), mode="eval")
    stored = {
        n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)
    }
    return (stored | {n.arg for n in ast.walk(tree) if isinstance(n, ast.arg)}) & set(names)


def insert_values(expression: str, values: Mapping[str, Value]) -> str:
    """Return an expression with the values of a trial in place of their names.

    >>> insert_values("Net(width=width)", {"width": 64, "lr": 0.1})
    'Net(width=64)'
    """
    if not used_names(expression, tuple(values)):
        return expression
    tree = ast.parse(expression.strip(), mode="eval")
    return ast.unparse(ast.fix_missing_locations(_Inserter(values).visit(tree)))


class _Inserter(ast.NodeTransformer):
    def __init__(self, values: Mapping[str, Value]) -> None:
        self._values = values

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(self._values[node.id]) if node.id in self._values else node


def compute(expression: str, values: Mapping[str, Any]) -> Any:
    """Return the value of an arithmetic expression, without running any other code.

    Raises:
        ArithmeticOnlyError: If it contains more than arithmetic.

    >>> compute("max(1, width // 2) if width > 1 else 0.5", {"width": 64})
    32
    """
    return _value_of(ast.parse(expression.strip(), mode="eval").body, values)


def _value_of(node: ast.expr, values: Mapping[str, Any]) -> Any:
    def value(part: ast.expr) -> Any:
        return _value_of(part, values)

    match node:
        case ast.Constant():
            return node.value
        case ast.Name() if node.id in values:
            return values[node.id]
        case ast.BinOp() if type(node.op) in _BINARY:
            return _apply(node.op, value(node.left), value(node.right))
        case ast.UnaryOp() if type(node.op) in _UNARY:
            return _UNARY[type(node.op)](value(node.operand))
        case ast.IfExp():
            return value(node.body if value(node.test) else node.orelse)
        case ast.Compare() if all(type(op) in _COMPARE for op in node.ops):
            terms = [value(term) for term in (node.left, *node.comparators)]
            pairs = zip(node.ops, terms, terms[1:], strict=False)
            return all(_COMPARE[type(op)](left, right) for op, left, right in pairs)
        case ast.List() | ast.Tuple():
            return [value(item) for item in node.elts]
        case ast.Call(func=ast.Name(id=name), keywords=[]) if name in FUNCTIONS:
            return FUNCTIONS[name](*[value(item) for item in node.args])
        case _:
            raise ArithmeticOnlyError(ast.unparse(node))


def _apply(op: ast.operator, left: Any, right: Any) -> Any:
    if isinstance(op, ast.Pow) and isinstance(left, int) and isinstance(right, int):
        if right * left.bit_length() > MAX_BITS:
            raise ValueError(f"{left} ** {right} is too large")
    # Repeating a text or a list could also use up all memory; adding two texts cannot.
    elif not isinstance(op, ast.Add) and {type(left), type(right)} & {str, list}:
        raise ArithmeticOnlyError("an operation on text or lists")
    return _BINARY[type(op)](left, right)
