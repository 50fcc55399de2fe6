"""Read YAML into plain data, with the position of every key and value.

PyYAML implements YAML 1.1, in which ``3e-4`` is text, ``no`` is false, ``12:30:00`` is 45000,
``017`` is 15, and a repeated key silently overwrites the first one. This module uses PyYAML only to
parse text into nodes, which have positions. It resolves scalars itself, by the core schema of YAML
1.2. Cells allow one tag, ``!py``: a Python expression over the notebook's names. Files allow no
tags.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

import yaml
from yaml.composer import Composer
from yaml.parser import Parser
from yaml.reader import Reader, ReaderError
from yaml.resolver import BaseResolver
from yaml.scanner import Scanner

from etrain_jupyter.config.source_map import (
    LINE_BREAK,
    Path,
    SourceMap,
    Span,
    did_you_mean,
)
from etrain_jupyter.errors import CellError

PY_TAG = "!py"
MOST_VALUES = 50_000
"""Maximum number of values in a document: more than any real cell or file has, and few enough to be
read within a second."""
_CORE = "tag:yaml.org,2002:"
_ADVICE = (
    (
        "mapping values are not allowed",
        "put quotes around a value that contains ': ', or check the indentation",
    ),
    ("could not find expected ':'", "write 'key: value', with a space after the colon"),
    ("found character '\\t'", "indent with spaces; YAML does not allow tabs"),
    ("cannot start any token", "put quotes around a value that starts with this character"),
    (
        "expected ',' or",
        "close the bracket, and put quotes around an expression in it that contains , : { or [",
    ),
    ("expected <block end>", "the keys of a group must start in the same column"),
    ("found undefined alias", "put quotes around a value that starts with *"),
    ("but found another document", "a cell describes one job: remove the line '---'"),
    ("while scanning a quoted scalar", "close the quotes"),
)


class _Resolver(BaseResolver):
    """Scalar resolver for the core schema of YAML 1.2."""


# PyYAML tries a pattern only for scalars that start with one of the listed characters.
for _name, _pattern, _first in (
    ("null", r"^(?:null|Null|NULL|~|)$", ["n", "N", "~", ""]),
    ("bool", r"^(?:true|True|TRUE|false|False|FALSE)$", list("tTfF")),
    ("int", r"^(?:[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+)$", list("-+0123456789")),
    (
        "float",
        r"^(?:[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?"
        r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$",
        list("-+.0123456789"),
    ),
):
    _Resolver.add_implicit_resolver(_CORE + _name, re.compile(_pattern), _first)


class _Loader(Reader, Scanner, Parser, Composer, _Resolver):
    """PyYAML's loader without the constructor, so that it only produces nodes."""

    def __init__(self, text: str) -> None:
        Reader.__init__(self, text)
        Scanner.__init__(self)
        Parser.__init__(self)
        Composer.__init__(self)
        _Resolver.__init__(self)


def load_body(
    body: str, *, namespace: Mapping[str, Any], first_line: str = "", only: str = ""
) -> tuple[Any, SourceMap]:
    """Read the body of a cell, and return plain data and the positions of its parts.

    Args:
        body: The cell without its first line.
        namespace: The notebook's names, for ``!py``.
        first_line: The ``%%etrain`` line, which is line 1 in error messages.
        only: The top-level key to read; empty for all. Other keys are neither read nor evaluated.

    Raises:
        CellError: If the body is invalid YAML, repeats a key, has a tag other than ``!py``, or
            ``!py`` raises.
    """
    source = SourceMap(lines=(first_line or "%%etrain", *LINE_BREAK.split(body)))
    return _load(body, source, first=2, namespace=namespace, only=only)


def load_file(text: str, file: str = "") -> tuple[Any, SourceMap]:
    """Read a whole file, and return plain data and the positions of its parts.

    It may contain only values, because its author is not necessarily trusted.

    Raises:
        CellError: If the file is invalid YAML, repeats a key, or has any tag, ``!py`` included.
    """
    source = SourceMap(lines=tuple(LINE_BREAK.split(text)), file=file)
    return _load(text, source, first=1, namespace=None)


def _load(
    body: str,
    source: SourceMap,
    *,
    first: int,
    namespace: Mapping[str, Any] | None,
    only: str = "",
) -> tuple[Any, SourceMap]:
    """Read text that begins on line ``first`` of ``source``."""
    try:
        node = _Loader(body).get_single_node()
        if only and isinstance(node, yaml.MappingNode):
            node.value = [pair for pair in node.value if pair[0].value == only]
        #   text -> PyYAML's scanner and parser -> nodes with marks -> _NodeReader -> plain data
        #           MarkedYAMLError: syntax                            CellError: keys, tags, !py
        reader = _NodeReader(body, source, first, namespace)
        data = reader.read(node, ()) if node is not None else None
    except ReaderError as exc:
        raise _unreadable(exc, body, source, first) from exc
    except yaml.MarkedYAMLError as exc:
        raise _syntax_error(exc, source, first) from exc
    except RecursionError:
        start = Span(line=first, column=1)
        raise source.error_at(start, "the text is nested too deeply to be read") from None
    return data, dataclasses.replace(reader.source, expressions=dict(reader.expressions))


