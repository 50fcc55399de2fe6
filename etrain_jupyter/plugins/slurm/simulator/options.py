"""Parse the options of sbatch, in a script's header and on the command line."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from etrain_jupyter.plugins.slurm.commands import seconds_of

HEADER = "#SBATCH "


class RefusedError(Exception):
    """The command is invalid; the text is what SLURM prints."""


class Parser(argparse.ArgumentParser):
    """Parser that raises instead of exiting."""

    def error(self, message: str) -> NoReturn:
        """Raise ``RefusedError``."""
        raise RefusedError(f"{self.prog}: {message}")


def parse_sbatch(arguments: Sequence[str]) -> tuple[argparse.Namespace, str]:
    """Return the options of a job and the text of its script.

    Options on the command line take precedence over those in the script.

    Raises:
        RefusedError: If an option is unknown.
    """
    *options, path = arguments
    text = Path(path).read_text()
    header = []
    for line in text.splitlines():
        if line.startswith(HEADER):
            header += shlex.split(line.removeprefix(HEADER))
        elif line.strip() and not line.startswith("#"):
            break  # as sbatch does: directives after the first command are comments
    return _sbatch_parser().parse_args([*header, *options]), text


def _sbatch_parser() -> Parser:
    parser = Parser(prog="sbatch", add_help=False, allow_abbrev=False)
    for names in (
        ("-J", "--job-name"),
        ("-p", "--partition"),
        ("-A", "--account"),
        ("-e", "--error"),
        ("-o", "--output"),
        ("-n", "--ntasks"),
        ("-c", "--cpus-per-task"),
        ("--mem",),
        ("--gres",),
        ("--constraint",),
        ("--signal",),
    ):
        parser.add_argument(*names)
    parser.add_argument("-t", "--time", type=seconds_of, default=float("inf"))
    parser.add_argument("--requeue", dest="requeue", action="store_true")
    parser.add_argument("--no-requeue", dest="requeue", action="store_false")
    return parser


def parse_signal(text: str | None) -> tuple[str, float, bool] | None:
    """Return name, seconds before the time limit, and whether only the batch shell gets a signal.

    >>> parse_signal("B:USR1@120")
    ('USR1', 120.0, True)
    """
    if not text:
        return None
    flags, _, rest = text.rpartition(":")
    name, _, seconds = rest.partition("@")
    return name, float(seconds or 60), "B" in flags


def parse_scancel(arguments: Sequence[str]) -> Any:
    """Return signal and job ids of a scancel command."""
    parser = Parser(prog="scancel", add_help=False)
    parser.add_argument("-s", "--signal")
    parser.add_argument("-b", "--batch", action="store_true")
    parser.add_argument("-f", "--full", action="store_true")
    parser.add_argument("jobs", nargs="+")
    return parser.parse_args(arguments)


def parse_squeue(arguments: Sequence[str]) -> Any:
    """Return the format of a squeue command."""
    parser = Parser(prog="squeue", add_help=False)
    parser.add_argument("-h", "--noheader", action="store_true")
    parser.add_argument("-u", "--user")
    parser.add_argument("-o", "--format", default="%i|%j|%t|%L|%M|%N|%r")
    return parser.parse_args(arguments)
