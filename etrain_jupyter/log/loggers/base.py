"""The protocol of loggers, and the records that they write.

A logger writes the values of one job to a tool that displays experiments. It receives records that
``timeline`` derives from the durable log: each value once, in order, without undone steps.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from etrain_jupyter.config.cell import parse_section
from etrain_jupyter.config.fields import Section
from etrain_jupyter.config.source_map import NOWHERE, SourceMap
from etrain_jupyter.errors import ConfigError
from etrain_jupyter.log.events import TERMINAL_STATUSES, ExhibitFormat, JobStatus
from etrain_jupyter.log.exhibits import Content

S = TypeVar("S", bound=Section)


@dataclass(frozen=True, kw_only=True)
class Record:
    """One entry in the timeline of a job."""

    number: int
    """Position in the revision of the run (see ``RunInfo``), starting at 0. The same log always
    gives the same numbers, so a restarted logger can continue after the records it has stored."""
    step: int
    """Number of updates so far."""
    time: float
    """Seconds since the epoch."""


@dataclass(frozen=True, kw_only=True)
class Values(Record):
    """The values of a step, of an evaluation or of its scores."""

    values: Mapping[str, float]
    """Values by tag, for example ``train/loss``; a value may be NaN or infinite."""


@dataclass(frozen=True, kw_only=True)
class Exhibit(Record):
    """A figure, text or table of an evaluation."""

    name: str
    format: ExhibitFormat
    size_bytes: int
    load: Callable[[], Content | None] = field(repr=False, compare=False)
    """Returns the checked content; None if the exhibit does not exist any more."""


@dataclass(frozen=True, kw_only=True)
class Note(Record):
    """A sentence on an interruption: a resume, a restart, a return to an older step, an error."""

    index: int
    """Number of earlier notes in the run."""
    text: str


@dataclass(frozen=True, kw_only=True)
class RunInfo:
    """The job to which the records belong."""

    job_id: str
    name: str
    created: float
    """When the job was submitted, in seconds since the epoch."""
    config: Mapping[str, Any]
    """JSON form of its TrainConfig."""
    revision: int = 0
    """Number of times that the job has returned to an older step. A revision has no undone records,
    and its records up to the newest return differ from those of the previous revision."""


class Logger(Protocol):
    """Destination of a job's records. One thread uses it.

    Any exception of ``open``, ``write``, ``drop_after`` or ``close`` means that the destination has
    failed. The caller then calls ``close(None)``, ignores its exceptions, and later creates another
    logger, which continues.
    """

    @property
    def options(self) -> dict[str, Any]:
        """All options as JSON, with absolute paths and the values from the environment.

        The scheduler, which may run elsewhere, creates the logger from them. They are stored with
        the job, so they must not include credentials.
        """
        ...

    def open(self, run: RunInfo) -> int:
        """Create or continue the run of a job, and remove its earlier revisions if possible.

        Called before the other methods, and again for each new revision.

        Returns:
            The number of records of this revision that are already stored. The caller continues
            with the record of that number.
        """
        ...

    def write(self, records: Sequence[Record]) -> None:
        """Store records. They must survive the end of this process once the method returns.

        Kinds of records that the destination cannot display are skipped.
        """
        ...

    def drop_after(self, step: int, time: float) -> bool:
        """Remove the values and exhibits after a step, because the job returned to that step.

        Notes remain.

        Returns:
            False if the destination cannot remove records. The caller then opens the next revision
            and writes all its records.
        """
        ...

    def close(self, status: JobStatus | None) -> None:
        """End the run with the final status of the job; None if the job has not ended.

        May be called before ``open``, with None.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class LoggerEntry:
    """One logger in ``log.to`` of a cell."""

    name: str
    values: Mapping[str, Any] = field(default_factory=dict)
    """Options as written in the cell, or as returned by ``Logger.options``; not yet validated."""
    source: SourceMap = NOWHERE
    """Positions of the options in the cell."""

    def read_as(self, section: type[S]) -> S:
        """Validate the options.

        Raises:
            ConfigError: If an option is invalid. The error points at the first invalid option.
        """
        return parse_section(self.values, section, self.source)

    def error(self, message: str, *, key: str = "", hint: str = "") -> ConfigError:
        """Return an error that points at an option, or at the whole entry."""
        return self.source.error((key,) if key else (), message, hint=hint)

    def require(self, module: str, *, extra: str) -> None:
        """Check that the library of the logger is installed.

        Raises:
            ConfigError: If it is not installed.
        """
        if importlib.util.find_spec(module) is None:
            raise self.error(
                f"log.to: {self.name} needs the package {module}, which is not installed",
                hint=f"pip install 'etrain-jupyter[{extra}]', or remove it from log.to; "
                f"%etrain track writes the values later from the job's log",
            )


class LoggerClass(Protocol):
    """Class of a logger that ``log.to`` can configure."""

    def from_entry(self, entry: LoggerEntry) -> Logger:
        """Create the logger, without a connection to its destination.

        Raises:
            ConfigError: If an option is invalid or the library is not installed.
        """
        ...


def is_final(status: JobStatus | None) -> bool:
    """Return True if the job has ended with this status."""
    return status in TERMINAL_STATUSES
