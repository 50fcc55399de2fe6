"""Processes or machines that ``write_shards`` can use."""

from __future__ import annotations

from concurrent.futures import Executor
from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol


class Workers(NamedTuple):
    """Processes that run functions of this package."""

    executor: Executor
    num_workers: int
    """Calls that run at the same time."""


class OpenWorkers(Protocol):
    """Connects to workers, or starts them, for the time of a context."""

    def __call__(self) -> AbstractContextManager[Workers]:
        """Return the context."""
        ...
