"""Parsers for the magic's line, derived from the signatures and docstrings of functions.

A mistyped line must not terminate the kernel, so these parsers raise an exception where argparse
would exit. Durations are written as in a cell: ``15s``, ``5 min``.
"""

from __future__ import annotations

import argparse
import difflib
import inspect
import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from types import UnionType
from typing import Annotated, Any, NoReturn, Union, get_args, get_origin, get_type_hints

from etrain_jupyter import plugin
from etrain_jupyter.config.cell import EXAMPLES, keys_of
from etrain_jupyter.config.fields import Interval
from etrain_jupyter.config.schema import TrainConfig
from etrain_jupyter.config.vocabulary import known_elsewhere
from etrain_jupyter.errors import ConfigError
from etrain_jupyter.notebook.job.export import FORMATS
from etrain_jupyter.rules.chaos import FAULT_KINDS, MODES

CELL_COMMAND = "distributed"
"""The sub-command that submits a body."""
TRAINER_FAULTS = tuple(kind for kind in FAULT_KINDS if kind not in ("notice", "worker"))
"""Faults that ``kill --how`` can inject into a trainer."""

FORCE_HELP = "resume even if a difference changes the rest of the curve"
TRUST_HELP = "run the job although another user may have submitted it"

WORDS: Mapping[str, Sequence[str]] = {
    "how": ("worker", *TRAINER_FAULTS),
    "mode": MODES,
    "format": FORMATS,
}
"""Accepted words by the name of the argument, for completion; ``one_of`` checks them."""


def words_of(name: str) -> Sequence[str]:
    """Return the accepted words of an argument; empty if it accepts any."""
    of_plugins = [plugin.load(one.words) for one in plugin.installed().values() if one.words]
    return next((words[name] for words in (WORDS, *of_plugins) if name in words), ())


class Parser(argparse.ArgumentParser):
    """Raises where argparse would exit: a mistyped line must not terminate the kernel."""

    body: Collection[str] = ()
    """Keys of the body below the line, which users also try as flags."""

    @property
    def arguments(self) -> Sequence[argparse.Action]:
        """The arguments of the line, in the order of the help."""
        return tuple(self._actions)

    def error(self, message: str) -> NoReturn:
        """Raise an error with a hint instead of exiting."""
        # argparse does not report which flag is wrong, so find the flag in the text of the message.
        flags = [word.rstrip(":") for word in message.split() if word.startswith("-")]
        hint = self._hint_for(flags[0]) if flags else ""
        raise ConfigError(f"{self.prog}: {message}", hint=hint or self.format_usage().strip())

    def _hint_for(self, flag: str) -> str:
        """Return the usage of a known flag, or the nearest flag; empty if there is none."""
        # argparse writes an argument with two flags as "-n/--number".
        action = self._option_string_actions.get(flag.partition("/")[0])
        if action is not None:
            return f"{flag} {action.metavar or ''}".rstrip() + f": {action.help}"
        # Suggest long flags only: every short flag is similar to every other one.
        known = [name for name in self._option_string_actions if name.startswith("--")]
        name = flag.partition("=")[0]
        if self.body and (answer := known_elsewhere([name.lstrip("-")])):
            return f"in the body, {answer}"
        near = difflib.get_close_matches(name, [*known, *(f"--{key}" for key in self.body)], n=1)
        if not near or near[0] in known:
            return f"did you mean {near[0]}?" if near else ""
        key = near[0][2:]
        return f"'{key}' is a key of the body: add '{EXAMPLES.get(key, f'{key}: ...')}' to it"


class StoreSeconds(argparse.Action):
    """A duration above 0, in seconds; not a type, because argparse rewrites the errors of types."""

    least = math.ulp(0.0)

    def __call__(
        self, parser: object, namespace: argparse.Namespace, values: Any, option: Any = None
    ) -> None:
        """Store the seconds."""
        setattr(namespace, self.dest, seconds_of(option, values, least=self.least))


class StoreSecondsOrZero(StoreSeconds):
    """A duration of 0 or more, in seconds."""

    least = 0.0


class StoreCount(argparse.Action):
    """An integer of 1 or more."""

    def __call__(
        self, parser: object, namespace: argparse.Namespace, values: Any, option: Any = None
    ) -> None:
        """Store the number."""
        # int() would also accept "1_000", " 5 " and digits from other scripts.
        number = int(values) if re.fullmatch(r"[+-]?\d+", values) else 0
        if number < 1:
            raise ConfigError(
                f"{option} {values}: this must be a whole number of 1 or more",
                hint=f"write for example {option} 50",
            )
        setattr(namespace, self.dest, number)


