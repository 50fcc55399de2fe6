"""Command lines that raise where argparse would end the process, and values spelt as in a cell."""

from __future__ import annotations

import argparse
import difflib
import math
import re
from collections.abc import Sequence
from typing import Any, NoReturn

from etrain_jupyter.config.fields import Interval
from etrain_jupyter.errors import ConfigError
from etrain_jupyter.notebook.job.export import FORMATS
from etrain_jupyter.rules.policy.chaos import FAULT_KINDS, MODES

CELL_COMMAND = "distributed"
"""The sub-command that takes a body."""

TRAINER_FAULTS = tuple(kind for kind in FAULT_KINDS if kind not in ("notice", "worker"))
"""What ``kill --how`` can do to a trainer."""

WORDS: dict[str, tuple[str, ...]] = {
    "how": ("worker", *TRAINER_FAULTS),
    "mode": MODES,
    "format": FORMATS,
}
"""What an argument of that name takes, for completion; what it refuses is said where it is used."""


class Parser(argparse.ArgumentParser):
    """Raises where argparse would end the process: a mistyped line must not end a kernel."""

    @property
    def arguments(self) -> Sequence[argparse.Action]:
        """What the line takes, flags and others, in the order of the help."""
        return tuple(self._actions)

    def error(self, message: str) -> NoReturn:
        """Raise what the surface shows instead of exiting."""
        flags = [word.rstrip(":") for word in message.split() if word.startswith("-")]
        hint = self._hint_for(flags[0]) if flags else ""
        raise ConfigError(f"{self.prog}: {message}", hint=hint or self.format_usage().strip())

    def _hint_for(self, flag: str) -> str:
        """Return what a flag that is known takes, or the flag that was meant; empty if none."""
        action = self._option_string_actions.get(flag.partition("/")[0])
        if action is not None:
            return f"{flag} {action.metavar or ''}".rstrip() + f": {action.help}"
        known = [name for name in self._option_string_actions if name.startswith("--")]
        near = difflib.get_close_matches(flag.partition("=")[0], known, n=1)
        return f"did you mean {near[0]}?" if near else ""


class StoreSeconds(argparse.Action):
    """A duration above 0 as seconds; an action, since argparse has words of its own for a type."""

    least = math.ulp(0.0)

    def __call__(
        self, parser: object, namespace: argparse.Namespace, values: Any, option: Any = None
    ) -> None:
        """Keep the seconds."""
        setattr(namespace, self.dest, seconds_of(option, values, least=self.least))


class StoreSecondsOrZero(StoreSeconds):
    """A duration that may be 0: at once."""

    least = 0.0


class StoreCount(argparse.Action):
    """A whole number of 1 or more."""

    def __call__(
        self, parser: object, namespace: argparse.Namespace, values: Any, option: Any = None
    ) -> None:
        """Keep the number."""
        number = int(values) if re.fullmatch(r"[+-]?\d+", values) else 0
        if number < 1:
            raise ConfigError(
                f"{option} {values}: that must be a whole number of 1 or more",
                hint=f"write for example {option} 50",
            )
        setattr(namespace, self.dest, number)


def question_as_help(words: Sequence[str]) -> list[str]:
    """Read a question mark at the end as in IPython: ``show?`` asks for the help of ``show``.

    >>> question_as_help(["show?"])
    ['show', '--help']
    """
    if len(words) == 1 and words[0].endswith("?"):
        words = [words[0].rstrip("?"), "?"]
    if not words or words[-1].strip("?"):
        return list(words)
    return [*(word for word in words[:-1] if word), "--help"]


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


