"""Command lines that raise where argparse would end the process, and values spelt as in a cell."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Sequence
from typing import NoReturn

from etrain_jupyter.config.fields import Interval
from etrain_jupyter.errors import ConfigError


class Parser(argparse.ArgumentParser):
    """Raises where argparse would end the process: a mistyped line must not end a kernel."""

    def error(self, message: str) -> NoReturn:
        """Raise what the surface shows instead of exiting."""
        flags = [word for word in message.split() if word.startswith("-")]
        known = [name for name in self._option_string_actions if name.startswith("--")]
        near = difflib.get_close_matches(flags[0], known, n=1) if flags else []
        hint = f"did you mean {near[0]}?" if near else self.format_usage().strip()
        raise ConfigError(f"{self.prog}: {message}", hint=hint)


class HelpAction(argparse.Action):
    """``--help`` as an exception that carries the text."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        """Stop parsing."""
        raise HelpRequested(parser.format_help())


class HelpRequested(Exception):
    """Somebody typed ``--help``; the text is the only argument."""


def make_parser(prog: str, summary: str, epilog: str = "") -> Parser:
    """Return a parser that neither prints nor exits."""
    parser = Parser(
        prog=prog, description=summary, epilog=epilog, add_help=False, allow_abbrev=False
    )
    parser.register("action", "help", HelpAction)
    parser.add_argument("-h", "--help", action="help", nargs=0, help="show this text")
    return parser


def one_of(flag: str, word: str, known: Sequence[str]) -> str:
    """Return ``word`` if it is known.

    Raises:
        ConfigError: If it is not; the message names the nearest.
    """
    if word in known:
        return word
    near = difflib.get_close_matches(word, known, n=1)
    hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}"
    raise ConfigError(f"{flag} {word}: there is no such word", hint=hint)


def seconds_of(flag: str, text: str) -> float:
    """Return a duration that is spelt as in the cell: ``15s``, ``5 min``.

    Raises:
        ConfigError: If it is none.
    """
    try:
        interval = Interval.parse(text)
    except ValueError:
        interval = None
    if interval is None or interval.unit != "s":
        raise ConfigError(f"{flag} {text}: that is no duration", hint="write for example 15s")
    return interval.value
