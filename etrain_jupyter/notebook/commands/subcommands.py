"""The sub-commands that ``%etrain`` and ``etrain`` share: each a function that returns text.

A sub-command gets a ``Surface``: how this place finds a job and shows one. The table at the end of
the file is the list that help, completion and the nearest-name hint are made from.
"""

from __future__ import annotations

import argparse
import difflib
import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Protocol

from pydantic import ValidationError

from etrain_jupyter.config import template
from etrain_jupyter.config.schema import LogConfig
from etrain_jupyter.errors import ConfigError, EtrainError, NotSupportedYetError, PoolError
from etrain_jupyter.log.events import (
    TERMINAL_STATUSES,
)
from etrain_jupyter.log.tensorboard import convert, require_tensorboard
from etrain_jupyter.notebook.commands.arguments import (
    TRAINER_FAULTS,
    HelpRequested,
    Parser,
    add_all,
    add_bounds,
    add_chances,
    add_cluster,
    add_export,
    add_follow,
    add_how,
    add_job,
    add_job_option,
    add_notice,
    add_now,
    add_number,
    add_out,
    add_pool,
    add_pools,
    add_reap,
    add_resume,
    add_timeout,
    add_verify,
    add_worker,
    make_parser,
    one_of,
    question_as_help,
)
from etrain_jupyter.notebook.commands.doctor import examine
from etrain_jupyter.notebook.commands.log_lines import follow_lines, log_lines
from etrain_jupyter.notebook.dashboard.saved_table import table_of_saved
from etrain_jupyter.notebook.job.export import FORMATS
from etrain_jupyter.notebook.job.job_record import JobRecord
from etrain_jupyter.notebook.job.run_store import JobSummary, Listing, RunStore
from etrain_jupyter.notebook.job.store_link import refresh_log
from etrain_jupyter.notebook.job.training_job import TrainingJob
from etrain_jupyter.pools import clusters
from etrain_jupyter.rules.policy.chaos import MODES
from etrain_jupyter.untrusted import plain_line

MOST_NAMED = 10
"""Folders that ``ls`` names as unreadable."""
IN_DOUBT_S = 60.0
"""Age of the last sign of a job after which ``ls`` shows that age, in seconds."""
LATER = ("diagnose", "plan")
"""Sub-commands of the contract that this version does not have."""


class Surface(Protocol):
    """The place from which a sub-command was typed."""

    @property
    def store(self) -> RunStore:
        """Where its jobs are."""

    def find(self, name_or_id: str | None) -> TrainingJob:
        """Return the job of that name or id; the latest without one."""

    def show(self, job: TrainingJob, variable: str | None = None) -> str:
        """Show a job, and bind it to ``variable`` if the place has variables."""

    def say(self, line: str) -> None:
        """Print one line at once, while the sub-command goes on."""

    def open_tensorboard(self, folder: Path) -> str:
        """Open TensorBoard on a folder where the place can; return what there is to read."""


@dataclass(frozen=True, kw_only=True)
class Subcommand:
    """One sub-command: its words, its arguments and what it does."""

    name: str
    summary: str
    run: Callable[[Surface, argparse.Namespace], str]
    arguments: tuple[Callable[[argparse.ArgumentParser], object], ...] = ()
    example: str = ""
    """A line that somebody may type, without ``%etrain``."""
    is_for_notebooks_only: bool = False

    def parser(self, prog: str) -> Parser:
        """Return the parser of its line."""
        epilog = f"example: {prog} {self.example}" if self.example else ""
        parser = make_parser(f"{prog} {self.name}", self.summary, epilog)
        for add in self.arguments:
            add(parser)
        return parser


def run_line(surface: Surface, words: Sequence[str], *, prog: str) -> str:
    """Carry out one line, for example ``["scale", "4"]``, and return what there is to read.

    Raises:
        EtrainError: For what cannot be done; the message says what to type instead.
    """
    words = question_as_help(words)
    if not words or words[0] in ("-h", "--help", "help"):
        return overview(prog)
    command = find_subcommand(words[0], prog=prog)
    parser = command.parser(prog)
    try:
        return command.run(surface, parser.parse_args(words[1:]))
    except HelpRequested as help_text:
        return str(help_text)


def find_subcommand(name: str, *, prog: str, others: Sequence[str] = ()) -> Subcommand:
    """Return the sub-command of that name; ``others`` are words that may have been meant.

    Raises:
        ConfigError: If there is none; the message names the nearest.
        NotSupportedYetError: If a later version brings it.
    """
    for command in SUBCOMMANDS:
        if command.name == name:
            return command
    if name in LATER:
        raise NotSupportedYetError(f"{prog} {name} comes with a later version")
    known = [*others, *(c.name for c in SUBCOMMANDS)]
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {prog} {near[0]}?" if near else f"{prog} --help lists what there is"
    raise ConfigError(f"there is no {prog} {name}", hint=hint)


