"""Error-tolerant outline of a cell body, with the key or value at the cursor.

A body that is being edited is usually incomplete, and the parser in ``config`` rejects it. This
reader goes line by line, never raises, and extracts only keys, values and their positions: in
blocks by indentation, in ``{}`` and ``[]`` by brackets. An open bracket or quote ends at a line
that looks like the next key.
"""

# Positions of the cursor, marked with |, and what the outline reports:
#
#   batch:|                 value of batch, lacks_space
#   batch: {glo|            key in batch
#   batch: {global: 3|2     value of batch.global, rest "2"
#     mic|                  key of the group above that this column belongs to
#   optimizer:| {name: ...  value of optimizer, is_whole: nothing can be inserted
#   # comm|ent              nothing

from __future__ import annotations

import re
from dataclasses import dataclass, field

from etrain_jupyter.config.keys import KeyPath, opens_group

_QUOTED = r"\"(?:[^\"\\\n]|\\.)*\"|'(?:[^'\n]|'')*'"
_KEY_LINE = re.compile(rf"((?:{_QUOTED})[ \t]*+|[^\s\"'#\[\]{{}},&*!|>%@`-][^#\n]*?):(?=\s|$)")
_BLOCK_TEXT = re.compile(r"[|>][-+0-9]*[ \t]*(#.*)?$")
_TAGGED = re.compile(r"!py[ \t]+")
_MAX_DEPTH = 50
"""Maximum nesting of brackets. A real body needs three; the limit prevents deep recursion."""


@dataclass(frozen=True, kw_only=True)
class CursorContext:
    """The key or value at the cursor."""

    path: KeyPath
    """For a key: the path of its group. For a value: the path of its key."""
    is_key: bool
    start: int
    """Offset at which the key or value starts."""
    word: str
    """Text of the key or value before the cursor, without an opening quote."""
    rest: str = ""
    """Text of the key or value after the cursor."""
    name: str = ""
    """For a key: the whole text."""
    has_colon: bool = False
    """For a key: True if it already has a colon."""
    is_computed: bool = False
    """For a value: True after ``!py``."""
    lacks_space: bool = False
    """For a value: True if it would touch the colon, so that a completion must add a space."""
    is_whole: bool = False
    """True if a complete value follows the cursor, so that nothing can be inserted."""


@dataclass
class Outline:
    """Keys and values of a body that may be incomplete."""

    context: CursorContext | None = None
    """The key or value at the cursor; None in a comment, or where neither is possible."""
    values: dict[KeyPath, str] = field(default_factory=dict)
    """Every key with the part of its value on the same line; empty for a group."""

    def given(self, group: KeyPath) -> dict[str, str]:
        """Return the keys of a group with their values, except the key at the cursor."""
        found = {path[-1]: text for path, text in self.values.items() if path[:-1] == group}
        if self.context is not None and self.context.is_key and self.context.path == group:
            found.pop(self.context.name, None)
        return found


@dataclass(frozen=True)
class _Block:
    indent: int
    path: KeyPath


def read_outline(body: str, cursor: int) -> Outline:
    """Read a body, which may be incomplete or invalid, with the cursor at an offset."""
    reader = _Reader(body, cursor)
    reader.read()
    return reader.outline