def question_as_help(words: Sequence[str]) -> list[str]:
    """Replace a question mark at the end with ``--help``, as in IPython's ``show?``.

    >>> question_as_help(["show?"])
    ['show', '--help']
    """
    # The question mark may follow a word or a space: `%etrain show?`, `%etrain show digits ?`.
    if len(words) == 1 and words[0].endswith("?"):
        words = [words[0].rstrip("?"), "?"]
    if not words or words[-1].strip("?"):
        return list(words)
    return [*(word for word in words[:-1] if word), "--help"]


class HelpAction(argparse.Action):
    """Raise ``--help`` as an exception that contains the help text."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        """Stop parsing."""
        # argparse prints the help and exits; in a kernel the caller prints it.
        raise HelpRequested(parser.format_help())


class HelpRequested(Exception):
    """Raised if the line contains ``--help``; its only argument is the help text."""


def make_parser(prog: str, summary: str, epilog: str = "") -> Parser:
    """Return a parser that neither prints nor exits."""
    parser = Parser(
        prog=prog, description=summary, epilog=epilog, add_help=False, allow_abbrev=False
    )
    parser.register("action", "help", HelpAction)
    parser.add_argument(
        "-h", "--help", action="help", nargs=0, default=argparse.SUPPRESS, help="show this text"
    )
    return parser


def distributed_parser() -> Parser:
    """Return the parser for the line ``%%etrain distributed``."""
    parser = cell_parser(
        CELL_COMMAND,
        "Train the job that the YAML in the cell's body describes, on an elastic set of workers.",
        epilog="%etrain template prints a commented body.",
        makes="job",
        wait="block until the job has ended; interrupt to stop it",
        dry_run="check the cell and print the plan; submit nothing",
        quiet="show no dashboard",
    )
    text = "resume this job from its last checkpoint, with this cell's code and values"
    parser.add_argument("--resume", metavar="JOB", help=text)
    parser.add_argument("--force", action="store_true", help=FORCE_HELP)
    parser.add_argument("--trust", action="store_true", help=TRUST_HELP)
    return parser


def cell_parser(
    command: str, summary: str, *, epilog: str, makes: str, wait: str, dry_run: str, quiet: str
) -> Parser:
    """Return a parser for the line of a command that submits a body."""
    parser = make_parser(f"%%etrain {command}", summary, epilog)
    parser.body = keys_of(TrainConfig)
    add = parser.add_argument
    add("--name", help=f"name of the {makes}; by default the name in the body, or the model's name")
    add("-o", "--out", metavar="VAR", help=f"assign the {makes} to this variable")
    add("--pool", help="pool of the workers; by default the pool in the body, or local")
    add("--wait", action="store_true", help=wait)
    add("--dry-run", action="store_true", help=dry_run)
    add("--quiet", action="store_true", help=quiet)
    return parser


# --- arguments from signatures ---


@dataclass(frozen=True, kw_only=True)
class Spelling:
    """Spelling of a parameter on the line, in addition to its name and type."""

    flags: tuple[str, ...] = ()
    """Other spellings: a short flag such as ``-o``, or an alias such as ``--workers``."""
    metavar: str | None = None
    nargs: str | None = None
    """``*`` for any number of words."""
    action: type[argparse.Action] | None = None
    """Parses the value if it is not plain text or a number."""


Variable = Annotated[str | None, Spelling(flags=("-o",), metavar="VAR")]
JobNames = Annotated[Sequence[str], Spelling(metavar="JOB", nargs="*")]
Number = Annotated[int | None, Spelling(metavar="N")]
Seconds = Annotated[float, Spelling(metavar="TIME", action=StoreSeconds)]
SecondsOrZero = Annotated[float, Spelling(metavar="TIME", action=StoreSecondsOrZero)]


COMMON_TEXTS = {
    "job": "name, id or start of an id; by default the latest job",
    "out": "assign the job to this variable",
    "region": "with --all: another region, in addition to those of pools.yaml",
    "min": "wait while there are fewer workers",
    "max": "never use more workers",
    "force": FORCE_HELP,
    "trust": TRUST_HELP,
}
"""Help texts for parameters that several sub-commands share."""


def add_parameters(parser: Parser, function: Callable[..., Any]) -> None:
    """Add an argument for each parameter of a function, except the first one.

    The help texts come from the function's docstring or from ``COMMON_TEXTS``.
    """
    # parameter                             argument
    # ------------------------------------  -------------------------------------------
    # job: str                              positional
    # job: str | None = None                positional, optional
    # jobs: JobNames = ()                   positional, any number
    # *, verify: bool = False               --verify, a switch
    # *, notice: Seconds = 120.0            --notice TIME, read by the action of Seconds
    # *, out: Variable = None               -o VAR, --out VAR
    hints = get_type_hints(function, include_extras=True)
    texts = COMMON_TEXTS | read_docstring(function).arguments
    _, *parameters = inspect.signature(function).parameters.values()
    for parameter in parameters:
        kind, spelling = _unpack(hints[parameter.name])
        is_flag = parameter.kind is inspect.Parameter.KEYWORD_ONLY
        has_default = parameter.default is not inspect.Parameter.empty
        options: dict[str, Any] = {"help": texts[parameter.name]}
        # A switch has neither a type nor a metavar: argparse rejects both for store_true.
        if kind is bool:
            options["action"] = "store_true"
        else:
            options |= {"default": parameter.default} if has_default else {}
            options |= {"metavar": spelling.metavar} if spelling.metavar else {}
            nargs = spelling.nargs or ("?" if has_default and not is_flag else None)
            options |= {"nargs": nargs} if nargs else {}
            options |= {"action": spelling.action} if spelling.action else {"type": kind}
        if not is_flag:
            parser.add_argument(parameter.name, **options)
            continue
        name = "--" + parameter.name.replace("_", "-")
        # Short flags come before the name in the help, aliases after it.
        flags = sorted([name, *spelling.flags], key=lambda flag: (flag[:2] == "--", flag != name))
        parser.add_argument(*flags, dest=parameter.name, **options)


def _unpack(annotation: Any) -> tuple[type, Spelling]:
    # `Annotated[int | None, Spelling(...)]` has the type int; `Variable | None` nests an Annotated
    # in a Union.
    spelling = Spelling()
    while get_origin(annotation) is not None:
        if get_origin(annotation) is Annotated:
            annotation, *extra = get_args(annotation)
            spelling = next((one for one in extra if isinstance(one, Spelling)), spelling)
        elif get_origin(annotation) in (Union, UnionType):
            [annotation] = [part for part in get_args(annotation) if part is not type(None)]
        else:  # Sequence[str]: each word is parsed on its own
            [annotation] = get_args(annotation)
    return annotation, spelling


@dataclass(frozen=True, kw_only=True)
class Docstring:
    """The parts of a docstring in Google style."""

    summary: str
    """The first line, without its full stop."""
    arguments: dict[str, str]
    """Texts of the section ``Args``, by parameter."""
    example: str
    """Text of the section ``Example``; empty if there is none."""


def read_docstring(function: Callable[..., Any]) -> Docstring:
    """Return the parts of a function's docstring."""
    summary, _, rest = inspect.getdoc(function).partition("\n")  # type: ignore[union-attr]
    sections: dict[str, list[str]] = {}
    section: list[str] = []
    # A section starts with a name in the first column, such as "Args:"; its lines are indented.
    for line in rest.splitlines():
        if line and not line.startswith(" "):
            section = sections.setdefault(line.rstrip(":"), [])
        else:
            section.append(line)
    return Docstring(
        summary=summary.rstrip("."),
        arguments=_read_arguments(sections.get("Args", [])),
        example=" ".join(sections.get("Example", [])).strip(),
    )


