"""The line of the magic: which words may follow, and which word is under the cursor."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from dataclasses import dataclass

from etrain_jupyter.notebook.commands.arguments import CELL_COMMAND, WORDS, Parser
from etrain_jupyter.notebook.commands.subcommands import SUBCOMMANDS
from etrain_jupyter.notebook.editor.help_texts import find_parser
from etrain_jupyter.notebook.editor.offers import Completion, Facts, Offers, matching

MAX_JOBS = 200
"""More names than anybody reads; IPython itself cuts a list at 500."""

_CELL = re.compile(r"\s*%%etrain(?![\w?])")
_LINE = re.compile(r"[ \t]*+(?:[\w.,*()\[\] \t]++=[ \t]*+)?%etrain(?![\w?])")


@dataclass(frozen=True, kw_only=True)
class Magic:
    """A line of ours with the cursor in it, or a cell of ours."""

    is_cell: bool
    start: int
    """Offset of what follows ``%etrain`` on the line."""
    line: str
    """What follows it."""
    body_start: int
    """Offset of the body; that of the cell's end for a line."""

    def is_in_body(self, cursor: int) -> bool:
        """Tell whether the cursor is below the line."""
        return self.is_cell and cursor >= self.body_start


def find_magic(text: str, cursor: int) -> Magic | None:
    """Return the magic of ours that the cursor is in, behind its name; None if there is none."""
    match = _CELL.match(text)
    is_cell = match is not None
    if match is None:
        match = _LINE.match(text, text.rfind("\n", 0, cursor) + 1)
    if match is None or cursor <= match.end():
        return None
    end = text.find("\n", match.end())
    end = len(text) if end < 0 else end
    return Magic(
        is_cell=is_cell,
        start=match.end(),
        line=text[match.end() : end],
        body_start=end + 1 if is_cell else len(text) + 1,
    )


@dataclass(frozen=True, kw_only=True)
class LinePlace:
    """Where the cursor is on the line of a magic."""

    words: tuple[str, ...]
    """The words before that at the cursor."""
    word: str
    """The word at the cursor, all of it."""
    begun: str
    """What stands of it before the cursor."""

    @property
    def is_at_end(self) -> bool:
        """Whether the cursor is at the end of its word."""
        return self.word == self.begun


def find_place(line: str, column: int) -> LinePlace | None:
    """Return where on a line the cursor is; None in the comment at its end."""
    words: list[str] = []
    for match in re.finditer(r"\S+", line):
        if match.start() > column:
            break
        if match[0].startswith("#"):
            return None
        if match.end() >= column:
            begun = line[match.start() : column]
            return LinePlace(words=tuple(words), word=match[0], begun=begun)
        words.append(match[0])
    return LinePlace(words=tuple(words), word="", begun="")


def complete_line(magic: Magic, cursor: int, facts: Facts) -> Offers:
    """Return what may stand at the cursor on the line of a magic."""
    place = find_place(magic.line, cursor - magic.start)
    if place is None or not place.is_at_end:
        return Offers(cursor)
    start = cursor - len(place.begun)
    if not place.words:
        names = [CELL_COMMAND] if magic.is_cell else [command.name for command in SUBCOMMANDS]
        return Offers(start, tuple(matching(names, place.begun, "command")))
    parser = find_parser(list(place.words), is_cell=magic.is_cell)
    if parser is None:
        return Offers(cursor)
    return _complete_argument(parser, place, start, facts)


def _complete_argument(parser: Parser, place: LinePlace, start: int, facts: Facts) -> Offers:
    given = place.words[1:]
    flag, equals, value = place.begun.partition("=")
    awaited = find_flag(parser, given[-1]) if given and "=" not in given[-1] else None
    if awaited is not None and awaited.nargs != 0:
        return Offers(start, tuple(_values(awaited, place.begun, facts)))
    if equals and flag.startswith("--"):
        found = find_flag(parser, flag)
        items = _values(found, value, facts) if found is not None else []
        return Offers(start + len(flag) + 1, tuple(items))
    items = []
    if not place.begun.startswith("-"):
        items = [
            offer
            for argument in _positional(parser, given)[:1]
            for offer in _values(argument, place.begun, facts)
        ]
    return Offers(start, (*items, *matching(_free_flags(parser, given), place.begun, "flag")))


def find_flag(parser: Parser, word: str) -> argparse.Action | None:
    """Return the argument that a flag stands for: ``-n``, ``--number`` or ``--number=3``."""
    flag = word.partition("=")[0]
    return next((a for a in parser.arguments if flag in a.option_strings), None)


def _free_flags(parser: Parser, given: Sequence[str]) -> list[str]:
    """Return the flags that were not given, each by its longest name, and help at last."""
    used = {id(find_flag(parser, word)) for word in given if word.startswith("-")}
    flags = [a for a in parser.arguments if a.option_strings and id(a) not in used]
    names = [max(a.option_strings, key=len) for a in flags]
    return sorted(names, key=lambda name: name == "--help")


def _positional(parser: Parser, given: Sequence[str]) -> list[argparse.Action]:
    """Return the arguments without a flag that are still to come."""
    rest = [argument for argument in parser.arguments if not argument.option_strings]
    is_value = False
    for word in given:
        found = find_flag(parser, word) if word.startswith("-") else None
        if found is None and not is_value:
            rest = rest[1:]
        is_value = found is not None and found.nargs != 0 and "=" not in word
    return rest


def _values(argument: argparse.Action, begun: str, facts: Facts) -> list[Completion]:
    """Return what an argument takes."""
    name = "job" if argument.metavar == "JOB" else argument.dest
    if name == "job":
        return matching(facts.jobs(), begun, "job")[:MAX_JOBS]
    if name == "pool":
        return matching(facts.pools(), begun, "pool")
    if name == "cluster":
        return matching(facts.clusters(), begun, "cluster")
    if name == "out":
        return matching(_variables(facts), begun, "name")
    return matching(WORDS.get(name, ()), begun, "value")


def _variables(facts: Facts) -> list[str]:
    """Return the names that a job may be bound to: those that hold one already, or ``job``."""
    held = [
        name
        for name, value in facts.names.items()
        if type(value).__name__ == "TrainingJob" and not name.startswith("_")
    ]
    return list(dict.fromkeys([*reversed(held), "job"]))
