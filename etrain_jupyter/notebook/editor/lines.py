"""Complete sub-commands, flags and arguments on an ``%etrain`` line."""

from __future__ import annotations

import argparse
import dataclasses
import re
from collections.abc import Sequence
from dataclasses import dataclass

from etrain_jupyter.notebook.commands.arguments import Parser, words_of
from etrain_jupyter.notebook.commands.subcommands import cell_commands, find_member, subcommands
from etrain_jupyter.notebook.editor.help_texts import find_parser
from etrain_jupyter.notebook.editor.offers import Completion, Facts, Offers, matching

MAX_JOBS = 200
"""Maximum number of jobs to offer. IPython itself limits a list to 500."""

_CELL = re.compile(r"\s*%%etrain(?![\w?])")
# Possessive quantifiers (*+, ++) prevent backtracking on a long line that is not a magic.
_LINE = re.compile(r"[ \t]*+(?:[\w.,*()\[\] \t]++=[ \t]*+)?%etrain(?![\w?])")


@dataclass(frozen=True, kw_only=True)
class Magic:
    """An ``%etrain`` line or an ``%%etrain`` cell that contains the cursor."""

    is_cell: bool
    start: int
    """Offset of the text after ``%etrain`` on the line."""
    line: str
    """The text after ``%etrain``."""
    body_start: int
    """Offset of the body; for a line, an offset past the end of the cell."""

    def is_in_body(self, cursor: int) -> bool:
        """Return True if the cursor is in the body of a cell."""
        return self.is_cell and cursor >= self.body_start


def find_magic(text: str, cursor: int) -> Magic | None:
    """Return the ``etrain`` magic around the cursor; None if the cursor is not after its name."""
    # A cell magic must start the cell. A line magic may be on any line, even in an assignment.
    match = _CELL.match(text)
    is_cell = match is not None
    if match is None:
        match = _LINE.match(text, text.rfind("\n", 0, cursor) + 1)
    # On the name itself, IPython completes the magic's name and `hints` explains it.
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
    """The word at the cursor on the line of a magic, and the words before it."""

    words: tuple[str, ...]
    """The words before the one at the cursor."""
    word: str
    """The whole word at the cursor."""
    begun: str
    """The part of the word before the cursor."""


def find_place(line: str, column: int) -> LinePlace | None:
    """Find the word at a column; None in a comment."""
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
    """Return the completions at the cursor on the line of a magic."""
    place = find_place(magic.line, cursor - magic.start)
    # Inside a word, inserting a completion would leave the rest of the word behind it.
    if place is None or place.word != place.begun:
        return Offers(cursor)
    start = cursor - len(place.begun)
    if not place.words:
        names = cell_commands() if magic.is_cell else [one.name for one in subcommands()]
        return Offers(start, tuple(matching(names, place.begun, "command")))
    parser = find_parser(list(place.words), is_cell=magic.is_cell)
    if parser is None:
        return Offers(cursor)
    if find_member(place.words):
        # The name of the sub-command has two words, so the arguments start one word later.
        place = dataclasses.replace(place, words=place.words[1:])
    return _complete_argument(parser, place, start, facts)


def _complete_argument(parser: Parser, place: LinePlace, start: int, facts: Facts) -> Offers:
    # text before the cursor   completions
    # -----------------------  --------------------------------------------------
    # --pool lo                values of the previous flag
    # --pool=lo                values of this flag, after the "="
    # -                        flags that have not been given yet
    # anything else            values of the next positional argument, then flags
    given = place.words[1:]
    flag, equals, value = place.begun.partition("=")
    # A flag with nargs == 0 is a switch: the word after it is not its value.
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
    """Return the argument of a flag such as ``-n``, ``--number`` or ``--number=3``."""
    flag = word.partition("=")[0]
    return next((a for a in parser.arguments if flag in a.option_strings), None)


def _free_flags(parser: Parser, given: Sequence[str]) -> list[str]:
    """Return the longest names of the flags that were not given, with ``--help`` last."""
    # Compare by identity, since "-n" and "--number" are the same argument.
    used = {id(find_flag(parser, word)) for word in given if word.startswith("-")}
    flags = [a for a in parser.arguments if a.option_strings and id(a) not in used]
    names = [max(a.option_strings, key=len) for a in flags]
    return sorted(names, key=lambda name: name == "--help")


def _positional(parser: Parser, given: Sequence[str]) -> list[argparse.Action]:
    rest = [argument for argument in parser.arguments if not argument.option_strings]
    is_value = False
    for word in given:
        found = find_flag(parser, word) if word.startswith("-") else None
        # A word that is neither a flag nor a flag's value fills the next positional argument,
        # unless that takes any number of words.
        if found is None and not is_value and rest and rest[0].nargs != "*":
            rest = rest[1:]
        is_value = found is not None and found.nargs != 0 and "=" not in word
    return rest


def _values(argument: argparse.Action, begun: str, facts: Facts) -> list[Completion]:
    """Return the values of an argument that start with ``begun``."""
    name = "job" if argument.metavar == "JOB" else argument.dest
    if name == "job":
        return matching(facts.jobs(), begun, "job")[:MAX_JOBS]
    if name == "pool":
        return matching(facts.pools(), begun, "pool")
    if name == "cluster":
        return matching(facts.clusters(), begun, "cluster")
    if name == "out":
        return matching(_variables(facts), begun, "name")
    if name == "types":
        # Complete the last type of a list with commas.
        before = begun[: begun.rfind(",") + 1]
        return matching([before + known for known in words_of(name)], begun, "value")
    return matching(words_of(name), begun, "value")


def _variables(facts: Facts) -> list[str]:
    """Return variable names for a job: variables that already hold a job, and ``job``."""
    held = [
        name
        for name, value in facts.names.items()
        if type(value).__name__ == "TrainingJob" and not name.startswith("_")
    ]
    return list(dict.fromkeys([*reversed(held), "job"]))
