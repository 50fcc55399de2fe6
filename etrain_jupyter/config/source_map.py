"""Source positions of the keys and values of a cell, for error messages."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from etrain_jupyter.errors import CellError, ConfigError

Path = tuple[str | int, ...]
"""Path of keys from the top of the body, as spelled in the cell: ``("batch", "global")``."""

LINE_BREAK = re.compile("\r\n|[\n\r\x85\u2028\u2029]")
"""Line breaks in YAML. ``str.splitlines`` splits at more characters, so its line numbers would
differ from the parser's."""


@dataclass(frozen=True, kw_only=True)
class Span:
    """A part of one line of the cell."""

    line: int
    """Counted from 1, which is the ``%%etrain`` line."""
    column: int
    """Counted from 1."""
    length: int = 1


@dataclass(frozen=True, kw_only=True)
class SourceMap:
    """Lines of a cell and positions of its keys and values; empty for a mapping from Python."""

    lines: tuple[str, ...] = ()
    """Line 1 is the ``%%etrain`` line."""
    file: str = ""
    """Path of the file with these lines; empty for a cell."""
    keys: Mapping[Path, Span] = field(default_factory=lambda: MappingProxyType({}))
    values: Mapping[Path, Span] = field(default_factory=lambda: MappingProxyType({}))
    expressions: Mapping[Path, str] = field(default_factory=lambda: MappingProxyType({}))
    """Expressions after ``!py``, by path."""

    @property
    def computed(self) -> frozenset[Path]:
        """Paths of values that ``!py`` returned, which may contain objects instead of names."""
        return frozenset(self.expressions)

    def error(
        self,
        path: Path,
        message: str,
        *,
        hint: str = "",
        at_key: bool = False,
        inside: tuple[int, int] | None = None,
    ) -> ConfigError:
        """Build the error for ``path``, with its position if there is a cell.

        Args:
            path: Key or value. If it is not in the cell, the error points at the nearest enclosing
                group, or at line 1.
            message: Description of the error, including the invalid value.
            hint: Suggested fix.
            at_key: True to point at the key instead of its value.
            inside: Offset and length of the invalid part within the value's text.
        """
        if not self.lines:
            return ConfigError(message, path=path, hint=hint)
        span = self.span_of(path, at_key=at_key)
        if inside is not None and path in self.values:
            span = self._narrow(span, path, *inside)
        return self.error_at(span, message, path=path, hint=hint)

    def error_at(self, span: Span, message: str, *, path: Path = (), hint: str = "") -> CellError:
        """Build the error for a known position."""
        return CellError(
            message,
            line=span.line,
            column=span.column,
            # A tab counts as one column, so it must be printed one character wide for the carets to
            # line up.
            text=self.text_of(span.line).replace("\t", " ").rstrip(),
            length=span.length,
            file=self.file,
            path=path,
            hint=hint,
        )

    def without(self, flags: Mapping[str, Any]) -> SourceMap:
        """Drop the positions of values that flags override, so that errors point at line 1."""
        # A flag that sets one key of a group, such as workers.max, keeps the group's positions.
        gone = {(key,) for key, value in flags.items() if not isinstance(value, Mapping)}
        keys = {path: span for path, span in self.keys.items() if path[:1] not in gone}
        values = {path: span for path, span in self.values.items() if path[:1] not in gone}
        return replace(self, keys=keys, values=values)

    def below(self, path: Path) -> SourceMap:
        """Return the positions below ``path``, relative to it.

        Errors about missing keys then point at the key of ``path``.
        """
        depth = len(path)
        keys = {known[depth:]: span for known, span in self.keys.items() if known[:depth] == path}
        values = {k[depth:]: span for k, span in self.values.items() if k[:depth] == path}
        return replace(self, keys=keys, values=values)

    def span_of(self, path: Path, *, at_key: bool = False) -> Span:
        """Return the position of ``path``, or of the nearest enclosing group in the cell."""
        first, second = (self.keys, self.values) if at_key else (self.values, self.keys)
        # A missing key has no position, so point at the group that lacks it.
        span = first.get(path) or second.get(path)
        for depth in range(len(path) - 1, 0, -1):
            if span is not None:
                break
            span = self.keys.get(path[:depth])
        if span is None:
            span = self.keys.get(())  # exists for a part of a file, see ``below``
        if span is None:
            return Span(line=1, column=1, length=len(self.text_of(1).rstrip()) or 1)
        return span

    def text_of(self, line: int) -> str:
        """Return a line of the cell; empty if the number is out of range."""
        return self.lines[line - 1] if 0 < line <= len(self.lines) else ""

    def _narrow(self, span: Span, path: Path, offset: int, length: int) -> Span:
        # With quotes, escapes and folded lines, positions in the source differ from those in the
        # value. If the difference is unknown, point at the whole value.
        start = span.column - 1
        text = self.text_of(span.line)[start : start + span.length]
        quoted = text[:1] in ("'", '"')
        if "\\" in text or (quoted and "''" in text[1:-1]) or text[:1] in ("|", ">", "!", "&", "*"):
            return span
        column = span.column + offset + quoted
        if column + length > span.column + span.length:
            return span
        return Span(line=span.line, column=column, length=max(1, length))


NOWHERE = SourceMap()
"""Source map of a mapping from Python: errors contain the path only."""


def nearest(word: str, names: Iterable[str], *, count: int = 1) -> list[str]:
    """Return the names most similar to ``word``, best match first, ignoring case.

    >>> nearest("optimiser", ["epochs", "optimizer"])
    ['optimizer']
    """
    # Compare case-insensitively, but return the name as spelled.
    by_folded: dict[str, str] = {}
    for name in names:
        by_folded.setdefault(name.casefold(), name)
    found = difflib.get_close_matches(word.casefold(), by_folded, n=count, cutoff=0.6)
    return [by_folded[name] for name in found]


def did_you_mean(word: str, names: Iterable[str], *, count: int = 1) -> str:
    """Return ``did you mean 'optimizer'?``, or an empty string if no name is similar."""
    found = [f"'{name}'" for name in nearest(word, names, count=count)]
    return f"did you mean {' or '.join(found)}?" if found else ""


def in_words(value: Any) -> str:
    """Describe a value for an error message: ``the text 'three'``, ``the number 3``, ``a list``."""
    if value is None:
        return "empty"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return f"the number {value}"
    if isinstance(value, str):
        return f"the text '{value if len(value) <= 40 else value[:37] + '...'}'"
    if isinstance(value, list | tuple):
        return "a list"
    if isinstance(value, Mapping):
        return "a group of keys"
    return with_article(type(value).__name__)


def with_article(noun: str) -> str:
    """Return ``a list`` or ``an object``."""
    return f"an {noun}" if noun[:1] in "aeiouAEIO" else f"a {noun}"


def dotted(path: Path) -> str:
    """Return ``batch.global`` for ``("batch", "global")``."""
    return ".".join(str(part) for part in path)