def overview(prog: str) -> str:
    """Return the list of sub-commands."""
    is_notebook = prog.startswith("%")
    lines = [f"{prog} SUB-COMMAND [arguments]; each takes --help and defaults to the latest job."]
    if is_notebook:
        lines.append(
            "  %%etrain distributed   train what the cell's YAML says; see %etrain template"
        )
    lines += [
        f"  {c.name:<13}{c.summary}"
        for c in SUBCOMMANDS
        if is_notebook or not c.is_for_notebooks_only
    ]
    return "\n".join(lines)


# --- the sub-commands -----------------------------------------------------------------------------


def _list(surface: Surface, args: argparse.Namespace) -> str:
    machines = f"\n\n{clusters.describe_aws(region=args.region)}" if args.all else ""
    listing = surface.store.scan()
    records = listing.jobs
    machines = _unreadable(listing) + machines
    if not records:
        return f"No jobs in {surface.store}.{machines}"
    table: list[tuple[str, ...]] = [("JOB", "STATUS", "STEP", "WORKERS", "SUBMITTED")]
    table += [_row(surface.store, record) for record in records[: args.number]]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = ["  ".join(map(str.ljust, line, widths)).rstrip() for line in table]
    return "\n".join(lines) + machines


def _unreadable(listing: Listing) -> str:
    """Return lines about what looks like a job and is none that can be used."""
    if not listing.problems:
        return ""
    named = [f"  {plain_line(name, 60)}: {why}" for name, why in listing.problems.items()]
    more = [f"  and {len(named) - MOST_NAMED} more"] if len(named) > MOST_NAMED else []
    return "\n".join(["\n\nNot listed, since they cannot be used:", *named[:MOST_NAMED], *more])


def _row(store: RunStore, record: JobRecord) -> tuple[str, ...]:
    """Return a job's line, without asking its cluster."""
    known = store.summarize(record)
    has_none = known.is_gone or known.status in TERMINAL_STATUSES
    return (
        record.job_id,
        describe_status(known),
        f"{known.step}/{known.total_steps}" if known.total_steps else str(known.step),
        "-" if has_none else str(known.world_size),
        datetime.fromtimestamp(record.created).strftime("%Y-%m-%d %H:%M"),
    )


def describe_status(job: JobSummary) -> str:
    """Return a job's status for a list; of a job in doubt also when it was last seen."""
    if job.is_gone:
        return "failed (its cluster has ended)"
    status = plain_line(job.status, 40)
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


def _show(surface: Surface, args: argparse.Namespace) -> str:
    return surface.show(surface.find(args.job))


def _attach(surface: Surface, args: argparse.Namespace) -> str:
    return surface.show(surface.find(args.job), args.out)


def _wait(surface: Surface, args: argparse.Namespace) -> str:
    return wait_for(surface.find(args.job), args.timeout)


def wait_for(job: TrainingJob, timeout: float | None = None) -> str:
    """Block until a job has ended; all but success is an error, so that "Run All" stops."""
    if job.note:
        print(f"etrain: {job.note}", flush=True)
    status = job.wait(timeout)
    if job.screen is not None:
        job.screen.settle()
    if status not in TERMINAL_STATUSES:
        raise EtrainError(
            f"job {job.id} is still {status} after {timeout:g} s, at step {job.step}. It goes on; "
            "%etrain wait without --timeout waits for its end."
        )
    job.raise_for_status()
    if job.was_interrupted or status == "stopped":
        by = "by the interrupt " if job.was_interrupted else ""
        raise EtrainError(
            f"job {job.id} was stopped {by}at step {job.step}. "
            "Run the next cells by hand to go on with what it has learnt."
        )
    return repr(job)


def _pause(surface: Surface, args: argparse.Namespace) -> str:
    return surface.find(args.job).pause()


def _resume(surface: Surface, args: argparse.Namespace) -> str:
    if args.epochs is not None and args.steps is not None:
        raise ConfigError("resume takes --epochs or --steps, not both")
    return surface.find(args.job).resume(
        pool=args.pool,
        min=args.min,
        max=args.max,
        epochs=args.epochs,
        steps=args.steps,
        force=args.force,
        trust=args.trust,
    )


def _stop(surface: Surface, args: argparse.Namespace) -> str:
    return surface.find(args.job).stop(now=args.now)


def _checkpoint(surface: Surface, args: argparse.Namespace) -> str:
    return surface.find(args.job).checkpoint()


def _checkpoints(surface: Surface, args: argparse.Namespace) -> str:
    job = surface.find(args.job)
    return table_of_saved(job.id, job.checkpoints(verify=args.verify))


