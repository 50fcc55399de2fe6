"""The command ``etrain``: the sub-commands of ``%etrain`` for a terminal, on the same run store.

::

    etrain ls                    etrain stop digits --now
    etrain wait digits-1a2b3c4d  etrain --runs /data/etrain-runs audit
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from etrain_jupyter import __version__, launch
from etrain_jupyter.config import parse_mapping
from etrain_jupyter.errors import ConfigError, EtrainError
from etrain_jupyter.notebook.commands.subcommands import find_subcommand, run_line
from etrain_jupyter.notebook.job.open_jobs import attach
from etrain_jupyter.notebook.job.run_store import ROOT_VARIABLE
from etrain_jupyter.notebook.job.runs import open_runs
from etrain_jupyter.notebook.job.training_job import TrainingJob
from etrain_jupyter.untrusted import plain_line, plain_text


class Terminal:
    """A terminal. It shows a job as text and does not support variables."""

    def __init__(self, root: str | None) -> None:
        self.store = open_runs(root)

    def find(self, name_or_id: str | None) -> TrainingJob:
        """Return the job with that name or id; by default the latest."""
        return attach(name_or_id, store=self.store)

    def bind(self, variable: str | None, value: object = None) -> None:
        """Reject a variable, because a terminal does not have variables."""
        if variable is not None:
            raise ConfigError(f"-o {variable} works only in a notebook", hint="leave out -o")

    def show(self, job: TrainingJob) -> str:
        """Return a job's latest values as lines."""
        status = f"{job.status} ({job.reason})" if job.reason else job.status
        values = {"job": job.id, "status": status, "step": job.step, "workers": job.world_size}
        lines = [f"{name:<16}{value}" for name, value in values.items()]
        lines += [f"{plain_line(name):<16}{value:.5g}" for name, value in job.metrics.items()]
        lines += [f"{'folder':<16}{job.record.where}"]
        return "\n".join([*lines, f"{'note':<16}{job.note}"] if job.note else lines)

    def show_result(self, result: object) -> str:
        """Return a comparison, a diagnosis or a plan as text."""
        return str(result)

    def say(self, line: str) -> None:
        """Print one line immediately."""
        print(plain_text(_in_terminal_words(line)), flush=True)

    def submit(self, body: Mapping[str, Any]) -> TrainingJob:
        """Submit a job, given as the keys of a cell, without showing it."""
        return launch.submit(launch.plan_job(parse_mapping(body, {}), {}))

    def open_tensorboard(self, folder: Path) -> str:
        """Return an empty string, because a terminal cannot show a page."""
        return ""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line and return the exit status: 0, 1 for a failure, 2 for a usage error."""
    try:
        root, words = _split_root(list(sys.argv[1:] if arguments is None else arguments))
        if words[:1] == ["--version"]:
            print(f"etrain {__version__}")
            return 0
        _refuse_notebook_only(words)
        text = run_line(Terminal(root), words, prog="etrain")
        # Log lines are printed as the workers wrote them, even if they contain "%etrain". An empty
        # log prints nothing, not even a newline.
        if text or words[:1] != ["logs"]:
            print(plain_text(text if words[:1] == ["logs"] else _in_terminal_words(text)))
    except BrokenPipeError:
        # `etrain ls | head` closes the pipe early, which is not a failure. Python flushes stdout
        # again at exit and would report the closed pipe, so redirect it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except KeyboardInterrupt:
        return 130  # 128 + SIGINT, as is customary for shells
    except EtrainError as exc:
        print(plain_text(_in_terminal_words("\n".join(exc.render()))), file=sys.stderr)
        return 2 if isinstance(exc, ConfigError) else 1
    return 0


def _in_terminal_words(text: str) -> str:
    """Replace ``%etrain`` with ``etrain``; ``%%etrain`` exists in notebooks only."""
    return re.sub(r"(?<!%)%etrain\b", "etrain", text)


def _split_root(words: list[str]) -> tuple[str | None, list[str]]:
    """Remove ``--runs DIR`` or ``--runs s3://...`` from anywhere on the line."""
    for place, word in enumerate(words):
        if word == "--runs":
            if place + 1 == len(words):
                raise ConfigError("--runs needs a folder", hint=f"or set {ROOT_VARIABLE}")
            return words[place + 1], words[:place] + words[place + 2 :]
        if word.startswith("--runs="):
            return word.removeprefix("--runs="), words[:place] + words[place + 1 :]
    return None, words


def _refuse_notebook_only(words: list[str]) -> None:
    if words and words[0] == "distributed":
        raise ConfigError(
            "jobs are submitted from a notebook or from Python",
            hint="%%etrain distributed, or etrain_jupyter.distributed({...})",
        )
    if words and not words[0].startswith("-") and words[0] != "help":
        command = find_subcommand(words[0], prog="etrain")
        if command.is_for_notebooks_only:
            raise ConfigError(
                f"etrain {command.name} works only in a notebook", hint="try etrain show"
            )
