"""Whether a job's coordinator answers at present, and when to ask it again.

A scheduler that is stopped, swapped out or cut off looks like a dead one from here; only what knows
its process can tell. So silence is no verdict: it is said, and asked again for as long as it lasts.
"""

from __future__ import annotations

import contextlib
from datetime import datetime

from etrain_jupyter.errors import JobLostError
from etrain_jupyter.notebook.job.link import ClusterEndedError, NoAnswerError, UnreachableError

RETRY_S = 0.3
"""How long to wait after the first failure; each further one doubles it."""
RETRY_MOST_S = 5.0
SAY_AFTER = 2
"""Failures in a row, each of some seconds, after which a person is told."""
LOST_AFTER = 2
"""Answers in a row by which the scheduler says that it does not know the job."""


class Contact:
    """Counts what failed since the last answer. Not thread-safe: the feed's thread owns it.

    Attributes:
        num_failures: Failures since the last answer.
        seen_at: Instant of the last answer, or of what is known otherwise; 0 if of nothing.
        trouble: What to tell a person; empty while the coordinator answers.
    """

    def __init__(self) -> None:
        self.num_failures = 0
        self.seen_at = 0.0
        self.trouble = ""
        self._num_denials = 0

    def succeed(self, now: float) -> bool:
        """Note an answer; return whether that ends a silence that a person was told of."""
        was_silent = bool(self.trouble)
        self.num_failures = self._num_denials = 0
        self.seen_at, self.trouble = now, ""
        return was_silent

    def fail(self, exc: BaseException) -> bool:
        """Note a failure; return whether a person has to be told of the silence now."""
        self.num_failures += 1
        is_denial = isinstance(exc, JobLostError) and not isinstance(exc, UnreachableError)
        self._num_denials = self._num_denials + 1 if is_denial else 0
        if self.trouble or self.num_failures < SAY_AFTER:
            return False
        self.trouble = f"{_what_failed(exc)}, {self._seen()}asking again"
        return True

    def _seen(self) -> str:
        with contextlib.suppress(ValueError, OverflowError, OSError):  # the log's time may be none
            if self.seen_at:
                return datetime.fromtimestamp(self.seen_at).strftime("last seen %H:%M:%S, ")
        return ""

    def is_final(self, exc: BaseException) -> bool:
        """Tell whether ``exc``, which was noted, means that no question will be answered again."""
        return isinstance(exc, ClusterEndedError) or self._num_denials >= LOST_AFTER

    def pause_s(self) -> float:
        """Return how long to wait before the next question."""
        doublings = min(self.num_failures - 1, 10)
        return float(min(RETRY_MOST_S, RETRY_S * 2**doublings)) if self.num_failures else 0.0


def _what_failed(exc: BaseException) -> str:
    if isinstance(exc, UnreachableError | NoAnswerError):
        return "its scheduler cannot be reached"
    # The first sentence says what happened; the advice after it is for requests.
    return str(exc).partition(". ")[0] or type(exc).__name__
