"""Write a job's log to experiment trackers: MLflow, and Weights & Biases."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from etrain_jupyter.errors import LoggerError
from etrain_jupyter.plugin import Plugin

_HERE = "etrain_jupyter.plugins.trackers"

PLUGIN = Plugin(
    loggers={
        "mlflow": f"{_HERE}.mlflow_logger:MlflowLogger",
        "wandb": f"{_HERE}.wandb_logger:WandbLogger",
    }
)


@contextlib.contextmanager
def as_logger_error(what: str) -> Iterator[None]:
    """Raise any exception of a tracker's package as a ``LoggerError`` of one line."""
    try:
        yield
    except LoggerError:
        raise
    # The packages raise their own exceptions, and those of databases, requests, the disk and other
    # processes.
    except Exception as exc:
        text = (str(exc).strip() or type(exc).__name__).splitlines()[0]
        raise LoggerError(f"{what} failed: {text}") from exc
