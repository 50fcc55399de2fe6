"""Look up loggers by name. Plug-ins can add loggers; see ``etrain_jupyter.plugin``."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from etrain_jupyter import plugin
from etrain_jupyter.config.cell import ParsedJob
from etrain_jupyter.config.schema import TrainConfig
from etrain_jupyter.config.source_map import NOWHERE, SourceMap, did_you_mean
from etrain_jupyter.errors import ConfigError
from etrain_jupyter.log.loggers.base import Logger, LoggerClass, LoggerEntry

TENSORBOARD = {"tensorboard": "etrain_jupyter.log.tensorboard:TensorBoardFiles"}
KEY = ("log", "to")


def logger_names() -> list[str]:
    """Return the names that ``log.to`` accepts on this machine."""
    return list({**TENSORBOARD, **plugin.loggers()})


def make_logger(name: str, values: Mapping[str, Any], source: SourceMap = NOWHERE) -> Logger:
    """Create a logger, without a connection to its destination.

    Args:
        name: A name from ``logger_names``.
        values: Its options.
        source: Positions of its options in a cell.

    Raises:
        ConfigError: If the name is unknown, its library is not installed, or an
            option is invalid.
    """
    kind = _class_of(name, source)
    try:
        return kind.from_entry(LoggerEntry(name=name, values=values, source=source))
    except ConfigError as exc:
        # With a position, the path is already complete.
        if source.lines or exc.path[: len(KEY)] == KEY:
            raise
        raise ConfigError(str(exc), path=(*KEY, name, *exc.path), hint=exc.hint) from None


def with_loggers(parsed: ParsedJob) -> TrainConfig:
    """Return a job's configuration with the complete options of its loggers.

    Paths and values from the environment are resolved here, in the notebook, because the scheduler
    may run in a different folder and with a different environment.

    Raises:
        ConfigError: See ``make_logger``; with its position in the cell.
    """
    config = parsed.config
    if not config.log.to:
        return config
    complete = {
        name: make_logger(name, values, _source_of(name, parsed.source)).options
        for name, values in config.log.to.items()
    }
    log = config.log.model_copy(update={"to": complete})
    return config.model_copy(update={"log": log})


def _source_of(name: str, source: SourceMap) -> SourceMap:
    below = source.below((*KEY, name))
    if below.keys or not source.lines:
        return below
    # 'to: NAME' and 'to: [NAME]' have no key of the logger, so point at the value of 'to'.
    return dataclasses.replace(below, keys={(): source.span_of(KEY)})


def _class_of(name: str, source: SourceMap) -> LoggerClass:
    known = {**TENSORBOARD, **plugin.loggers()}
    if name not in known:
        raise source.error(
            (),
            f"log.to: unknown logger '{name}'",
            hint=did_you_mean(name, list(known))
            or f"known loggers: {', '.join(known)}; a package that adds '{name}' must be "
            "installed here and where the scheduler runs",
            at_key=True,
        )
    try:
        loaded: LoggerClass = plugin.load(known[name])
    # The module may belong to another package, so importing it may raise any exception.
    except Exception as exc:
        raise source.error(
            (),
            f"log.to: the logger '{name}' ({known[name]}) cannot be imported: "
            f"{type(exc).__name__}: {exc}",
            hint="update or reinstall the package that provides it",
            at_key=True,
        ) from exc
    return loaded