def _read_arguments(lines: Sequence[str]) -> dict[str, str]:
    texts: dict[str, str] = {}
    name = ""
    for line in lines:
        start = re.fullmatch(r" {4}(\w+): (.*)", line)
        if start:
            name = start[1]
            texts[name] = start[2]
        # A continuation line, which is indented further than a name.
        elif line.strip():
            texts[name] += " " + line.strip()
    # Follow the style of argparse's own texts: no full stop, and no capital letter except in an
    # abbreviation such as "IAM".
    return {
        name: (text if text[:2].isupper() else text[:1].lower() + text[1:]).rstrip(".")
        for name, text in texts.items()
    }


def one_of(flag: str, word: str, known: Sequence[str]) -> str:
    """Return ``word`` if it is known; otherwise raise an error that suggests the nearest word."""
    if word in known:
        return word
    near = difflib.get_close_matches(word, known, n=1)
    hint = f"did you mean {near[0]}?" if near else f"known values: {', '.join(known)}"
    raise ConfigError(f"{flag} {word}: unknown value", hint=hint)


def seconds_of(flag: str, text: str, *, least: float = 0.0) -> float:
    """Return a duration in seconds, ``least`` or more, such as ``15``, ``15s`` or ``5 min``."""
    hint = f"write for example {flag} 15s"
    try:
        value = float(text)
    except ValueError:
        value = _parse_interval(text)
    # NaN if the text is not a duration; float() also accepts "inf" and "nan".
    if not math.isfinite(value):
        raise ConfigError(f"{flag} {text}: this is not a duration", hint=hint)
    if value < 0:
        raise ConfigError(f"{flag} {text}: a duration is 0 or more", hint=hint)
    if value < least:
        raise ConfigError(f"{flag} {text}: this duration must be above 0", hint=hint)
    return value


def _parse_interval(text: str) -> float:
    try:
        interval = Interval.parse(text)
    except ValueError:
        return math.nan
    # An interval in a cell may also count steps or epochs, which are not durations.
    return interval.value if interval.unit == "s" else math.nan
