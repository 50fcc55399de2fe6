"""The magics ``%%etrain`` and ``%etrain``: parse the line, run it, and print the result.

An EtrainError is rendered only here, as its message without stack frames. The cell's status is
still "error", so that "Run All" stops. Any other exception is shown with a normal traceback.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from IPython.core.magic import Magics, line_cell_magic, magics_class, no_var_expand
from IPython.display import display

from etrain_jupyter import launch, plugin
from etrain_jupyter.config import parse_mapping
from etrain_jupyter.errors import ConfigError, EtrainError
from etrain_jupyter.log.tensorboard import OPTIONS
from etrain_jupyter.notebook.commands.arguments import (
    CELL_COMMAND,
    HelpRequested,
    distributed_parser,
    question_as_help,
)
from etrain_jupyter.notebook.commands.subcommands import (
    cell_commands,
    check_variable,
    find_subcommand,
    overview,
    run_line,
    wait_for,
)
from etrain_jupyter.notebook.dashboard.browser import has_front_end
from etrain_jupyter.notebook.display import follow, open_panel, show
from etrain_jupyter.notebook.editor import hooks
from etrain_jupyter.notebook.editor.help_texts import (
    help_on_cell,
    help_on_magic,
)
from etrain_jupyter.notebook.job.open_jobs import attach
from etrain_jupyter.notebook.job.plan import Plan
from etrain_jupyter.notebook.job.run_store import RunStore
from etrain_jupyter.notebook.job.runs import open_runs
from etrain_jupyter.notebook.job.training_job import TrainingJob
from etrain_jupyter.untrusted import plain_text

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell


@magics_class
class EtrainMagics(Magics):
    """The magics of one shell, which also display the results of their sub-commands."""

    @property
    def store(self) -> RunStore:
        """The run store of the kernel's current folder."""
        return open_runs()

    @no_var_expand
    @line_cell_magic
    def etrain(self, line: str, cell: str | None = None) -> None:
        """Train elastically: %%etrain distributed with a YAML body, %etrain --help for the rest."""
        try:
            text = self._run_line(line) if cell is None else self._run_cell(line, cell)
        except EtrainError as exc:
            # IPython calls this method instead of formatting a traceback. The instance attribute
            # overrides the class's method, which also prints the caller's frames.
            lines = list(map(plain_text, exc.render()))
            vars(exc)["_render_traceback_"] = lambda: lines
            raise
        if text:
            print(plain_text(text))

    def find(self, name_or_id: str | None) -> TrainingJob:
        """Return the job with that name or id; by default the latest."""
        return attach(name_or_id, store=self.store)

    def bind(self, variable: str | None, value: object = None) -> None:
        """Assign a value to a notebook variable, if one is given.

        Without a value, only check the name.
        """
        check_variable(variable)
        if variable and value is not None:
            self.names[variable] = value

    def show(self, job: TrainingJob) -> str:
        """Show a job's dashboard below the cell."""
        show(job)
        return f"etrain: {job.note}" if job.note else ""

    def show_result(self, result: object) -> str:
        """Show a comparison, a diagnosis or a plan below the cell."""
        display(result)  # type: ignore[no-untyped-call]
        return ""

    def say(self, line: str) -> None:
        """Print one line immediately."""
        print(plain_text(line), flush=True)

    def submit(self, body: Mapping[str, Any]) -> TrainingJob:
        """Submit a job, given as the keys of a cell, without showing it."""
        return launch.submit(launch.plan_job(parse_mapping(body, {}), {}))

    def profile(self, line: str, body: str) -> TrainingJob:
        """Train a cell for at most a minute on one and two workers; return the stopped job."""
        plan = launch.plan_cell(body, self.names, {}, f"%%etrain {line}".rstrip())
        self.say(f"etrain: profiling the cell on pool {plan.config.pool} for at most a minute")
        return launch.profile(plan)

    def open_tensorboard(self, folder: Path) -> str:
        """Open TensorBoard below the cell, using its own magic."""
        assert self.shell is not None, "magics are registered with a shell"
        self.shell.run_line_magic("load_ext", "tensorboard")
        # Call the magic instead of running a line, because IPython would expand {expressions} and
        # $names in the folder's path, which another user's job may have chosen.
        magics: dict[str, Any] = self.shell.magics_manager.magics["line"]
        start = magics.get("tensorboard")
        if start is None:
            raise EtrainError(
                "the tensorboard extension does not define %tensorboard, so TensorBoard was not "
                "started. Upgrade it: pip install --upgrade tensorboard"
            )
        start(f"--logdir {shlex.quote(str(folder))} {OPTIONS}")
        return ""

    def _run_line(self, line: str) -> str:
        words = question_as_help(split_line(line))
        name = words[0] if words else ""
        if name == CELL_COMMAND or name in plugin.cells():
            is_own = name == CELL_COMMAND
            if {"-h", "--help"} & set(words):
                return help_on_cell() if is_own else str(plugin.load(plugin.cells()[name].help)())
            more = "; %etrain template prints a body" if is_own else ""
            raise ConfigError(
                f"%etrain {name} needs a body",
                hint=f"begin the cell with two percent signs: %%etrain {name}{more}",
            )
        return run_line(self, words, prog="%etrain")

    def _run_cell(self, line: str, body: str) -> str:
        words = question_as_help(split_line(line))
        if words and words[0] in plugin.cells():
            command = plugin.cells()[words[0]]
            try:
                options = plugin.load(command.parser)().parse_args(words[1:])
            except HelpRequested:
                return str(plugin.load(command.help)())
            return str(plugin.load(command.run)(self, options, line, body))
        if not words or words[0] != CELL_COMMAND:
            return self._run_other(words, line, body)
        try:
            options = distributed_parser().parse_args(words[1:])
        except HelpRequested:
            return help_on_cell()
        check_variable(options.out)  # checked early, because a submitted job needs its variable
        for flag in ("force", "trust"):
            if getattr(options, flag) and not options.resume:
                raise ConfigError(f"--{flag} requires --resume", hint=f"--resume JOB --{flag}")
        given = {"name": options.name, "pool": options.pool}
        flags = {key: value for key, value in given.items() if value is not None}
        plan = launch.plan_cell(body, self.names, flags, f"%%etrain {line}".rstrip())
        # `-o net` also names a new job "net". A resumed job keeps its name.
        if options.out and plan.config.name is None and not options.resume:
            named = plan.config.model_copy(update={"name": options.out})
            plan = dataclasses.replace(plan, config=named)
        if options.dry_run:
            return str(plan)
        job = self._resume(plan, options) if options.resume else launch.submit(plan)
        # Assign the variable first, because display or waiting may be interrupted while the job
        # continues.
        self.bind(options.out, job)
        if not options.quiet:
            show(job)
        elif has_front_end():
            follow(job)  # --quiet suppresses the output below the cell, not the side panel
        if options.wait:
            wait_for(job)
        return ""

    def _resume(self, plan: Plan, options: argparse.Namespace) -> TrainingJob:
        job = self.find(options.resume)
        print(launch.resume(job, plan, is_forced=options.force, is_trusted=options.trust))
        return job

    def _run_other(self, words: list[str], line: str, body: str) -> str:
        """Run a sub-command of a plug-in on the cell's body."""
        if not words or words[0] in ("-h", "--help", "help"):
            return overview("%etrain")
        command = find_subcommand(words[0], prog="%%etrain", others=cell_commands())
        if {"-h", "--help"} & set(words):
            return run_line(self, words, prog="%etrain")
        if command.cell is None:
            raise ConfigError(
                f"{command.name} does not accept a body", hint=f"type %etrain {' '.join(words)}"
            )
        arguments = vars(command.parser("%%etrain").parse_args(words[1:]))
        return command.cell(self, line, body, **arguments)

    @property
    def names(self) -> dict[str, Any]:
        """The notebook's names."""
        assert self.shell is not None, "magics are registered with a shell"
        names: dict[str, Any] = self.shell.user_ns
        return names


