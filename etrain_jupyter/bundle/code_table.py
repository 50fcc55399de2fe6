"""Fingerprints of a bundle's code, to report what changed when a job is resumed.

The digest of the whole bundle differs between kernels: it contains the file names of compiled cells
and depends on the order of sets. The table compares parts instead:

=================  =====================================================================
functions          by the syntax tree of their source. Bytecode would differ with the rest
                   of the cell: imported names compile to different calls.
plain values       by their ``repr``: constants that functions and references use
data               by the digest of their bytes
=================  =====================================================================
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
"""Maximum length of a line or value in a difference, in characters."""
_MISSING = "(missing)"
_PLAIN = (bool, int, float, complex, str, bytes, type(None))


@dataclass(frozen=True, kw_only=True)
class CodeTable:
    """Fingerprints of the code, values and data of one bundle."""

    functions: Mapping[str, Mapping[str, Any]]
    """By qualified name: ``digest``, and the ``file`` and ``line`` of the definition."""
    values: Mapping[str, str]
    """``repr`` of the plain values that functions and references use, by name."""
    data: Mapping[str, str]
    """Digests of captured data, by name."""

    @property
    def digest(self) -> str:
        """SHA-256 of the table; equal for equal code, regardless of the kernel that captured it."""
        functions = {name: entry["digest"] for name, entry in self.functions.items()}
        text = json.dumps([functions, dict(self.values), dict(self.data)], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True, kw_only=True)
class CodeChange:
    """One difference between two bundles."""

    name: str
    """For example ``Net.forward``, ``HIDDEN`` or ``train_set``."""
    kind: str
    """``code``, ``value`` or ``data``."""
    where: str
    """Cell or file of the current definition; empty if unknown."""
    old: str
    new: str


def tabulate(
    codes: Iterable[CodeType],
    functions: Iterable[FunctionType],
    classes: Iterable[type],
    names: Mapping[str, Any],
    data: Mapping[str, str],
) -> CodeTable:
    """Compute the table for the objects that a pickler has recorded.

    ``codes`` and ``classes`` are pickled by value; ``functions`` are all that were pickled.
    ``names`` has the captured objects by the name that the references use, and ``data`` has
    digests.
    """
    # List outer functions only: the source of a nested function is part of its outer function.
    known = list(dict.fromkeys(codes))
    inner = {part for code in known for part in _nested(code) if part is not code}
    outer = [code for code in known if code not in inner]
    # Several functions may share a qualified name, such as '<lambda>': digest them together.
    digests: dict[str, list[str]] = {}
    table: dict[str, dict[str, Any]] = {}
    for code in outer:
        digests.setdefault(code.co_qualname, []).append(digest_of_function(code))
        place = {"file": code.co_filename, "line": code.co_firstlineno}
        table.setdefault(code.co_qualname, place)
    for name, found in digests.items():
        table[name]["digest"] = hashlib.sha256("".join(sorted(found)).encode()).hexdigest()
    values = {name: text for name, value in names.items() if (text := _plain_text(value))}
    # Functions of installed packages are not part of the user's code: ignore their globals.
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
    """Return the SHA-256 of a function's syntax tree, or of its bytecode if it has no source."""
    lines = linecache.getlines(code.co_filename)[code.co_firstlineno - 1 :]
    if not lines:  # compiled by exec() or eval() from a string
        return digest_of_code(code)
    try:
        text = textwrap.dedent("".join(inspect.getblock(lines)))
        return hashlib.sha256(ast.dump(ast.parse(text)).encode()).hexdigest()
    except (SyntaxError, IndexError, tokenize.TokenError):  # a lambda within a larger expression
        return digest_of_code(code)


def digest_of_code(code: CodeType) -> str:
    """Return the SHA-256 of a function's bytecode, independent of its file and line."""
    digest = hashlib.sha256()
    digest.update(code.co_code)
    # Leave out the file, line numbers and qualified name, which differ between kernels.
    shape = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags)
    names = (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)
    digest.update(repr((code.co_name, shape, names)).encode())
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            digest.update(digest_of_code(constant).encode())
        else:
            text = _plain_text(constant) or f"{type(constant).__name__} {constant!r}"
            digest.update(text.encode())
    return digest.hexdigest()


