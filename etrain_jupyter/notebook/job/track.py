"""Write the log of a job to a logger from this process."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from pydantic import ValidationError

from etrain_jupyter.config.schema import LogConfig
from etrain_jupyter.errors import ConfigError, LoggerError, RunStoreError
from etrain_jupyter.log.events import ExhibitStored, JobStatus
from etrain_jupyter.log.exhibits import Content
from etrain_jupyter.log.loggers.base import Logger
from etrain_jupyter.log.loggers.feed import export_log, writer_lock
from etrain_jupyter.log.loggers.registry import make_logger
from etrain_jupyter.log.loggers.timeline import ReadExhibit
from etrain_jupyter.notebook.job.job_record import RunRecord
from etrain_jupyter.notebook.job.store_link import refresh_log
from etrain_jupyter.notebook.job.stored_exhibits import Exhibit
from etrain_jupyter.untrusted import plain_line

LOCK_TIMEOUT_S = 30.0
"""Seconds to wait for another process that writes the job to the same logger."""


def track_job(
    record: RunRecord,
    to: str | None,
    options: Mapping[str, Any],
    *,
    status: str,
    is_over: bool,
    list_exhibits: Callable[[], Iterable[Exhibit]],
) -> str:
    """Write a job's log, in its current state, to one logger or to those of its ``log.to``.

    Args:
        record: The job's record.
        to: Name of a logger; None for the job's own loggers.
        options: Options of the logger; by default those of the job's own logger.
        status: The job's status, for messages.
        is_over: True if the job has ended or is lost.
        list_exhibits: Returns the exhibits in the log, once it is up to date.

    Returns:
        A line per logger.

    Raises:
        ConfigError: If the logger is unknown, an option is invalid, or the job's scheduler
            currently writes to the logger.
        LoggerError: If the destination fails.
    """
    own = own_loggers(record)
    if to is None and not own:
        raise ConfigError(
            f"job {record.job_id} has no loggers of its own",
            hint="name one: %etrain track --to tensorboard",
        )
    if to is None and options:
        raise ConfigError(
            "options belong to one logger", hint="name it: %etrain track --to tensorboard"
        )
    chosen = {to: dict(options) or own.get(to, {})} if to else own
    for name in chosen:
        # The destination would get each value twice: from here and from the scheduler.
        if not is_over and name in configured_loggers(record):
            raise ConfigError(
                f"job {record.job_id} is {status}, and its scheduler writes to {name} already",
                hint="wait for its end: %etrain wait",
            )
    loggers = {name: make_logger(name, values) for name, values in chosen.items()}
    refresh_log(record)
    read_exhibit = exhibit_reader(list_exhibits())
    lines = []
    for name, logger in loggers.items():
        ended_as = _export(record, name, logger, read_exhibit)
        where = ", ".join(f"{key}: {value}" for key, value in logger.options.items() if value)
        lines.append(f"{record.job_id} ({ended_as or 'no status'}) is in {name} ({where})")
    return "\n".join(lines)


def _export(
    record: RunRecord, name: str, logger: Logger, read_exhibit: ReadExhibit
) -> JobStatus | None:
    ends_at = time.monotonic() + LOCK_TIMEOUT_S
    # The scheduler's own logger may still write the last values of a job that has just ended.
    with writer_lock(record.log_path, name, lambda: time.monotonic() < ends_at) as is_locked:
        if not is_locked:
            raise LoggerError(
                f"Another process still writes job {record.job_id} to {name}, after "
                f"{LOCK_TIMEOUT_S:.0f} s of waiting. Nothing was written. Run %etrain track again "
                "when it has ended."
            )
        try:
            return export_log(record.log_path, logger, read_exhibit)
        except (LoggerError, OSError) as exc:
            reason = str(exc) if isinstance(exc, LoggerError) else f"{name} failed: {exc}."
            raise LoggerError(
                f"{reason} The log of job {record.job_id} is complete: run %etrain track again. "
                "Values that are already stored are not repeated."
            ) from exc


def own_loggers(record: RunRecord) -> dict[str, dict[str, Any]]:
    """Return the loggers in a job's ``log`` group, if this user submitted the job.

    The record of another user's job must not choose where this process writes.
    """
    return configured_loggers(record) if record.is_own else {}


def configured_loggers(record: RunRecord) -> dict[str, dict[str, Any]]:
    """Return the loggers in a job's ``log`` group; empty if it is invalid in this version."""
    try:
        config = LogConfig.model_validate(record.config.get("log") or {})
        return dict(config.loggers_of(record.folder))
    except ValidationError:
        return {}


def exhibit_reader(exhibits: Iterable[Exhibit]) -> ReadExhibit:
    """Return a function that reads the exhibits of a job, from its bucket if necessary."""
    # Read only exhibits that still exist, because each one in a bucket takes a request.
    kept = {(one.step, one.name, one.time): one for one in exhibits}

    def read(event: ExhibitStored) -> Content | None:
        exhibit = kept.get((event.step, event.name, event.time))
        try:
            return exhibit.read() if exhibit else None
        except RunStoreError:  # the other values are still worth displaying
            return None

    return read


def parse_options(words: Iterable[str]) -> dict[str, Any]:
    """Read options from ``KEY=VALUE`` words; ``true`` and ``false`` are switches.

    Raises:
        ConfigError: If a word has another form.

    >>> parse_options(["experiment=digits", "mode=offline"])
    {'experiment': 'digits', 'mode': 'offline'}
    """
    options: dict[str, Any] = {}
    for word in words:
        key, separator, value = word.partition("=")
        if not separator or not key.isidentifier() or key in options:
            raise ConfigError(
                f"--options {plain_line(word, 80)}: this is not a new KEY=VALUE",
                hint="write for example --options experiment=digits",
            )
        options[key] = {"true": True, "false": False}.get(value, value)
    return options
