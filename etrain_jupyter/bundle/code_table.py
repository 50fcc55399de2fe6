"""What a bundle's code says, apart from where it stands: to tell a resumed job what has changed.

A bundle's own digest differs from one kernel to the next, by the names under which cells are
compiled and by the order of sets. Here each function counts by the tree of its source (its
instructions depend on what else is in the cell: the compiler calls what it saw imported in another
way), the plain values that functions use by their text, and data by their bytes.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import json
import linecache
import textwrap
import tokenize
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import CodeType, FunctionType
from typing import Any

from etrain_jupyter.bundle.sources import CellSource

MAX_SHOWN = 80
_PLAIN = (bool, int, float, complex, str, bytes, type(None))


@dataclass(frozen=True, kw_only=True)
class CodeTable:
    """The code of one bundle."""

    functions: Mapping[str, Mapping[str, Any]]
    """By qualified name: ``digest``, and the ``file`` and ``line`` where it is defined."""
    values: Mapping[str, str]
    """Plain values that functions and references use, by name, as Python writes them."""
    data: Mapping[str, str]
    """Digests of the captured data that are no code, by name."""

    @property
    def digest(self) -> str:
        """SHA-256 of all of it; equal for equal code, whichever kernel captured it."""
        functions = {name: entry["digest"] for name, entry in self.functions.items()}
        text = json.dumps([functions, dict(self.values), dict(self.data)], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {"functions": self.functions, "values": self.values, "data": self.data}


@dataclass(frozen=True, kw_only=True)
class CodeChange:
    """One thing that two bundles have different."""

    name: str
    """``Net.forward``, ``HIDDEN``, ``train_set``."""
    kind: str
    """``code``, ``value`` or ``data``."""
    where: str
    """The cell or file that defines it now; empty if that is not known."""
    old: str
    new: str


def tabulate(
    codes: Iterable[CodeType],
    functions: Iterable[FunctionType],
    classes: Iterable[type],
    names: Mapping[str, Any],
    data: Mapping[str, str],
) -> CodeTable:
    """Describe what a pickler has met.

    Args:
        codes: The code that travels by value.
        functions: Functions that it met, by value or not.
        classes: Classes that travel by value.
        names: What the references name themselves.
        data: Digests of data by name.
    """
    known = list(dict.fromkeys(codes))
    inner = {part for code in known for part in _nested(code) if part is not code}
    outer = [code for code in known if code not in inner]
    digests: dict[str, list[str]] = {}
    table: dict[str, dict[str, Any]] = {}
    for code in outer:
        digests.setdefault(code.co_qualname, []).append(digest_of_function(code))
        place = {"file": code.co_filename, "line": code.co_firstlineno}
        table.setdefault(code.co_qualname, place)
    for name, found in digests.items():
        table[name]["digest"] = hashlib.sha256("".join(sorted(found)).encode()).hexdigest()
    values = {name: text for name, value in names.items() if (text := _plain_text(value))}
    by_value = set(known)
    for function in functions:
        if function.__code__ in by_value:
            values |= dict(_values_of(function))
    for owner in classes:
        values |= {
            f"{owner.__qualname__}.{name}": text
            for name, value in vars(owner).items()
            if not name.startswith("__") and (text := _plain_text(value))
        }
    return CodeTable(functions=table, values=values, data=data)


def digest_of_function(code: CodeType) -> str:
    """Return the SHA-256 of a function's source without its layout, else of its instructions."""
    lines = linecache.getlines(code.co_filename)[code.co_firstlineno - 1 :]
    if not lines:  # typed nowhere: made by exec
        return digest_of_code(code)
    try:
        text = textwrap.dedent("".join(inspect.getblock(lines)))
        return hashlib.sha256(ast.dump(ast.parse(text)).encode()).hexdigest()
    except (SyntaxError, IndexError, tokenize.TokenError):  # a lambda within a larger expression
        return digest_of_code(code)


def digest_of_code(code: CodeType) -> str:
    """Return the SHA-256 of a function's instructions; where it stands does not count."""
    digest = hashlib.sha256()
    digest.update(code.co_code)
    shape = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags)
    names = (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)
    digest.update(repr((code.co_name, shape, names)).encode())
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            digest.update(digest_of_code(constant).encode())
        else:
            digest.update(_constant_text(constant).encode())
    return digest.hexdigest()