def distributed_parser() -> Parser:
    """Return the parser of the line ``%%etrain distributed``."""
    parser = make_parser(
        f"%%etrain {CELL_COMMAND}",
        "Train what the YAML in the cell's body says, on workers that may come and go.",
        epilog="%etrain template prints a commented body.",
    )
    add = parser.add_argument
    add("--name", help="the job's name; else the body's, else the model's")
    add("-o", "--out", metavar="VAR", help="bind the job to this name")
    add("--pool", help="where the workers come from; else the body's, else local")
    add("--wait", action="store_true", help="block until the job has ended; interrupt to stop it")
    add("--dry-run", action="store_true", help="check and show the plan, submit nothing")
    add("--quiet", action="store_true", help="show no dashboard")
    text = "let this job go on from its last checkpoint, with this cell's code and values"
    add("--resume", metavar="JOB", help=text)
    add_force(parser)
    add_trust(parser)
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


def seconds_of(flag: str, text: str, *, least: float = 0.0) -> float:
    """Return a duration: seconds as a bare number, or spelt as in the cell, ``15s``, ``5 min``.

    Raises:
        ConfigError: If it is none, or less than ``least``.
    """
    hint = f"write for example {flag} 15s"
    try:
        value = float(text)
    except ValueError:
        value = _parse_interval(text)
    if not math.isfinite(value):
        raise ConfigError(f"{flag} {text}: that is no duration", hint=hint)
    if value < 0:
        raise ConfigError(f"{flag} {text}: a duration is 0 or more", hint=hint)
    if value < least:
        raise ConfigError(f"{flag} {text}: this duration must be above 0", hint=hint)
    return value


def _parse_interval(text: str) -> float:
    """Return the seconds of ``5 min``; NaN for what is no interval of time."""
    try:
        interval = Interval.parse(text)
    except ValueError:
        return math.nan
    return interval.value if interval.unit == "s" else math.nan


# --- the arguments of the sub-commands ---


def add_job(parser: argparse.ArgumentParser) -> None:
    """Which job, by position."""
    parser.add_argument("job", nargs="?", help="name, id or the start of an id; the latest job")


def add_job_option(parser: argparse.ArgumentParser) -> None:
    """Which job, where the position is another thing's."""
    parser.add_argument("--job", help="name, id or the start of an id; the latest job")


def add_bounds(parser: argparse.ArgumentParser) -> None:
    """How many workers."""
    parser.add_argument("number", nargs="?", type=int, metavar="N", help="short for --max N")
    parser.add_argument("--min", type=int, help="wait below this number of workers")
    parser.add_argument("--max", type=int, help="never use more workers")


def add_resume(parser: argparse.ArgumentParser) -> None:
    """What shall be otherwise in a job that goes on."""
    add = parser.add_argument
    add("--pool", help="where its workers come from now; else the same pool")
    add("--min", type=int, metavar="N", help="wait below this number of workers")
    add("--max", "--workers", type=int, metavar="N", help="never use more workers")
    add("--epochs", type=float, metavar="N", help="how many epochs all in all")
    add("--steps", type=int, metavar="N", help="how many steps all in all, instead")
    add_force(parser)
    add_trust(parser)


def add_force(parser: argparse.ArgumentParser) -> None:
    """Whether differences matter."""
    text = "go on although what differs makes the rest of the curve another one"
    parser.add_argument("--force", action="store_true", help=text)


def add_trust(parser: argparse.ArgumentParser) -> None:
    """Whether somebody else's code may run."""
    text = "run the job although somebody else may have submitted it"
    parser.add_argument("--trust", action="store_true", help=text)


def add_worker(parser: argparse.ArgumentParser) -> None:
    """Which worker."""
    parser.add_argument("worker", nargs="?", help="its name; by default the coordinator chooses")


def add_notice(parser: argparse.ArgumentParser) -> None:
    """How long a notice lasts."""
    text = "how long before it goes, for example 2min (120s)"
    add = parser.add_argument
    add("--notice", action=StoreSecondsOrZero, default=120.0, metavar="TIME", help=text)


def add_how(parser: argparse.ArgumentParser) -> None:
    """What befalls a worker."""
    kinds = ", ".join(TRAINER_FAULTS)
    text = f"worker (default: its whole process), or what befalls its trainer: {kinds}"
    parser.add_argument("--how", default="worker", metavar="KIND", help=text)


