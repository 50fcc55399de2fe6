"""Send warnings to the jobs' logs, each kind at most every ten minutes."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

logger = logging.getLogger(__name__)

REPEAT_S = 600.0
"""A warning is repeated after this time if its cause persists, in seconds."""


class RateLimitedWarnings:
    """Sends warnings, unless one with the same key was sent a short time ago."""

    def __init__(self, send: Callable[[str], None]) -> None:
        self._send = send
        self._sent_at: dict[str, float] = {}

    def warn(self, key: str, text: str) -> bool:
        """Send a warning; return False if it was suppressed."""
        # Compare keys, not texts, because prices and times in the text differ in each tick.
        now = time.time()
        if now - self._sent_at.get(key, float("-inf")) < REPEAT_S:
            return False
        self._sent_at[key] = now
        logger.warning("%s", text)
        self._send(text)
        return True