class _NodeReader:
    """Convert nodes to plain data and record their positions."""

    def __init__(
        self,
        body: str,
        source: SourceMap,
        first: int,
        namespace: Mapping[str, Any] | None,
    ) -> None:
        self._body = body
        self._first = first
        self._namespace = namespace
        self._num_read = 0
        self._keys: dict[Path, Span] = {}
        self._values: dict[Path, Span] = {}
        # Identities of the nodes that are being read. An alias to one of them would recurse
        # forever.
        self._open: set[int] = set()
        self.expressions: dict[Path, str] = {}
        self.source = dataclasses.replace(source, keys=self._keys, values=self._values)

    def read(self, node: yaml.Node, path: Path) -> Any:
        """Return the value of a node, and record its position under ``path``."""
        self._values[path] = self._span(node)
        self._num_read += 1
        if self._num_read > MOST_VALUES:
            # A few hundred bytes of nested aliases can expand to more values than fit into memory.
            raise self._error(node, f"the text contains more than {MOST_VALUES:,} values", path)
        if id(node) in self._open:
            raise self._error(node, "this alias is inside the value that it refers to", path)
        self._open.add(id(node))
        try:
            return self._value(node, path)
        finally:
            self._open.discard(id(node))

    def _value(self, node: yaml.Node, path: Path) -> Any:
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(node, path)
        if node.tag == PY_TAG and self._namespace is None:
            raise self._py_in_file(node, path)
        if node.tag == PY_TAG:
            raise self._error(
                node,
                "!py takes one expression, not a list or a group",
                path,
                'write !py "..." with quotes',
            )
        if isinstance(node, yaml.SequenceNode) and node.tag == _CORE + "seq":
            return [self.read(item, (*path, i)) for i, item in enumerate(node.value)]
        if isinstance(node, yaml.MappingNode) and node.tag == _CORE + "map":
            return self._mapping(node, path)
        raise self._unknown_tag(node, path)

    def _mapping(self, node: yaml.MappingNode, path: Path) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key = self._key(key_node, path)
            inner = (*path, key)
            if key in result:
                raise self._error(
                    key_node,
                    f"duplicate key '{key}'",
                    inner,
                    f"it is already on line {self._keys[inner].line}: keep one of the two",
                )
            self._keys[inner] = self._span(key_node)
            result[key] = self.read(value_node, inner)
        return result

    def _key(self, node: yaml.Node, path: Path) -> str:
        if isinstance(node, yaml.ScalarNode) and node.tag == _CORE + "str":
            return str(node.value)
        what = f"'{node.value}'" if isinstance(node, yaml.ScalarNode) else "a group or a list"
        raise self._error(node, f"a key must be a word, not {what}", path)

    def _scalar(self, node: yaml.ScalarNode, path: Path) -> Any:
        text: str = node.value
        if node.tag == PY_TAG:
            self.expressions[path] = text
            return self._evaluate(node, text, path)
        kind = node.tag.removeprefix(_CORE)
        if kind not in ("str", "null", "bool", "int", "float"):
            raise self._unknown_tag(node, path)
        try:
            return _core_value(kind, text)
        except ValueError as exc:
            raise self._error(node, f"'{text[:40]}' cannot be read as !!{kind}", path) from exc

    def _evaluate(self, node: yaml.ScalarNode, text: str, path: Path) -> Any:
        if self._namespace is None:
            raise self._py_in_file(node, path)
        if not text.strip():
            raise self._error(
                node, "!py without an expression", path, "write !py name_in_the_notebook"
            )
        try:
            return evaluate(text, self._namespace)
        except ExpressionError as exc:
            cause = exc.__cause__
            if isinstance(cause, SyntaxError):
                # Point at the position in the expression; Python's offset counts from 1.
                span = self._inside(node, text, (cause.offset or 1) - 1)
                raise self.source.error_at(span, str(exc), path=path) from cause
            hint = "run the cell that defines it first" if isinstance(cause, NameError) else ""
            raise self._error(node, str(exc), path, exc.hint or hint) from cause

    def _py_in_file(self, node: yaml.Node, path: Path) -> CellError:
        message = "!py is not evaluated in a file, which may contain plain values only"
        return self._error(node, message, path, "write the value itself; !py works in cells only")

    def _unknown_tag(self, node: yaml.Node, path: Path) -> CellError:
        tag = node.tag.replace(_CORE, "!!")
        hint = "the only tag here is !py; put quotes around a text that starts with '!'"
        if self._namespace is None:
            hint = "tags are not allowed in a file; put quotes around a text that starts with '!'"
        return self._error(node, f"unknown tag '{tag}'", path, hint)

    def _error(self, node: yaml.Node, message: str, path: Path, hint: str = "") -> CellError:
        return self.source.error_at(self._span(node), message, path=path, hint=hint)

    def _span(self, node: yaml.Node) -> Span:
        start, end = node.start_mark, node.end_mark
        if end.line == start.line:
            length = end.column - start.column
        else:
            text = self.source.text_of(start.line + self._first)
            # The node continues on later lines: mark the rest of its first line, without a comment.
            length = len(text.split(" #")[0].rstrip()) - start.column
        # PyYAML's marks count from 0.
        return Span(line=start.line + self._first, column=start.column + 1, length=max(1, length))

    def _inside(self, node: yaml.ScalarNode, text: str, offset: int) -> Span:
        span = self._span(node)
        written = self._body[node.start_mark.index : node.end_mark.index]
        begin = written.find(text)
        # Escapes or line breaks shift the offset, so point at the whole expression.
        if begin < 0 or "\n" in written or offset >= len(text):
            return span
        return Span(line=span.line, column=span.column + begin + offset)


