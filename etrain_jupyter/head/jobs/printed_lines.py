"""Limit the number of printed lines in a job's log to keep them from filling the disk.

A job's first lines are all logged. After that, the average number of lines logged per second is
limited, regardless of the number of trainers. The number of dropped lines is logged, too. Errors in
the notebook's code, and a crashed trainer's last lines, are logged separately and never dropped.
"""

from __future__ import annotations

BURST = 20_000
"""Number of lines logged without a rate limit, at the start and after a long quiet period."""

PER_S = 5.0
"""Average number of lines logged per second after the burst: about 100 MB of log a day."""

REPORT_S = 60.0
"""Minimum interval in seconds between reports of dropped lines."""


class PrintedLines:
    """Choose which of a job's printed lines to log. Callers pass in the current time.

    >>> lines = PrintedLines(burst=2, per_s=1.0)
    >>> [lines.take(now=0.0) for _ in range(4)], lines.take(now=1.0)
    ([True, True, False, False], True)
    >>> lines.report(now=100.0), lines.report(now=100.0)
    (2, 0)
    """

    def __init__(self, *, burst: int = BURST, per_s: float = PER_S) -> None:
        self._burst, self._per_s = burst, per_s
        self._left = float(burst)
        self._taken_at: float | None = None
        self._num_dropped = 0
        self._reported_at: float | None = None

    def take(self, now: float) -> bool:
        """Return whether to log a line that arrives now; otherwise count it as dropped."""
        # Token bucket: refill for the time that has passed, up to the burst.
        if self._taken_at is not None:
            passed_s = max(0.0, now - self._taken_at)
            self._left = min(self._burst, self._left + self._per_s * passed_s)
        self._taken_at = now
        if self._left < 1.0:
            self._num_dropped += 1
            return False
        self._left -= 1.0
        return True

    def report(self, now: float, *, is_last: bool = False) -> int:
        """Return the number of lines dropped since the last report if a report is due, or 0."""
        is_due = self._reported_at is None or now - self._reported_at >= REPORT_S
        if not self._num_dropped or not (is_due or is_last):
            return 0
        num, self._num_dropped = self._num_dropped, 0
        self._reported_at = now
        return num
