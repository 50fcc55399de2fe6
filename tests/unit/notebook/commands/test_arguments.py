"""Arguments from signatures and docstrings."""

from __future__ import annotations

from typing import Annotated

import pytest

from etrain_jupyter.errors import ConfigError
from etrain_jupyter.notebook.commands.arguments import (
    COMMON_TEXTS,
    Number,
    Parser,
    Seconds,
    Spelling,
    Variable,
    add_parameters,
    make_parser,
    read_docstring,
)
from etrain_jupyter.notebook.commands.subcommands import subcommands


def train(
    surface: object,
    path: str,
    job: str | None = None,
    *,
    steps: Number = None,
    every: Seconds | None = None,
    now: bool = False,
    many: Annotated[int, Spelling(flags=("-m", "--lots"), metavar="K")] = 3,
    out: Variable = None,
) -> str:
    """Train a job on a file.

    Args:
        path: Its file, whose text goes
            on in a second line.
        steps: How many steps.
        every: IAM stays upper case.
        now: Immediately.
        many: Some number.

    Example:
        train data.bin --now
    """
    return ""


@pytest.fixture
def parser() -> Parser:
    made = make_parser("%etrain train", "train")
    add_parameters(made, train)
    return made


def test_values_arrive_under_the_parameters_names(parser: Parser) -> None:
    line = [
        "data.bin",
        "digits",
        "--steps",
        "5",
        "--every",
        "2min",
        "--now",
        "-m",
        "7",
        "-o",
        "job",
    ]

    assert vars(parser.parse_args(line)) == {
        "path": "data.bin",
        "job": "digits",
        "steps": 5,
        "every": 120.0,
        "now": True,
        "many": 7,
        "out": "job",
    }


def test_defaults_are_those_of_the_signature(parser: Parser) -> None:
    assert vars(parser.parse_args(["data.bin"])) == {
        "path": "data.bin",
        "job": None,
        "steps": None,
        "every": None,
        "now": False,
        "many": 3,
        "out": None,
    }


def test_a_positional_parameter_without_a_default_is_required(parser: Parser) -> None:
    with pytest.raises(ConfigError, match="required: path"):
        parser.parse_args([])


def test_help_is_that_of_the_docstring_or_the_common_one(parser: Parser) -> None:
    texts = {action.dest: action.help for action in parser.arguments}

    assert texts["path"] == "its file, whose text goes on in a second line"
    assert texts["every"] == "IAM stays upper case"
    assert texts["job"] == COMMON_TEXTS["job"]


def test_flags_are_short_long_and_then_aliases(parser: Parser) -> None:
    flags = {action.dest: action.option_strings for action in parser.arguments}

    assert flags["many"] == ["-m", "--many", "--lots"]


def test_a_docstring_has_a_summary_and_an_example() -> None:
    found = read_docstring(train)

    assert (found.summary, found.example) == ("Train a job on a file", "train data.bin --now")


@pytest.mark.parametrize("command", subcommands(), ids=lambda command: command.name)
def test_each_argument_of_a_subcommand_has_a_help_text(command: object) -> None:
    for action in command.parser("%etrain").arguments:  # type: ignore[attr-defined]
        assert action.help