def split_line(line: str) -> list[str]:
    """Return the words of a magic's line, without the comment at its end.

    Raises:
        ConfigError: If a quote is not closed.

    >>> split_line("resume 'digits #2' --steps 10  # twice as long")
    ['resume', 'digits #2', '--steps', '10']
    """
    # Match quoted text as a whole, so that a # in it does not start a comment.
    words = r"""(?:'[^']*'|"(?:\\.|[^"\\])*"|\\.|[^\s'"\\])"""
    code = re.match(rf"(?:\s*(?!#){words}+)*", line)
    rest = line[code.end() :].lstrip() if code else line
    # The match ends at a comment, at the end of the line, or at an unclosed quote. In the last
    # case, pass on the whole line, so that shlex raises an error.
    try:
        return shlex.split(code[0] if code and rest.startswith("#") else line)
    except ValueError as exc:
        raise ConfigError(f"cannot parse the line ({exc})", hint=f"line: {line}") from exc


def give_empty_body(lines: list[str]) -> list[str]:
    """Add an empty body to ``%%etrain distributed --help``, because IPython requires one.

    Below ``%etrain distributed`` with a single %, the body would be a syntax error in Python. It is
    dropped, so that the line's own error explains the second %.
    """
    cells = "|".join(map(re.escape, (CELL_COMMAND, *plugin.cells())))
    if lines and re.match(rf"%etrain\s+({cells})(\s|$)", lines[0]):
        return lines[:1]
    if len(lines) != 1 or not re.match(r"%%etrain(\s|$)", lines[0]):
        return lines
    return [lines[0].rstrip("\n") + "\n", "\n"]


def load(shell: InteractiveShell) -> None:
    """Register the magics, completion, hints and the side panel; for ``%load_ext``."""
    EtrainMagics.etrain.__doc__ = help_on_magic()  # what %etrain? shows
    shell.register_magics(EtrainMagics)
    hooks.install(shell)
    if give_empty_body not in shell.input_transformers_cleanup:
        shell.input_transformers_cleanup.append(give_empty_body)
    open_panel()


def unload(shell: InteractiveShell) -> None:
    """Undo ``load``; jobs and clusters continue to run."""
    hooks.remove(shell)
    if give_empty_body in shell.input_transformers_cleanup:
        shell.input_transformers_cleanup.remove(give_empty_body)
    # IPython does not provide a method to unregister a magic.
    magics: dict[str, dict[str, Any]] = shell.magics_manager.magics
    for kind in ("cell", "line"):
        magics[kind].pop("etrain", None)