class ExpressionError(Exception):
    """A ``!py`` expression is invalid, or raised the exception that is the cause of this one."""

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


def evaluate(text: str, namespace: Mapping[str, Any], place: str = "in this notebook") -> Any:
    """Return the value of a ``!py`` expression; raise ``ExpressionError`` if it has none."""
    try:
        # Evaluate in a copy, so that an assignment expression does not change the names.
        return eval(compile(text.strip(), "<!py>", "eval"), dict(namespace))
    except SyntaxError as exc:
        message = f"!py {text}: this is not a valid Python expression ({exc.msg})"
        raise ExpressionError(message) from exc
    except NameError as exc:
        unknown = exc.name or str(exc)
        hint = did_you_mean(unknown, visible_names(namespace), count=3)
        message = f"!py {text}: '{unknown}' is not defined {place}"
        raise ExpressionError(message, hint=hint) from exc
    except Exception as exc:  # The user's code may raise any exception.
        raise ExpressionError(f"!py {text} raised {type(exc).__name__}: {exc}") from exc


def visible_names(namespace: Mapping[str, Any]) -> list[str]:
    """Return the names to suggest to a user, without private names and those of IPython.

    >>> visible_names({"net": 1, "_i3": "", "In": [], "quit": 0})
    ['net']
    """
    hidden = {"In", "Out", "exit", "quit", "get_ipython"}
    return [name for name in namespace if not name.startswith("_") and name not in hidden]


def _core_value(kind: str, text: str) -> Any:
    if kind == "str":
        return text
    if kind == "null":
        return None
    if kind == "bool":
        if text.lower() not in ("true", "false"):
            raise ValueError(text)
        return text.lower() == "true"
    if kind == "float":
        return float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))
    # Do not use int(text, 0), which rejects leading zeros: in YAML 1.2, 017 is seventeen.
    base = {"0o": 8, "0x": 16}.get(text[:2], 10)
    return int(text, base)


def _unreadable(exc: ReaderError, body: str, source: SourceMap, first: int) -> CellError:
    before = LINE_BREAK.split(body[: exc.position])
    span = Span(line=len(before) - 1 + first, column=len(before[-1]) + 1)
    code = exc.character if isinstance(exc.character, int) else ord(exc.character)
    message = f"the character U+{code:04X} is not allowed in a cell"
    return source.error_at(span, message, hint="remove it: it came with pasted text")


def _syntax_error(exc: yaml.MarkedYAMLError, source: SourceMap, first: int) -> CellError:
    lines = source.lines
    mark = exc.problem_mark or exc.context_mark
    problem = exc.problem or exc.context or "this is not valid YAML"
    described = f"{exc.context}, {problem}" if exc.context and exc.context != problem else problem
    hint = next((advice for sign, advice in _ADVICE if sign in described), "")
    # Some errors from the composer have no position.
    if mark is None:
        return source.error_at(Span(line=first, column=1), problem, hint=hint)
    line, column = mark.line + first, mark.column + 1
    at_end = line > len(lines) or not lines[line - 1].strip() or "unexpected end" in problem
    if at_end and exc.context_mark is not None:
        # The parser detects the error at the end of the body or on an empty line: point at the
        # start of the construct.
        line = exc.context_mark.line + first
        column = exc.context_mark.column + 1
    # Without its ':', 'epochs 3' continues on the next line, where the parser then reports the
    # error. Point at the line that lacks the colon.
    is_before = "mapping values" in problem and _lacks_colon(lines, line - 1, first)
    of_key = exc.context_mark if exc.context == "while scanning a simple key" else None
    if is_before or of_key is not None:
        line = line - 1 if of_key is None else of_key.line + first
        text = lines[line - 1].strip()
        column, problem = lines[line - 1].index(text) + 1, "this line has no ':'"
        hint = "write 'key: value', with a space after the colon"
        key, _, value = map(str.strip, text.partition("="))
        if value and key.isidentifier():  # epochs = 20
            hint = f"write '{key}: {value}'"
    message = f"this is not valid YAML: {problem}"
    return source.error_at(Span(line=line, column=column), message, hint=hint)


def _lacks_colon(lines: tuple[str, ...], line: int, first: int) -> bool:
    # YAML joins two lines of plain text in the same column. Here, the second line was meant as a
    # key.
    text, following = lines[line - 1], lines[line]
    same_column = len(text) - len(text.lstrip()) == len(following) - len(following.lstrip())
    return line >= first and same_column and bool(text.strip()) and ":" not in text