def compare_code(
    old: CodeTable, new: CodeTable, cells: tuple[Mapping[str, CellSource], ...]
) -> list[CodeChange]:
    """Return the differences between two tables: functions, then values, then data.

    ``cells`` are the sources of the old and of the new bundle.
    """
    changes = []
    for name in _in_order(old.functions, new.functions):
        # None if the function is missing from one of the bundles.
        before, after = old.functions.get(name), new.functions.get(name)
        if before and after and before["digest"] == after["digest"]:
            continue
        lines = _first_difference(_source(before, cells[0]), _source(after, cells[1]))
        place = after or before or {}
        cell = cells[1 if after else 0].get(str(place.get("file")))
        shown = [
            text if entry else _MISSING for text, entry in zip(lines, (before, after), strict=True)
        ]
        where = cell.label if cell else ""
        changes.append(CodeChange(name=name, kind="code", where=where, old=shown[0], new=shown[1]))
    for kind, olds, news, shorten in (
        ("value", old.values, new.values, _short),
        ("data", old.data, new.data, lambda digest: digest[:12]),
    ):
        for name in _in_order(olds, news):
            if olds.get(name) != news.get(name):
                shown = [shorten(t[name]) if name in t else _MISSING for t in (olds, news)]
                changes.append(
                    CodeChange(name=name, kind=kind, where="", old=shown[0], new=shown[1])
                )
    return changes


def _in_order(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    return list(dict.fromkeys([*new, *old]))


def _nested(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _nested(constant)


def _values_of(function: FunctionType) -> Iterator[tuple[str, str]]:
    """Yield the plain values of a function's globals, closure variables and defaults."""
    # co_names also contains attribute names. If one equals a global name, an unused value is added.
    # At worst, a change is reported that has no effect.
    used = {name for code in _nested(function.__code__) for name in code.co_names}
    for name in sorted(used & function.__globals__.keys()):
        if text := _plain_text(function.__globals__[name]):
            yield name, text
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            text = _plain_text(cell.cell_contents)
        except ValueError:  # the variable has no value yet
            continue
        if text:
            yield f"{function.__qualname__}.{name}", text
    defaults = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).items()]
    if defaults and (text := _plain_text(defaults)):
        yield f"the defaults of {function.__qualname__}", text


def _plain_text(value: Any) -> str:
    """Return the ``repr`` of a plain value, with sets in a fixed order; empty for other types."""
    if isinstance(value, _PLAIN):
        return repr(value)
    # Use type() instead of isinstance(): a subclass may have its own meaning, and its own repr.
    if type(value) in (tuple, list, set, frozenset):
        parts = [_plain_text(item) for item in value]
        if type(value) in (set, frozenset):
            parts.sort()
        return f"{type(value).__name__}({', '.join(parts)})" if all(parts) else ""
    if type(value) is dict:
        pairs = [(_plain_text(key), _plain_text(item)) for key, item in value.items()]
        is_plain = all(key and item for key, item in pairs)
        return "{" + ", ".join(f"{key}: {item}" for key, item in pairs) + "}" if is_plain else ""
    return ""


def _source(entry: Mapping[str, Any] | None, cells: Mapping[str, CellSource]) -> Sequence[str]:
    """Return the source lines of a function, without indentation; empty if unknown."""
    cell = cells.get(str(entry["file"])) if entry else None
    if entry is None or cell is None:
        return ()
    lines = cell.text.splitlines(keepends=True)[int(entry["line"]) - 1 :]
    try:
        return [line.strip() for line in inspect.getblock(lines) if line.strip()]
    except (SyntaxError, IndexError, tokenize.TokenError):
        return ()


def _first_difference(old: Sequence[str], new: Sequence[str]) -> tuple[str, str]:
    """Return the first pair of lines that differ; placeholders if all lines are equal."""
    length = max(len(old), len(new))
    for i in range(length):
        pair = [lines[i] if i < len(lines) else "(no line)" for lines in (old, new)]
        if pair[0] != pair[1]:
            return _short(pair[0]), _short(pair[1])
    # The digests differ nevertheless, for example because another definition with the same
    # qualified name has changed.
    return "previous code", "current code"


def _short(text: str) -> str:
    return text if len(text) <= MAX_SHOWN else text[: MAX_SHOWN - 3] + "..."
