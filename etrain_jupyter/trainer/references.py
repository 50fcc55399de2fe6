"""References to the notebook's expressions, and the error for objects that do not fit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from etrain_jupyter.config.references import check_call


class References(Protocol):
    """The notebook's expressions, which an opened bundle evaluates on this rank."""

    def evaluate(self, key: str) -> Any:
        """Evaluate the expression of a config key, and return a new value."""
        ...


class WorkloadError(ValueError):
    """The notebook's objects do not fit together; the message names them and suggests a fix."""


class DataError(ValueError):
    """The notebook's data cannot be used; the message says how to fix it."""


def check_fit(key: str, value: Any) -> None:
    """Check that the job can call the value of ``key``, as the kernel has done for plain names.

    Raises:
        WorkloadError: If it cannot.
    """
    name = repr(getattr(value, "__name__", type(value).__name__))
    check_call(key, name, value, lambda text, hint: WorkloadError(f"{text}. To fix it, {hint}."))


def listed(names: Sequence[str]) -> str:
    """Return the first names of a list, for a message.

    >>> listed(["a"]), listed(["a", "b", "c", "d", "e"])
    ('a', 'a, b, c and 2 more')
    """
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more
