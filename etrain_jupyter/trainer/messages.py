"""Messages that the training code sends to the coordinator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Send = Callable[[dict[str, Any]], None]
"""Sends one message. Safe from any thread."""


def log_message(level: str, text: str) -> dict[str, Any]:
    """Return a message for the job's log; ``level`` is ``info``, ``warning`` or ``error``."""
    return {"op": "log", "level": level, "text": text}
