"""Text of ``?`` and ``--help``, also used by hints."""

from __future__ import annotations

import argparse

from etrain_jupyter import plugin
from etrain_jupyter.config.describe import example_body, keys_in_words
from etrain_jupyter.notebook.commands.arguments import (
    CELL_COMMAND,
    Parser,
    distributed_parser,
)
from etrain_jupyter.notebook.commands.subcommands import (
    cell_commands,
    find_member,
    overview,
    subcommands,
)

CELL_PROG = f"%%etrain {CELL_COMMAND}"


def help_on_magic() -> str:
    """Return the text of ``%etrain?`` and ``%%etrain?``."""
    return (
        f"{overview('%etrain')}\n\n"
        "Refer to a job by its name, its id, or the start of its id.\n\n"
        f"An example of a cell:\n\n{_indented(example_cell())}\n\n"
        f"{CELL_PROG} --help lists the flags and all keys of the body."
    )


def help_on_cell() -> str:
    """Return the text of ``%%etrain distributed --help``."""
    return (
        f"{distributed_parser().format_help().rstrip()}\n\n"
        f"keys of the body, in YAML:\n{keys_in_words()}\n\n"
        f"example:\n{_indented(example_cell())}"
    )


def example_cell() -> str:
    """Return an example cell with common keys."""
    return f"{CELL_PROG} --name digits -o job\n{example_body()}".rstrip()


def find_parser(words: list[str], *, is_cell: bool) -> Parser | None:
    """Return the parser for a line that starts with these words; None if there is none."""
    if not words:
        return None
    if words[0] == CELL_COMMAND:
        return distributed_parser()
    if is_cell and words[0] in plugin.cells():
        parser: Parser = plugin.load(plugin.cells()[words[0]].parser)()
        return parser
    if is_cell and words[0] not in cell_commands():
        return None
    prog = "%%etrain" if is_cell else "%etrain"
    if member := find_member(words):
        return member.parser(prog)
    return next((c.parser(prog) for c in subcommands() if c.name == words[0]), None)


def usage_of(argument: argparse.Action) -> str:
    """Return the usage of an argument: ``-n N, --number N``, or ``job``."""
    value = _value_of(argument)
    if not argument.option_strings:
        return value
    return ", ".join(f"{flag} {value}".rstrip() for flag in argument.option_strings)


def _value_of(argument: argparse.Action) -> str:
    # A switch has no value.
    if argument.nargs == 0:
        return ""
    if isinstance(argument.metavar, str):
        return argument.metavar
    return argument.dest.upper() if argument.option_strings else argument.dest


def _indented(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines())
