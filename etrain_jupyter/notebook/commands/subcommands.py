"""The sub-commands of ``%etrain`` and ``etrain``: each is a function that returns text.

A sub-command's arguments, help and example come from its signature and docstring, see
``arguments``. Its first parameter is a ``Surface``: the notebook or the terminal.
"""

from __future__ import annotations

import difflib
import shlex
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Protocol

from pydantic import ValidationError

from etrain_jupyter import plugin
from etrain_jupyter.config import template as make_template
from etrain_jupyter.config.schema import LogConfig
from etrain_jupyter.display.tables import align_columns
from etrain_jupyter.errors import ConfigError, EtrainError, PoolError
from etrain_jupyter.log.events import TERMINAL_STATUSES
from etrain_jupyter.log.tensorboard import OPTIONS, convert, require_tensorboard
from etrain_jupyter.notebook.commands.arguments import (
    CELL_COMMAND,
    TRAINER_FAULTS,
    HelpRequested,
    JobNames,
    Number,
    Parser,
    Seconds,
    SecondsOrZero,
    Spelling,
    StoreCount,
    Variable,
    add_parameters,
    make_parser,
    one_of,
    question_as_help,
    read_docstring,
)
from etrain_jupyter.notebook.commands.doctor import examine
from etrain_jupyter.notebook.commands.log_lines import follow_lines, log_lines
from etrain_jupyter.notebook.job import open_jobs
from etrain_jupyter.notebook.job.export import FORMATS
from etrain_jupyter.notebook.job.job_record import RunRecord
from etrain_jupyter.notebook.job.run_store import JobSummary, Listing, RunStore
from etrain_jupyter.notebook.job.saved_records import table_of_saved
from etrain_jupyter.notebook.job.store_link import refresh_log
from etrain_jupyter.notebook.job.track import exhibit_reader, parse_options
from etrain_jupyter.notebook.job.training_job import TrainingJob
from etrain_jupyter.pools import clusters
from etrain_jupyter.rules.chaos import MODES
from etrain_jupyter.untrusted import plain_line

MAX_PROBLEMS = 10
"""Maximum number of unreadable folders that ``ls`` names."""
IN_DOUBT_S = 60.0
"""Age in seconds from which ``ls`` shows when a job last reported."""

Count = Annotated[int, Spelling(flags=("-n",), metavar="N", action=StoreCount)]
Workers = Annotated[int | None, Spelling(flags=("--workers",), metavar="N")]


class Surface(Protocol):
    """Where a sub-command was typed: in a notebook or in a terminal."""

    @property
    def store(self) -> RunStore:
        """The run store of its jobs."""

    def find(self, name_or_id: str | None) -> TrainingJob:
        """Return the job with that name or id; by default the latest."""

    def show(self, job: TrainingJob) -> str:
        """Show a job; return the text to print."""

    def show_result(self, result: object) -> str:
        """Show a comparison, a diagnosis or a plan; return the text to print."""

    def bind(self, variable: str | None, value: object = None) -> None:
        """Assign a value to a variable, if one is given; without a value, only check its name."""

    def say(self, line: str) -> None:
        """Print one line immediately, while the sub-command continues."""

    def submit(self, body: Mapping[str, Any]) -> TrainingJob:
        """Submit a job, given as the keys of a cell, without showing it."""

    def open_tensorboard(self, folder: Path) -> str:
        """Open TensorBoard on a folder if possible; return the text to print."""


class CellSurface(Surface, Protocol):
    """A notebook, whose sub-commands can also run on the body of a cell."""

    @property
    def names(self) -> Mapping[str, Any]:
        """The notebook's names."""

    def profile(self, line: str, body: str) -> TrainingJob:
        """Train a cell for at most a minute on one and two workers; return the stopped job."""


@dataclass(frozen=True, kw_only=True)
class Subcommand:
    """One sub-command, described by its function."""

    run: Callable[..., str]
    is_for_notebooks_only: bool = False
    group: str = ""
    """Sub-command that it belongs to, such as ``pools`` for ``pools init``; usually empty."""
    cell: Callable[..., str] | None = None
    """Runs it on the body of a cell; None if it does not accept a body. See ``plugin.Command``."""

    @property
    def name(self) -> str:
        """Name of the sub-command on the line, with that of its group."""
        return f"{self.group} {self.run.__name__}".strip()

    @property
    def summary(self) -> str:
        """First line of its docstring, which the help shows."""
        text = read_docstring(self.run).summary
        return text[:1].lower() + text[1:]

    @property
    def example(self) -> str:
        """Example line without ``%etrain``; empty if it has none."""
        return read_docstring(self.run).example

    def parser(self, prog: str) -> Parser:
        """Return the parser of its line."""
        epilog = f"example: {prog} {self.example}" if self.example else ""
        parser = make_parser(f"{prog} {self.name}", self.summary, epilog)
        add_parameters(parser, self.run)
        return parser


