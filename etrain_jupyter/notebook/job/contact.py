"""Track whether a job's coordinator responds, and schedule retries.

From the kernel, a suspended, swapped-out or disconnected scheduler looks like a dead one. Only a
process on the same machine can tell them apart. A timeout alone is therefore reported but never
treated as final, and the feed keeps retrying.
"""

from __future__ import annotations

import contextlib
from datetime import datetime

from etrain_jupyter.errors import JobLostError
from etrain_jupyter.notebook.job.link import ClusterEndedError, NoAnswerError, UnreachableError

RETRY_S = 0.3
"""Delay before the first retry, in seconds; it doubles with each further failure."""
RETRY_MAX_S = 5.0
NOTIFY_AFTER = 2
"""Number of consecutive failures, each taking a few seconds, before the user is notified."""
LOST_AFTER = 2
"""Number of consecutive responses that the job is unknown before it counts as lost."""


class Contact:
    """Count the failures since the last response. Not thread-safe: only the feed's thread uses it.

    Attributes:
        num_failures: Number of failures since the last response.
        seen_at: Time of the last response or, before the first, of the newest event in the log;
            0 if there is neither.
        trouble: Message for the user; empty while the coordinator responds.
    """

    def __init__(self) -> None:
        self.num_failures = 0
        self.seen_at = 0.0
        self.trouble = ""
        self._num_denials = 0

    def succeed(self, now: float) -> bool:
        """Record a response; return True if it ends an outage that the user was notified of."""
        was_silent = bool(self.trouble)
        self.num_failures = self._num_denials = 0
        self.seen_at, self.trouble = now, ""
        return was_silent

    def fail(self, exc: BaseException) -> bool:
        """Record a failure; return True if the user must be notified of the outage now."""
        # A request that failed, and the delay before the next one:
        #   failure   1        2          3      4      5      6 and later
        #   delay     0.3 s    0.6 s      1.2 s  2.4 s  4.8 s  5 s
        #   user               notified   (once, until a response ends the outage)
        # A suspended scheduler is detected by each request's timeout, which adds to the delay.
        self.num_failures += 1
        # Only a scheduler that responds can report that it does not have the job.
        # `UnreachableError` is also a `JobLostError`, but does not prove that the job is lost, so
        # it resets the count of denials.
        is_denial = isinstance(exc, JobLostError) and not isinstance(exc, UnreachableError)
        self._num_denials = self._num_denials + 1 if is_denial else 0
        if self.trouble or self.num_failures < NOTIFY_AFTER:
            return False
        # The first sentence is the cause; the rest is advice for requests that a user made.
        cause = str(exc).partition(". ")[0] or type(exc).__name__
        if isinstance(exc, UnreachableError | NoAnswerError):
            cause = "its scheduler cannot be reached"
        self.trouble = f"{cause}, {self._describe_last_seen()}retrying"
        return True

    def _describe_last_seen(self) -> str:
        with contextlib.suppress(ValueError, OverflowError, OSError):  # an invalid time in the log
            if self.seen_at:
                return datetime.fromtimestamp(self.seen_at).strftime("last seen %H:%M:%S, ")
        return ""

    def is_final(self, exc: BaseException) -> bool:
        """Return True if ``exc``, already recorded, shows that no later request can succeed."""
        return isinstance(exc, ClusterEndedError) or self._num_denials >= LOST_AFTER

    def pause_s(self) -> float:
        """Return the delay before the next request, in seconds."""
        doublings = min(self.num_failures - 1, 10)
        return float(min(RETRY_MAX_S, RETRY_S * 2**doublings)) if self.num_failures else 0.0