def add_chances(parser: argparse.ArgumentParser) -> None:
    """What befalls workers by chance, and how often."""
    add = parser.add_argument
    text = "mean time between two faults (15s)"
    add("--mtbf", action=StoreSeconds, default=15.0, metavar="TIME", help=text)
    kinds = ", ".join(FAULT_KINDS)
    add("--mode", default="mix", metavar="KIND", help=f"mix of all (default), or one of: {kinds}")
    text = "end it after this time, for example 5min"
    add("--duration", action=StoreSeconds, metavar="TIME", help=text)
    add("--seed", type=int, metavar="N", help="repeat the faults of a run with the same seed")
    add("--off", action="store_true", help="end it now")


def add_now(parser: argparse.ArgumentParser) -> None:
    """Whether to wait for the step."""
    parser.add_argument("--now", action="store_true", help="at once, without a checkpoint")


def add_timeout(parser: argparse.ArgumentParser) -> None:
    """How long to wait."""
    text = "give up after this time, for example 5min"
    parser.add_argument("--timeout", action=StoreSecondsOrZero, metavar="TIME", help=text)


def add_out(parser: argparse.ArgumentParser) -> None:
    """Which variable gets the job."""
    parser.add_argument("-o", "--out", metavar="VAR", help="bind the job to this name")


def add_number(parser: argparse.ArgumentParser) -> None:
    """How many lines."""
    text = "at most N, 1 or more (50)"
    parser.add_argument("-n", "--number", action=StoreCount, default=50, metavar="N", help=text)


def add_follow(parser: argparse.ArgumentParser) -> None:
    """Whether to go on."""
    text = "go on with what comes, through a resume, until the job has ended"
    parser.add_argument("-f", "--follow", action="store_true", help=text)


def add_verify(parser: argparse.ArgumentParser) -> None:
    """How closely to look at checkpoints."""
    text = "read all of them and compare their SHA-256"
    parser.add_argument("--verify", action="store_true", help=text)


def add_export(parser: argparse.ArgumentParser) -> None:
    """Which weights go where, and how."""
    add = parser.add_argument
    add("path", help="the file, or with --format transformers the folder, to write")
    add("--best", action="store_true", help="the best weights instead of the newest")
    add("--step", type=int, metavar="N", help="those of the checkpoint of step N")
    text = "safetensors (default: one file), or transformers (a folder for from_pretrained)"
    add("--format", default="safetensors", metavar="FORMAT", help=text)
    add("--overwrite", action="store_true", help="replace files of that name")


def add_cluster(parser: argparse.ArgumentParser) -> None:
    """Which cluster."""
    text = "a cluster's id, or a pool for all of that one's; by default every one of yours"
    parser.add_argument("cluster", nargs="?", help=text)


def add_all(parser: argparse.ArgumentParser) -> None:
    """Whether to look on EC2, too."""
    text = "what there is on EC2 of anybody's clusters, too: with age and price"
    parser.add_argument("--all", action="store_true", help=text)
    _add_region(parser)


def add_pool(parser: argparse.ArgumentParser) -> None:
    """Which pool, and how many workers of it."""
    parser.add_argument("pool", nargs="?", default="local", help="its name; by default local")
    text = "have at least N workers, whether or not a job needs them"
    parser.add_argument("-w", "--workers", type=int, metavar="N", help=text)


def add_pools(parser: argparse.ArgumentParser) -> None:
    """Whether to list pools, or to print what one needs."""
    parser.add_argument("what", nargs="?", metavar="policy", help="print IAM policies")
    parser.add_argument("pool", nargs="?", help="of this pool; by default of the only one")


def add_reap(parser: argparse.ArgumentParser) -> None:
    """What to remove."""
    parser.add_argument("cluster", nargs="?", help="its id; by default all that have expired")
    text = "those too that have not expired: whoever uses them loses their machines"
    parser.add_argument("--all", action="store_true", help=text)
    _add_region(parser)


def _add_region(parser: argparse.ArgumentParser) -> None:
    text = "look there too, besides the regions of pools.yaml"
    parser.add_argument("--region", metavar="NAME", help=text)