def run_line(surface: Surface, words: Sequence[str], *, prog: str) -> str:
    """Run one line, for example ``["scale", "4"]``, and return the text to print.

    Raises:
        EtrainError: If the sub-command fails; the message says what to type instead.
    """
    words = question_as_help(words)
    if not words or words[0] in ("-h", "--help", "help"):
        return overview(prog)
    command, rest = find_subcommand(words[0], prog=prog), words[1:]
    if rest and (member := find_member(words)):
        command, rest = member, words[2:]
    try:
        # The names of the parser's arguments are those of the function's parameters.
        arguments = vars(command.parser(prog).parse_args(rest))
    except HelpRequested as help_text:
        return str(help_text)
    return command.run(surface, **arguments)


def find_subcommand(name: str, *, prog: str, others: Sequence[str] = ()) -> Subcommand:
    """Return the sub-command with that name; ``others`` are additional words for the hint.

    Raises:
        ConfigError: If the sub-command is unknown; the message suggests the nearest word.
    """
    for command in subcommands():
        if command.name == name:
            return command
    known = [*others, *(c.name for c in subcommands())]
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {prog} {near[0]}?" if near else f"{prog} --help lists all sub-commands"
    raise ConfigError(f"unknown sub-command: {prog} {name}", hint=hint)


def cell_commands() -> list[str]:
    """Return the names of the sub-commands that accept a body."""
    accepting = [command.name for command in subcommands() if command.cell]
    return [CELL_COMMAND, *plugin.cells(), *accepting]


def find_member(words: Sequence[str]) -> Subcommand | None:
    """Return the sub-command of two words, such as ``pools init``, that a line starts with."""
    named = " ".join(words[:2])
    return next((command for command in members() if command.name == named), None)


def overview(prog: str) -> str:
    """Return the list of sub-commands."""
    is_notebook = prog.startswith("%")
    lines = [f"{prog} SUB-COMMAND [arguments]; the default is the latest job. All have --help."]
    if is_notebook:
        lines.append(
            "  %%etrain distributed   train the job in the cell's YAML body; see %etrain template"
        )
        lines += [f"  %%etrain {name:<14}{one.summary}" for name, one in plugin.cells().items()]
    lines += [
        f"  {c.name:<13}{c.summary}"
        for c in subcommands()
        if is_notebook or not c.is_for_notebooks_only
    ]
    return "\n".join(lines)


def check_variable(name: str | None) -> None:
    """Check the name after ``-o``.

    Raises:
        ConfigError: If it is not a valid variable name.
    """
    if name is not None and not name.isidentifier():
        raise ConfigError(f"-o {name}: this is not a valid variable name", hint="-o job")


# --- the sub-commands -----------------------------------------------------------------------------


def ls(
    surface: Surface, *, number: Count = 50, all: bool = False, region: str | None = None
) -> str:
    """List the jobs, the newest first.

    Args:
        number: At most N jobs, 1 or more (50).
        all: Also list the machines of all clusters in your accounts, with age and price.

    Example:
        ls -n 10
    """
    # Only on request: this sends requests that take seconds and need credentials.
    machines = f"\n\n{clusters.describe_machines(region=region)}" if all else ""
    listing = surface.store.scan()
    end = _describe_problems(listing) + machines
    if not listing.jobs:
        return f"No jobs in {surface.store}.{end}"
    # Summarize only the jobs that are shown, because each summary reads a log.
    table: list[tuple[str, ...]] = [("JOB", "STATUS", "STEP", "WORKERS", "SUBMITTED")]
    table += [_row(surface.store, record) for record in listing.jobs[:number]]
    return align_columns(table) + end