def compare_code(
    old: CodeTable, new: CodeTable, cells: tuple[Mapping[str, CellSource], ...]
) -> list[CodeChange]:
    """Return what differs, functions first; ``cells`` are the texts of the old and the new one."""
    changes = []
    for name in _in_order(old.functions, new.functions):
        was, is_now = old.functions.get(name), new.functions.get(name)
        if was and is_now and was["digest"] == is_now["digest"]:
            continue
        lines = _first_difference(_source(was, cells[0]), _source(is_now, cells[1]))
        place = is_now or was or {}
        cell = cells[1 if is_now else 0].get(str(place.get("file")))
        shown = [
            text if entry else "(not there)"
            for text, entry in zip(lines, (was, is_now), strict=True)
        ]
        where = cell.label if cell else ""
        changes.append(CodeChange(name=name, kind="code", where=where, old=shown[0], new=shown[1]))
    for name in _in_order(old.values, new.values):
        texts = [table.values.get(name, "(not there)") for table in (old, new)]
        if texts[0] != texts[1]:
            short = [_short(text) for text in texts]
            changes.append(
                CodeChange(name=name, kind="value", where="", old=short[0], new=short[1])
            )
    for name in _in_order(old.data, new.data):
        texts = [table.data.get(name, "") for table in (old, new)]
        if texts[0] != texts[1]:
            words = [text[:12] if text else "(not there)" for text in texts]
            changes.append(CodeChange(name=name, kind="data", where="", old=words[0], new=words[1]))
    return changes


def _in_order(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    return list(dict.fromkeys([*new, *old]))


def _nested(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _nested(constant)


def _values_of(function: FunctionType) -> Iterator[tuple[str, str]]:
    """Yield the plain values that a function takes from outside of itself."""
    used = {name for code in _nested(function.__code__) for name in code.co_names}
    for name in sorted(used & function.__globals__.keys()):
        if text := _plain_text(function.__globals__[name]):
            yield name, text
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            text = _plain_text(cell.cell_contents)
        except ValueError:  # not filled yet
            continue
        if text:
            yield f"{function.__qualname__}.{name}", text
    defaults = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).items()]
    if defaults and (text := _plain_text(defaults)):
        yield f"the defaults of {function.__qualname__}", text


def _plain_text(value: Any) -> str:
    """Return a plain value as Python writes it; empty for anything else."""
    if isinstance(value, _PLAIN):
        return repr(value)
    if type(value) in (tuple, list, set, frozenset):
        parts = [_plain_text(item) for item in value]
        if type(value) in (set, frozenset):
            parts.sort()
        return f"{type(value).__name__}({', '.join(parts)})" if all(parts) else ""
    if type(value) is dict:
        pairs = [(_plain_text(key), _plain_text(item)) for key, item in value.items()]
        whole = all(key and item for key, item in pairs)
        return "{" + ", ".join(f"{key}: {item}" for key, item in pairs) + "}" if whole else ""
    return ""


def _constant_text(constant: Any) -> str:
    return _plain_text(constant) or f"{type(constant).__name__} {constant!r}"


def _source(entry: Mapping[str, Any] | None, cells: Mapping[str, CellSource]) -> Sequence[str]:
    """Return the lines of a function, without what stands around it; none if they are not known."""
    cell = cells.get(str(entry["file"])) if entry else None
    if entry is None or cell is None:
        return ()
    lines = cell.text.splitlines(keepends=True)[int(entry["line"]) - 1 :]
    try:
        return [line.strip() for line in inspect.getblock(lines) if line.strip()]
    except (SyntaxError, IndexError, tokenize.TokenError):
        return ()


def _first_difference(old: Sequence[str], new: Sequence[str]) -> tuple[str, str]:
    """Return the first lines that differ; they may be equal if only something around them does."""
    length = max(len(old), len(new))
    for place in range(length):
        pair = [lines[place] if place < len(lines) else "(no line)" for lines in (old, new)]
        if pair[0] != pair[1]:
            return _short(pair[0]), _short(pair[1])
    return "other code", "this code"


def _short(text: str) -> str:
    return text if len(text) <= MAX_SHOWN else text[: MAX_SHOWN - 3] + "..."
