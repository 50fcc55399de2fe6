"""The notebook's expressions as a rank sees them, and what it says if one does not fit."""

from __future__ import annotations

from typing import Any, Protocol


class References(Protocol):
    """The notebook's expressions, to be evaluated here: an opened bundle."""

    def evaluate(self, key: str) -> Any:
        """Return the value of one of the config's references, built anew."""
        ...


class WorkloadError(ValueError):
    """The notebook's objects do not fit together; the message says which and how to mend it."""