def _describe_problems(listing: Listing) -> str:
    if not listing.problems:
        return ""
    named = [f"  {plain_line(name, 60)}: {why}" for name, why in listing.problems.items()]
    more = [f"  and {len(named) - MAX_PROBLEMS} more"] if len(named) > MAX_PROBLEMS else []
    head = (
        "\n\nNot listed, because their records are invalid (restore job.json from a backup, or "
        "delete the folder):"
    )
    return "\n".join([head, *named[:MAX_PROBLEMS], *more])


def _row(store: RunStore, record: RunRecord) -> tuple[str, ...]:
    known = store.summarize(record)
    # The log still contains the last world size, but those workers are no longer training this job.
    has_none = known.is_gone or known.status in TERMINAL_STATUSES
    return (
        record.job_id,
        describe_status(known),
        f"{known.step}/{known.total_steps}" if known.total_steps else str(known.step),
        "-" if has_none else str(known.world_size),
        datetime.fromtimestamp(record.created).strftime("%Y-%m-%d %H:%M"),
    )


def describe_status(job: JobSummary) -> str:
    """Return a job's status for a list, with the time of the last report if that is long ago."""
    if job.is_gone:
        return "failed (its cluster has ended)"
    status = plain_line(job.status, 40)
    # This is set if the coordinator runs on another machine and may have died.
    age_s = 0.0 if job.last_seen_at is None else time.time() - job.last_seen_at
    return f"{status} (last seen {format_age(age_s)} ago)" if age_s > IN_DOUBT_S else status


