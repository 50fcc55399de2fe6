"""References to the notebook's expressions, and the error for objects that do not fit."""

from __future__ import annotations

from typing import Any, Protocol


class References(Protocol):
    """The notebook's expressions, to be evaluated on this rank; an opened bundle."""

    def evaluate(self, key: str) -> Any:
        """Evaluate the expression of a config key, and return a new value."""
        ...


class WorkloadError(ValueError):
    """The notebook's objects do not fit together; the message names them and suggests a fix."""


class DataError(ValueError):
    """The notebook's data cannot be used; the message says how to fix it."""