def _export(surface: Surface, args: argparse.Namespace) -> str:
    if args.best and args.step is not None:
        raise ConfigError("export takes --best or --step N, not both")
    which = "best" if args.best else "last" if args.step is None else args.step
    job = surface.find(args.job)
    written = job.export(
        args.path,
        format=one_of("--format", args.format, FORMATS),
        which=which,
        overwrite=args.overwrite,
    )
    return f"{describe_which(which)} weights of {job.id} are in {written}"


def describe_which(which: str | int) -> str:
    """Return for example ``The newest``."""
    known = {"last": "The newest", "best": "The best"}
    return known.get(str(which), f"Step {which}'s")


def _scale(surface: Surface, args: argparse.Namespace) -> str:
    if args.number is not None and args.max is not None:
        raise ConfigError("scale takes N or --max, not both: N is short for --max N")
    most = args.max if args.number is None else args.number
    if most is None and args.min is None:
        raise ConfigError("scale to how many workers?", hint="scale N, or --min N and --max N")
    return surface.find(args.job).scale(min=args.min, max=most)


def _preempt(surface: Surface, args: argparse.Namespace) -> str:
    job = surface.find(args.job)
    with _job_told_from_worker(surface, "preempt", args.worker):
        return job.preempt(args.worker, notice_s=args.notice)


def _kill(surface: Surface, args: argparse.Namespace) -> str:
    how = one_of("--how", args.how, ("worker", *TRAINER_FAULTS))
    job = surface.find(args.job)
    with _job_told_from_worker(surface, "kill", args.worker):
        return job.kill(args.worker, how=how)


@contextmanager
def _job_told_from_worker(surface: Surface, command: str, worker: str | None) -> Iterator[None]:
    """Say of a worker that the coordinator does not know that a job is called so."""
    try:
        yield
    except PoolError as exc:
        names = {
            name for record in surface.store.records() for name in (record.name, record.job_id)
        }
        if worker not in names:
            raise
        raise PoolError(f"{exc}. {worker!r} is a job: %etrain {command} --job {worker}") from exc


def _chaos(surface: Surface, args: argparse.Namespace) -> str:
    if args.off:
        return surface.find(args.job).chaos(off=True)
    mode = one_of("--mode", args.mode, MODES)
    job = surface.find(args.job)
    return job.chaos(mtbf_s=args.mtbf, mode=mode, duration_s=args.duration, seed=args.seed)


def _audit(surface: Surface, args: argparse.Namespace) -> str:
    report = surface.find(args.job).audit()
    if not report.ok:
        # A proof that fails must stop whatever relies on it.
        raise EtrainError(str(report))
    return str(report)


def _logs(surface: Surface, args: argparse.Namespace) -> str:
    job = surface.find(args.job)
    if args.follow:
        for line in follow_lines(job, surface.store, number=args.number):
            surface.say(line)
        return ""
    return "\n".join(log_lines(job.events())[-args.number :]) or "No log lines."


def _tensorboard(surface: Surface, args: argparse.Namespace) -> str:
    require_tensorboard()
    record = surface.find(args.job).record
    try:
        log = LogConfig.model_validate(record.config.get("log") or {})
    except ValidationError as exc:
        raise EtrainError(
            f"the configuration of job {record.job_id} has a group log that this version does not "
            f"know: {plain_line(str(exc.errors()[0]['msg']))}. Nothing was opened."
        ) from exc
    folder = log.tensorboard_of(record.job_id, record.folder)
    if folder is None or (record.place and not folder.exists()):
        refresh_log(record)
        folder = record.folder / "tensorboard"
        if folder.is_symlink():
            raise EtrainError(f"{folder} is a link, which is not followed. Nothing was written.")
        convert(record.log_path, folder)
    command = f"tensorboard --logdir {shlex.quote(str(folder))}"
    how = "" if log.tensorboard else " The files say what the job has done until now."
    shown = surface.open_tensorboard(folder)
    return f"{shown}In a terminal: {command}{how}"


def _template(surface: Surface, args: argparse.Namespace) -> str:
    return template()


def _doctor(surface: Surface, args: argparse.Namespace) -> str:
    found = examine(surface.store, with_ec2=args.all, region=args.region)
    return "\n".join(map(str, found))


def _cost(surface: Surface, args: argparse.Namespace) -> str:
    job = surface.find(args.job)
    return f"{job.id} is {job.status}\n{job.cost()}"


def _pools(surface: Surface, args: argparse.Namespace) -> str:
    if args.what is None:
        return clusters.describe_pools()
    one_of("pools", args.what, ("policy",))
    return clusters.policies(args.pool)


def _up(surface: Surface, args: argparse.Namespace) -> str:
    return clusters.bring_up(args.pool, num_workers=args.workers)


