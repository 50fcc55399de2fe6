"""The lines ``pools init``, ``check`` and ``remove``, before they reach AWS."""

from __future__ import annotations

from pathlib import Path

import pytest

from etrain_jupyter import cli
from etrain_jupyter.errors import ConfigError
from etrain_jupyter.notebook.commands.subcommands import members, run_line
from etrain_jupyter.plugins.ec2.account_commands import _ask


@pytest.fixture
def terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> cli.Terminal:
    monkeypatch.setenv("ETRAIN_POOLS", str(tmp_path / "pools.yaml"))
    monkeypatch.chdir(tmp_path)
    return cli.Terminal(str(tmp_path))


@pytest.mark.parametrize("name", ["init", "check", "remove"])
def test_each_action_has_its_own_help(terminal: cli.Terminal, name: str) -> None:
    text = run_line(terminal, ["pools", name, "--help"], prog="etrain")
    assert text.startswith(f"usage: etrain pools {name}")
    assert f"example: etrain pools {name} spot" in text


def test_every_flag_of_the_actions_has_a_text() -> None:
    for command in members():
        assert all(one.help for one in command.parser("%etrain").arguments), command.name


def test_mistyped_action_suggests_the_nearest(terminal: cli.Terminal) -> None:
    with pytest.raises(ConfigError) as caught:
        run_line(terminal, ["pools", "int", "spot"], prog="etrain")
    assert "init" in caught.value.hint


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("init spot --budget -3", "US dollars above 0"),
        ("init spot --head laptop", "unknown value"),
        ("init spot --workers 0", "1 or more"),
        ("init Spot --yes", "cannot be called 'Spot'"),
        ("remove spot --yes", "no pools.yaml defines pool 'spot'"),
        ("check spot", "no pool 'spot' of kind aws-spot"),
    ],
)
def test_wrong_values_are_refused(terminal: cli.Terminal, line: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run_line(terminal, ["pools", *line.split()], prog="etrain")


def test_question_without_a_user_names_the_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_input(_: str) -> str:
        raise EOFError

    monkeypatch.setattr("builtins.input", no_input)
    with pytest.raises(ConfigError) as caught:
        _ask("Create them? [y/N] ")
    assert "--yes" in caught.value.hint