def format_age(seconds: float) -> str:
    """Return an age in its largest unit.

    >>> format_age(90), format_age(3 * 3600), format_age(200_000)
    ('1 min', '3 h', '2 days')
    """
    minutes, hours, days = (int(seconds // unit) for unit in (60, 3600, 86_400))
    if days:
        return f"{days} day" + ("" if days == 1 else "s")
    return f"{hours} h" if hours else f"{minutes} min"


def show(surface: Surface, job: str | None = None, *, out: Variable = None) -> str:
    """Show a job.

    Example:
        show digits
    """
    # Reject an invalid variable name before searching for the job.
    surface.bind(out)
    found = surface.find(job)
    surface.bind(out, found)
    return surface.show(found)


def attach(surface: Surface, job: str | None = None, *, out: Variable = None) -> str:
    """Follow a job from this notebook.

    Example:
        attach digits -o job
    """
    return show(surface, job, out=out)


def wait(surface: Surface, job: str | None = None, *, timeout: SecondsOrZero | None = None) -> str:
    """Block until a job has ended; an interrupt stops the job.

    Args:
        timeout: Stop waiting after this time, for example 5min.

    Example:
        wait --timeout 5min
    """
    return wait_for(surface.find(job), timeout)


def wait_for(job: TrainingJob, timeout: float | None = None) -> str:
    """Block until a job has ended; raise unless it succeeded, so that "Run All" stops."""
    if job.note:
        print(f"etrain: {job.note}", flush=True)
    try:
        status = job.wait(timeout)
    finally:
        if job.screen is not None:
            # The last update must belong to this cell; see Dashboard.settle.
            job.screen.settle()
    if status not in TERMINAL_STATUSES:
        raise EtrainError(
            f"job {job.id} is still {status} after {timeout:g} s, at step {job.step}. It "
            "continues; %etrain wait without --timeout waits for its end."
        )
    # A stopped job has not failed, but "Run All" must not continue with half-trained weights.
    if job.was_interrupted or status == "stopped":
        by = "by the interrupt " if job.was_interrupted else ""
        why = f" ({job.reason})" if job.reason else ""
        raise EtrainError(
            f"job {job.id} was stopped {by}at step {job.step}{why}. "
            "Run the next cells by hand to use the current weights."
        )
    return repr(job)


def pause(surface: Surface, job: str | None = None) -> str:
    """Pause a job; its ranks keep their state.

    Example:
        pause digits
    """
    return surface.find(job).pause()


def resume(
    surface: Surface,
    job: str | None = None,
    *,
    pool: str | None = None,
    min: Number = None,
    max: Workers = None,
    epochs: Annotated[float | None, Spelling(metavar="N")] = None,
    steps: Number = None,
    force: bool = False,
    trust: bool = False,
    out: Variable = None,
) -> str:
    """Resume a paused job, or an ended job from its last checkpoint.

    Args:
        pool: Pool of its workers; by default the same pool.
        epochs: Number of epochs in total.
        steps: Number of steps in total, instead of epochs.

    Example:
        resume digits --epochs 12 --max 2
    """
    if epochs is not None and steps is not None:
        raise ConfigError("resume takes --epochs or --steps, not both")
    surface.bind(out)
    found = surface.find(job)
    message = found.resume(
        pool=pool, min=min, max=max, epochs=epochs, steps=steps, force=force, trust=trust
    )
    surface.bind(out, found)
    return message


def stop(surface: Surface, job: str | None = None, *, now: bool = False) -> str:
    """Stop a job after its next step, with a checkpoint.

    Args:
        now: Stop immediately, without a checkpoint.

    Example:
        stop digits --now
    """
    return surface.find(job).stop(now=now)


def checkpoint(surface: Surface, job: str | None = None) -> str:
    """Write a checkpoint after the next step.

    Example:
        checkpoint
    """
    return surface.find(job).checkpoint()


def checkpoints(surface: Surface, job: str | None = None, *, verify: bool = False) -> str:
    """List a job's checkpoints and check that they are complete.

    Args:
        verify: Read all data and compare its SHA-256.

    Example:
        checkpoints --verify
    """
    found = surface.find(job)
    return table_of_saved(found.id, found.checkpoints(verify=verify))


def export(
    surface: Surface,
    path: str,
    *,
    best: bool = False,
    step: Number = None,
    format: Annotated[str, Spelling(metavar="FORMAT")] = "safetensors",
    raw: bool = False,
    overwrite: bool = False,
    job: str | None = None,
) -> str:
    """Write saved weights to a file, or to a folder for from_pretrained.

    Args:
        path: The file, or with --format transformers the folder, to write.
        best: The best weights instead of the newest.
        step: The weights of the checkpoint at step N.
        format: Safetensors (default: one file), or transformers (a folder for from_pretrained).
        raw: With ema, the weights that are trained instead of their average.
        overwrite: Replace existing files.

    Example:
        export net.safetensors --best
    """
    if best and step is not None:
        raise ConfigError("export takes --best or --step N, not both")
    which = "best" if best else "last" if step is None else step
    found = surface.find(job)
    written = found.export(
        path,
        format=one_of("--format", format, FORMATS),
        which=which,
        weights="raw" if raw else "auto",
        overwrite=overwrite,
    )
    described = {"last": "The newest", "best": "The best"}.get(str(which), f"Step {which}'s")
    return f"{described} weights of {found.id} are in {written}"


def scale(
    surface: Surface,
    number: Number = None,
    *,
    min: Number = None,
    max: Number = None,
    job: str | None = None,
) -> str:
    """Change the number of workers that a job may use.

    Args:
        number: Short for --max N.

    Example:
        scale --min 1 --max 4
    """
    if number is not None and max is not None:
        raise ConfigError("scale takes N or --max, not both: N is short for --max N")
    most = max if number is None else number
    if most is None and min is None:
        raise ConfigError("scale needs a number of workers", hint="scale N, or --min N and --max N")
    return surface.find(job).scale(min=min, max=most)


def preempt(
    surface: Surface,
    worker: str | None = None,
    *,
    notice: SecondsOrZero = 120.0,
    job: str | None = None,
) -> str:
    """Preempt a worker after a notice, as a spot market does.

    Args:
        worker: Its name; by default the coordinator chooses one.
        notice: Time until the worker ends, for example 2min (120s).

    Example:
        preempt --notice 30s
    """
    found = surface.find(job)
    # The positional argument is a worker here but a job everywhere else, so users may confuse the
    # two.
    with _job_is_not_a_worker(surface, "preempt", worker):
        return found.preempt(worker, notice_s=notice)


def kill(
    surface: Surface,
    worker: str | None = None,
    *,
    how: Annotated[str, Spelling(metavar="KIND")] = "worker",
    job: str | None = None,
) -> str:
    """Kill a worker's process: fault injection.

    Args:
        worker: Its name; by default the coordinator chooses one.
        how: Worker (default: its whole process), or a fault of its trainer: kill, segfault, exit,
            stop, hold_gil or hang.

    Example:
        kill --how hang
    """
    kind = one_of("--how", how, ("worker", *TRAINER_FAULTS))
    found = surface.find(job)
    with _job_is_not_a_worker(surface, "kill", worker):
        return found.kill(worker, how=kind)


@contextmanager
def _job_is_not_a_worker(surface: Surface, command: str, worker: str | None) -> Iterator[None]:
    """Add a hint to the error for an unknown worker if a job has that name."""
    try:
        yield
    except PoolError as exc:
        # The word may not be the name of a job either.
        if not any(worker in (record.name, record.job_id) for record in surface.store.records()):
            raise
        raise PoolError(f"{exc}. {worker!r} is a job: %etrain {command} --job {worker}") from exc


def chaos(
    surface: Surface,
    job: str | None = None,
    *,
    mtbf: Seconds = 15.0,
    mode: Annotated[str, Spelling(metavar="KIND")] = "mix",
    duration: Seconds | None = None,
    seed: Number = None,
    off: bool = False,
) -> str:
    """Inject random faults to test that training survives them.

    Args:
        mtbf: Mean time between two faults (15s).
        mode: Mix of all (default), or one of: kill, segfault, exit, stop, hold_gil, hang, notice,
            worker.
        duration: Stop after this time, for example 5min.
        seed: Repeat the faults of a run with the same seed.
        off: Stop now.

    Example:
        chaos --mtbf 30s --mode kill --duration 5min
    """
    # The other arguments describe the faults to inject, so they have no effect here.
    if off:
        return surface.find(job).chaos(off=True)
    kind = one_of("--mode", mode, MODES)
    return surface.find(job).chaos(mtbf_s=mtbf, mode=kind, duration_s=duration, seed=seed)


def cost(surface: Surface, job: str | None = None) -> str:
    """Show the cost of a job: spent, saved, and wasted by interruptions.

    Example:
        cost digits
    """
    found = surface.find(job)
    return f"{found.id} is {found.status}\n{found.cost()}"


def audit(surface: Surface, job: str | None = None) -> str:
    """Prove from the log that each sample was trained on once per epoch.

    Example:
        audit digits
    """
    report = surface.find(job).audit()
    if not report.ok:
        # Raise if the proof fails, so that later cells which rely on it do not run.
        raise EtrainError(str(report))
    return str(report)


def compare(
    surface: Surface,
    jobs: JobNames = (),
    *,
    html: Annotated[str | None, Spelling(metavar="FILE")] = None,
) -> str:
    """Compare jobs: throughput, efficiency, metrics, time and cost.

    Args:
        jobs: Names or ids; by default the newest jobs with the name of the latest one.
        html: Also write one self-contained page, for example report.html.

    Example:
        compare digits-1 digits-4 --html report.html
    """
    comparison = open_jobs.compare(jobs or None, store=surface.store)
    # Write the page first: its path may be invalid, and showing the table takes longer.
    written = "" if html is None else f"The page is in {comparison.write_html(html)}"
    shown = surface.show_result(comparison)
    return "\n\n".join(part for part in (shown, written) if part)


def diagnose(surface: Surface, job: str | None = None) -> str:
    """Find the cause that slows a job down, and suggest a remedy.

    Example:
        diagnose digits
    """
    return surface.show_result(open_jobs.diagnose(surface.find(job)))


def logs(
    surface: Surface,
    job: str | None = None,
    *,
    number: Count = 50,
    follow: Annotated[bool, Spelling(flags=("-f",))] = False,
) -> str:
    """Show the output and step times of the trainers, and lost workers.

    Args:
        number: At most N lines, 1 or more (50).
        follow: Print new lines, through a resume, until the job has ended.

    Example:
        logs digits -n 100 --follow
    """
    found = surface.find(job)
    if follow:
        for line in follow_lines(found, surface.store, number=number):
            surface.say(line)
        return ""
    return "\n".join(log_lines(found.events())[-number:]) or "No log lines."


def tensorboard(surface: Surface, job: str | None = None) -> str:
    """Open TensorBoard on a job.

    Example:
        tensorboard digits
    """
    require_tensorboard()
    found = surface.find(job)
    record = found.record
    try:
        log = LogConfig.model_validate(record.config.get("log") or {})
    # The record may be from another version, or another user may have written it.
    except ValidationError as exc:
        raise EtrainError(
            f"the group 'log' in the configuration of job {record.job_id} is invalid in this "
            f"version: {plain_line(str(exc.errors()[0]['msg']))}. Nothing was opened."
        ) from exc
    folder = log.tensorboard_of(record.job_id, record.folder)
    # Either the job writes no files or, if it is in a bucket, it wrote them on another machine.
    # Create the files from the log, next to its local copy.
    if folder is None or (record.place and not folder.exists()):
        refresh_log(record)
        folder = record.folder / "tensorboard"
        # Another user may own the run folder, where a link could point to this user's files.
        if folder.is_symlink():
            raise EtrainError(f"{folder} is a link, which is not followed. Nothing was written.")
        convert(record.log_path, folder, exhibit_reader(found.exhibits()))
    command = f"tensorboard --logdir {shlex.quote(str(folder))} {OPTIONS}"
    note = "" if log.tensorboard else " The files show the job up to now."
    shown = surface.open_tensorboard(folder)
    return f"{shown}In a terminal: {command}{note}"


def track(
    surface: Surface,
    job: str | None = None,
    *,
    to: Annotated[str | None, Spelling(metavar="LOGGER")] = None,
    options: Annotated[Sequence[str], Spelling(metavar="KEY=VALUE", nargs="*")] = (),
) -> str:
    """Write the values of a job to a logger, for example an experiment tracker.

    Args:
        to: tensorboard, or the name of a plug-in's logger; by default the loggers in the job's
            log.to.
        options: Options of the logger, as in log.to.

    Example:
        track digits --to tensorboard --options folder=boards
    """
    return surface.find(job).track(to, **parse_options(options))


def template(surface: Surface) -> str:
    """Print a commented cell body to start from."""
    return make_template()


def pools(
    surface: Surface,
    action: Annotated[str | None, Spelling(metavar="ACTION")] = None,
    pool: str | None = None,
) -> str:
    """List the pools and their clusters, or set up a pool.

    Args:
        action: "init", "check", "remove" or "policy", which have their own help.
        pool: Pool to act on.

    Example:
        pools init spot
    """
    if action is None:
        return clusters.describe_pools()
    # The actions reach this function only if they were mistyped.
    known = [command.run.__name__ for command in members() if command.group == "pools"]
    one_of("pools", action, known)
    raise AssertionError("members run their own functions")


def up(
    surface: Surface,
    pool: str = "local",
    *,
    workers: Annotated[int | None, Spelling(flags=("-w",), metavar="N")] = None,
) -> str:
    """Start a pool before a job needs it.

    Args:
        pool: Its name; by default local.
        workers: Keep at least N workers, even if no job needs them.

    Example:
        up spot-p3 --workers 4
    """
    return clusters.bring_up(pool, num_workers=workers)


def down(surface: Surface, cluster: str | None = None, *, all: bool = False) -> str:
    """Shut down clusters; their running jobs save a checkpoint first.

    Args:
        cluster: Id of a cluster, or a pool for all of its clusters, also if jobs run there; by
            default the idle clusters of this notebook's pools.
        all: All your clusters on this machine, with their jobs.

    Example:
        down
    """
    return clusters.down(cluster, all_clusters=all)


def doctor(surface: Surface, *, all: bool = False, region: str | None = None) -> str:
    """Check this installation and suggest fixes.

    Args:
        all: Also check the clusters in your accounts.

    Example:
        doctor --all
    """
    return "\n".join(map(str, examine(surface.store, with_all=all, region=region)))


# Sub-commands for jobs, in the order of a job's life cycle, followed by those for clusters.
_IN_ORDER: tuple[Callable[..., Any], ...] = (
    ls, show, attach, wait, pause, resume, stop, checkpoint, checkpoints, export, scale, preempt,
    kill, chaos, cost, compare, diagnose, audit, logs, tensorboard, track, template, pools,
    up, down, doctor,
)  # fmt: skip


@cache
def subcommands() -> tuple[Subcommand, ...]:
    """Return all sub-commands, including those of plug-ins, in the order of the help."""
    found = [Subcommand(run=run, is_for_notebooks_only=run is attach) for run in _IN_ORDER]
    for command in plugin.commands():
        if not command.group:
            names = [one.name for one in found]
            place = names.index(command.after) + 1 if command.after in names else len(names)
            found.insert(place, _load(command))
    return tuple(found)


@cache
def members() -> tuple[Subcommand, ...]:
    """Return the sub-commands of two words."""
    return tuple(_load(command) for command in plugin.commands() if command.group)


def _load(command: plugin.Command) -> Subcommand:
    cell = plugin.load(command.cell) if command.cell else None
    return Subcommand(run=plugin.load(command.run), group=command.group, cell=cell)