class _Reader:
    # Reads the body once. Each _read_... method returns the offset at which the next one continues,
    # and calls a _see_... method for each part, which stores the part if the cursor is in it.

    def __init__(self, text: str, cursor: int) -> None:
        self._text, self._at = text, cursor
        self._blocks: list[_Block] = []
        self._last: KeyPath = ()
        """The last key at block level."""
        self._last_is_open = True
        """True if the key's value may follow on the next lines."""
        self._depth = 0
        """Number of open brackets."""
        self._base = 0
        """Column of the key before a bracket. A key in this column or left of it ends the bracket,
        even if the bracket was not closed."""
        self.outline = Outline()

    def read(self) -> None:
        """Read the whole body."""
        pos = 0
        # Use <= rather than <, because a key may also start on an empty last line.
        while pos <= len(self._text):
            pos = self._read_line(pos)

    # ---------------------------------------------------------------------------------- by lines

    def _read_line(self, pos: int) -> int:
        end = self._end_of_line(pos)
        line = self._text[pos:end]
        text = line.lstrip(" \t")
        indent = len(line) - len(text)
        begin = pos + indent
        # In an empty line or a comment, the cursor may be in the indentation of the next key.
        if not text or text.startswith("#"):
            if pos <= self._at <= (end if not text else begin):
                self._see_gap(self._at - pos)
            return end + 1
        if pos <= self._at < begin:
            self._see_gap(self._at - pos, before=text)
        match = _KEY_LINE.match(self._text, begin, end)
        # The bracket has no key: either the whole body is in braces, or a value is on the line
        # below its key.
        if match is None and text[0] in "{[":
            self._base = self._blocks[-1].indent if self._blocks else -1
            pos = self._after_flow(self._read_flow(begin, self._last))
            # A body that is one group in braces ends with that group, so skip the rest.
            return pos if self._last else len(self._text) + 1
        group = self._enter(indent)
        if match is None or group is None:
            self._see_loose_text(begin, end, group)
            return end + 1
        return self._read_entry(match, indent, group)

    def _read_entry(self, match: re.Match[str], indent: int, group: KeyPath) -> int:
        begin, end = match.start(), self._end_of_line(match.start())
        path = (*group, _unquoted(match[1]))
        self._last, self._base = path, indent
        self._see_key(begin, match.end(1), group)
        value = self._skip_spaces(match.end())
        rest = self._text[value:end]
        if not rest or rest.startswith("#"):
            self.outline.values.setdefault(path, "")
            self._last_is_open = True
            stop = value if rest else end
            if match.end() <= self._at <= stop:
                self._see_value(path, self._at, stop, lacks_space=self._at == match.end())
            return end + 1
        # The value is on this line, so the lines below are not its keys.
        self._last_is_open = False
        self._see_space(path, match.end(), value)
        if rest[0] in "{[":
            self.outline.values.setdefault(path, "")
            return self._after_flow(self._read_flow(value, path))
        if _BLOCK_TEXT.match(rest):
            self.outline.values.setdefault(path, "")
            return self._skip_text(end + 1, indent, path)
        self._read_scalar(path, value, end, is_flow=False)
        return end + 1

    def _enter(self, column: int) -> KeyPath | None:
        # Returns the group with keys in this column, and closes the groups that are indented more.
        # None if no key is valid in the column: "b" is in neither of the two blocks of
        #
        #   batch:
        #       global: 3
        #     b|
        while self._blocks and self._blocks[-1].indent > column:
            self._blocks.pop()
        group = self._group_in(column)
        if group is not None and (not self._blocks or self._blocks[-1].indent < column):
            self._blocks.append(_Block(column, group))
        return group

    def _group_in(self, column: int) -> KeyPath | None:
        # A key can start in a column in two cases: an open block has its keys there, or the key is
        # the first one of a new block under the last key, whose value is still empty.
        blocks = [block for block in self._blocks if block.indent <= column]
        if not blocks:
            return () if not self._blocks else None
        if blocks[-1].indent == column:
            return blocks[-1].path
        is_child = len(blocks) == len(self._blocks) and self._last_is_open
        return self._last if is_child and opens_group(self._last) else None

    def _skip_text(self, pos: int, indent: int, path: KeyPath) -> int:
        # The lines of a block scalar after | or > are indented more than its key, or empty.
        while pos <= len(self._text):
            end = self._end_of_line(pos)
            line = self._text[pos:end]
            inner = len(line) - len(line.lstrip(" "))
            if line.strip() and inner <= indent:
                break
            if line.strip() and pos + inner <= self._at <= end:
                self._see_value(path, pos + inner, end)
            pos = end + 1
        return pos

    # -------------------------------------------------------------------------------- in brackets

    def _read_flow(self, pos: int, path: KeyPath) -> tuple[int, bool]:
        # Returns the end position, and whether the bracket was closed.
        #
        # is_ready: after the bracket and after a comma, where a new item may start.
        # is_torn:  a value has an open parenthesis, so commas after it may belong to a Python call:
        #
        #     {model: Net(3, hid|den=4)}    "hidden" is not offered keys of the group
        is_group, is_torn, is_ready = self._text[pos] == "{", False, True
        pos, is_closed = pos + 1, True
        self._depth += 1
        while is_closed:
            begin = pos
            pos, is_over = self._skip_blank(pos)
            if is_ready and begin <= self._at <= pos and not self._is_in_comment(begin):
                before = "" if pos >= len(self._text) else self._text[pos]
                self._see_item(path, is_group and not is_torn, before)
            mark = "" if is_over else self._text[pos]
            if mark == "" or mark in "}]":
                self._depth -= 1
                return (pos, False) if is_over else (pos + 1, True)
            is_ready = mark == ","
            # The nesting is too deep, so treat the bracket like a comma instead of recursing.
            if is_ready or (mark in "{[" and self._depth > _MAX_DEPTH):
                pos += 1
            elif mark in "{[":
                # The group has no key: use a path that no schema contains, so that nothing is
                # offered.
                pos, is_closed = self._read_flow(pos, (*path, ""))
            elif is_group:
                pos, is_closed, is_torn = self._read_flow_entry(pos, path, is_torn)
            else:
                pos = self._read_scalar(path, pos, self._end_of_line(pos), is_flow=True, note=False)
        self._depth -= 1
        return pos, False

    def _read_flow_entry(self, pos: int, group: KeyPath, is_torn: bool) -> tuple[int, bool, bool]:
        end = self._end_of_scalar(pos, self._end_of_line(pos), is_flow=True, is_key=True)
        name = _unquoted(self._text[pos:end])
        path = (*group, name)
        colon = self._skip_spaces(end)
        has_colon = self._text[colon : colon + 1] == ":"
        if not is_torn:
            self._see_key(pos, end, group, has_colon=has_colon)
        if not has_colon:
            return max(end, pos + 1), True, is_torn
        value, is_over = self._skip_blank(colon + 1)
        at_end = is_over or self._text[value] in ",}]"
        if colon + 1 <= self._at and (self._at <= value if at_end else self._at < value):
            stop = self._at if at_end else value
            self._see_value(path, self._at, stop, lacks_space=self._at == colon + 1, here=at_end)
        self.outline.values.setdefault(path, "")
        if at_end:
            return value, not is_over, is_torn
        # The text of a group is not a value; only its keys are recorded.
        if self._text[value] in "{[" and self._depth <= _MAX_DEPTH:
            pos, is_closed = self._read_flow(value, path)
            return pos, is_closed, is_torn
        pos = self._read_scalar(path, value, self._end_of_line(value), is_flow=True)
        text = self.outline.values[path]
        return pos, True, is_torn or (text.count("(") > text.count(")") and text[:1] not in "\"'")

    def _after_flow(self, ended: tuple[int, bool]) -> int:
        pos, is_closed = ended
        return self._end_of_line(pos) + 1 if is_closed else pos

    def _skip_blank(self, pos: int) -> tuple[int, bool]:
        # Skips blanks, line breaks and comments. Also returns whether open brackets end here: at
        # the end of the body, or before a line that looks like the block's next key.
        while pos < len(self._text):
            mark = self._text[pos]
            if mark == "\n" and self._is_next_key(pos + 1):
                return pos + 1, True
            if mark == "#" and self._text[pos - 1].isspace():
                pos = self._end_of_line(pos)
            elif mark.isspace():
                pos += 1
            else:
                return pos, False
        return len(self._text) + 1, True

    def _is_next_key(self, pos: int) -> bool:
        # This line is at the level of the key before the bracket, or at an outer level.
        line = self._text[pos : self._end_of_line(pos)]
        text = line.lstrip(" ")
        return len(line) - len(text) <= self._base and bool(_KEY_LINE.match(text))

    # ------------------------------------------------------------------------------------- scalars

    def _read_scalar(
        self, path: KeyPath, begin: int, end: int, *, is_flow: bool, note: bool = True
    ) -> int:
        stop = self._end_of_scalar(begin, end, is_flow=is_flow)
        text = self._text[begin:stop].rstrip()
        if note:
            self.outline.values[path] = text
        # While a value is being typed, blanks after its last word belong to it.
        if begin <= self._at <= stop:
            self._see_value(path, begin, begin + len(text))
        return max(stop, begin + 1)

    def _end_of_scalar(self, pos: int, end: int, *, is_flow: bool, is_key: bool = False) -> int:
        # Quoted text after the tag may contain ':' and '#', just as without a tag.
        tag = _TAGGED.match(self._text, pos, end)
        pos = tag.end() if tag else pos
        mark = self._text[pos : pos + 1]
        if mark and mark in "\"'":
            match = re.compile(_QUOTED).match(self._text, pos, end)
            return match.end() if match else end
        while pos < end:
            mark, following = self._text[pos], self._text[pos + 1 : pos + 2]
            if is_flow and mark in ",[]{}":
                break
            if (
                (is_flow or is_key)
                and mark == ":"
                and (not following.strip() or following in ",}]")
            ):
                break
            if mark == "#" and self._text[pos - 1].isspace():
                break
            pos += 1
        return pos

    # ---------------------------------------------------------------------- what the cursor touches

    def _see_key(self, begin: int, end: int, group: KeyPath, *, has_colon: bool = True) -> None:
        end = begin + len(self._text[begin:end].rstrip())
        if begin <= self._at <= end:
            text = self._text[begin:end]
            self.outline.context = CursorContext(
                path=group,
                is_key=True,
                start=begin,
                word=self._text[begin : self._at],
                rest=self._text[self._at : end],
                name=_unquoted(text),
                has_colon=has_colon,
            )

    def _see_value(
        self,
        path: KeyPath,
        begin: int,
        end: int,
        *,
        lacks_space: bool = False,
        here: bool = True,
    ) -> None:
        tag = _TAGGED.match(self._text, begin, max(end, self._at))
        is_computed = bool(tag) and tag.end() <= self._at if tag else False
        if tag and is_computed:
            begin = tag.end()
        # Leave quotes out of the value. After the closing quote nothing can be completed.
        if self._text[begin : begin + 1] in ("'", '"') and begin < self._at:
            quote = self._text[begin]
            begin += 1
            if self._text[begin:end].endswith(quote):
                end -= 1
                if self._at > end:
                    self.outline.context = None
                    return
        self.outline.context = CursorContext(
            path=path,
            is_key=False,
            start=begin,
            word=self._text[begin : self._at],
            rest=self._text[self._at : max(end, self._at)],
            is_computed=is_computed,
            lacks_space=lacks_space,
            is_whole=not here,
        )

    def _see_space(self, path: KeyPath, begin: int, end: int) -> None:
        """Handle the cursor between a colon and an existing value."""
        if begin <= self._at < end:
            self._see_value(path, self._at, end, lacks_space=self._at == begin, here=False)

    def _see_item(self, path: KeyPath, is_key: bool, before: str) -> None:
        """Handle the cursor in brackets between two items; ``before`` is the next character."""
        if not is_key:
            self.outline.context = None
            return
        rest = "" if before in ("", ",", "}", "]") else before
        self.outline.context = CursorContext(
            path=path, is_key=True, start=self._at, word="", rest=rest
        )

    def _see_gap(self, column: int, *, before: str = "") -> None:
        """Handle the cursor on an empty line, or in the indentation before text."""
        group = self._group_in(column)
        if group is not None:
            self.outline.context = CursorContext(
                path=group, is_key=True, start=self._at, word="", rest=before
            )
        elif column > 0 and self._last_is_open and self._last and not opens_group(self._last):
            self._see_value(self._last, self._at, self._at)

    def _see_loose_text(self, begin: int, end: int, group: KeyPath | None) -> None:
        # A line without a colon: an incomplete key, or the continuation of a value.
        self._last_is_open = self._last_is_open and group is not None
        stop = self._end_of_scalar(begin, end, is_flow=False)
        stop = begin + len(self._text[begin:stop].rstrip())
        if self._text.startswith("- ", begin) or not begin <= self._at <= stop:
            return
        if group is not None:
            self._see_key(begin, stop, group, has_colon=False)
        elif self._last:
            self._see_value(self._last, begin, stop)

    # --------------------------------------------------------------------------------------- places

    def _end_of_line(self, pos: int) -> int:
        end = self._text.find("\n", pos)
        return len(self._text) if end < 0 else end

    def _skip_spaces(self, pos: int) -> int:
        while pos < len(self._text) and self._text[pos] in " \t":
            pos += 1
        return pos

    def _is_in_comment(self, begin: int) -> bool:
        """Return True if the cursor is in a comment that starts at or after ``begin``."""
        start = max(begin, self._text.rfind("\n", 0, self._at) + 1)
        return re.search(r"(?:^|\s)#", self._text[max(0, start - 1) : self._at]) is not None


def _unquoted(text: str) -> str:
    text = text.strip()
    return text[1:-1] if len(text) > 1 and text[0] in "\"'" and text[-1] == text[0] else text