def _reap(surface: Surface, args: argparse.Namespace) -> str:
    return clusters.reap(args.cluster, all_clusters=args.all, region=args.region)


def _down(surface: Surface, args: argparse.Namespace) -> str:
    return clusters.down(args.cluster)


SUBCOMMANDS: tuple[Subcommand, ...] = (
    Subcommand(
        name="ls",
        summary="list the jobs, the newest first",
        example="ls -n 10",
        run=_list,
        arguments=(add_number, add_all),
    ),
    Subcommand(
        name="show", summary="show a job", example="show digits", run=_show, arguments=(add_job,)
    ),
    Subcommand(
        name="attach",
        summary="follow a job from this notebook",
        example="attach digits -o job",
        run=_attach,
        arguments=(add_job, add_out),
        is_for_notebooks_only=True,
    ),
    Subcommand(
        name="wait",
        summary="block until a job has ended; an interrupt stops it",
        example="wait --timeout 5min",
        run=_wait,
        arguments=(add_job, add_timeout),
    ),
    Subcommand(
        name="pause",
        summary="let the ranks wait with their state",
        example="pause digits",
        run=_pause,
        arguments=(add_job,),
    ),
    Subcommand(
        name="resume",
        summary="go on after pause, or from the last checkpoint of an ended job",
        example="resume digits --epochs 12 --max 2",
        run=_resume,
        arguments=(add_job, add_resume),
    ),
    Subcommand(
        name="stop",
        summary="end a job after its next step, with a checkpoint",
        example="stop digits --now",
        run=_stop,
        arguments=(add_job, add_now),
    ),
    Subcommand(
        name="checkpoint",
        summary="write a checkpoint after the next step",
        example="checkpoint",
        run=_checkpoint,
        arguments=(add_job,),
    ),
    Subcommand(
        name="checkpoints",
        summary="list what is saved of a job, and whether it is whole",
        example="checkpoints --verify",
        run=_checkpoints,
        arguments=(add_job, add_verify),
    ),
    Subcommand(
        name="export",
        summary="write saved weights to a file, or to a folder for from_pretrained",
        example="export net.safetensors --best",
        run=_export,
        arguments=(add_export, add_job_option),
    ),
    Subcommand(
        name="scale",
        summary="change how many workers a job may have",
        example="scale --min 1 --max 4",
        run=_scale,
        arguments=(add_bounds, add_job_option),
    ),
    Subcommand(
        name="preempt",
        summary="take a worker away with a notice, as a spot market does",
        example="preempt --notice 30s",
        run=_preempt,
        arguments=(add_worker, add_notice, add_job_option),
    ),
    Subcommand(
        name="kill",
        summary="kill a worker's process: a fault on purpose",
        example="kill --how hang",
        run=_kill,
        arguments=(add_worker, add_how, add_job_option),
    ),
    Subcommand(
        name="chaos",
        summary="let faults happen at random, to see that nothing comes of it",
        example="chaos --mtbf 30s --mode kill --duration 5min",
        run=_chaos,
        arguments=(add_job, add_chances),
    ),
    Subcommand(
        name="cost",
        summary="what a job has cost: spent, saved, wasted by interruptions",
        example="cost digits",
        run=_cost,
        arguments=(add_job,),
    ),
    Subcommand(
        name="audit",
        summary="prove from the log that each sample was trained once an epoch",
        example="audit digits",
        run=_audit,
        arguments=(add_job,),
    ),
    Subcommand(
        name="logs",
        summary="what the trainers printed, what their time went into, and who was lost",
        example="logs digits -n 100 --follow",
        run=_logs,
        arguments=(add_job, add_number, add_follow),
    ),
    Subcommand(
        name="tensorboard",
        summary="open TensorBoard on a job",
        example="tensorboard digits",
        run=_tensorboard,
        arguments=(add_job,),
    ),
    Subcommand(name="template", summary="print a commented body", run=_template),
    Subcommand(
        name="pools",
        summary="list the pools and their clusters, or print the IAM policies of one",
        example="pools policy spot-p3",
        run=_pools,
        arguments=(add_pools,),
    ),
    Subcommand(
        name="up",
        summary="bring a pool up before a job needs it",
        example="up spot-p3 --workers 4",
        run=_up,
        arguments=(add_pool,),
    ),
    Subcommand(
        name="down",
        summary="end clusters that we started",
        example="down",
        run=_down,
        arguments=(add_cluster,),
    ),
    Subcommand(
        name="reap",
        summary="remove what dead clusters left on EC2, by its tags",
        example="reap --all",
        run=_reap,
        arguments=(add_reap,),
    ),
    Subcommand(
        name="doctor",
        summary="what is wrong here, and how to mend it",
        example="doctor --all",
        run=_doctor,
        arguments=(add_all,),
    ),
)
